"""Data parallelism in one process: each batch is split over the devices, outputs are gathered."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.accelerators import current_device, number_of
from fitkit.errors import ConfigurationError, warn
from fitkit.extras.rows import gather, part_sizes, split
from fitkit.samples import samples_among
from fitkit.seams.steps import loss_in, said_count, stop_gradients_of_nothing
from fitkit.seams.strategies import Assignment, ReplicatedModel, Strategy, WrappedModel

ABSENT = object()

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""A call's arguments, by position and by keyword."""


@dataclasses.dataclass
class Replica:
    """One replica.

    Attributes:
        module: the copy.
        device: where it is.
        metrics: by the id of a metric of the original, that metric and its copy here.
    """

    module: Any
    device: torch.device
    metrics: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)


class Replicas(ReplicatedModel):
    """Calls a module's methods with a batch divided among replicas.

    Each call copies the module for every part of the batch. On several GPUs the parts are computed
    side by side, in threads that have the caller's gradient, inference and autocast modes. The
    gradients of one backward pass over the gathered outputs are those of one device, as far as the
    method treats samples apart; batch normalization sees a part's statistics. torch's functions for
    `DataParallel` do the work there. They know no CPU, so replicas on a CPU share the parameters
    and compute one after the other.

    A module that has `_begin_replica(device, samples)` gets it called on each replica before the
    method, and one that has `_end_replicas(replicas)` gets it called once after all have ended.

    Args:
        module: what is replicated. It stays on the first device.
        devices: of the replicas; on CPU the same one several times.
        strategy: its name, for messages.
        warned: the lost attributes that were warned of before.

    Attributes:
        net: the module.
        weights: the number of samples of each replica in the last call.

    Raises:
        ConfigurationError: a module that is compiled, so that its replicas would compute with it.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: tuple[torch.device, ...],
        strategy: str = "dp",
        warned: set[str] | None = None,
    ) -> None:
        for name, child in module.named_modules():
            if child._compiled_call_impl is not None or "_orig_mod" in child._modules:
                where = f"Its submodule {name!r}" if name else "It"
                raise ConfigurationError(
                    f"{type(module).__name__} can't be replicated. {where} is compiled by "
                    "torch.compile, and compiled code is bound to the module it was made from. "
                    "Write jit_compile=False, or strategy='ddp', where each device has a process "
                    "of its own."
                )
        super().__init__(module)
        self._devices = devices
        self._strategy = strategy
        self._warned: set[str] = set() if warned is None else warned

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the replicas return, gathered (see `rows.gather`).

        Args:
            method: `""` calls the module itself, and all arguments are divided together. Of
                another method's arguments the first is the batch, the others go to every
                replica as they are.

        Raises:
            ConfigurationError: outputs that can't be gathered.
            Exception: the first replica's that failed, as it raised it.
        """
        if method:
            parts = [((part, *args[1:]), kwargs) for part in split(args[0], len(self._devices))]
            samples = samples_among(args[0])
        else:
            # Arguments are entries of a batch; a tuple of them isn't a list of samples.
            samples = samples_among({**dict(enumerate(args)), **kwargs})
            parts = split((args, kwargs), len(self._devices), samples)
        weights = part_sizes(samples, len(self._devices))
        self.weights = weights
        replicas = replicate(self.module, list(self._devices[: len(parts)]))
        for replica, size in zip(replicas, weights, strict=True):
            if hasattr(type(replica.module), "_begin_replica"):
                replica.module._begin_replica(replica.device, size)
        begun = [_attributes_of(replica.module) for replica in replicas]
        outputs = self._run(replicas, method, parts)
        for attributes in begun:
            self._warn_of_lost_state(attributes, method)
        _keep_buffers(self.module, replicas[0].module)
        for replica in replicas:
            for own, copied in replica.metrics.values():
                for given, named in _moved(copied._noted, own.device):
                    own.update(*given, **named)
        if hasattr(type(self.module), "_end_replicas"):
            net: Any = self.module
            net._end_replicas([replica.module for replica in replicas])
        if method:
            for output in outputs:
                _stop_gradients_of_nothing(output, said_count(output))
            return gather(outputs, replicas[0].device)
        counts: list[Any] = []
        if self.weigh is not None:
            inputs = [kwargs or (args[0] if len(args) == 1 else args) for args, kwargs in parts]
            counts = [self.weigh(*pair) for pair in zip(outputs, inputs, strict=True)]
        is_known = bool(counts) and None not in counts
        for output, count in zip(outputs, counts or weights, strict=True):
            _stop_gradients_of_nothing(output, count)
        return gather(outputs, replicas[0].device, counts if is_known else weights)

    def _run(self, replicas: list[Replica], method: str, parts: list[Arguments]) -> list[Any]:
        """Each replica's outputs for its part."""
        modes = _callers_modes(share_casts=len(replicas) == 1)

        def call(index: int) -> tuple[Any, BaseException | None]:
            """Return what a replica returns, or its error."""
            replica = replicas[index]
            entry = getattr(replica.module, method) if method else replica.module
            try:
                args, kwargs = parts[index]
                if replica.device != replicas[0].device:
                    args, kwargs = _moved(parts[index], replica.device)
                elif len(parts) > 1:  # the replicas may write into their parts
                    args, kwargs = trees.cloned(parts[index])
                with modes():
                    return entry(*args, **kwargs), None
            except BaseException as error:
                return None, error

        results: list[Any] = []
        if len(replicas) == 1 or replicas[0].device.type == "cpu":
            for index in range(len(replicas)):
                results.append(call(index))
                if results[-1][1] is not None:
                    break
        else:
            # Each thread needs a copy of the caller's context for its own.
            calls: list[Any] = [
                partial(contextvars.copy_context().run, call, index)
                for index in range(len(replicas))
            ]
            devices = [replica.device for replica in replicas]
            results = nn.parallel.parallel_apply(calls, [()] * len(calls), devices=devices)
        failed = [index for index, (_, error) in enumerate(results) if error is not None]
        if not failed:
            return [outputs for outputs, _ in results]
        index, sizes = failed[0], self.weights
        error: Any = results[index][1]
        if hasattr(error, "add_note"):  # not in Python 3.10
            error.add_note(
                f"Raised by replica {index} (of 0 to {len(replicas) - 1}) on "
                f"{replicas[index].device}, with {sizes[index]} of the batch's {sum(sizes)} "
                "samples."
            )
        try:
            raise error
        finally:
            # An error's frames hold this one, which would hold the error and all that they hold.
            del error, results

    def _warn_of_lost_state(self, begun: Attributes, method: str) -> None:
        """Warn of attributes that a step set in a replica, where they are lost; once of each."""
        for child, before in begun:
            for name, value in child.__dict__.items():
                attribute = f"{type(child).__name__}.{name}"
                if before.get(name, ABSENT) is value or name.startswith("_"):
                    continue
                # Torch's weight and spectral norm set the weight before each forward.
                is_recomputed = any(f"{name}{end}" in child._parameters for end in ("_g", "_orig"))
                if attribute in self._warned or is_recomputed:
                    continue
                self._warned.add(attribute)
                warn(
                    f"{method or 'forward'} sets {attribute}, which is lost: under "
                    f"strategy={self._strategy!r} each device runs a replica of the model that is "
                    "dropped after the batch. Return it and set it in the *_step_end hook, make it "
                    "a buffer (register_buffer: the first replica's persists), or use "
                    "strategy='ddp'."
                )


