"""Modules and optimizers that train in another form, in place, and are restored afterwards.

The model, its parameters and its optimizer stay the same objects, and their `state_dict()` is whole
even during training. Torch's own functions (`distributed.checkpoint.state_dict`, 2.13) do neither.
They don't restore a module. They call `state_dict()` themselves, so no hook of it can use them. And
to read an optimizer without a state yet, they make a step, which hooks and schedulers count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class InPlace:
    """A module or an optimizer in another form, until `end` or, after a failure, `abandon`."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def end(self, *, wanted: bool) -> None:
        """Make it ordinary again, with what was learned.

        Args:
            wanted: whether this rank needs that.

        Ranks:
            Collective.
        """
        raise NotImplementedError

    def abandon(self) -> None:
        """Let go after a failure, when other ranks may be gone."""
        raise NotImplementedError

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class ModuleInPlace(InPlace):
    """A module in whose places other parameters stand.

    Args:
        module: the same numbers on all ranks.

    Attributes:
        twins: the parameters that stand in, by the module's own.
    """

    hook_origins: tuple[str, ...] = ()
    """How the names begin of the modules whose hooks are taken off again."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.twins: dict[nn.Parameter, nn.Parameter] = {}
        self._backup: dict[nn.Parameter, torch.Tensor] = {}
        self._places = [
            (part, name, parameter)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        self._shapes = {parameter: parameter.shape for _, _, parameter in self._places}
        self._before = [
            (part, type(part), set(vars(part)), part._parameters) for part in module.modules()
        ]

    def _is_added(self, name: str) -> bool:
        """Whether the engine notes something on modules under that name."""
        return False

    def _empty(self, parameter: nn.Parameter, *, keeps: bool) -> None:
        """Let one of the module's own parameters give up its memory.

        Args:
            keeps: whether its numbers are kept in main memory, for `abandon`.
        """
        if keeps:
            self._backup[parameter] = parameter.data.cpu()
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)

    def abandon(self) -> None:
        numbers = {}
        for parameter in self.twins:
            shape = self._shapes[parameter]
            if parameter.shape != shape:
                lost = torch.full(shape, torch.nan, dtype=parameter.dtype)
                numbers[parameter] = self._backup.get(parameter, lost)
        self.give_back(numbers)

    def give_back(self, numbers: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Make the module ordinary again: its own parameters, and its submodules as they were.

        This is where torch and DeepSpeed are known from inside, since neither offers a way back.
        `fully_shard` gives each submodule another class (`FSDPLinear`), a state in
        `_module_state_mapping` (by which it refuses to shard a module twice), attributes and hooks
        whose handles nobody has. DeepSpeed gives it another `_parameters`, attributes and hooks.
        Tied parameters have several places, and a recurrent layer notes its weights when one is
        set, so they are set by `setattr`. Tested: the attributes, hooks and types of every
        submodule are the same before and after.

        Args:
            numbers: the parameters' new values. Those that aren't named keep theirs.
        """
        from torch.distributed._composable_state import _module_state_mapping

        self._remove_hooks()
        for parameter, twin in self.twins.items():
            parameter.requires_grad_(twin.requires_grad)
            if parameter in numbers:
                parameter.data = numbers[parameter]
        for part, kind, names, parameters in self._before:
            part.__class__ = kind
            _module_state_mapping.pop(part, None)
            _take_off_hooks(part, self.hook_origins)
            vars(part)["_parameters"] = parameters
            for name in [n for n in vars(part) if n not in names and self._is_added(n)]:
                del vars(part)[name]
        for part, name, parameter in self._places:
            setattr(part, name, parameter)
        self.twins, self._backup = {}, {}


def _take_off_hooks(part: nn.Module, origins: tuple[str, ...]) -> None:
    """Take hooks off a submodule, which torch has no way to do without their handles."""
    numbers = [
        number
        for name, held in vars(part).items()
        if name.endswith("_hooks")
        for number, hook in held.items()
        if str(getattr(hook, "__module__", "")).startswith(origins)
    ]
    for held in vars(part).values():
        if isinstance(held, dict):
            for number in numbers:
                held.pop(number, None)


