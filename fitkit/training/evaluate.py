"""`evaluate` and `predict`: one pass over data, on each rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from fitkit import trees
from fitkit.callables import is_torchs
from fitkit.callbacks import CallbackList, ProgressBar
from fitkit.callbacks.watches import non_finite_losses
from fitkit.data.arrays import ArraySource
from fitkit.data.batches import NoRows
from fitkit.data.sharding import Share, whole_of
from fitkit.data.sources import Source
from fitkit.data.stream import limited
from fitkit.data.to_device import CudaStreams, tensors_in
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Door, Strategy
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import evaluation_stage, overridden
from fitkit.modes import in_use
from fitkit.module import Module
from fitkit.training.explain import memory_explained
from fitkit.training.log import LazyLogs, reduced
from fitkit.training.own_step import (
    StepContext,
    Step,
    predict_step_for,
    running,
    step_for,
)
from fitkit.training.settings import EvaluateArguments
from fitkit.training.step import CompiledStep, PredictStep
from fitkit.training.surroundings import (
    backend_flags,
    closing,
    net_prepared,
    place,
    share_of,
    with_own,
)

if TYPE_CHECKING:
    from fitkit.training.settings import Compilation


def run_evaluate(
    model: Module, compilation: Compilation, arguments: EvaluateArguments
) -> dict[str, Any]:
    """`evaluate` on this rank: the loss and metrics by name, over all ranks' samples."""
    with memory_explained(model, compilation, "evaluate", _size(arguments)):
        return _evaluated(model, compilation, arguments)


def _size(arguments: EvaluateArguments) -> int | None:
    return None if arguments.source is None else arguments.source.batch_size


def _evaluated(
    model: Module, compilation: Compilation, arguments: EvaluateArguments
) -> dict[str, Any]:
    place(model, compilation.strategy)
    source = share_of(arguments.source, compilation, training=False)
    name = evaluation_stage(model) or "test"
    targets = [source.target]
    stage, step = step_for(model, compilation, name, all_targets=targets, source=source)
    callbacks = with_own(arguments.callback_list, arguments.verbose)
    group = compilation.steps_per_execution
    callbacks.begin(model, pass_params("evaluate", source, arguments, group))
    with backend_flags(compilation), net_prepared(model, compilation), closing(callbacks):
        values = evaluate_source(
            model, compilation, source, arguments.steps, stage, step, callbacks
        )
    sentence = non_finite_losses(values, arguments.callback_list.callbacks)
    if sentence is not None and model.is_global_zero and model._fitkit.fit_state.run is None:
        warn(f"In evaluate {sentence}")
    return values


def evaluate_source(
    model: Module,
    compilation: Compilation,
    source: Source,
    steps: int | None,
    stage: StepContext,
    step: Step,
    callbacks: CallbackList,
    name: str = "x",
) -> dict[str, Any]:
    """The values of one pass over a source, with the test hooks called.

    The model is left in evaluation mode.

    Raises:
        ConfigurationError: there was no batch on any rank.
    """
    shares, group = compilation.strategy.shares, compilation.steps_per_execution
    step.begin()
    with (
        running(model, stage),
        model._fitkit.fit_state.evaluated(),
        contextlib.ExitStack() as losses,
    ):
        model.eval()
        for loss in compilation.loss_modules():
            losses.enter_context(in_use(loss, "evaluate", alone=False))
            loss.eval()
        compilation.strategy.before_evaluation(model)
        stage.open(callbacks.hooks("on_test_begin"), {})
        inference = inference_for(model, step, callbacks, "test", source)
        together = InStep(_first(source, steps, shares), compilation.strategy)
        try:
            fed = step.mover.fed(iter(together))
            batches = evaluate_batches(fed, stage, step, callbacks, inference, group)
        except BaseException:
            step.logbook.logged.finish()
            raise
        if steps is not None and batches and shares.world_size == 1 and batches < steps:
            warn(f"{name} ended after {batches} batches of the {steps} that were asked for.")
        with torch.no_grad():
            step.finish()
        values, everyones = reduced(step.logbook, shares)
        if not everyones:
            raise ConfigurationError(f"{name} is empty: it gave no batches with rows.")
        model._fitkit.log_names = list(values)
        callbacks.call("on_test_end", values)
    return values


def _first(source: Source, steps: int | None, collectives: Collectives) -> Iterator[Any]:
    """This rank's part of the first `steps` batches: those that one process would read."""
    if steps is not None:
        steps = len(range(collectives.rank, steps, collectives.world_size))
    return limited(source, steps)


