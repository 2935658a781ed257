"""For strategies: the base classes, ranks, exchanges, wrappers, and training in another form.

Example:
    >>> import torch, fitkit
    >>> from fitkit.seams.strategies import STRATEGIES, Engine, SingleDevice
    >>> class Halving(Engine):
    ...     "Makes gradients half as large."
    ...     def __init__(self, parameters):
    ...         self.parameters = parameters
    ...     def backward(self, loss):
    ...         loss.backward()
    ...         for parameter in self.parameters:
    ...             parameter.grad *= 0.5
    >>> class Halved(SingleDevice):
    ...     "Trains on one device by half the gradient."
    ...     name = "halved"
    ...     has_engine = True
    ...     def engine_for(self, module, optimizers):
    ...         return Halving(list(module.parameters()))
    >>> added = STRATEGIES.add("halved", Halved)
    >>> model = fitkit.Model(torch.nn.Linear(1, 1, bias=False))
    >>> torch.nn.init.zeros_(model.net.weight).item()
    0.0
    >>> model.compile("sgd", "mse", learning_rate=1.0, strategy="halved")
    >>> x = torch.ones(4, 1)
    >>> history = model.fit(x, x, batch_size=4, verbose=0)
    >>> model.net.weight.item()  # the gradient is -2
    1.0
"""

from fitkit.distributed.collectives import (
    Collectives,
    Solo,
    done_by_rank_zero,
    together,
)
from fitkit.distributed.in_place import (
    ModuleInPlace,
    OptimizerInPlace,
    as_parts,
    held_by,
    is_spread,
    whole,
    whole_on_host,
)
from fitkit.distributed.resolve import named_strategy, resolve_strategy
from fitkit.distributed.strategies import STRATEGIES, SingleDevice
from fitkit.distributed.strategies.base import Assignment, Strategy
from fitkit.distributed.strategies.engine import Engine, norm_of
from fitkit.distributed.world import World
from fitkit.distributed.wrapped_model import (
    DividedModel,
    ReplicatedModel,
    StepRouter,
    WrappedModel,
    mean_by,
)

__all__ = [
    "STRATEGIES",
    "Assignment",
    "Collectives",
    "DividedModel",
    "Engine",
    "ModuleInPlace",
    "OptimizerInPlace",
    "ReplicatedModel",
    "SingleDevice",
    "Solo",
    "StepRouter",
    "Strategy",
    "World",
    "WrappedModel",
    "as_parts",
    "done_by_rank_zero",
    "held_by",
    "is_spread",
    "mean_by",
    "named_strategy",
    "norm_of",
    "resolve_strategy",
    "together",
    "whole",
    "whole_on_host",
]
