"""For optimizers and schedules: their names, rates, and what torch's have.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.optimizers import OPTIMIZERS
    >>> class SignDescent(torch.optim.SGD):
    ...     "Moves each weight by its rate, whatever the gradient's size."
    ...     def step(self, closure=None):
    ...         for group in self.param_groups:
    ...             for parameter in group["params"]:
    ...                 parameter.grad.sign_()
    ...         return super().step(closure)
    >>> added = OPTIMIZERS.add("sign_descent", SignDescent)
    >>> model = fitkit.Model(torch.nn.Linear(1, 1, bias=False))
    >>> torch.nn.init.zeros_(model.net.weight).item()
    0.0
    >>> model.compile("sign_descent", "mse", learning_rate=0.25, accelerator="cpu", devices=1)
    >>> x = torch.ones(4, 1)
    >>> history = model.fit(x, 3 * x, batch_size=4, verbose=0)
    >>> model.net.weight.item()
    0.25
"""

from fitkit.closures import uses_closure
from fitkit.optimizer_copies import with_inner
from fitkit.optimizers import (
    FUSED,
    HOW,
    OPTIMIZERS,
    Arranges,
    check_layer_decay,
    check_trainable,
    class_of,
    first_rate,
    members_of,
    put_rate,
)
from fitkit.schedulers import SCHEDULERS, PlannedScheduler

__all__ = [
    "FUSED",
    "HOW",
    "OPTIMIZERS",
    "SCHEDULERS",
    "Arranges",
    "PlannedScheduler",
    "check_layer_decay",
    "check_trainable",
    "class_of",
    "first_rate",
    "members_of",
    "put_rate",
    "uses_closure",
    "with_inner",
]
