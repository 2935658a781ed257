"""`evaluate` and `predict` on each rank: one pass over the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.accelerators import has_streams
from fitkit.callbacks import CallbackList, ProgressBar
from fitkit.callbacks.base import share_buffers
from fitkit.callbacks.progress import with_built_in
from fitkit.data.arrays import ArraySource
from fitkit.data.batches import Batch, NoRows, Source, in_groups, limited
from fitkit.data.to_device import Streams, tensors_in
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import evaluation_stage
from fitkit.module import Module
from fitkit.pulse import heard
from fitkit.samples import samples_of
from fitkit.tensors import is_dense
from fitkit.training.compiler import PassSteps, Take, compiler_of
from fitkit.training.log import LazyLogs, reduced, warn_of_empty
from fitkit.training.settings import EvaluateArguments
from fitkit.training.step import Outcome
from fitkit.training.step_context import StepContext
from fitkit.training.step_for import Step, predict_step_for, step_for
from fitkit.training.surroundings import evaluating, rank_source, surroundings
from fitkit.training.with_gradients import first_step
from fitkit.typing import Outputs


def run_evaluate(model: Module, arguments: EvaluateArguments) -> dict[str, Any]:
    """Run `evaluate` on this rank; return the loss and metrics over all ranks' samples, by name."""
    with surroundings(model, "evaluate", arguments.source.batch_size):
        source = rank_source(model, arguments.source, training=False, steps=arguments.steps)
        stage = evaluation_stage(model) or "test"
        context, step = step_for(model, stage, all_targets=[source.target], source=source)
        callbacks = with_built_in(arguments.callback_list, arguments.verbose)
        with callbacks.running(model, _params(model, "evaluate", source, arguments)):
            values = evaluate_source(model, source, arguments.steps, context, step, callbacks)
    if model.is_global_zero and model._fitkit.fit_state.run is None:
        sentence = arguments.callback_list.warning_of(values)
        if sentence is not None:
            warn(f"In evaluate {sentence}")
        warn_of_empty(values, "In evaluate")
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
    """Make one pass over a source, call the test hooks, and return the values.

    This leaves the model in evaluation mode. A batch without rows gets a number among the batches,
    but no step and no hooks.

    Raises:
        ConfigurationError: no rank had a batch with rows.
    """
    strategy: Strategy = model._fitkit.compilation.strategy
    data_ranks, logbook = strategy.data_ranks, step.logbook
    if source.steps == 1:
        logbook.meters.waits = False  # no later batch is measured with it
    step.begin()
    context.begin()
    model.stop_evaluating = False
    with evaluating(model, context):
        share_buffers(model)
        callbacks.call("on_test_begin", {})
        plan = EvaluationPass(model, step, callbacks, "test", source, step.record)
        mine = InStep(_share_of_steps(source, steps, data_ranks), strategy)
        try:
            count, empty = plan.run(context, mine, "stop_evaluating", lambda _: logbook.results())
        except BaseException:
            logbook.logged.finish()
            raise
        logbook.steps = count - empty
        wanted = None if model.stop_evaluating else steps
        if wanted is not None and count and data_ranks.world_size == 1 and count < wanted:
            warn(f"{name} ended after {count} of {wanted} batches.")
        with torch.no_grad():
            step.finish()
        context.batch = None  # a validation's context stays, and would hold its memory
        values, everyones = reduced(logbook, strategy.log_ranks)
        if not everyones:
            raise ConfigurationError(f"{name} is empty: it gave no samples.")
        model._fitkit.log_names = list(values)
        context.call_at_end(callbacks.hooks("on_test_end"), values, data_ranks, values)
    return values


def _share_of_steps(source: Source, steps: int | None, collectives: Collectives) -> Iterator[Any]:
    """Give this rank's part of the first `steps` batches that a single process would read."""
    if source.limit is not None:  # it ends there by itself, on all ranks at once
        steps = None
    elif steps is not None:
        steps = len(range(collectives.rank, steps, collectives.world_size))
    return limited(source, steps)


def run_predict(model: Module, arguments: EvaluateArguments) -> Any:
    """Run `predict` on this rank; return the outputs of all ranks' batches, in input order."""
    data_ranks: Collectives = model._fitkit.compilation.strategy.data_ranks
    copies = HostCopies()
    with surroundings(model, "predict", arguments.source.batch_size):
        predict_source(model, arguments, copies)
        # Without the outputs of repeated batches, which have no samples.
        counted = zip(copies.outputs, copies.samples, strict=True)
        everyone = data_ranks.gather([pair if pair[1] else NoRows for pair in counted])
    whole = list(in_input_order(everyone))
    if not whole:
        raise ConfigurationError("x is empty: it gave no samples.")
    outputs, samples = zip(*whole, strict=True)
    return joined(list(outputs), list(samples))


