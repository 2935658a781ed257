"""Data sets that draw, and a loop that seeds each sample by hand."""

import random
import struct

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

import fitkit

SAMPLES, WIDTH = 40, 9


def seeded_by_hand(key, number, index, again=0):
    """Seed the process's generators as a sample's, written out."""
    bits = xxhash.xxh3_128_intdigest(struct.pack("<QQQQ", key, number, index, again))
    torch.manual_seed(bits & 0xFFFFFFFF)
    np.random.seed(bits >> 32 & 0xFFFFFFFF)
    random.seed(bits >> 64)
    return bits


def key_of(state):
    """The key of a fit that begins with this state of torch's generator."""
    return xxhash.xxh3_64_intdigest(state.numpy().tobytes()) & (1 << 63) - 1


class Augmented(Dataset):
    """Samples with numbers of torch, NumPy and `random`.

    Args:
        every: only each so many samples draw, each by another generator.
    """

    def __init__(self, every=1):
        self.every = every

    def __len__(self):
        return SAMPLES

    def draws(self, index, place):
        return self.every == 1 or index % self.every == place

    def columns(self, index):
        yield torch.randn(()).item() if self.draws(index, 0) else 0.0
        yield np.random.randn() if self.draws(index, 1) else 0.0
        yield random.gauss(0, 1) if self.draws(index, 2) else 0.0

    def __getitem__(self, index):
        x = torch.tensor(list(self.columns(index)))
        return torch.cat([torch.tensor([index / SAMPLES]), x]), x.sum(0, keepdim=True)


class WithOwn(Augmented):
    """With generators of its own, too, one of which is made by the first sample."""

    def __init__(self, every=1):
        super().__init__(every)
        self.new, self.deep = np.random.default_rng(), [{"old": np.random.RandomState()}]
        self.python, self.torch = random.Random(), torch.Generator()
        self.late = None

    def columns(self, index):
        if self.late is None:
            self.late = np.random.default_rng()
        yield from super().columns(index)
        yield self.new.normal() if self.draws(index, 3) else 0.0
        yield self.deep[0]["old"].normal() if self.draws(index, 4) else 0.0
        yield self.python.random() if self.draws(index, 5) else 0.0
        has_torchs = self.torch is not None and self.draws(index, 6)
        yield torch.rand((), generator=self.torch).item() if has_torchs else 0.0
        yield self.late.normal() if self.draws(index, 7) else 0.0
        yield fitkit.data.sample_seed() / 2**31 if self.draws(index, 8) else 0.0
