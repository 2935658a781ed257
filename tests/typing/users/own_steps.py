# pyright: strict
"""Steps and optimizers of one's own."""

from typing import Any

import torch
from torch.nn import functional
from typing_extensions import assert_type

import fitkit


class Weighted(fitkit.Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, factor = batch
        losses = functional.cross_entropy(self(x), y, reduction="none")
        self.log("spread", losses.std(), prog_bar=True)
        return (factor * losses).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


model = Weighted(torch.nn.Linear(4, 3))
assert_type(model, Weighted)
model.compile(accelerator="cpu", devices=2, strategy="ddp_spawn", precision="bf16-mixed")
rows = torch.rand(8, 4), torch.zeros(8, dtype=torch.int64), torch.ones(8)
model.fit([rows], epochs=2, verbose=0)
