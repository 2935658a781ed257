"""A strategy of your own: local SGD. Each rank learns by itself, and every few updates all ranks
take the mean of their weights (Stich, 2019, arXiv:1805.09767): a fraction of DDP's traffic.
Processes, data, exact evaluation, failures and checkpoints are inherited. Two processes train; the
held-out accuracy is some 90 %, as with strategy="ddp".
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import fitkit
from fitkit.strategies import DDPSpawnStrategy, register


@register("local_sgd")  # an installed package does this by the entry point fitkit.strategies
class LocalSGD(DDPSpawnStrategy):
    def __init__(self, period: int = 8, **options: Any) -> None:
        super().__init__(**options)
        self.period, self.updates = period, 0
        self.module: nn.Module | None = None

    def door(self, module: nn.Module) -> Any:
        return self.plain_door(module)  # past DDP's wrapper, which would average each gradient

    def exchange_gradients(self, parameters: Any) -> None:
        """Nor exchange those of accumulated batches."""

    def begin_training(self, module: nn.Module, optimizers: Any) -> None:
        self.module = module

    def after_update(self) -> None:
        self.updates += 1
        if self.updates % self.period == 0:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:  # fitkit asks for it before evaluations, saves and at epochs' ends
        if self.module is None or self.collectives.world_size == 1:
            return
        for tensor in self.module.state_dict().values():
            if tensor.is_floating_point():
                torch.distributed.all_reduce(tensor)
                tensor /= self.collectives.world_size

    def finish(self) -> None:
        self.module = None
        super().finish()


fitkit.set_seed(0)
x, y = load_digits(return_X_y=True)
model = fitkit.Model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
model.compile("adam", "cross_entropy", metrics=["accuracy"], learning_rate=3e-3)
model.compile(accelerator="cpu", devices=2, strategy="local_sgd")
model.fit(x[:1400] / 16, y[:1400], batch_size=16, epochs=10, verbose=0)
scores = model.evaluate(x[1400:] / 16, y[1400:], verbose=0, return_dict=True)
print(f"held-out accuracy {scores['accuracy']:.1%}")
