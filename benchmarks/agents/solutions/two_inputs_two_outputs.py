import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.kind, self.size = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, left, right):
        hidden = self.body(torch.cat([left, right], dim=1)).relu()
        return {"kind": self.kind(hidden), "size": self.size(hidden)}


net = Net()
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile(
    "sgd",
    loss={"kind": "cross_entropy", "size": "mse"},
    loss_weights={"size": 0.25},
    learning_rate=0.05,
)
model.fit(
    {"left": data["left"], "right": data["right"]},
    {"kind": data["kind"], "size": data["size"]},
    batch_size=20,
    epochs=4,
    shuffle=False,
)
torch.save(net.state_dict(), "weights.pt")
