import numpy as np
import torch
from torch import nn

import fitkit

data = np.load("data.npz")


def trained(seed, path):
    fitkit.set_seed(seed)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy")
    model.fit(data["x"], data["y"], batch_size=10, epochs=3)
    torch.save(net.state_dict(), path)


trained(1, "first.pt")
trained(1, "again.pt")
trained(2, "other.pt")
