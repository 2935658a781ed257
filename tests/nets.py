"""The nets and the data that several files of tests build, always of the same numbers."""

from itertools import pairwise

import torch
from torch import nn


def linear(inputs, outputs, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def dense(*sizes, seed=0, activation=nn.Tanh):
    """Linear layers from each size to the next, with an activation between them."""
    torch.manual_seed(seed)
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    between = [[layer, activation()] for layer in layers[:-1]]
    return nn.Sequential(*sum(between, []), layers[-1])


class DropPath(nn.Identity):
    """What StochasticDepth looks for."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.0


def normed():
    """A net with a state beside its parameters; its numbers differ from call to call."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def regression(rows, features, seed=0):
    """Samples, and one target of each."""
    return normal(rows, features, seed=seed), normal(rows, 1, seed=seed + 1)


def classification(rows, features, seed=0):
    """Samples of three classes drawn by chance."""
    generator = torch.Generator().manual_seed(seed + 1)
    return normal(rows, features, seed=seed), torch.randint(3, (rows,), generator=generator)


def classes_in_turn(rows, features, seed=0):
    """Samples of the classes 0, 1, 2, 0, 1, 2, …"""
    return normal(rows, features, seed=seed), torch.arange(rows) % 3


class LoRA(nn.Module):
    """A frozen layer beside which a product of two small matrices learns (Hu et al., 2021)."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_adapter(seed=0, features=40):
    """A frozen net with running statistics, of which one layer has an adapter."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(features, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 1)
    ).requires_grad_(False)
    torch.manual_seed(seed + 100)
    net[0] = LoRA(net[0])
    return net


class Rows(torch.utils.data.Dataset):
    """Rows of anything, and their labels as Python's integers."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])
