"""An optimizer's step as torch's compiler traces it: by torch's own functional optimizers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.metrics.sums import widest_dtype
from fitkit.optimizers import HOW, class_of
from fitkit.training.programs import UNROLLED, UncompiledError


class Group:
    """What a parameter group's update is computed from, by torch's functional optimizer.

    Args:
        optimizer: whose group it is; it has the state of its parameters.
        group: one of its groups.
        places: each learning parameter's place among the gradients.

    Attributes:
        rates: the learning rate in each of a call's steps, as a tensor: schedules change it
            without another program.
    """

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], places: dict[nn.Parameter, int]
    ) -> None:
        kind = class_of(optimizer)
        self.function: Callable[..., None] = functional(kind)
        self.given = group
        init: Any = kind._init_group  # type: ignore[attr-defined]
        names = list(inspect.signature(init).parameters)[2:]
        lists: dict[str, list[Any]] = {name: [] for name in names}
        init(optimizer, group, *lists.values())
        parameters, _, *states = lists.values()
        self.places: list[int] = [places[parameter] for parameter in parameters]
        self.parameters = parameters
        found = dict(zip(names[2:], states, strict=True))
        if "momentum_buffer_list" in found and group.get("momentum") and "dampening" in group:
            self._begin_momentum(optimizer, group, found["momentum_buffer_list"])
        # By position, as torch's functions want them; the order is another than that of above.
        taken = inspect.signature(self.function).parameters
        self.states: list[list[Any]] = [found[name] for name in taken if name in found]
        kept = {n: v for n, v in group.items() if n not in ("params", "lr", *HOW)}
        self.settings: dict[str, Any] = {
            name: value for name, value in kept.items() if name in taken
        }
        if "beta1" in taken:
            self.settings["beta1"], self.settings["beta2"] = group["betas"]
        # One tensor after the other, which the compiler joins itself.
        self.settings |= {name: False for name in HOW if name in taken}
        if group.get("capturable"):
            self.settings["capturable"] = True
        self._names, self._values = list(kept), list(kept.values())
        rate = group["lr"]
        self.last: list[float] = [float(rate)] * UNROLLED
        device = parameters[0].device if parameters else torch.device("cpu")
        if device.type == "cuda" and "capturable" in taken:
            self.settings["capturable"] = True  # all numbers stay on the GPU
        dtype = widest_dtype(device)
        self.rates: torch.Tensor = torch.tensor(self.last, dtype=dtype, device=device)

    def _begin_momentum(
        self, optimizer: Optimizer, group: dict[str, Any], buffers: list[torch.Tensor | None]
    ) -> None:
        """Give SGD's momenta, which its first update would make, the value before it."""
        if all(buffer is not None for buffer in buffers):
            return
        if group.get("dampening"):
            raise UncompiledError("SGD's dampening begins with its second update only")
        for place, (parameter, buffer) in enumerate(zip(self.parameters, buffers, strict=True)):
            if buffer is None:
                buffers[place] = torch.zeros_like(parameter, requires_grad=False)
                optimizer.state[parameter]["momentum_buffer"] = buffers[place]

    def follows(self, place: int = 0) -> bool:
        """Take the rate that the group has now for a step; whether its other settings are kept.

        Args:
            place: the step's among those of a call.
        """
        given, rate = self.given, self.given["lr"]
        if rate is not self.last[place]:
            self.put(float(rate), place)
        return list(map(given.__getitem__, self._names)) == self._values

    def put(self, rate: float, place: int = 0) -> None:
        """Let a step of the next call have this rate."""
        if rate != self.last[place]:
            self.rates[place] = rate
            self.last[place] = rate

    def update(self, gradients: Sequence[torch.Tensor], place: int) -> None:
        """Make a step's update, from the gradients of all learning parameters; traced."""
        own = [gradients[place] for place in self.places]
        # Torch counts steps in float32, of which an eager step makes Python's numbers first.
        wide = [[_wide(one) for one in states] for states in self.states]
        self.function(self.parameters, own, *wide, lr=self.rates[place], **self.settings)
        for before, after in zip(self.states, wide, strict=True):
            for one, computed in zip(before, after, strict=True):
                if computed is not one:
                    one.copy_(computed)


def _wide(state: Any) -> Any:
    """A number of an optimizer's state in float64; anything else as it is."""
    if isinstance(state, torch.Tensor) and state.ndim == 0 and state.dtype is torch.float32:
        return state.to(widest_dtype(state.device))
    return state


def functional(kind: type[Optimizer]) -> Callable[..., None]:
    """Torch's function that makes an optimizer's update: `torch.optim.adam.adam` for `Adam`.

    Raises:
        UncompiledError: the optimizer has none.
    """
    if kind.__module__.startswith("torch.optim.") and hasattr(kind, "_init_group"):
        found = getattr(sys.modules[kind.__module__], kind.__name__.lower(), None)
        if found is not None and "lr" in inspect.signature(found).parameters:
            return found
    raise UncompiledError(
        f"{kind.__name__} isn't one of torch.optim's optimizers that can be traced"
    )
