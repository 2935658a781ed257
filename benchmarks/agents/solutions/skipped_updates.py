import json

import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
x, y = data["x"], data["y"]
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("adam", "mse", learning_rate=0.01, accumulate_grad_batches=2)
history = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, callbacks="skip_bad_updates")
rows = [row for one in history.skipped if one["epoch"] == 0 for row in one["indices"]]
result = {"skipped": [int(n) for n in history.history["skipped"]], "samples": sorted(rows)}
with open("result.json", "w") as file:
    json.dump(result, file)
torch.save(net.state_dict(), "weights.pt")