def _stop_gradients_of_nothing(output: Any, count: Any) -> None:
    """Let no NaNs flow into a replica in whose part nothing counts."""
    loss, count = loss_in(output), number_of(count)
    if count is not None and isinstance(loss, torch.Tensor):
        stop_gradients_of_nothing(loss, count)


def _moved(tree: Any, device: torch.device) -> Any:
    """Return a tree with its tensors on a device."""
    return trees.map_leaves(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf,
        tree,
    )


def _callers_modes(*, share_casts: bool) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Give this thread's modes to other threads: torch keeps them by thread.

    `parallel_apply` hands on less: neither inference mode nor autocast's dtype.

    Args:
        share_casts: whether autocast may keep cast weights. It does so in one place for all
            threads: which replicas share a cast, and so how gradients are rounded, would be a
            matter of chance.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = share_casts and torch.is_autocast_cache_enabled()
    autocast = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in {"cpu", current_device().type}
        if torch.is_autocast_enabled(kind)
    ]

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))
            yield

    return modes


# ---------------------------------------------------------------------- copies


def replicate(module: nn.Module, devices: list[torch.device]) -> list[Replica]:
    """Return copies of a module, one for each device, made for one call.

    Replicas on one device (the CPU) have the module's own parameters; those on several have
    copies through which gradients flow back, and their `parameters()` are empty, as with
    torch's `DataParallel`. The first replica has the module's own buffers and metrics, the
    others have copies, metrics' with nothing counted.
    """
    if len(set(devices)) == 1:
        copies = [_with_shared_parameters(module, index) for index in range(len(devices))]
    else:
        copies = nn.parallel.replicate(module, devices, not torch.is_grad_enabled())
    replicas = [Replica(copied, device) for copied, device in zip(copies, devices, strict=True)]
    for index, replica in enumerate(replicas):
        for own, copied in _pairs(module, replica.module):
            if not _is_torchs(own):  # methods kept as attributes (`self.act = self.gelu`)
                for name, value in own.__dict__.items():
                    if type(value) is types.MethodType and value.__self__ is own:
                        copied.__dict__[name] = types.MethodType(value.__func__, copied)
            for name, child in own._modules.items():
                if child is not None and _counts(child):
                    copied._modules[name] = child if index == 0 else _fresh(child, replica)
    return replicas


