"""A whole training step as one CUDA graph: forward, backward and the optimizer's step.

A small net's step is hundreds of launches, between which the device waits for the host. A graph is
recorded once and launched as a whole. It reads and writes always the same memory, so each batch is
copied to where the first one was, and it repeats what the host decided when it was recorded: where
that changes (a learning rate, a frozen layer, another shape), it is recorded anew or left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit import trees
from fitkit.data.batches import samples_in
from fitkit.distributed.strategies import Strategy
from fitkit.notices import warn
from fitkit.optimizers import FUSED, class_of
from fitkit.torch_errors import is_out_of_memory
from fitkit.training.cuda_graphs import CudaGraphs
from fitkit.training.updates import Updater

WARM_UP = 3
"""Steps made as usual before the first recording: libraries choose their kernels in them."""

MOST_RECORDINGS = 4
"""With changed rates; from then on the optimizer's step is made outside of the graph."""

PATIENCE = 8
"""Batches in a row of another shape than recorded, before the graph is given up."""


ACTS = ("backward", "clip_gradients", "update", "after_update", "begin_training")
"""What a strategy that does nothing of its own in a step leaves as it is."""


@dataclasses.dataclass
class Recording:
    """A recorded step.

    Attributes:
        replay: repeats it.
        inputs: the tensors that it reads a batch from.
        results: the prediction, the loss and its parts, in the memory that it writes to.
        gradients: of each parameter, likewise.
        kind: of the batches that it is for.
        settings: of the optimizer's groups, which it repeats.
        decisions: what it repeats of the net.
    """

    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    results: tuple[Any, torch.Tensor, dict[str, torch.Tensor]]
    gradients: list[torch.Tensor | None]
    kind: list[Any]
    settings: list[Any]
    decisions: Any


