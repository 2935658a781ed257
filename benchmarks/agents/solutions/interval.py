import json

import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("trained.pt"))
model = fitkit.Model(net)
model.compile(loss="cross_entropy", metrics=["accuracy"])
found = model.evaluate(data["x"], data["y"], interval=0.9, return_dict=True)
with open("result.json", "w") as file:
    json.dump(found, file)
