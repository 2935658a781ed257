"""Other parameters in the places of a module's own, for an engine to do with as it likes."""

from __future__ import annotations

import torch
from torch import nn

from fitkit.distributed.module_places import places_of, take_off_hooks


class StandIns:
    """Lets an engine have parameters of its own in a module, in place, until `restore`.

    Engines change a parameter's memory, class and attributes, and hang hooks on modules. Here
    they get others with the same numbers; afterwards the very same objects are back.

    Args:
        module: the same numbers on all ranks.
        engine: the package whose hooks are taken off again.

    Attributes:
        twins: the parameters that stand in, by the module's own.
    """

    def __init__(self, module: nn.Module, engine: str) -> None:
        self._engine = engine
        self._places = places_of(module)
        self._before = [
            (part, type(part), set(vars(part)), part._parameters) for part in module.modules()
        ]
        self.twins: dict[nn.Parameter, nn.Parameter] = {}
        self._shapes: dict[nn.Parameter, torch.Size] = {}
        self._devices: dict[nn.Parameter, torch.device] = {}
        for place in self._places:
            parameter = place.parameter
            if parameter not in self.twins:
                twin = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                self.twins[parameter] = twin
                self._shapes[parameter] = parameter.shape
                self._devices[parameter] = parameter.device
            place.put(self.twins[parameter])

    def let_go_of_numbers(self, *, keeps: bool) -> None:
        """Let the module's own parameters give up their memory, once the engine has its own.

        Args:
            keeps: whether this rank keeps the numbers in main memory, for a training that fails.
        """
        for parameter in self.twins:
            parameter.grad = None
            parameter.data = parameter.data.cpu() if keeps else parameter.data.new_empty(0)

    def restore(self, numbers: dict[nn.Parameter, torch.Tensor] | None = None) -> None:
        """Put the module's own parameters back.

        Args:
            numbers: what they shall have; None for those from before, NaN where nobody kept them.
        """
        for parameter, twin in self.twins.items():
            parameter.requires_grad_(twin.requires_grad)
            if numbers is not None:
                parameter.data = numbers[parameter]
            else:
                parameter.data = self._kept(parameter).to(self._devices[parameter])
        for part, kind, names, parameters in self._before:
            part.__class__ = kind
            take_off_hooks(part, self._engine)
            vars(part)["_parameters"] = parameters
            for name in [name for name in vars(part) if name not in names and _is_engines(name)]:
                del vars(part)[name]
        for place in self._places:
            place.put(place.parameter)
        self.twins = {}

    def _kept(self, parameter: nn.Parameter) -> torch.Tensor:
        shape = self._shapes[parameter]
        if parameter.shape == shape:
            return parameter.data
        return torch.full(shape, torch.nan, dtype=parameter.dtype)


def _is_engines(name: str) -> bool:
    """Whether an engine notes something on modules under that name."""
    known = ("_external_params", "_original_parameters", "all_parameters")
    backward = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")
    return name.startswith("ds_") or name in known + backward
