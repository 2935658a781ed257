import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
model = fitkit.Model(net)
model.compile("sgd", "cross_entropy", learning_rate=0.1)
model.fit(
    data["x"],
    data["y"],
    batch_size=20,
    epochs=4,
    shuffle=False,
    class_weight={0: 0.5, 1: 1.0, 2: 4.0},
)
torch.save(net.state_dict(), "weights.pt")
