import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.load_weights("pretrained.pt", skip_mismatch=True)
model.compile("sgd", "cross_entropy", learning_rate=0.1)
model.fit(data["x"], data["y"], batch_size=20, epochs=3, shuffle=False)
torch.save(net.state_dict(), "weights.pt")
