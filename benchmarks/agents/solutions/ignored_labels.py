import json

import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
labels = data["labels"]


class ByPlace(nn.Module):
    """The net's logits with the classes in axis 1, where torch's cross entropy has them."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x).transpose(1, 2)


net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(ByPlace(net))
model.compile(
    "sgd",
    "cross_entropy",
    metrics=["accuracy"],
    learning_rate=0.2,
    accumulate_grad_batches=4,
)
model.fit(data["x"], labels, batch_size=4, epochs=3, shuffle=False)
result = model.evaluate(data["test_x"], data["test_labels"], batch_size=4, return_dict=True)
with open("result.json", "w") as file:
    json.dump({"loss": result["loss"], "accuracy": result["accuracy"]}, file)
torch.save(net.state_dict(), "weights.pt")
