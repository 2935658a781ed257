# pyright: strict
"""Data of torch's, and of one's own."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fitkit

Sample = tuple[torch.Tensor, int]


class Squares(Dataset[Sample]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Sample:
        return torch.full((4,), float(index)), index % 3


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(4):
        yield torch.rand(8, 4), torch.zeros(8, dtype=torch.int64)


model = fitkit.Model(torch.nn.Linear(4, 3))
model.compile("adam", "cross_entropy", metrics=["accuracy"])
loader: DataLoader[Sample] = DataLoader(Squares(), batch_size=8, shuffle=True)
held_out = TensorDataset(torch.rand(16, 4), torch.zeros(16, dtype=torch.int64))
model.fit(loader, epochs=2, validation_data=held_out)
model.fit(Squares(), batch_size=16, class_weight={0: 1.0, 1: 2.0, 2: 1.0})
model.fit(batches(), steps_per_epoch=4)
model.fit({"left": torch.rand(8, 4)}, [torch.rand(8, 1)], sample_weight=torch.ones(8))
