"""`evaluate` and `predict`: one pass over data, on each rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from fitkit import trees
from fitkit.arguments import is_torchs
from fitkit.callbacks import CallbackList, ProgressBar
from fitkit.callbacks.ranks import share_buffers
from fitkit.data.arrays import ArraySource
from fitkit.data.batches import NoRows, Source, in_groups, limited
from fitkit.data.sharding import RankBatch
from fitkit.data.to_device import CudaStreams, tensors_in
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import evaluation_stage, overridden
from fitkit.losses import Count
from fitkit.module import Module
from fitkit.training.compiled_pass import HELD, compiled_pass
from fitkit.training.explain import raise_explained
from fitkit.training.log import LazyLogs, reduced
from fitkit.training.own_step import Step, StepContext, predict_step_for, step_for
from fitkit.training.settings import EvaluateArguments
from fitkit.training.step import CompiledStep, PredictStep, is_plain_wrapper
from fitkit.training.surroundings import (
    as_written,
    close_bars,
    evaluating,
    rank_source,
    surroundings,
    with_built_in,
)


def run_evaluate(model: Module, arguments: EvaluateArguments) -> dict[str, Any]:
    """`evaluate` on this rank: the loss and metrics by name, over all ranks' samples."""
    with surroundings(model, "evaluate", arguments.source.batch_size):
        source = rank_source(model, arguments.source, training=False)
        stage = evaluation_stage(model) or "test"
        context, step = step_for(model, stage, all_targets=[source.target], source=source)
        callbacks = with_built_in(arguments.callback_list, arguments.verbose)
        callbacks.begin(model, _params(model, "evaluate", source, arguments))
        try:
            values = evaluate_source(model, source, arguments.steps, context, step, callbacks)
        finally:
            close_bars(callbacks)
    sentence = arguments.callback_list.warning_of(values)
    if sentence is not None and model.is_global_zero and model._fitkit.fit_state.run is None:
        warn(f"In evaluate {sentence}")
    return values


def evaluate_source(
    model: Module,
    source: Source,
    steps: int | None,
    context: StepContext,
    step: Step,
    callbacks: CallbackList,
    name: str = "x",
) -> dict[str, Any]:
    """The values of one pass over a source, with the test hooks called.

    The model is left in evaluation mode. A batch without rows has its number among the batches,
    and no more: no step, no hook.

    Raises:
        ConfigurationError: there was no batch on any rank.
    """
    strategy: Strategy = model._fitkit.compilation.strategy
    data_ranks, group_size = strategy.data_ranks, model._fitkit.compilation.steps_per_execution
    logbook = step.logbook
    step.begin()
    model.stop_evaluating = False
    with evaluating(model, context):
        share_buffers(model)
        context.call_before_batch(callbacks.hooks("on_test_begin"), {})
        begin, end = callbacks.hooks("on_test_batch_begin"), callbacks.hooks("on_test_batch_end")
        plan = EvaluationPlan(model, step, callbacks, "test", source)
        index, empty = -1, 0
        try:
            with plan:
                advance = plan.first_step
                together = InStep(_first(source, steps, data_ranks), strategy)
                batches = plan.batches(step.mover.bring_each(iter(together)))
                for group in in_groups(batches, group_size):
                    has_rows = False
                    for index, batch in group:
                        if batch is NoRows:
                            empty += 1
                            continue
                        if begin and not has_rows:
                            context.call_before_batch(begin, index, {})
                        advance(batch, index)
                        if context.waiting:
                            context.take_waiting()
                        if index == empty:
                            step.undo_writes()
                            if source.steps != 1:
                                advance = plan.step_after_first(batch)
                        has_rows = True
                    if end and has_rows:
                        plan.flush_group()
                        logs = LazyLogs(logbook.results)
                        for hook in end:
                            hook(index, logs)
                    if model.stop_evaluating and together.ends_here():
                        break
                plan.flush()
        except BaseException:
            logbook.logged.finish()
            raise
        count, logbook.steps = index + 1, index + 1 - empty
        wanted = None if model.stop_evaluating else steps
        if wanted is not None and count and data_ranks.world_size == 1 and count < wanted:
            warn(f"{name} ended after {count} batches of the {wanted} that were asked for.")
        with torch.no_grad():
            step.finish()
        values, everyones = reduced(logbook, strategy.log_ranks)
        if not everyones:
            raise ConfigurationError(f"{name} is empty: it gave no batches with rows.")
        model._fitkit.log_names = list(values)
        context.call_at_end(callbacks.hooks("on_test_end"), values, data_ranks, values)
    return values


