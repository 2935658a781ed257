"""Estimate what a training needs on each device, without the devices."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import html
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fitkit import trees
from fitkit.arguments import check_count, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.activation_checkpointing import is_recomputed, matching, recompute
from fitkit.extras.bagua.base import all_gather_bytes, all_reduce_bytes
from fitkit.extras.bagua.strategy import Bagua
from fitkit.extras.ddp import DDP
from fitkit.extras.ddp2 import DDP2
from fitkit.extras.deepspeed import DeepSpeed, bucket_of
from fitkit.extras.distillation import teachers_of
from fitkit.extras.dp import DP
from fitkit.extras.parallel.tensor import divided_in
from fitkit.extras.sharding.ddp_sharded import DDPSharded
from fitkit.extras.sharding.fsdp import FSDP
from fitkit.extras.sharding.sharded_module import blocks_of
from fitkit.extras.summary import number_type
from fitkit.extras.tune import untouched
from fitkit.model import Model
from fitkit.printing import say
from fitkit.samples import samples_of
from fitkit.seams.data import as_tensors, is_array, made_dense
from fitkit.seams.networks import verb_of
from fitkit.seams.optimizers import check_trainable
from fitkit.seams.precisions import MixedPrecision
from fitkit.seams.steps import unpacker_of
from fitkit.seams.strategies import Assignment, SingleDevice, Strategy, named_strategy
from fitkit.tensors import human_bytes

LINKS = {"10 Gbit/s Ethernet": 1.25e9, "100 Gbit/s network": 12.5e9, "NVLink": 300e9}
"""The most bytes per second that one device can send over common links."""

ROWS = (
    "parameters", "gradients", "optimizer", "buffers", "activations", "backward", "exchange",
    "teacher",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`. `str()` gives the table.

    Attributes:
        devices: the number of devices on each node.
        num_nodes: the number of machines.
        samples: the number of samples in the measured batch.
        whole: the bytes that a training of the whole net takes on one device.
        costs: the bytes on the fullest device, by the strategy's name.
        notes: what the figures leave out.
    """

    devices: int
    num_nodes: int
    samples: int
    whole: Costs
    costs: dict[str, Costs]
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        """Each line's name, and its entry for each strategy."""
        columns = list(self.costs.values())
        for name in ROWS:
            if name != "teacher" or self.whole.teacher:
                yield name, [human_bytes(getattr(costs, name)) for costs in columns]
        yield "a device in all", [human_bytes(costs.memory) for costs in columns]
        yield "sent each update", [human_bytes(costs.sent) for costs in columns]
        for link, bytes_per_s in LINKS.items():
            yield f"  by {link}", [_duration(costs.sent / bytes_per_s) for costs in columns]

    def __str__(self) -> str:
        ranks = self.devices * self.num_nodes
        batch = f"a process's batch of {self.samples}"
        title = f"{ranks} device{'s' if ranks > 1 else ''}"
        title += f" ({self.num_nodes} nodes × {self.devices})" if self.num_nodes > 1 else ""
        lines = [f"{title}, {batch}; what the fullest one holds:", ""]
        width = max(11, *(len(name) + 2 for name in self.costs))
        lines.append(" " * 24 + "".join(f"{name:>{width}}" for name in self.costs))
        for name, cells in self.rows():
            lines.append(f"{name:24}" + "".join(f"{cell:>{width}}" for cell in cells))
        return "\n".join([*lines, "", *self.notes])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


SPLIT = (
    "Activations are in proportion to the samples. Where a batch doesn't fit, "
    "compile(out_of_memory='split') computes it in parts (one device, ddp, ddp_spawn)."
)
"""What a plan says below its table."""


