"""`evaluate` and `predict` on each rank, and the validations of `fit`: one pass over the data."""

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
from fitkit.data.batches import Batch, NoRows, Source, limited
from fitkit.data.to_device import Streams, tensors_in
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import evaluation_stage
from fitkit.module import Module
from fitkit.pulse import heard
from fitkit.samples import samples_of
from fitkit.scopes import Scope
from fitkit.tensors import is_dense
from fitkit.training.compiler import PassSteps, Take, compiler_of
from fitkit.training.log import LazyLogs, Logbook, reduced, warn_of_empty
from fitkit.training.passes import PREDICT, TEST, VALIDATION, Pass, Stage, users_look
from fitkit.training.settings import EvaluateArguments
from fitkit.training.step import Outcome
from fitkit.training.step_context import StepContext
from fitkit.training.step_for import Step, new_context, step_for
from fitkit.training.surroundings import evaluating, rank_source, surroundings
from fitkit.training.with_gradients import first_step
from fitkit.typing import Outputs


def run_evaluate(model: Module, arguments: EvaluateArguments) -> dict[str, Any]:
    """Run `evaluate` on this rank; return the loss and metrics over all ranks' samples, by name."""
    with surroundings(model, "evaluate", arguments.source.batch_size):
        source = rank_source(model, arguments.source, training=False, steps=arguments.steps)
        stage = VALIDATION if evaluation_stage(model) == "validation" else TEST
        step = step_for(model, stage.name, all_targets=[source.target], source=source)
        callbacks = with_built_in(arguments.callback_list, arguments.verbose)
        with callbacks.running(model, _params(model, "evaluate", source, arguments)):
            values = evaluate_source(model, source, arguments.steps, stage, step, callbacks)
    if model.is_global_zero and model._fitkit.fit_state.run is None:
        lost = arguments.callback_list.lost_losses(values)
        if lost is not None:
            from fitkit.extras.bad_numbers import advice_after_evaluation

            warn(f"In evaluate {lost}. {advice_after_evaluation(model, arguments.source)}")
        warn_of_empty(values, "In evaluate")
    return values


