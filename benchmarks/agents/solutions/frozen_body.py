import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
x, y = data["x"], data["y"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))


net = Net()
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
net.body.requires_grad_(False).eval()
model.compile("sgd", "cross_entropy", learning_rate=0.2)
model.fit(x, y, batch_size=24, epochs=3, shuffle=False)
torch.save(net.state_dict(), "head.pt")

net.body.requires_grad_(True).train()
model.compile("sgd", "cross_entropy", learning_rate=0.05)
model.fit(x, y, batch_size=24, epochs=3, shuffle=False)
torch.save(net.state_dict(), "weights.pt")
