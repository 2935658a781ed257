import json

import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")


def mix(rows):
    return 0.7 * rows + 0.3 * rows.roll(1, 0)


def mixed(x, y):
    one_hot = nn.functional.one_hot(y, 3).float()
    return mix(x), mix(one_hot)


net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", "cross_entropy", learning_rate=0.3, batch_transforms=[mixed])
history = model.fit(
    data["x"],
    data["y"],
    validation_data=(data["val_x"], data["val_y"]),
    batch_size=20,
    epochs=4,
    shuffle=False,
).history
with open("history.json", "w") as file:
    json.dump({"val_loss": history["val_loss"]}, file)
torch.save(net.state_dict(), "weights.pt")
