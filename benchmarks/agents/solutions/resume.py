import json

import numpy as np
from torch import nn

import fitkit

data = np.load("data.npz")
x, y = data["x"], data["y"]


def made():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", learning_rate=0.01)
    return model


first = made()
first.load_weights("start.pt")
first.fit(x, y, batch_size=16, epochs=2, shuffle=False)
first.save("training.h5")

second = made()
second.load_weights("training.h5")
second.fit(x, y, batch_size=16, epochs=5, shuffle=False, resume_from="training.h5")
with open("result.json", "w") as file:
    json.dump({"updates": second.global_step}, file)
second.save_weights("weights.pt")
