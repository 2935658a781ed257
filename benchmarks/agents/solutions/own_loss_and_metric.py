import json

import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")


def pinball(prediction, target):
    error = target - prediction
    return torch.maximum(0.9 * error, -0.1 * error)


def covered(prediction, target):
    return (target <= prediction).float().mean()


net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", pinball, metrics=[covered], learning_rate=0.1)
model.fit(data["x"], data["y"], batch_size=20, epochs=4, shuffle=False)
result = model.evaluate(data["test_x"], data["test_y"], batch_size=16, return_dict=True)
with open("result.json", "w") as file:
    json.dump({"loss": result["loss"], "covered": result["covered"]}, file)
torch.save(net.state_dict(), "weights.pt")