def predict_source(model: Module, arguments: EvaluateArguments, copies: HostCopies) -> None:
    """Make one pass over a rank's batches, call the predict hooks, and collect the outputs.

    Args:
        copies: gets the outputs.
    """
    strategy: Strategy = model._fitkit.compilation.strategy
    group_size = model._fitkit.compilation.given.steps_per_execution
    source = rank_source(
        model,
        arguments.source,
        training=False,
        steps=arguments.steps,
        fills=True,
        samples_of=samples_of,
    )
    context, step = predict_step_for(model, source)
    callbacks = with_built_in(arguments.callback_list, arguments.verbose)
    model.stop_predicting = False
    mine = InStep(_share_of_steps(source, arguments.steps, strategy.data_ranks), strategy)
    params = _params(model, "predict", source, arguments)
    with callbacks.running(model, params), evaluating(model, context):
        callbacks.call("on_predict_begin", {})
        plan = EvaluationPass(model, step, callbacks, "predict", source, copies.take, copies.skip)
        plan.run(context, mine, "stop_predicting", partial(_outputs, copies, group_size))
        copies.wait()
        callbacks.call("on_predict_end", {})


def in_input_order(everyone: list[list[Any]]) -> Iterator[Any]:
    """Return the ranks' outputs in the order of the inputs, without `NoRows`.

    Ranks took batches in turn. Loaders that shard themselves may give unequal numbers.
    """
    dealt = itertools.chain(*itertools.zip_longest(*everyone, fillvalue=NoRows))
    return (pair for pair in dealt if pair is not NoRows)


def _outputs(copies: HostCopies, group_size: int, index: int) -> dict[str, Any]:
    """Return the outputs of the group of batches that ends with number `index`, for its hooks.

    This waits for outputs that are still being copied. The outputs of several batches are joined,
    or given as a list if they can't be joined.
    """
    first = copies.handed_on
    if len(copies.outputs) < index + 1 - first:
        copies.wait()
    group = slice(index - index % group_size - first, index + 1 - first)
    pairs = zip(copies.outputs[group], copies.samples[group], strict=False)
    found, counts = [], []
    for output, count in pairs:
        if output is not NoRows:
            found.append(output)
            counts.append(count)
    if len(found) == 1:
        return {"outputs": found[0]}
    try:
        return {"outputs": trees.concatenate(found, counts)}
    except (RuntimeError, ValueError):
        return {"outputs": found}


def _params(
    model: Module, stage: str, source: Source, arguments: EvaluateArguments
) -> dict[str, Any]:
    """Return what callbacks are given in `params` by `evaluate` and `predict`."""
    return {
        "stage": stage,
        "epochs": 1,
        "initial_epoch": 0,
        "steps": arguments.steps or source.steps,
        "samples": source.samples,
        "batch_size": source.batch_size,
        "steps_per_execution": model._fitkit.compilation.given.steps_per_execution,
        "validation_steps": None,
        "verbose": arguments.verbose,
    }


def joined(outputs: list[Any], samples: list[int] | None = None) -> Any:
    """Join the outputs of batches.

    Args:
        samples: the samples of each batch, by which lists with an entry per sample are known.

    Raises:
        ConfigurationError: the outputs' shapes differ beyond the first dimension.
    """
    if samples is not None and _are_samples_second(outputs, samples):
        warn(
            "predict joins the batches' outputs along their first dimension, but in outputs of "
            f"shape {tuple(outputs[0].shape)} the samples are the second. Return "
            "output.transpose(0, 1) from the net, or give its recurrent layers batch_first=True."
        )
    try:
        return trees.concatenate(outputs, samples)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            "The outputs of the batches can't be joined: their shapes differ beyond the first "
            f"dimension ({error}). Use predict_on_batch for each batch."
        ) from error


def _are_samples_second(outputs: list[Any], samples: list[int]) -> bool:
    """Whether each of several batches has its samples in the second dimension, not the first."""
    return len(outputs) > 1 and all(
        isinstance(output, (torch.Tensor, np.ndarray))
        and output.ndim > 1
        and output.shape[0] != count == output.shape[1]
        for output, count in zip(outputs, samples, strict=False)
    )


NOTHING = object()


