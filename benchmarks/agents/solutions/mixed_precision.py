import json

import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", "cross_entropy", learning_rate=0.5, precision="bf16-mixed")
model.fit(data["x"], data["y"], batch_size=16, epochs=10, shuffle=False)
with open("result.json", "w") as file:
    json.dump({"dtype": str(net[0].weight.dtype)}, file)
torch.save(net.state_dict(), "weights.pt")