def _with_shared_parameters(module: nn.Module, index: int) -> nn.Module:
    """Return what `nn.parallel.replicate` makes of a module, with the module's own parameters."""
    modules: dict[int, nn.Module] = {}
    buffers: dict[int, torch.Tensor] = {}

    def copied(own: nn.Module) -> nn.Module:
        if isinstance(own, torch.jit.ScriptModule) or _counts(own):
            return own  # a script can't be taken apart, and metrics come later
        if id(own) not in modules:
            made = modules[id(own)] = own._replicate_for_data_parallel()
            made.__dict__["_parameters"] = own._parameters.copy()
            made.__dict__["_modules"] = {
                name: None if child is None else copied(child)
                for name, child in own._modules.items()
            }
            if index:
                for name, buffer in own._buffers.items():
                    if buffer is not None:
                        found = buffers.setdefault(id(buffer), buffer.detach().clone())
                        made._buffers[name] = found
        return modules[id(own)]

    return copied(module)


def _pairs(module: nn.Module, other: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return a module and its submodules, down to metrics, each with its copy in `other`."""
    found = [(module, other)]
    for name, child in module._modules.items():
        copied = other._modules.get(name)
        if child is not None and copied is not None and copied is not child and not _counts(child):
            found += _pairs(child, copied)
    return found


def _keep_buffers(module: nn.Module, first: nn.Module) -> None:
    """Give the module the buffers that the first replica replaced, which torch's copies don't."""
    for own, copied in _pairs(module, first):
        for name, buffer in copied._buffers.items():
            before = own._buffers.get(name)
            if buffer is not before and not (before is not None and before.requires_grad):
                own._buffers[name] = buffer


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


Attributes = list[tuple[nn.Module, dict[str, Any]]]
"""Modules, each with its attributes."""


def _attributes_of(replica: nn.Module) -> Attributes:
    """Each submodule with its attributes as they are now; torch's own layers keep no state."""
    return [
        (child, child.__dict__.copy())
        for child in replica.modules()
        if not (_is_torchs(child) or _counts(child))
    ]


# ---------------------------------------------------------------------- metrics


def _counts(module: nn.Module) -> bool:
    """Whether it is a metric of torchmetrics', or a collection of some."""
    return _is_metric(module) or _is_collection(module)


def _is_metric(module: nn.Module) -> bool:
    return hasattr(type(module), "merge_state") and "_defaults" in module.__dict__


def _is_collection(module: nn.Module) -> bool:
    return hasattr(type(module), "compute_groups") and "_groups" in module.__dict__


def _fresh(metric: Any, replica: Replica, *, is_inner: bool = False) -> Any:
    """Return a replica's copy of a metric or collection: it has counted nothing, and notes its
    updates.

    Args:
        is_inner: whether it is inside of another metric (as in `MinMaxMetric`), which notes them.
    """
    if id(metric) in replica.metrics:
        return replica.metrics[id(metric)][1]
    made = copy.copy(metric)  # which binds `update` to the copy, as a shallow dict wouldn't
    is_collection, state = _is_collection(metric), made.__dict__
    children = {}
    for name, child in metric._modules.items():
        if child is not None and _counts(child):
            child = _fresh(child, replica, is_inner=is_inner or not is_collection)
        elif child is not None and not is_collection and metric.device != replica.device:
            child = copy.deepcopy(child)  # a net of its own, which moving the copy would move
        children[name] = child
    state["_modules"] = children
    if is_collection:
        state["_groups"] = copy.deepcopy(metric._groups)
        return made
    state["_defaults"] = dict(metric._defaults)
    for name in made._defaults:
        if isinstance(getattr(made, name), list):
            setattr(made, name, [])  # `reset` empties lists in place
    made.reset()
    if metric.device != replica.device:
        made = made.to(replica.device)
    if not is_inner:
        replica.metrics[id(metric)] = metric, made
        _note_updates(made)
    return made


def _note_updates(metric: Any) -> None:
    """Have a metric note the arguments of its updates.

    They are made again with the original, in the replicas' order: not all states can be merged.
    """
    noted: list[Arguments] = []
    is_within = False  # `forward`, which itself calls `update`

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_within
            if is_within:
                return function(*args, **kwargs)
            noted.append((args, kwargs))
            is_within = True
            try:
                return function(*args, **kwargs)
            finally:
                is_within = False

        return call

    vars(metric).update(_noted=noted, update=noting(metric.update), forward=noting(metric.forward))


class DP(Strategy):
    """Trains in one process: each batch is split over the devices, and the outputs are gathered.

    Each call of a step copies the module to the devices and runs the copies with a part of the
    batch each (on GPUs in threads). What they return is gathered on the first device: tensors are
    joined along dimension 0, scalars become a vector with one entry per replica. A `*_step_end`
    hook sees the whole batch. A loss over all of its samples (such as in-batch negatives) is
    therefore the same as on one device. One backward pass gives one device's gradients, and one
    optimizer makes the update.

    On CPU the replicas share the device and run one after the other. On several GPUs, `ddp` is
    faster: it copies no module and no outputs, and Python's lock doesn't hold up its processes.

    A torchmetrics metric that a step updates counts what all replicas saw. Other state that a step
    sets on the module is lost, except for the buffers of the first replica. A warning says so.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", accelerator="cpu", devices=2,
        ...               strategy=fitkit.strategies.DPStrategy())
    """

    name = "dp"
    replicates = True

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()

    def connect(self, assignment: Assignment) -> Strategy:
        self._warned = set()
        kind = assignment.devices[0].type
        if kind not in ("cpu", "cuda") and not hasattr(torch._C, "_broadcast_coalesced"):
            raise ConfigurationError(
                f"strategy='{self.name}' replicates nets on {kind} devices by functions that this "
                "build of torch doesn't have. Write strategy='ddp', where each device has a "
                "process of its own."
            )
        return super().connect(assignment)

    def wrap_for_evaluation(self, module: torch.nn.Module) -> WrappedModel:
        return Replicas(module, self.devices, self.name, self._warned)