def plan(
    model: Model,
    devices: int,
    strategy: str | Strategy | Sequence[str | Strategy],
    batch: Any,
    *,
    num_nodes: int = 1,
) -> Plan:
    """Print what a training would hold on each device and send in each update.

    If the net is on a real device, it makes one step there with its compiled optimizer, loss and
    precision, and is restored afterwards. So the memory of autograd and of the optimizer is
    counted, not estimated. A net on the `meta` device runs only its forward pass, without memory.
    The devices that you ask about need not exist.

    Activations are those of `batch`, and grow in proportion to its samples. The row `backward` is
    the gradient of the largest one. The figures leave out memory that lives within one operation
    only, and the device's own context and libraries (about half a gigabyte on CUDA). They also
    leave out memory that the allocator can't fill (often a tenth).

    Args:
        model: a compiled model.
        devices: the number of devices on each node.
        strategy: a name or an object, or a list of several to compare. `"auto"` is what `fit` would
            choose: `"ddp_spawn"` on several devices.
        batch: the batch that one process gets in a step, in the form for `fit`: `(x, y)`.
        num_nodes: the number of machines. Default 1.

    Returns:
        The figures, in bytes.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(512, 512))
        >>> model.compile("adam", "mse")
        >>> batch = torch.rand(32, 512), torch.rand(32, 512)
        >>> found = fitkit.plan(model, 8, ["ddp", "fsdp"], batch)
        8 devices, a process's batch of 32; what the fullest one holds:
        ...
        >>> found.costs["fsdp"].memory < found.costs["ddp"].memory
        True

    Reference: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020, arXiv:1910.02054, for which rank keeps what.
    """
    if not isinstance(model, Model):
        raise ArgumentTypeError(
            f"model={describe(model)} must be a compiled fitkit.Model, because its optimizer, loss "
            "and precision count. Write fitkit.Model(net) and compile it."
        )
    devices = check_count("devices", devices)
    num_nodes = check_count("num_nodes", num_nodes)
    check_trainable(model._fitkit.compilation.trained(model).learning())
    _check_batch(batch)
    batch = _read(batch, model)
    given = [strategy] if isinstance(strategy, (str, Strategy)) else strategy
    if not isinstance(given, Sequence):
        raise ArgumentTypeError(
            f"strategy={describe(strategy)} must be a name, such as 'ddp', a Strategy, or a list."
        )
    if not given:
        raise ConfigurationError("strategy is empty. Give a name, such as 'ddp', or several.")
    auto = "single_device" if devices * num_nodes == 1 else "ddp_spawn"  # what fit would choose
    chosen = _by_name([named_strategy(auto if item == "auto" else item) for item in given])
    meta = any(parameter.is_meta for parameter in model.parameters())
    measured = _costs_on_meta if meta else _costs_of_a_step
    whole, notes = measured(model, batch)
    net = model._weights_module()
    costs: dict[str, Costs] = {}
    for name, item in chosen.items():
        own = whole
        if devices * num_nodes > 1:
            if isinstance(item, FSDP) and item.activation_checkpointing:
                with _recomputed(net, item):
                    own, _ = measured(model, batch)
            own = costs_of(item, net, own, devices, num_nodes)
        costs[name] = own
    if any(one.cuts_batches and not one.has_engine for one in chosen.values()):
        notes = (*notes, SPLIT)
    found = Plan(devices, num_nodes, samples_of(batch), whole, costs, notes)
    say(found)
    return found