class Graphed:
    """Learns from one batch after another by repeating a recorded step.

    Args:
        learn: makes a step as usual.
        step: computes losses, and notes them.
        updater: makes the updates.
        parameters: of the net and the losses.
        modules: whose training flags matter.
        graphs: records and repeats.
        rates_move: whether rates change with each update, so that the optimizer's step has to
            stay outside.
    """

    def __init__(
        self,
        learn: Any,
        step: Any,
        updater: Updater,
        parameters: list[torch.nn.Parameter],
        modules: list[torch.nn.Module],
        graphs: Any,
        *,
        rates_move: bool,
    ) -> None:
        self._learn = learn
        self._step = step
        self._updater = updater
        self._parameters = parameters
        self._modules = modules
        self._graphs = graphs
        self._optimizes = not rates_move and repeats_its_step(updater.optimizer)
        self._warm = self._rates_changed = self._misfits = 0
        self._is_off = self._has_doubt = self._owns_gradients = False
        self._recording: Recording | None = None

    @property
    def is_between_groups(self) -> bool:
        return bool(self._learn.is_between_groups)

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        return self._learn.watch(batches)

    def finish(self) -> None:
        self._learn.finish()
        # Between epochs callbacks may freeze layers, load weights, …
        self._has_doubt = True

    def __call__(self, batch: Any, index: int) -> None:
        if self._is_off or self._updater.will_accumulate:
            self._usual(batch, index)
        elif self._warm < WARM_UP or self._net_changed():
            self._warm += 1
            self._graphs.warm_up(lambda: self._learn(batch, index))
        else:
            self._by_graph(batch, index)

    def _usual(self, batch: Any, index: int) -> None:
        self._learn(batch, index)
        self._owns_gradients = False

    def _by_graph(self, batch: Any, index: int) -> None:
        opened = self._step.opened(batch)
        kind = _kind(opened)
        recording = self._recording
        if recording is None or self._rate_changed(recording):
            recording = self._recording = None  # its memory serves the next
            recording = self._recording = self._record(opened, kind)
        if recording is None or kind != recording.kind:
            self._usual(batch, index)
            self._misfits += 1
            if self._misfits == PATIENCE:
                self._give_up("batches differ in shape; pad them to one")
            return
        self._misfits = 0
        self._repeat(recording, opened)

    def _net_changed(self) -> bool:
        """Whether the net was decided otherwise than recorded; the recording is dropped then.

        The next step is to be made as usual: parameters that learn from now on get their running
        values in it, and libraries choose their kernels.
        """
        if self._recording is None or not self._has_doubt:
            return False
        self._has_doubt = False
        if self._recording.decisions == self._decisions():
            return False
        self._recording = None
        return True

    def _rate_changed(self, recording: Recording) -> bool:
        """Whether the optimizer's settings differ from those that the graph repeats."""
        if not self._optimizes or settings(self._updater.optimizer) == recording.settings:
            return False
        self._rates_changed += 1
        self._optimizes = self._rates_changed < MOST_RECORDINGS
        return True

    def _record(self, opened: Any, kind: list[Any]) -> Recording | None:
        """Record a step; None where that failed."""
        if any(map(has_hooks, self._modules)):
            self._give_up("layers have hooks, which a graph wouldn't call")
            return None
        optimizer = self._updater.optimizer
        inputs = [leaf.clone() for leaf in trees.tensors(opened)]
        static = _with_tensors(opened, inputs)
        self._drop_gradients()  # an earlier recording's memory is free then
        known = {parameter for parameter, state in optimizer.state.items() if state}
        try:
            with capturable(optimizer):
                replay, results = self._graphs.record(lambda: self._work(static))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._give_up(f"recording failed ({_first_line(error)})")
            return None
        finally:
            made = forget_others(optimizer, known)
        if made:
            return None
        self._owns_gradients, self._has_doubt = True, False
        gradients = [parameter.grad for parameter in self._parameters]
        changing = settings(self._updater.optimizer)
        return Recording(replay, inputs, results, gradients, kind, changing, self._decisions())

    def _work(self, opened: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        """What is recorded: a step's work on the device."""
        self._drop_gradients()  # so that the graph makes them, in memory of its own
        prediction, loss, parts = self._step.compute(self._step.forward, *opened)
        self._updater.backward(loss)
        if self._optimizes:
            self._updater.apply()
        parts = {name: part.detach() for name, part in parts.items()}
        return trees.map_leaves(_detached, prediction), loss.detach(), parts

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _repeat(self, recording: Recording, opened: tuple[Any, Any, Any]) -> None:
        step, updater = self._step, self._updater
        torch._foreach_copy_(recording.inputs, trees.tensors(opened), non_blocking=True)
        # Where the optimizer steps outside, others may have taken them away meanwhile.
        if not (self._owns_gradients and self._optimizes):
            for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
                parameter.grad = gradient
            self._owns_gradients = True
        recording.replay()
        if not self._optimizes:
            updater.apply()
        updater.count()
        prediction, loss, parts = recording.results
        if step.meters is not None:  # They keep what they get; the graph writes it again.
            prediction = trees.map_leaves(_copied, prediction)
        step.samples = step.total = samples_in(opened[0], opened[1])
        parts = {name: part.clone() for name, part in parts.items()}
        step.note(prediction, loss.clone(), parts, opened[1], opened[2])

    def _give_up(self, reason: str) -> None:
        self._is_off, self._recording = True, None
        warn(not_captured(reason))

    def _decisions(self) -> Any:
        """What a graph repeats of the net: which parameters learn, where they are, which mode."""
        buffers = [b for module in self._modules for b in module._buffers.values() if b is not None]
        return (
            [(parameter.data_ptr(), parameter.requires_grad) for parameter in self._parameters],
            [buffer.data_ptr() for buffer in buffers],
            [module.training for module in self._modules],
        )


def graphed(
    learn: Any,
    step: Any,
    updater: Updater,
    compilation: Any,
    model: Any,
    graphs: Callable[[torch.device], Any] = CudaGraphs,
) -> Graphed:
    """A learning that repeats a recorded step.

    Args:
        learn: makes a step as usual.
        step: a `CompiledStep`.
        compilation: says whether rates move with the updates.
        graphs: makes what records, given the device.
    """
    by_updates = any(plan.interval == "step" for plan in model._fitkit.fit_state.schedulers)
    return Graphed(
        learn,
        step,
        updater,
        compilation.trainable(model),
        list(model.modules()),
        graphs(compilation.strategy.device),
        rates_move=bool(compilation.warmup_epochs) or by_updates,
    )


def why_not(compilation: Any, own_steps: bool, updaters: list[Updater]) -> str | None:
    """Why a training's step can't be recorded; None where it can."""
    strategy: Strategy = compilation.strategy
    updater = updaters[0]
    several = strategy.collectives.world_size * strategy.replicas > 1
    own = any(getattr(type(strategy), act) is not getattr(Strategy, act) for act in ACTS)
    if strategy.device.type != "cuda":
        return f"the run is on {strategy.device.type}, without a CUDA device"
    if own_steps:
        return "training_step is the model's own, and may decide on the host what is computed"
    if len(updaters) > 1:
        return f"there are {len(updaters)} optimizers"
    if several or own:
        return f"under strategy={strategy.name!r} the ranks exchange something in each step"
    if updater.is_scaled:
        return "precision='16-mixed' decides after each step whether it counts; bf16-mixed doesn't"
    if updater.takes_closure:
        return f"{type(updater.optimizer).__name__} computes the loss several times a step"
    if compilation.accumulate_grad_batches > 1:
        return f"accumulate_grad_batches={compilation.accumulate_grad_batches} makes steps unequal"
    return None


def not_captured(reason: str) -> str:
    """The notice that a step runs without a graph."""
    return f"cuda_graphs=True: the steps run one by one, because {reason}."


def repeats_its_step(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is one of the device alone: torch's fused ones."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return class_of(optimizer) in FUSED and fused and not hooks


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether something on the host looks at a layer each time it computes."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def settings(optimizer: Optimizer) -> list[Any]:
    """What a recorded step repeats of an optimizer's groups.

    Tensors on the device by their identity, as it reads them anew; those in main memory by value.
    """
    return [
        _setting(value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    ]


def _setting(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.tolist() if value.device.type == "cpu" else id(value)


def forget_others(optimizer: Optimizer, known: set[Any]) -> bool:
    """Drop the running values of parameters that had none before a recording.

    Nothing was computed in it: these are unset memory, which each repetition would begin anew.

    Args:
        known: the parameters that had some.

    Returns:
        Whether there were any: the recording is of no use then.
    """
    states = optimizer.state.items()
    others = [parameter for parameter, state in states if state and parameter not in known]
    for parameter in others:
        del optimizer.state[parameter]
    return bool(others)


@contextlib.contextmanager
def capturable(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer's step be recorded; fused ones could always be, but ask for the flag."""
    groups = [group for group in optimizer.param_groups if group.get("capturable") is False]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False


def _first_line(error: BaseException) -> str:
    """What an error that others followed says first: after a forbidden call all calls fail."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error) or type(error).__name__).splitlines()[0]


def _kind(opened: Any) -> list[Any]:
    """What a graph depends on in a batch: shapes, number types, all that is no tensor."""
    return [
        (path, leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else (path, leaf)
        for path, leaf in trees.leaves_with_paths(opened)
    ]


def _with_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """A tree with other tensors in the places of its own."""
    rest = iter(tensors)
    return trees.map_leaves(
        lambda leaf: next(rest) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