def _first(source: Source, steps: int | None, collectives: Collectives) -> Iterator[Any]:
    """This rank's part of the first `steps` batches: those that one process would read."""
    if steps is not None:
        steps = len(range(collectives.rank, steps, collectives.world_size))
    return limited(source, steps)


def run_predict(model: Module, arguments: EvaluateArguments) -> Any:
    """`predict` on this rank: the outputs of all ranks' batches, joined in input order."""
    strategy: Strategy = model._fitkit.compilation.strategy
    data_ranks, group_size = strategy.data_ranks, model._fitkit.compilation.steps_per_execution
    with surroundings(model, "predict", arguments.source.batch_size):
        source = rank_source(model, arguments.source, training=False)
        context, step = predict_step_for(model)
        callbacks = with_built_in(arguments.callback_list, arguments.verbose)
        callbacks.begin(model, _params(model, "predict", source, arguments))
        copies = HostCopies()
        model.stop_predicting = False
        together = InStep(
            _first(source, arguments.steps, data_ranks), strategy, marks_padding=False
        )
        try:
            with evaluating(model, context):
                callbacks.call("on_predict_begin", {})
                begin = callbacks.hooks("on_predict_batch_begin")
                end = callbacks.hooks("on_predict_batch_end")
                plan = EvaluationPlan(model, step, callbacks, "predict", source, copies.add)
                index, empty = -1, 0
                with plan:
                    advance = plan.first_step
                    batches = plan.batches(step.mover.bring_each(iter(together)))
                    for group in in_groups(batches, group_size):
                        has_rows = False
                        for index, batch in group:
                            if batch is NoRows:
                                empty += 1
                                plan.flush()
                                copies.add(batch)
                                continue
                            if begin and not has_rows:
                                context.call_before_batch(begin, index, {})
                            if (outputs := advance(batch, index)) is not HELD:
                                copies.add(outputs)
                            if index == empty and source.steps != 1:
                                advance = plan.step_after_first(batch)
                            has_rows = True
                        if end and has_rows:
                            plan.flush_group()
                            logs = LazyLogs(partial(_outputs, copies, index, group_size))
                            for hook in end:
                                hook(index, logs)
                        if model.stop_predicting and together.ends_here():
                            break
                    plan.flush()
                copies.wait()
                callbacks.call("on_predict_end", {})
        finally:
            close_bars(callbacks)
        everyone = data_ranks.gather(together.without_padding(copies.outputs))
    # Batches were dealt out in turn; loaders that shard themselves may give unequal numbers.
    dealt = itertools.chain(*itertools.zip_longest(*everyone, fillvalue=NoRows))
    whole = [output for output in dealt if output is not NoRows]
    if not whole:
        raise ConfigurationError("x is empty: it gave no batches with rows.")
    return joined(whole)


def _outputs(copies: HostCopies, index: int, group_size: int) -> dict[str, Any]:
    """The outputs of the group of batches that ends with number `index`, for its hooks.

    They may be on their way still. Several batches' outputs are one, or a list where they can't
    be.
    """
    if len(copies.outputs) < index + 1:
        copies.wait()
    found = copies.outputs[index - index % group_size : index + 1]
    found = [output for output in found if output is not NoRows]
    if len(found) == 1:
        return {"outputs": found[0]}
    try:
        return {"outputs": trees.concatenate(found)}
    except (RuntimeError, ValueError):
        return {"outputs": found}


def _params(
    model: Module, stage: str, source: Source, arguments: EvaluateArguments
) -> dict[str, Any]:
    """What callbacks know of a call of `evaluate` or `predict`."""
    return {
        "stage": stage,
        "epochs": 1,
        "initial_epoch": 0,
        "steps": arguments.steps or source.steps,
        "samples": source.samples,
        "batch_size": source.batch_size,
        "steps_per_execution": model._fitkit.compilation.steps_per_execution,
        "validation_steps": None,
        "verbose": arguments.verbose,
    }


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
        marks_padding: whether a repeated batch is a `RankBatch` without samples, which counts for
            nothing in a step. Else it is the batch as it was, and `without_padding` takes out what
            became of it.
    """

    def __init__(
        self, batches: Iterator[Any], strategy: Strategy, *, marks_padding: bool = True
    ) -> None:
        self._batches = batches
        self._collectives = strategy.collectives
        self._together = strategy.evaluates_in_step
        self._marks_padding = marks_padding
        self._count = 0
        self._padding: set[int] = set()
        self._ended = False

    def ends_here(self) -> bool:
        """End this rank's batches; whether the loop may, too: ranks in step wait for all."""
        self._ended = True
        return not self._together

    def __iter__(self) -> Iterator[Any]:
        """The batches.

        Ranks:
            Collective, before each batch.
        """
        return self._in_step() if self._together else self._batches

    def without_padding(self, outputs: list[Any]) -> list[Any]:
        """The outputs with `NoRows` in place of those of repeated batches."""
        return [NoRows if i in self._padding else output for i, output in enumerate(outputs)]

    def _in_step(self) -> Iterator[Any]:
        last: Any = NOTHING
        while True:
            batch = NOTHING if self._ended else next(self._batches, NOTHING)
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
                gathered = self._collectives.gather(batch if able else None)
                last = last if last is not NOTHING else next(b for b in gathered if b is not None)
            if able:
                last = batch
                yield batch
            else:
                self._padding.add(self._count - 1)
                yield RankBatch(last, 0, 1) if self._marks_padding else last