@dataclasses.dataclass(frozen=True)
class Costs:
    """The bytes that a device holds, and that a rank sends in a step.

    Attributes:
        parameters: all parameters.
        gradients: the gradients of the parameters that learn.
        optimizer: the optimizer's state after an update.
        buffers: running statistics and the like.
        activations: what the forward pass keeps for the backward pass, for one process's batch.
        backward: the gradient of the largest activation, which the backward pass holds as well.
        numbers: how many numbers of the whole net learn.
        element: bytes per number when sent: in half precision if used, else its own width.
        exchange: the buffers for gradients or parameters that are sent.
        teacher: a teacher's weights, if the net learns from one (`losses.Distillation`).
        sent: the bytes that a rank sends per update.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    backward: float
    numbers: int
    element: float
    exchange: float = 0.0
    teacher: float = 0.0
    sent: float = 0.0

    @property
    def memory(self) -> float:
        """All bytes that the device holds."""
        held = (self.parameters, self.gradients, self.optimizer, self.buffers)
        return sum(held) + self.activations + self.backward + self.exchange + self.teacher


# ---------------------------------------------------------------- what strategies cost


@functools.singledispatch
def costs_of(
    strategy: Strategy, module: nn.Module, whole: Costs, devices: int, nodes: int
) -> Costs:
    """Compute what the fullest device would hold and a rank would send, without the devices.

    For your own strategy, use `costs_of.register` on a function with the same arguments. Without
    it, your strategy costs the same as its parent class.

    Args:
        strategy: its class and its options decide.
        module: the net.
        whole: those of a device that holds everything and sends nothing.
        devices: the number of devices on each node.
        nodes: the number of machines.
    """
    return whole


@costs_of.register
def _(strategy: DP, module: nn.Module, whole: Costs, devices: int, nodes: int) -> Costs:
    # The first device, which gathers the copies' gradients. It sends the parameters to each other
    # device, and gets as many gradients back.
    return dataclasses.replace(
        whole,
        activations=whole.activations / devices,
        backward=whole.backward / devices,
        sent=whole.parameters * (devices - 1),
    )


@costs_of.register
def of_ddp(strategy: DDP, module: nn.Module, whole: Costs, devices: int, nodes: int) -> Costs:
    if devices * nodes == 1:
        return whole
    halved = strategy.comm_hook in ("fp16", "bf16")
    return dataclasses.replace(
        whole,
        exchange=0.0 if strategy.options["gradient_as_bucket_view"] else whole.gradients,
        sent=all_reduce_bytes(whole.gradients, devices * nodes) / (2 if halved else 1),
    )


@costs_of.register
def _(strategy: DDP2, module: nn.Module, whole: Costs, devices: int, nodes: int) -> Costs:
    within = dataclasses.replace(
        whole, activations=whole.activations / devices, backward=whole.backward / devices
    )
    return of_ddp(strategy, module, within, 1, nodes)


@costs_of.register
def _(strategy: Bagua, module: nn.Module, whole: Costs, devices: int, nodes: int) -> Costs:
    plain, ranks = of_ddp(strategy, module, whole, devices, nodes), devices * nodes
    sent = strategy.algorithm.sent(whole.gradients, whole.numbers, ranks)
    return dataclasses.replace(plain, sent=sent)


@costs_of.register
def _(strategy: DDPSharded, module: nn.Module, whole: Costs, devices: int, nodes: int) -> Costs:
    plain, ranks = of_ddp(strategy, module, whole, devices, nodes), devices * nodes
    return dataclasses.replace(
        plain,
        optimizer=whole.optimizer / ranks,
        sent=plain.sent + all_gather_bytes(whole.gradients, ranks),  # the updated parameters
    )


@costs_of.register
def _(strategy: DeepSpeed, module: nn.Module, whole: Costs, devices: int, nodes: int) -> Costs:
    ranks = devices * nodes
    masters = whole.numbers * 4 / ranks  # the updated copy, besides the one that computes
    travelling = whole.numbers * whole.element
    bucket = bucket_of(strategy.config, whole.numbers) * whole.element
    is_third = strategy.stage == 3
    return dataclasses.replace(
        whole,
        parameters=whole.parameters / (ranks if is_third else 1),
        gradients=whole.gradients / (ranks if strategy.stage > 1 else 1),
        optimizer=whole.optimizer / ranks + masters,
        # The third stage may gather all parameters at once (`stage3_max_live_parameters`).
        exchange=bucket + (travelling if is_third else 0.0),
        sent=2 * all_gather_bytes(travelling, ranks) + all_gather_bytes(whole.gradients, ranks)
        if is_third
        else all_reduce_bytes(whole.gradients, ranks) + all_gather_bytes(travelling, ranks),
    )


@costs_of.register
def _(strategy: FSDP, module: nn.Module, whole: Costs, devices: int, nodes: int) -> Costs:
    ranks = devices * nodes
    strategy.check_groups(ranks)
    together, reshards = strategy.tensor_parallel, strategy.reshard_after_forward
    within = strategy.shard_size or ranks // together  # ranks that share one copy
    # Of the ranks that compute a batch together, each has a part of the parameters in the plan.
    divided = divided_in(module, strategy.tensor_parallel_plan or {})
    blocks = blocks_of(module, strategy.wrap)

    def held(parameters: Iterable[nn.Parameter]) -> float:
        return sum(p.numel() / (together if p in divided else 1) for p in parameters)

    parameters = list(module.parameters())
    learning = [p for p in parameters if p.requires_grad]
    of_all = held(parameters) / max(sum(p.numel() for p in parameters), 1)
    of_learning = held(learning) / max(sum(p.numel() for p in learning), 1)
    travelling = held(parameters) * whole.element  # frozen ones, too
    gradients = whole.gradients * of_learning
    inside = [held(block.parameters()) for block in blocks]
    rest = held(parameters) - sum(inside)
    # One block at work, the next on its way, and always what belongs to no block.
    at_once = rest + (2 * max(inside, default=0) if reshards else sum(inside))
    on_device = 0 if strategy.cpu_offload else 1 / within
    return dataclasses.replace(
        whole,
        activations=whole.activations / strategy.context_parallel,
        backward=whole.backward / strategy.context_parallel,
        parameters=whole.parameters * of_all * on_device,
        gradients=gradients * on_device,
        optimizer=whole.optimizer * of_learning * on_device,
        exchange=at_once * whole.element,
        sent=(2 if reshards else 1) * all_gather_bytes(travelling, within)
        + all_gather_bytes(gradients, within)
        + all_reduce_bytes(gradients / within, ranks // together // within),
    )


def _check_batch(batch: Any) -> None:
    """Refuse what isn't a batch."""
    if batch is None or isinstance(batch, (DataLoader, Dataset, Iterator, str, int, float)):
        raise ArgumentTypeError(
            f"batch={describe(batch)} must be one batch of tensors or arrays, as one process gets "
            "it in a step: (x, y), or next(iter(loader))."
        )


