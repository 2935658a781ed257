import json

import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")


def loaded(name):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    net.load_state_dict(torch.load(f"{name}.pt"))
    return fitkit.Model(net)


for name in ("new", "large"):
    found = fitkit.tune.compare_predictions(loaded("old"), loaded(name), data["x"], data["y"])
    names = {"a": "old", "b": name}
    result = {
        "better": found.better and names[found.better],
        "p": found.p_value,
        "difference": found.difference,
    }
    with open(f"{name}.json", "w") as file:
        json.dump(result, file)