def run_predict(model: Module, compilation: Compilation, arguments: EvaluateArguments) -> Any:
    """`predict` on this rank: the outputs of all ranks' batches, joined in input order."""
    with memory_explained(model, compilation, "predict", _size(arguments)):
        return _predicted(model, compilation, arguments)


def _predicted(model: Module, compilation: Compilation, arguments: EvaluateArguments) -> Any:
    strategy = compilation.strategy
    place(model, strategy)
    source = share_of(arguments.source, compilation, training=False)
    stage, step = predict_step_for(model, compilation)
    callbacks = with_own(arguments.callback_list, arguments.verbose)
    group = compilation.steps_per_execution
    callbacks.begin(model, pass_params("predict", source, arguments, group))
    flags, shares = backend_flags(compilation), strategy.shares
    as_told, evaluated = net_prepared(model, compilation), model._fitkit.fit_state.evaluated()
    with flags, as_told, closing(callbacks), running(model, stage), evaluated:
        model.eval()
        callbacks.call("on_predict_begin", {})
        inference = inference_for(model, step, callbacks, "predict", source)
        together = InStep(_first(source, arguments.steps, shares), strategy, muted=False)
        batches = step.mover.fed(iter(together))
        outputs = together.own(predict_batches(batches, step, callbacks, inference, group))
        callbacks.call("on_predict_end", {})
    everyone = shares.gather(outputs)
    # Batches were dealt out in turn; loaders that shard themselves may give unequal numbers.
    dealt = itertools.chain(*itertools.zip_longest(*everyone, fillvalue=NoRows))
    whole = [output for output in dealt if output is not NoRows]
    if not whole:
        raise ConfigurationError("x is empty: it gave no batches with rows.")
    return joined(whole)


def joined(outputs: list[Any]) -> Any:
    """Batches' outputs as one.

    Raises:
        ConfigurationError: their shapes differ beyond the first dimension.
    """
    try:
        return trees.concatenate(outputs)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            "The batches' outputs can't be joined, because their shapes differ beyond the first "
            f"dimension ({error}). Use predict_on_batch for each batch."
        ) from error


NOTHING = object()


class InStep:
    """A pass's batches; a rank that has run out, or whose batch has no rows, repeats one.

    That counts for nothing.

    Args:
        batches: this rank's.
        strategy: says whether its ranks go in step; where they don't, the batches are as given.
        muted: whether the step mutes a `Share` without samples. Else fillers come as they are,
            and `own` leaves out what became of them.
    """

    def __init__(self, batches: Iterator[Any], strategy: Strategy, *, muted: bool = True) -> None:
        self._batches = batches
        self._collectives = strategy.collectives
        self._together = strategy.evaluates_in_step
        self._muted = muted
        self._count = 0
        self._fillers: set[int] = set()

    def __iter__(self) -> Iterator[Any]:
        """The batches.

        Ranks:
            Collective, before each batch.
        """
        return self._in_step() if self._together else self._batches

    def own(self, outputs: list[Any]) -> list[Any]:
        """The outputs of this rank's own batches; `NoRows` in place of the others'."""
        return [NoRows if i in self._fillers else output for i, output in enumerate(outputs)]

    def _in_step(self) -> Iterator[Any]:
        last: Any = NOTHING
        while True:
            batch = next(self._batches, NOTHING)
            able = batch is not NOTHING and batch is not NoRows
            here, with_batch, ranks_ready = self._collectives.sums(
                [float(batch is not NOTHING), float(able), float(able or last is not NOTHING)]
            )
            if not here:
                return
            self._count += 1
            if not with_batch:
                yield NoRows
                continue
            if ranks_ready < self._collectives.world_size:  # a rank has had none to repeat
                told = self._collectives.gather(batch if able else None)
                last = last if last is not NOTHING else next(b for b in told if b is not None)
            if able:
                last = batch
                yield batch
            else:
                self._fillers.add(self._count - 1)
                yield Share(last, 0, 1) if self._muted else last


def pass_params(
    stage: str, source: Source, arguments: EvaluateArguments, group: int = 1
) -> dict[str, Any]:
    """What callbacks are told of a call of `evaluate` or `predict`.

    Args:
        group: batches between two calls of the batch hooks.
    """
    return {
        "stage": stage,
        "epochs": 1,
        "initial_epoch": 0,
        "steps": arguments.steps or source.steps,
        "samples": source.samples,
        "batch_size": source.batch_size,
        "steps_per_execution": group,
        "validation_steps": None,
        "verbose": arguments.verbose,
    }