class InStep:
    """Gives a pass's batches, with as many steps on each rank as on all others.

    A rank that has run out of batches, or whose batch has no rows, repeats a batch. A repeated
    batch has no samples, so it doesn't count.

    Args:
        batches: this rank's batches.
        strategy: says whether its ranks run in step. If they don't, the batches stay as they are.
    """

    def __init__(self, batches: Iterator[Any], strategy: Strategy) -> None:
        self._batches = batches
        self._collectives = strategy.collectives
        self._together = strategy.evaluates_in_step
        self._ended = False

    def ends_here(self) -> bool:
        """End this rank's batches; return whether the loop may end too, or must wait for others."""
        self._ended = True
        return not self._together

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches.

        Ranks:
            Collective before each batch, if the ranks run in step.
        """
        return self._in_step() if self._together else self._batches

    def _in_step(self) -> Iterator[Any]:
        last: Any = NOTHING
        while True:
            batch: Any = NOTHING if self._ended else next(self._batches, NOTHING)
            able = batch is not NOTHING and batch is not NoRows
            here, with_batch, ranks_ready = self._collectives.sums(
                [float(batch is not NOTHING), float(able), float(able or last is not NOTHING)]
            )
            if not here:
                return
            if not with_batch:
                yield NoRows
                continue
            if ranks_ready < self._collectives.world_size:  # a rank has no batch to repeat
                gathered = self._collectives.gather(batch if able else None)
                last = last if last is not NOTHING else next(b for b in gathered if b is not None)
            if able:
                last = batch
                batch.is_lent = True  # it may come again
                yield batch
            else:
                yield Batch(last.data, 0, 1)


class EvaluationPass:
    """Decides how a pass over data computes its batches, and what makes it fast.

    - Losses that are means over samples are computed for many batches at once, as metrics are.
    - A compiler may take the step's place (`PassSteps`).

    A pass computes no gradients. The first batch is an ordinary step, with all checks.

    Args:
        model: the model that the pass evaluates.
        step: computes the batches, unless a compiler does.
        callbacks: the pass's callbacks.
        stage: the stage in the names of callbacks' hooks, `"test"` or `"predict"`.
        source: gives the batches.
        take: receives each batch with its outcome, in their order.
        skip: called in place of that for a batch without rows, if given.
    """

    def __init__(
        self,
        model: Module,
        step: Step,
        callbacks: CallbackList,
        stage: str,
        source: Source,
        take: Take,
        skip: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._step = step
        self._take = take
        self._skip = skip
        self._begin = callbacks.hooks(f"on_{stage}_batch_begin")
        self._end = callbacks.hooks(f"on_{stage}_batch_end")
        self._has_one_batch = source.steps == 1
        self._compiled: PassSteps | None = None
        if (compiler := compiler_of(model)) is not None:
            shows = any(isinstance(callback, ProgressBar) for callback in callbacks.callbacks)
            self._compiled = compiler.pass_steps(model, step, take, is_announced=shows)
        self._users_look = users_look(callbacks, stage)
        # Whether batches are rows of tensors in memory. Ranks in step don't qualify: they may
        # repeat a batch, marked as one that doesn't count.
        alike = not model._fitkit.compilation.strategy.evaluates_in_step
        self._in_memory = alike and isinstance(source.whole, ArraySource)
        self._no_grad = torch.no_grad()

    def run(
        self,
        context: StepContext,
        mine: InStep,
        stop: str,
        logs_of: Callable[[int], dict[str, Any]],
    ) -> tuple[int, int]:
        """Compute the batches, and call the callbacks' hooks of batches.

        Args:
            context: the pass's context.
            mine: this rank's batches.
            stop: the name of the model's attribute that ends the pass.
            logs_of: returns the logs for the hooks after a batch, by its number.

        Returns:
            The number of batches, and how many of them had no rows.
        """
        model, begin, end, take = self._model, self._begin, self._end, self._take
        advance: Callable[[Batch, int], Outcome | None] = self._first
        index, empty = -1, 0
        with self:
            read = heard(iter(mine), context.name)
            batches = self._step.mover.bring_each(self._step.looking(read))
            for group in in_groups(batches, model._fitkit.compilation.given.steps_per_execution):
                has_rows = False
                for index, batch in group:
                    if batch is NoRows:
                        empty += 1
                        if self._skip is not None:  # in the batches' order
                            self.flush()
                            self._skip()
                        continue
                    context.batch = batch
                    if context.waiting:
                        context.log_waiting()
                    if not has_rows:
                        for hook in begin:
                            hook(index, {})
                    if (outcome := advance(batch, index)) is not None:
                        take(batch, outcome)
                    if index == empty and not self._has_one_batch:
                        advance = self.step_after_first(batch)
                    has_rows = True
                if end and has_rows:
                    self.flush_for_hooks()
                    logs = LazyLogs(partial(logs_of, index))
                    for hook in end:
                        hook(index, logs)
                if getattr(model, stop) and mine.ends_here():
                    break
            self.flush()
        return index + 1, empty

    def _first(self, batch: Batch, index: int) -> Outcome:
        """Make a step with all checks."""
        make = self._step if self._compiled is None else self._compiled.first
        found: Outcome = first_step(self._model, self._step, batch, index, make)
        return found

    def __enter__(self) -> EvaluationPass:
        self._no_grad.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._compiled is not None:
            self._compiled.close()
        self._no_grad.__exit__(None, None, None)

    def step_after_first(self, first: Batch) -> Callable[[Batch, int], Outcome | None]:
        """Return the function that makes the steps from the second on.

        Args:
            first: the first batch, whose step is done.
        """
        if self._in_memory:
            self._step.join_losses()
        if self._compiled is None:
            return self._step
        return self._compiled.after_first(first, keeps=self._in_memory, users_look=self._users_look)

    def flush_for_hooks(self) -> None:
        """Compute pending batches at the end of a group, if a callback may read the results."""
        if self._users_look:
            self.flush()

    def flush(self) -> None:
        """Compute pending batches, in one call."""
        if self._compiled is not None:
            self._compiled.flush()


def users_look(callbacks: CallbackList, stage: str) -> bool:
    """Return whether a callback other than the progress bar acts at batches of a pass."""
    hooks = (*callbacks.hooks(f"on_{stage}_batch_begin"), *callbacks.hooks(f"on_{stage}_batch_end"))
    return any(type(getattr(hook, "__self__", None)) is not ProgressBar for hook in hooks)


class HostCopies:
    """Collects batches' outputs on the CPU, without waiting for the device after each batch.

    A separate GPU stream copies the outputs into pinned memory while the next batch is computed.
    One batch later they are copied out of pinned memory, and the GPU's memory is free again.

    Args:
        streams: creates the GPU's streams for a device.

    Attributes:
        outputs: the batches' outputs in order; the last one is included after `wait`.
        samples: how many samples each of them has.
        handed_on: how many outputs before them have been handed on, and aren't kept.
    """

    def __init__(self, streams: Callable[[torch.device], Any] = Streams) -> None:
        self.outputs: list[Any] = []
        self.samples: list[int] = []
        self.handed_on: int = 0
        self._make_streams = streams
        self._streams: Any = None
        self._flying: tuple[Any, Any] | None = None

    def take(self, batch: Batch, outcome: Outcome) -> None:
        """Add a batch's outputs."""
        self.samples.append(batch.samples)
        self.add(outcome.outputs)

    def skip(self) -> None:
        """Add `NoRows` in place of the outputs of a batch without rows."""
        self.samples.append(0)
        self.add(NoRows)

    def add(self, output: Any) -> None:
        """Add a batch's output."""
        is_tensor = type(output) is torch.Tensor or isinstance(output, torch.Tensor)
        if is_tensor and output.is_cpu and self._flying is None:
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
        """Wait for the copies in progress."""
        if self._flying is None:
            return
        (copies, copied), self._flying = self._flying, None
        self._streams.wait_on_host(copied)
        # Pinned memory is scarce and reused for the next batches, so clone what is kept.
        self.outputs.append(_mapped(copies, torch.Tensor.clone))


def on_host(output: Outputs) -> Any:
    """Move a net's output to the CPU; drop None values of dicts and Hugging Face outputs."""
    return output.cpu() if isinstance(output, torch.Tensor) else _mapped(output, torch.Tensor.cpu)


def _mapped(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to the tensors of a net's output; drop a dict's None values."""
    if isinstance(output, torch.Tensor):
        return function(output)
    if hasattr(output, "items"):
        return {key: _mapped(value, function) for key, value in output.items() if value is not None}
    return trees.map_leaves(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, output
    )


def _gpu_of(output: Outputs) -> torch.device | None:
    """Return the device with streams that all of an output's tensors are on, or None."""
    tensors = list(tensors_in(output))
    if any(isinstance(one, torch.Tensor) and not is_dense(one) for one in tensors):
        return None  # streams can't record the use of their memory
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and has_streams(device) else None
