"""For networks and data of another library, and modules that bring their own steps.

A `Guest` says what such a network needs that a torch module needs nobody to do. The key of a
registry is the library's top-level package.

Example:
    >>> import sys, types, torch, fitkit
    >>> from fitkit.seams.networks import GUESTS, Guest
    >>> class Line:
    ...     "A network of the other library."
    ...     def __init__(self):
    ...         self.slope = torch.nn.Parameter(torch.ones(1, 1))
    ...     def at(self, points):
    ...         return points @ self.slope
    >>> class LineGuest(Guest):
    ...     "It takes a tensor, and adds the square of its slope to the loss."
    ...     def __init__(self, given):
    ...         super().__init__(given)
    ...         self.slope = given.slope
    ...     def forward(self, inputs):
    ...         return self.given.at(inputs)
    ...     def with_added(self, loss, count, terms, *, is_part):
    ...         return loss + self.slope.square().sum(), count, terms
    >>> Line.__module__ = "elsewhere"  # as if it had been imported from there
    >>> sys.modules["elsewhere"] = types.ModuleType("elsewhere")
    >>> added = GUESTS.add("elsewhere", LineGuest)
    >>> model = fitkit.Model(Line())
    >>> model.compile(loss="mse", accelerator="cpu", devices=1)
    >>> model.evaluate(torch.ones(2, 1), torch.ones(2, 1), verbose=0)
    1.0
"""

from fitkit.buffers import attributes_restorer
from fitkit.guests import DATA, GUESTS, MODELS, Guest, OpenedData, as_ours, guest_of
from fitkit.hooks import has_own_steps, overridden, verb_of
from fitkit.module import Module
from fitkit.pickling import REDUCERS, Together

__all__ = [
    "DATA",
    "GUESTS",
    "MODELS",
    "REDUCERS",
    "Guest",
    "Module",
    "OpenedData",
    "Together",
    "as_ours",
    "attributes_restorer",
    "guest_of",
    "has_own_steps",
    "overridden",
    "verb_of",
]