def evaluate_batches(
    batches: Iterator[Any],
    stage: StepContext,
    step: Step,
    callbacks: CallbackList,
    inference: Inference,
    group: int = 1,
) -> int:
    """Note losses and metrics of batches, without gradients.

    Args:
        stage: takes what hooks log.
        step: keeps the running values.
        inference: surrounds the steps, and says what makes them from the second on.
        group: batches between two calls of the batch hooks.

    Returns:
        How many were read.
    """
    begin = callbacks.hooks("on_test_batch_begin")
    end = callbacks.hooks("on_test_batch_end")
    results = step.logbook.results
    index = -1
    empty = 0
    waits = False
    with inference:
        advance: Callable[..., Any] = step
        for index, batch in enumerate(inference.batches(batches)):
            if batch is NoRows:
                empty += 1
            else:
                if begin and not waits:
                    stage.open(begin, index, {})
                advance(batch, index)
                if stage.waiting:
                    stage.take_waiting()
                if index == empty:
                    step.after_first()
                    advance = inference.settled(batch)
                waits = True
            if waits and (index + 1) % group == 0:
                waits = False
                if end:
                    logs = LazyLogs(results)
                    for hook in end:
                        hook(index, logs)
        if waits:
            logs = LazyLogs(results)
            for hook in end:
                hook(index, logs)
    step.logbook.steps = index + 1 - empty
    return index + 1


def predict_batches(
    batches: Iterator[Any],
    step: Callable[..., Any],
    callbacks: CallbackList,
    inference: Inference,
    group: int = 1,
) -> list[Any]:
    """The net's outputs for each batch, in order, on the CPU; `NoRows` for one without rows.

    Args:
        inference: surrounds the steps, and says what makes them from the second on.
        group: batches between two calls of the batch hooks, which get these batches' outputs.
    """
    begin = callbacks.hooks("on_predict_batch_begin")
    end = callbacks.hooks("on_predict_batch_end")
    copies = HostCopies()
    index = -1
    empty = 0
    waits = False

    def tell() -> None:
        logs = LazyLogs(partial(_outputs_of, copies, index - index % group, index + 1))
        for hook in end:
            hook(index, logs)

    with inference:
        advance = step
        for index, batch in enumerate(inference.batches(batches)):
            if batch is NoRows:
                empty += 1
                copies.add(batch)
            else:
                if not waits:
                    for hook in begin:
                        hook(index, {})
                copies.add(advance(batch, index))
                if index == empty:
                    advance = inference.settled(batch)
                waits = True
            if waits and (index + 1) % group == 0:
                waits = False
                if end:
                    tell()
        if end and waits:
            tell()
    copies.settle()
    return copies.outputs


def _outputs_of(copies: HostCopies, first: int, end: int) -> dict[str, Any]:
    """What a hook finds in its logs: some batches' outputs as one, or a list where they can't be.

    Asked for only where a hook looks, because they may be on their way still.
    """
    if len(copies.outputs) < end:
        copies.settle()
    outputs = [output for output in copies.outputs[first:end] if output is not NoRows]
    if len(outputs) == 1:
        return {"outputs": outputs[0]}
    try:
        return {"outputs": trees.concatenate(outputs)}
    except (RuntimeError, ValueError):
        return {"outputs": outputs}


