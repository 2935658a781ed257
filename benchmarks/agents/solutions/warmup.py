import functools
import json
import math

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import fitkit
from fitkit.callbacks import LambdaCallback


def factor(t):
    return (t + 1) / 6 if t < 6 else 0.5 * (1 + math.cos(math.pi * (t - 6) / 24))


data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
schedule = functools.partial(LambdaLR, lr_lambda=factor)
model.compile(
    "sgd",
    "cross_entropy",
    learning_rate=0.2,
    lr_scheduler={"scheduler": schedule, "interval": "step"},
)
rates = []
note = LambdaCallback(
    on_train_batch_begin=lambda batch, logs: rates.append(model.optimizer.learning_rate)
)
model.fit(data["x"], data["y"], batch_size=20, epochs=6, shuffle=False, callbacks=[note])
with open("rates.json", "w") as file:
    json.dump(rates, file)
torch.save(net.state_dict(), "weights.pt")