class OptimizerInPlace(InPlace):
    """An optimizer whose state is in another form. Its `state_dict()` is collective, and whole.

    Its schedulers, loss scaling and hooks keep working.

    Args:
        optimizer: the same on all ranks.
        twins: the parameters that stand in for its own.
    """

    def __init__(self, optimizer: Optimizer, twins: Mapping[Any, Any]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self._twins = dict(twins)
        self._ordinary = {twin: parameter for parameter, twin in self._twins.items()}
        self._backup: dict[torch.Tensor, Any] = {}

    def end(self, *, wanted: bool) -> None:
        self.give_back(self._whole_states(wanted=wanted))

    def abandon(self) -> None:
        self.give_back(self._backup)

    def give_back(self, state: dict[torch.Tensor, Any]) -> None:
        self._remove_hooks()
        self._replace(self._ordinary, state)

    def _replace(self, others: Mapping[Any, Any], state: Mapping[Any, Any]) -> None:
        """Give the optimizer other parameters, and the state of these."""
        for group in self.optimizer.param_groups:
            # A training that fails while it ends has put some back already.
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
        self.optimizer.state.clear()
        self.optimizer.state.update(state)

    def _add_hooks(self, *handles: Any) -> None:
        """Let state dicts be whole from now on; other hooks come along."""
        self._handles = [
            self.optimizer.register_state_dict_post_hook(self._whole_state_dict),
            *handles,
        ]

    def _whole_states(self, *, wanted: bool) -> dict[torch.Tensor, Any]:
        """Return the whole states of its own parameters, to continue with.

        Ranks:
            Collective.
        """
        raise NotImplementedError

    def _states_for_dict(self) -> dict[torch.Tensor, Any]:
        """Return the whole states of the parameters that it holds now, for a state dict.

        Ranks:
            Collective.
        """
        raise NotImplementedError

    def _whole_state_dict(self, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        numbers: dict[torch.Tensor, int] = {p: i for i, p in enumerate(held_by(optimizer))}
        found = {numbers[p]: state for p, state in self._states_for_dict().items()}
        return {**packed, "state": dict(sorted({**packed["state"], **found}.items()))}


def held_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters that an optimizer holds, in the order in which state dicts number them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ---------------------------------------------------------------- spread tensors


def is_spread(value: Any) -> bool:
    """Whether a value is a tensor that is spread over ranks."""
    # Its class is loaded by whoever spreads a tensor, and by nobody else.
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def whole(value: Any) -> Any:
    """Return a spread tensor's numbers from all ranks; any other value as it is.

    Ranks:
        Collective.
    """
    if not is_spread(value):
        return value
    value = value.detach()
    if value.device_mesh.ndim > 1:
        from torch.distributed.tensor import Replicate

        # One dimension after the other: a tensor may be divided along both in the same direction.
        value = value.redistribute(placements=[Replicate(), *value.placements[1:]])
    return value.full_tensor()


def whole_on_host(value: Any, *, wanted: bool = True) -> Any:
    """As `whole`, in main memory; a rank that doesn't want it gets its part as a plain tensor.

    Ranks:
        Collective.
    """
    if not is_spread(value):
        return value
    numbers = whole(value)
    return numbers.cpu() if wanted else value.detach().to_local()


def as_parts(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a whole tensor, the same on all ranks, spread as another is; this rank keeps its part.

    One that is spread already, or beside one that isn't, is itself.
    """
    if is_spread(value) or not is_spread(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    placed = value.detach().to(like.device)
    # No exchange, and a copy: the part of a view would keep the whole alive.
    spread: torch.Tensor = distribute_tensor(
        placed, like.device_mesh, like.placements, src_data_rank=None
    )
    return spread.clone()
