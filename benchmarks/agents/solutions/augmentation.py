import noise
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fitkit

data = np.load("data.npz")
x, y = data["x"], data["y"]


class Noisy(Dataset):
    def __len__(self):
        return len(y)

    def __getitem__(self, index):
        noise.seed(fitkit.data.sample_seed())
        return noise.noisy(x[index]), y[index]


def trained(seed, num_workers, path):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    net.load_state_dict(torch.load("start.pt"))
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", learning_rate=0.1)
    fitkit.set_seed(seed)
    loader = DataLoader(Noisy(), 16, num_workers=num_workers, persistent_workers=num_workers > 0)
    model.fit(loader, epochs=3)
    torch.save(net.state_dict(), path)


trained(1, 0, "none.pt")
trained(1, 2, "two.pt")
trained(2, 0, "other.pt")
