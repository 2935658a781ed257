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
from fitkit.strategies import DDPSpawnStrategy, Engine, register
from fitkit.typing import Name


@register("local_sgd")  # an installed package does this by the entry point fitkit.strategies
class LocalSGD(DDPSpawnStrategy):
    has_engine = True

    def __init__(self, period: int = 8, **options: Any) -> None:
        super().__init__(**options)
        self.period = period

    def engine_for(self, module: nn.Module, optimizers: Any) -> Engine | None:
        ranks = self.collectives.world_size
        return None if ranks == 1 else Averaging(module, ranks, self.period)


class Averaging(Engine):
    replaces_ddp = True  # which would average each gradient

    def __init__(self, module: nn.Module, ranks: int, period: int) -> None:
        self.module, self.ranks, self.period, self.updates = module, ranks, period, 0

    def average_gradients(self, parameters: Any) -> bool:
        return True  # nor are those of several optimizers or manual updates averaged

    def after_update(self) -> None:
        self.updates += 1
        if self.updates % self.period == 0:
            self.average_ranks()

    @torch.no_grad()
    def average_ranks(self) -> None:  # fitkit asks before evaluations, saves and at epochs' ends
        for tensor in self.module.state_dict().values():
            if tensor.is_floating_point():
                torch.distributed.all_reduce(tensor)
                tensor /= self.ranks


fitkit.set_seed(0)
x, y = load_digits(return_X_y=True)
model = fitkit.Model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
model.compile("adam", "cross_entropy", metrics=["accuracy"], learning_rate=3e-3)
model.compile(accelerator="cpu", devices=2, strategy=Name("local_sgd"))
model.fit(x[:1400] / 16, y[:1400], batch_size=16, epochs=10, verbose=0)
scores = model.evaluate(x[1400:] / 16, y[1400:], verbose=0, return_dict=True)
print(f"held-out accuracy {scores['accuracy']:.1%}")