class Inference:
    """Surrounds a pass over data: no gradients, and inference mode where it is allowed.

    The first batch, which has everything checked, runs under `no_grad` alone.

    Args:
        step: makes the steps.
        allowed: whether they may run in inference mode; see `may_infer`.
        in_memory: whether batches are views or rows of tensors. Others are made outside of
            inference mode, since whoever makes them may keep them.
    """

    def __init__(self, step: Any, *, allowed: bool, in_memory: bool) -> None:
        self._step = step
        self._allowed = allowed
        self._in_memory = in_memory
        self._mode: torch.inference_mode | None = None
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Inference:
        self._no_grad.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()
        self._no_grad.__exit__(None, None, None)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, made outside of inference mode where that could matter."""
        return batches if self._in_memory or not self._allowed else self._outside(batches)

    def _outside(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self._leave()

    def settled(self, first: Any) -> Callable[..., Any]:
        """What makes the steps from the second on.

        Args:
            first: the first batch, whose step is done.
        """
        step = self._step
        if not isinstance(step, (CompiledStep, PredictStep)):
            return step
        self._allowed = self._allowed and step.is_private
        if not self._in_memory:
            return self._inside if self._allowed else step
        if self._allowed:
            self._enter()
        return step.settled(first, alone=self._allowed)

    def _inside(self, batch: Any, index: int) -> Any:
        self._enter()
        return self._step(batch, index)

    def _enter(self) -> None:
        if self._mode is None:
            self._mode = torch.inference_mode()
            self._mode.__enter__()

    def _leave(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


def inference_for(
    model: Module, step: Any, callbacks: CallbackList, stage: str, source: Source
) -> Inference:
    """What surrounds a pass of `evaluate` (`stage` is `"test"`) or `predict`."""
    # Ranks in step may repeat a batch, marked as one that doesn't count.
    alike = not model._fitkit.compilation.strategy.evaluates_in_step
    return Inference(
        step,
        allowed=may_infer(model, step, callbacks, stage),
        in_memory=alike and isinstance(whole_of(source), ArraySource),
    )


def may_infer(model: Module, step: Any, callbacks: CallbackList, stage: str) -> bool:
    """Whether only torch's layers and fitkit's own code see what steps make.

    Not so with steps of the model's own, with callbacks that act at each batch, with hooks, and
    where something stands before the net (replicas, shards). A compiled net would be compiled a
    second time.
    """
    if not isinstance(step, (CompiledStep, PredictStep)) or type(step.door) is not Door:
        return False
    if not model._is_plain_wrapper or overridden(model, "transfer_batch_to_device"):
        return False
    hooks = (*callbacks.hooks(f"on_{stage}_batch_begin"), *callbacks.hooks(f"on_{stage}_batch_end"))
    if not all(type(getattr(hook, "__self__", None)) is ProgressBar for hook in hooks):
        return False
    layers = (module for module in model.modules() if module is not model)
    has_hooks = bool(model._forward_hooks or model._forward_pre_hooks or _has_any_global_hook())
    return not has_hooks and all(map(is_torchs, layers))


class HostCopies:
    """Collects batches' outputs on the CPU, without waiting for the device at each of them.

    From a GPU they are copied on a stream of their own into pinned memory while the next batch is
    computed; one batch later they are taken from there, and the device's memory is free again.

    Args:
        streams: makes the GPU's streams, given its device.

    Attributes:
        outputs: the batches' outputs in their order; the last one is there after `settle`.
    """

    def __init__(self, streams: Callable[[torch.device], Any] = CudaStreams) -> None:
        self.outputs: list[Any] = []
        self._make_streams = streams
        self._streams: Any = None
        self._flying: tuple[Any, Any] | None = None

    def add(self, output: Any) -> None:
        """Take a batch's output."""
        if isinstance(output, torch.Tensor) and output.is_cpu and self._flying is None:
            self.outputs.append(output)
            return
        device = _gpu_of(output)
        if device is None:
            self.settle()
            self.outputs.append(on_host(output))
            return
        if self._streams is None:
            self._streams = self._make_streams(device)
        streams = self._streams
        with streams.aside(after=True):
            copies = _mapped(output, streams.start_copy)
            copied = streams.mark()
            for tensor in tensors_in(output):
                streams.used_here(tensor)
        self.settle()
        self._flying = copies, copied

    def settle(self) -> None:
        """Wait for the copies that are on their way."""
        if self._flying is None:
            return
        (copies, copied), self._flying = self._flying, None
        self._streams.wait_on_host(copied)
        # Pinned memory is scarce, and used again for the next batches: it isn't for keeping.
        self.outputs.append(_mapped(copies, torch.Tensor.clone))


def on_host(output: Any) -> Any:
    """A net's output on the CPU; a dict (or Hugging Face's objects) without its Nones."""
    return output.cpu() if isinstance(output, torch.Tensor) else _mapped(output, torch.Tensor.cpu)


def _mapped(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A net's output with a function applied to its tensors; a dict without its Nones."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if hasattr(output, "items"):
        return {key: _mapped(value, function) for key, value in output.items() if value is not None}
    return trees.map_leaves(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, output
    )


def _gpu_of(output: Any) -> torch.device | None:
    """The CUDA device that all of an output's tensors are on; None where that isn't so."""
    tensors = list(tensors_in(output))
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in tensors):
        return None  # streams can't be told of their memory
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None