def _read(batch: Any, model: Model) -> Any:
    """Return a batch with data frames, and what else converts to arrays, as tensors."""
    dtype = number_type(model)

    def as_tensor(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, np.ndarray)) or not is_array(leaf):
            return leaf
        return made_dense(as_tensors(leaf, "batch", dtype))

    return trees.map_leaves(as_tensor, batch)


def _by_name(strategies: list[Strategy]) -> dict[str, Strategy]:
    """Strategies by name. The second with the same name is numbered."""
    found: dict[str, Strategy] = {}
    for item in strategies:
        earlier = sum(type(other) is type(item) for other in found.values())
        found[f"{item.name} ({earlier + 1})" if earlier else item.name] = item
    return found


def _costs_of_a_step(model: Model, batch: Any) -> tuple[Costs, tuple[str, ...]]:
    """Return the bytes that one real step on one device holds."""
    strategy = model._fitkit.compilation.strategy
    alone = SingleDevice().connect(
        Assignment((strategy.device,), strategy.device_ids[:1], copy.copy(strategy.precision))
    )
    with untouched(model):
        model._fitkit.compilation = model._fitkit.compilation.on(alone)
        with _activations(model) as saved:
            # fit would take a list of one tensor as arrays, and cut its own batches from it.
            verb_of(model, "fit")(iter([batch]), verbose=0)
        held = model._fitkit.compilation.trained(model).learning()
        state = sum(
            _held_bytes(own)
            for optimizer in model._fitkit.fit_state.optimizers
            for own in optimizer.state.values()
        )
        return _costs(model, held, state, saved.peak, saved.largest), ()


def _costs_on_meta(model: Model, batch: Any) -> tuple[Costs, tuple[str, ...]]:
    """Return the same for a net without memory, from its shapes."""
    net = model._weights_module()
    inputs = trees.map_leaves(_as_meta, unpacker_of(model)(batch)[0])
    with _activations(net) as saved:
        outputs = model(inputs)
    notes = ["The net is on the meta device: its loss, and half precision, aren't in activations."]
    activations = saved.peak + trees.tensor_bytes(outputs)
    largest = max([saved.largest, *(tensor.nbytes for tensor in trees.tensors(outputs))])
    try:
        state = _state_on_meta(model, [p for p in net.parameters() if p.requires_grad])
    except Exception as error:
        state = 0
        notes.append(f"The optimizer's state isn't known without a real net ({error}).")
    # Graphs and optimizers that refer to parameters would keep them from getting memory later.
    del outputs
    gc.collect()
    return _costs(model, list(net.parameters()), state, activations, largest), tuple(notes)


