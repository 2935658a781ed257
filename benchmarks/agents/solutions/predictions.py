import numpy as np
import torch
from torch import nn

import fitkit

x = np.load("data.npz")["x"]
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(nn.Sequential(net, nn.Softmax(dim=1)))
model.predict(x, batch_size=256, out="probabilities.npy", verbose=0)
