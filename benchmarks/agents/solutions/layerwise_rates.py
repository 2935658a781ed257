import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
net.load_state_dict(torch.load("start.pt"))
optimizer = torch.optim.AdamW(
    [
        {"params": net[0].parameters(), "lr": 0.001, "weight_decay": 0.0},
        {"params": net[2].parameters(), "lr": 0.02, "weight_decay": 0.1},
    ]
)
model = fitkit.Model(net)
model.compile(optimizer, "cross_entropy")
model.fit(data["x"], data["y"], batch_size=20, epochs=4, shuffle=False)
torch.save(net.state_dict(), "weights.pt")