def _state_on_meta(model: Model, parameters: list[nn.Parameter]) -> float:
    """Return the bytes of an optimizer's state after one step."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        state = 0.0
        for optimizer in model._fitkit.compilation.optimizer.build(parameters, model):
            optimizer.step()
            state += sum(_held_bytes(own) for own in optimizer.state.values())
            optimizer.state.clear()  # it may be the user's optimizer
    finally:
        for parameter in parameters:
            parameter.grad = None
    return state


def _costs(
    model: Model,
    parameters: list[nn.Parameter],
    state: float,
    activations: float,
    largest: float,
) -> Costs:
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in learning)
    precision = model._fitkit.compilation.strategy.precision
    gradients = trees.tensor_bytes(learning)
    mixed = isinstance(precision, MixedPrecision)
    teachers = teachers_of(model._fitkit.compilation.given.loss)
    return Costs(
        parameters=_held_bytes(parameters),
        gradients=gradients,
        optimizer=state,
        buffers=trees.tensor_bytes(list(model.buffers())),
        activations=activations,
        backward=largest,
        numbers=numbers,
        element=2.0 if mixed else gradients / max(numbers, 1),
        teacher=sum(_held_bytes([*net.parameters(), *net.buffers()]) for net in teachers),
    )


def _held_bytes(tree: Any) -> int:
    """Return the bytes of a tree's tensors. A quantized tensor counts as the tensors that it
    wraps.
    """

    def size(tensor: Any) -> int:
        if not hasattr(tensor, "__tensor_flatten__"):
            return int(tensor.nbytes)
        return sum(size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])

    return sum(map(size, trees.tensors(tree)))


@contextlib.contextmanager
def _recomputed(net: nn.Module, strategy: FSDP) -> Iterator[None]:
    """Recompute the blocks that the strategy's training recomputes."""
    blocks = blocks_of(net, strategy.wrap)
    forwards = recompute(matching(net, blocks, strategy.activation_checkpointing))
    try:
        yield
    finally:
        for forward in forwards:
            forward.remove()


@contextlib.contextmanager
def _activations(net: nn.Module) -> Iterator[SavedTensors]:
    """Count what autograd keeps, and what blocks keep while they are recomputed.

    Autograd's hooks don't see the latter. So each block runs its forward once more, to be counted.
    During its backward it keeps as much again as after its forward.
    """

    def held() -> list[torch.Tensor]:
        return [*net.parameters(), *net.buffers()]

    def count(block: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            apart = [*held(), *trees.tensors([args, kwargs])]
            with SavedTensors(apart_from=lambda: apart) as inside:
                block.forward.plainly(*args, **kwargs)
            saved.peak = max(saved.peak, saved.bytes + inside.peak)
            saved.largest = max(saved.largest, inside.largest)

    handles = [
        part.register_forward_hook(count, with_kwargs=True)
        for part in net.modules()
        if is_recomputed(part)
    ]
    try:
        with SavedTensors(apart_from=held) as saved:
            yield saved
    finally:
        for handle in handles:
            handle.remove()


def _as_meta(leaf: Any) -> Any:
    leaf = torch.as_tensor(leaf) if hasattr(leaf, "__array__") else leaf
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


class SavedTensors:
    """Counts the bytes that autograd keeps inside the block. Shared memory counts once.

    Args:
        apart_from: returns the tensors that exist anyway, such as parameters. It is asked when
            autograd keeps its first tensor, because `fit` moves parameters to their device.

    Attributes:
        bytes: the bytes kept now.
        peak: the most bytes kept at one time.
        largest: the bytes of the largest tensor that may have a gradient.
    """

    def __init__(self, apart_from: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        self.peak: int = 0
        self.largest: int = 0
        self.bytes: int = 0
        self._holders: Counter[int] = Counter()
        self._apart_from = apart_from
        self._apart: set[int] | None = None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, attrgetter("tensor"))

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        storage = _storage(tensor)
        if self._apart is None:
            self._apart = {_storage(other) for other in self._apart_from()}
        if storage not in self._apart:
            size = tensor.untyped_storage().nbytes()
            self._holders[storage] += 1
            if self._holders[storage] == 1:
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
                if trees.is_inexact(tensor):  # others have no gradient
                    self.largest = max(self.largest, tensor.nbytes)
            weakref.finalize(kept, self._released, storage, size).atexit = False
        return kept

    def _released(self, storage: int, size: int) -> None:
        self._holders[storage] -= 1
        if self._holders[storage] == 0:
            self.bytes -= size


class _Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that tensors over the same memory share, even without real memory."""
    return tensor.untyped_storage()._cdata
