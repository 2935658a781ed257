import json

import numpy as np
from torch import nn

import fitkit

data = np.load("data.npz")


def build(rate):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", learning_rate=rate)
    return model


def verdict(path, rates, practical=None):
    found = fitkit.tune.compare(
        {name: lambda rate=rate: build(rate) for name, rate in rates.items()},
        data["x"],
        data["y"],
        metric="val_loss",
        practical=practical,
        workers=1,
        validation_data=(data["val_x"], data["val_y"]),
        epochs=4,
        batch_size=16,
    )
    result = {
        "better": found.better,
        "difference": found.difference,
        "interval": list(found.interval),
        "runs": found.runs,
    }
    with open(path, "w") as file:
        json.dump(result, file)


verdict("far.json", {"slow": 0.003, "fast": 0.1})
verdict("close.json", {"fast": 0.1, "same": 0.1001}, practical=0.05)
