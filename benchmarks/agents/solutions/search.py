import json

import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")


def build(rate, momentum):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    net.load_state_dict(torch.load("start.pt"))
    model = fitkit.Model(net)
    sgd = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)
    model.compile(sgd, "cross_entropy")
    return model


def searched(runs):
    found = fitkit.tune.search(
        build,
        {
            "rate": fitkit.tune.Between(1e-3, 1.0, log=True),
            "momentum": fitkit.tune.Between(0.0, 0.9),
        },
        data["x"],
        data["y"],
        metric="val_loss",
        runs=runs,
        folder="search",
        workers=1,
        validation_data=(data["val_x"], data["val_y"]),
        epochs=3,
        batch_size=16,
        shuffle=False,
    )
    return [{**run.params, "value": run.value} for run in found.runs]


def write(path, content):
    with open(path, "w") as file:
        json.dump(content, file)


write("first.json", searched(4))
write("all.json", searched(10))
with open("all.json") as file:
    write("best.json", json.load(file)[0])  # the runs are sorted, the best first
