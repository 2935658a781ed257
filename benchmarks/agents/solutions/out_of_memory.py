import json

import numpy as np
import torch
from net import Net

import fitkit

data = np.load("data.npz")
batches = [(data[f"x{n}"], data[f"y{n}"]) for n in range(6)]
net = Net()
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", "cross_entropy", learning_rate=0.2, out_of_memory="split")
history = model.fit(batches, epochs=2)
with open("history.json", "w") as file:
    json.dump({"loss": history.history["loss"]}, file)
torch.save(net.state_dict(), "weights.pt")
