import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
fitkit.Model(net).export("model.pt2", example=data["x"][:4])
