"""A module's replicas: copies for one parallel call, and what of them outlives it."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.errors import ConfigurationError, warn

ABSENT = object()
PLAIN_COPY = nn.Module._replicate_for_data_parallel


@dataclasses.dataclass
class Replica:
    """One replica.

    Attributes:
        module: the copy.
        device: where it is.
        metrics: each metric of the original that has a copy in this replica, with that copy.
    """

    module: Any
    device: torch.device
    metrics: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


def check_can_replicate(module: nn.Module) -> None:
    """Refuse a module whose replicas would compute with the original.

    Raises:
        ConfigurationError: a submodule is compiled by `torch.compile`.
    """
    for name, child in module.named_modules():
        if child._compiled_call_impl is not None or "_orig_mod" in child._modules:
            where = f"Its submodule {name!r}" if name else "It"
            raise ConfigurationError(
                f"{type(module).__name__} can't be replicated. {where} is compiled by "
                "torch.compile, and compiled code is bound to the module it was made from. Write "
                "jit_compile=False, or strategy='ddp', where each device has a process of its own."
            )


def replicate(module: nn.Module, devices: list[torch.device]) -> list[Replica]:
    """Copies of a module, one for each device, made for one call.

    Replicas on one device (the CPU) have the module's own parameters; those on several have
    copies through which gradients flow back, and their `parameters()` are empty, as with
    torch's `DataParallel`. The first replica has the module's own buffers and metrics, the
    others have copies, metrics' with nothing counted.
    """
    if len(set(devices)) == 1:
        return [_Copying(index, device).replica(module) for index, device in enumerate(devices)]
    detach = not torch.is_grad_enabled()
    copies: list[nn.Module] = nn.parallel.replicate(module, devices, detach)
    replicas = [Replica(copy, device) for copy, device in zip(copies, devices, strict=True)]
    for index, replica in enumerate(replicas):
        pairs = _pairs(module, replica.module)
        for own, copied in pairs:
            _rebind(own, copied)
        _give_metrics(module, pairs, index, replica)
    return replicas


def shallow(module: nn.Module) -> nn.Module:
    """A copy of a module that has the same things in it."""
    if type(module)._replicate_for_data_parallel is not PLAIN_COPY:  # recurrent layers, graphs
        return module._replicate_for_data_parallel()
    made: nn.Module = module.__new__(type(module))
    made.__dict__.update(module.__dict__)
    return made


class _Copying:
    """Copies modules and what is in them for one replica, sharing their parameters.

    Args:
        index: the replica's.
        device: the one where the modules are.
    """

    def __init__(self, index: int, device: torch.device) -> None:
        self.is_first = index == 0
        self.device = device
        self.modules: dict[int, nn.Module] = {}
        self.buffers: dict[int, torch.Tensor] = {}

    def replica(self, module: nn.Module) -> Replica:
        copied = self.of(module)
        return Replica(copied, self.device, self.metrics(module))

    def metrics(self, module: nn.Module) -> list[tuple[Any, Any]]:
        """The module's metrics with their copies; none in the first replica, which has them."""
        own = [] if self.is_first else metrics_in(module)
        return [(metric, self.modules[id(metric)]) for metric in own]

    def of(self, module: nn.Module) -> nn.Module:
        """The copy of a module; of one that is in several places, the same one."""
        found = self.modules.get(id(module))
        if found is None:
            found = self.modules[id(module)] = self._made(module)
        return found

    def _made(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):  # it can't be taken apart
            return module
        if is_metric(module) or is_metrics(module):
            return module if self.is_first else fresh(module, self.children(module), self.device)
        made = shallow(module)
        # By its dict: nn.Module's own way to set attributes takes ten times as long.
        held = made.__dict__
        held["_parameters"] = module._parameters.copy()
        if not self.is_first:  # the first has the very dict, so that a buffer set anew persists
            held["_buffers"] = {name: self.buffer(b) for name, b in module._buffers.items()}
        else:
            held["_buffers"] = module._buffers
        held["_modules"] = self.children(module)
        _rebind(module, made)
        return made

    def children(self, module: nn.Module) -> dict[str, nn.Module | None]:
        """The copies of a module's children by name."""
        children = module._modules.items()
        return {name: None if child is None else self.of(child) for name, child in children}

    def buffer(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        found = self.buffers.get(id(tensor))
        if found is None:
            found = self.buffers[id(tensor)] = tensor.detach().clone()
        return found


def keep_buffers(module: nn.Module, first: nn.Module) -> None:
    """Give the module the buffers that the first replica set anew, as torch's copies don't."""
    for name, child in module._modules.items():
        other = first._modules.get(name)
        if child is not None and other is not None:
            keep_buffers(child, other)
    for name, buffer in first._buffers.items():
        own = module._buffers.get(name)
        if buffer is not own and not (own is not None and own.requires_grad):
            module._buffers[name] = buffer


def _rebind(module: nn.Module, made: nn.Module) -> None:
    """Make methods that a module keeps as attributes (`self.act = self.gelu`) its copy's."""
    if not _is_torchs(module):
        for name, value in module.__dict__.items():
            if type(value) is types.MethodType and value.__self__ is module:
                made.__dict__[name] = types.MethodType(value.__func__, made)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _give_metrics(
    module: nn.Module, pairs: list[tuple[nn.Module, nn.Module]], index: int, replica: Replica
) -> None:
    """Put metrics into a replica that torch made, where `update` would be the original's."""
    copying = _Copying(index, replica.device)
    for parent, other in pairs:
        for name, child in parent._modules.items():
            if child is not None and (is_metric(child) or is_metrics(child)):
                other._modules[name] = copying.of(child)
    replica.metrics = copying.metrics(module)


def _pairs(module: nn.Module, other: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """A module and its submodules, down to metrics, each with its copy in `other`."""
    found = [(module, other)]
    for name, child in module._modules.items():
        copied = other._modules.get(name)
        if child is not None and copied is not None and not (is_metric(child) or is_metrics(child)):
            found += _pairs(child, copied)
    return found


def merge_metrics(replicas: list[Replica]) -> None:
    """Add what the replicas' metrics counted to the module's own, in the replicas' order."""
    for replica in replicas:
        for own, other in replica.metrics:
            take_up(own, counts_of(other))


# ---------------------------------------------------------------------- state that is lost


Begun = list[tuple[nn.Module, dict[str, Any]]]


def attributes_of(replica: nn.Module) -> Begun:
    """Each submodule with its attributes as they are now; torch's own layers keep no state."""
    return [
        (child, child.__dict__.copy())
        for child in replica.modules()
        if not (_is_torchs(child) or is_metric(child) or is_metrics(child))
    ]


def warn_of_lost_state(begun: Begun, method: str, strategy: str, warned: set[str]) -> None:
    """Warn of attributes that a step set in a replica, where they are lost.

    Args:
        begun: `attributes_of` the replica before the step.
        method: the step's name; empty for a forward.
        strategy: the strategy's name.
        warned: the attributes that were named before; new ones are added.
    """
    for child, before in begun:
        for name, value in child.__dict__.items():
            if before.get(name, ABSENT) is value or name.startswith("_"):
                continue
            attribute = f"{type(child).__name__}.{name}"
            if attribute in warned or _is_recomputed(child, name):
                continue
            warned.add(attribute)
            warn(
                f"{method or 'forward'} sets {attribute}, which is lost: under "
                f"strategy={strategy!r} each device runs a replica of the model that is dropped "
                f"after the batch. Return it and set it in the *_step_end hook, make it a buffer "
                "(register_buffer: the first replica's persists), or use strategy='ddp'."
            )


def _is_recomputed(module: nn.Module, name: str) -> bool:
    """Whether it is a weight that torch's weight or spectral norm sets before each forward."""
    return any(f"{name}{end}" in module._parameters for end in ("_g", "_orig"))


MERGEABLE = ("dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min")
"""torchmetrics' reductions that may be applied time and again as counts come in."""

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""The arguments of a metric's updates."""


def is_metric(module: nn.Module) -> bool:
    """Whether it counts as torchmetrics' objects do."""
    return hasattr(type(module), "merge_state") and "_defaults" in module.__dict__


def is_metrics(module: nn.Module) -> bool:
    """Whether it is torchmetrics' collection, whose members may share what they count."""
    return hasattr(type(module), "compute_groups") and "_groups" in module.__dict__


def metrics_in(module: nn.Module) -> list[Any]:
    """A module's metrics, without those that are inside of another (as in `MinMaxMetric`)."""
    found: dict[int, Any] = {}

    def look(within: nn.Module) -> None:
        if is_metric(within):
            found[id(within)] = within
        else:
            for child in within.children():
                look(child)

    look(module)
    return list(found.values())


@dataclasses.dataclass
class Counts:
    """What one replica's metric counted in one step.

    Attributes:
        states: by their names.
        updates: how many there were.
        calls: what the updates were given, where states of this kind can't be merged.
    """

    states: dict[str, Any]
    updates: int
    calls: Calls | None


def fresh(metric: Any, children: dict[str, nn.Module | None], device: torch.device) -> Any:
    """A copy of a metric or collection that has counted nothing.

    Args:
        children: the copies of its submodules.
        device: where it counts.
    """
    made = copy.copy(metric)  # which binds `update` to the copy, as a shallow dict wouldn't
    state = made.__dict__
    state["_modules"] = children
    if is_metrics(metric):
        state["_groups"] = copy.deepcopy(metric._groups)
        return made
    state["_defaults"] = dict(metric._defaults)
    begin(made)
    return made if metric.device == device else made.to(device)


def begin(metric: Any) -> None:
    """Let a metric count from nothing, without touching what it has counted."""
    for name in metric._defaults:
        if isinstance(getattr(metric, name), list):
            setattr(metric, name, [])  # `reset` empties lists in place
    metric.reset()
    if not _can_merge(metric):
        _record(metric)


def counts_of(metric: Any) -> Counts:
    """What a metric has counted since `begin`."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    recorded = vars(metric).get("_recorded")
    calls = None if recorded is None else list(recorded)
    return Counts(states, metric._update_count, calls)


def take_up(metric: Any, counts: Counts) -> None:
    """Add what a replica's metric counted, later than what the metric has counted by now."""
    if counts.calls is not None:
        for args, kwargs in _moved(counts.calls, metric.device):
            metric.update(*args, **kwargs)
        return
    if not counts.updates:
        return
    older = copy.copy(metric)
    # torchmetrics takes the one that is given as the older one: its rows come first.
    vars(metric).update(_moved(counts.states, metric.device))
    metric._update_count = older._update_count + counts.updates
    metric._computed = None
    metric.merge_state(older)


def _moved(tree: Any, device: torch.device) -> Any:
    return trees.map_leaves(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _can_merge(metric: Any) -> bool:
    """Whether its states can be merged again and again; else its updates are made once more."""
    if any(is_metric(child) for child in metric.modules() if child is not metric):
        return False
    if type(metric).merge_state.__module__ != "torchmetrics.metric":
        return True  # a way of its own
    names = [getattr(reduction, "__name__", "") for reduction in metric._reductions.values()]
    plain = metric.full_state_update is False and not metric.dist_sync_on_step
    return plain and all(name in MERGEABLE for name in names)


class _Recorded(Calls):
    """Notes the calls of a metric's `update` and `forward`, which itself calls `update`."""

    def __init__(self) -> None:
        super().__init__()
        self._is_within = False

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its outermost calls noted."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._is_within:
                return function(*args, **kwargs)
            self.append((args, kwargs))
            self._is_within = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_within = False

        return noted


def _record(metric: Any) -> None:
    recorded = _Recorded()
    vars(metric).update(
        _recorded=recorded,
        update=recorded.noting(metric.update),
        forward=recorded.noting(metric.forward),
    )