class EvaluationPlan:
    """How a pass over data computes its batches: all that makes it fast is decided here.

    - There are no gradients. Where nobody can notice it there is torch's inference mode, which
      saves one or two microseconds an operation over `no_grad`. But what is made in it can never
      take part in a backward pass, and nothing in it can be differentiated: a net's own code may
      keep such tensors for later (positions, masks), or compute a derivative. So it is for nets
      that consist of torch's own layers, evaluated by losses and metrics that fitkit knows.
    - From the second batch on steps are made without what can't change where all batches are rows
      of the same tensors.
    - Losses that are means of each sample's are computed of many batches at once, as metrics are.

    - Where `jit_compile` asks for it, net and loss are compiled (`CompiledPass`).

    The first batch, which has everything checked, is an ordinary step under `no_grad`.

    Args:
        step: makes the first batch's step, and all where there is no shorter way.
        callbacks: of the pass.
        stage: as its callbacks' hooks call it, `"test"` or `"predict"`.
        source: gives the batches.
        take: takes the outputs of `predict` that don't come with their batch's step.

    Attributes:
        first_step: makes the first step.
    """

    def __init__(
        self,
        model: Module,
        step: Any,
        callbacks: CallbackList,
        stage: str,
        source: Source,
        take: Callable[[Any], None] | None = None,
    ) -> None:
        self._model = model
        self._step = step
        self._sees_only_torchs = partial(sees_only_torchs, model, step, callbacks, stage)
        self._may_infer = self._sees_only_torchs()
        shows = any(isinstance(callback, ProgressBar) for callback in callbacks.callbacks)
        self._compiled = compiled_pass(model, step, take, is_announced=shows)
        self.first_step: Callable[..., Any] = step
        if self._compiled is not None:
            self.first_step = self._compiled.first
        self._users_look = users_look(callbacks, stage)
        # Batches that are views or rows of tensors. Others are made outside of inference mode,
        # since whoever makes them may keep them. Ranks in step may repeat a batch, marked as one
        # that doesn't count.
        alike = not model._fitkit.compilation.strategy.evaluates_in_step
        self._in_memory = alike and isinstance(source.whole, ArraySource)
        self._is_plain = model._fitkit.compilation.strategy.precision.is_plain
        self._mode: torch.inference_mode | None = None
        self._no_grad = torch.no_grad()
        self._as_written = contextlib.ExitStack()

    def __enter__(self) -> EvaluationPlan:
        self._no_grad.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()
        self._as_written.close()
        self._no_grad.__exit__(None, None, None)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, made outside of inference mode where that could matter."""
        return batches if self._in_memory or not self._may_infer else self._outside(batches)

    def _outside(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self._leave()

    def step_after_first(self, first: Any) -> Callable[..., Any]:
        """What makes the steps from the second on.

        Args:
            first: the first batch, whose step is done.
        """
        compiled = self._compiled
        if compiled is not None and not compiled.gains:
            self._compiled = compiled = None
            self._as_written.enter_context(as_written(self._model))
            self._may_infer = self._sees_only_torchs()
        plain = self._plain_after(first)
        if compiled is None:
            return plain
        return compiled.after_first(first, plain, keeps=self._in_memory)

    def _plain_after(self, first: Any) -> Callable[..., Any]:
        step = self._step
        if isinstance(step, CompiledStep):
            # Whether the user has no code that a step calls, but the net's.
            users = step.loss.has_user_code or (step.meters or step.loss).has_user_code
            self._may_infer = self._may_infer and not users
        elif not isinstance(step, PredictStep):
            return step
        if not self._in_memory:
            return self._inside if self._may_infer else step
        if self._may_infer:
            self._enter()
        if type(first) is not tuple or not self._is_plain or not step.mover.leaves(first):
            return step
        forward = self._model.net if self._may_infer else step.forward
        if isinstance(step, PredictStep):
            return _short_prediction(step, forward, first)
        return _short_evaluation(step, forward, first)

    def flush_group(self) -> None:
        """Compute the batches that wait at a group's end, where somebody may look."""
        if self._users_look:
            self.flush()

    def flush(self) -> None:
        """Compute the batches that wait to be computed in one call."""
        if self._compiled is not None:
            self._compiled.flush()

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