def evaluate_source(
    model: Module,
    source: Source,
    steps: int | None,
    stage: Stage,
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
    data_ranks = strategy.data_ranks
    model.stop_evaluating = False
    with Scope() as scope:
        context = new_context(model, stage.name, step, scope)
        record = context.record
        scope.enter_context(evaluating(model, context))
        share_buffers(model)
        callbacks.call("on_test_begin", {})
        mine = InStep(_share_of_steps(source, steps, data_ranks), strategy)
        made = run_pass(
            model, stage, step, context, callbacks, source, mine,
            partial(step.record, record=record), lambda _: LazyLogs(record.results),
        )  # fmt: skip
        count = made.done
        wanted = None if model.stop_evaluating else steps
        if wanted is not None and count and data_ranks.world_size == 1 and count < wanted:
            warn(f"{name} ended after {count} of {wanted} batches.")
        with torch.no_grad():
            step.call_epoch_end(record)
        values, steps_of_all = reduced(record, strategy.log_ranks)
        if not steps_of_all:
            raise ConfigurationError(f"{name} is empty: it gave no samples.")
        model._fitkit.log_names = list(values)
        context.call_at_end(callbacks.hooks("on_test_end"), values, data_ranks, values)
    return values


def run_pass(
    model: Module,
    stage: Stage,
    step: Step,
    context: StepContext,
    callbacks: CallbackList,
    source: Source,
    mine: InStep,
    take: Take,
    logs: Callable[[int], LazyLogs],
    skip: Callable[[], None] | None = None,
) -> Pass:
    """Make a pass that learns nothing, without gradients; return it.

    Args:
        mine: this rank's batches.
        take, skip: as in `Evaluation`.
        logs: as in `Pass`.
    """
    with Scope() as scope:
        scope.enter_context(torch.no_grad())
        execute = Evaluation(
            model, step, callbacks, stage, source, take, context.record, scope, skip
        )
        group = model._fitkit.compilation.given.steps_per_execution
        made = Pass(stage, context, callbacks, execute, logs, group=group)
        read = heard(iter(mine), stage.name)
        batches = step.mover.bring_each(step.looking(read))
        made.run(batches, lambda: getattr(model, stage.stop) and mine.end())
    return made


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
    step = step_for(model, PREDICT.name, source=source)
    callbacks = with_built_in(arguments.callback_list, arguments.verbose)
    model.stop_predicting = False
    mine = InStep(_share_of_steps(source, arguments.steps, strategy.data_ranks), strategy)
    params = _params(model, "predict", source, arguments)
    with Scope() as scope:
        context = new_context(model, "predict", step, scope)
        scope.enter_context(callbacks.running(model, params))
        scope.enter_context(evaluating(model, context))
        callbacks.call("on_predict_begin", {})
        run_pass(
            model, PREDICT, step, context, callbacks, source, mine, copies.take,
            lambda index: LazyLogs(partial(_outputs, copies, group_size, index)), copies.skip,
        )  # fmt: skip
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

    def end(self) -> bool:
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


class Evaluation:
    """Makes the steps of a pass that learns nothing, and decides what makes them fast.

    - Losses that are means over samples are computed for many batches at once, as metrics are.
    - A compiler may take the step's place (`PassSteps`).

    The first batch is an ordinary step, with all checks.

    Args:
        model: the model that the pass evaluates.
        step: computes the batches, unless a compiler does.
        callbacks: the pass's callbacks.
        stage: the kind of pass.
        source: gives the batches.
        take: receives each batch with its outcome, in their order.
        record: the pass's values.
        scope: the pass's.
        skip: called for a batch without rows, in the batches' order, if given.
    """

    def __init__(
        self,
        model: Module,
        step: Step,
        callbacks: CallbackList,
        stage: Stage,
        source: Source,
        take: Take,
        record: Logbook,
        scope: Scope,
        skip: Callable[[], None] | None = None,
    ) -> None:
        self._model, self._step = model, step
        self._take, self._skip = take, skip
        self._has_one_batch = source.steps == 1
        self._compiled: PassSteps | None = None
        if (compiler := compiler_of(model)) is not None:
            shows = any(isinstance(callback, ProgressBar) for callback in callbacks.callbacks)
            self._compiled = compiler.pass_steps(
                model, step, take, record, scope, is_announced=shows
            )
        self._users_look = users_look(callbacks, stage)
        # Whether batches are rows of tensors in memory. Ranks in step don't qualify: they may
        # repeat a batch, marked as one that doesn't count.
        alike = not model._fitkit.compilation.strategy.evaluates_in_step
        self._in_memory = alike and isinstance(source.whole, ArraySource)
        # What makes the steps after the first.
        self._advance: Callable[[Batch, int], Outcome | None] | None = None

    def make(self, batch: Batch, index: int) -> None:
        """Make a batch's step, or hold it."""
        if self._advance is None:
            self._first(batch, index)
        elif (outcome := self._advance(batch, index)) is not None:
            self._take(batch, outcome)

    def _first(self, batch: Batch, index: int) -> None:
        """Make and take a step with all checks, and choose what makes those after it."""
        make = self._step if self._compiled is None else self._compiled.first
        self._take(batch, first_step(self._model, self._step, batch, index, make))
        if not self._has_one_batch:
            step = (self._step.joining_losses(batch) if self._in_memory else None) or self._step
            self._advance = step
            if self._compiled is not None:
                self._advance = self._compiled.after_first(
                    batch, step, keeps=self._in_memory, users_look=self._users_look
                )

    def skip(self) -> None:
        """Note a batch without rows."""
        if self._skip is not None:
            self.flush()
            self._skip()

    def flush(self) -> None:
        """Compute the batches that are held, in one call."""
        if self._compiled is not None:
            self._compiled.flush()

    def end(self) -> None:
        """Compute what is left."""
        self.flush()


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
    if trees.has_items(output):
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