def sees_only_torchs(model: Module, step: Any, callbacks: CallbackList, stage: str) -> bool:
    """Whether only torch's layers and fitkit's own code see what steps make.

    Not so with steps of the model's own, with callbacks that act at each batch, with hooks, and
    where something stands before the net (replicas, shards). A compiled net would be compiled a
    second time.
    """
    if not isinstance(step, (CompiledStep, PredictStep)) or not step.wrapped.is_bare:
        return False
    if not is_plain_wrapper(model) or overridden(model, "transfer_batch_to_device"):
        return False
    if users_look(callbacks, stage):
        return False
    layers = (module for module in model.modules() if module is not model)
    has_hooks = bool(model._forward_hooks or model._forward_pre_hooks or _has_any_global_hook())
    return not has_hooks and all(map(is_torchs, layers))


def users_look(callbacks: CallbackList, stage: str) -> bool:
    """Whether a callback beside the progress bar acts at batches of a pass."""
    hooks = (*callbacks.hooks(f"on_{stage}_batch_begin"), *callbacks.hooks(f"on_{stage}_batch_end"))
    return any(type(getattr(hook, "__self__", None)) is not ProgressBar for hook in hooks)


def _short_evaluation(
    compiled: CompiledStep, forward: Callable[..., Any], first: Any
) -> Callable[..., Any]:
    """What notes the same as a step and gives nothing, for pairs `(x, y)` of one tensor each.

    The loss may be computed later, of many batches (`OutputGroup.join_loss`).
    """
    loss, add = compiled.loss.direct, compiled.logbook.loss.add
    meters = None if compiled.meters is None else compiled.meters.only
    has_several = compiled.meters is not None and meters is None
    if len(first) != 2 or loss is None or has_several or compiled.class_weights is not None:
        return compiled
    counted = compiled.loss.counted if compiled.may_count else None
    update = of_each = shape = None
    if meters is not None:
        update = meters.update
        of_each = compiled.loss.of_each(compiled.all_targets)
        if of_each is not None:
            meters.join_loss(of_each, compiled.mover.transfer.device)

    def step(batch: Any, index: int = 0) -> None:
        nonlocal shape
        x, y = batch
        try:
            prediction = forward(x)
            # A prediction of another shape: what doesn't fit shall fail by itself, before it is
            # joined with others.
            count: Count = None
            if counted is not None:
                value, count = counted(prediction, y, None, is_part=False)
            elif of_each is None or prediction.shape != shape:
                value, shape = loss(prediction, y), prediction.shape
        except Exception as error:
            compiled.explain(error, x, y)
            raise
        compiled.samples = compiled.total = samples = y.shape[0]
        if of_each is None:
            add(
                value.detach() if value.requires_grad else value,
                samples if count is None else count,
            )
        if update is not None:
            update(prediction, y, None)

    return step


def _short_prediction(
    whole: PredictStep, forward: Callable[..., Any], first: Any
) -> Callable[..., Any]:
    """What gives the same as a step, for batches whose inputs are one tensor."""
    if not isinstance(first[0], torch.Tensor):
        return whole
    net = whole.wrapped.net

    def step(batch: Any, index: int = 0) -> Any:
        x = batch[0]
        try:
            return forward(x)
        except Exception as error:
            raise_explained(error, net, x, None)
            raise

    return step


class HostCopies:
    """Collects batches' outputs on the CPU, without waiting for the device at each of them.

    From a GPU they are copied on a stream of their own into pinned memory while the next batch is
    computed; one batch later they are taken from there, and the device's memory is free again.

    Args:
        streams: makes the GPU's streams, given its device.

    Attributes:
        outputs: the batches' outputs in their order; the last one is there after `wait`.
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
            self.wait()
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
        self.wait()
        self._flying = copies, copied

    def wait(self) -> None:
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
