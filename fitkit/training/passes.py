"""`evaluate` and `predict`: one pass over data, on each rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fitkit import trees
from fitkit.callbacks import CallbackList
from fitkit.callbacks.watches import non_finite_losses
from fitkit.data.batches import NoRows, Source
from fitkit.data.sharding import RankBatch
from fitkit.data.stream import limited
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ConfigurationError, warn
from fitkit.hooks import evaluation_stage
from fitkit.modes import in_use
from fitkit.module import Module
from fitkit.training.explain import memory_explained
from fitkit.training.inferring import inference_for
from fitkit.training.jobs import PassJob
from fitkit.training.log import reduced
from fitkit.training.loop import evaluate_batches, predict_batches
from fitkit.training.runs import (
    Step,
    closing,
    pass_params,
    predict_step_for,
    share_of,
    step_for,
    with_own,
)
from fitkit.training.session import backend_flags, net_prepared, place
from fitkit.training.stage import Stage, running

if TYPE_CHECKING:
    from fitkit.training.compilation import Compilation


def run_evaluate(model: Module, compilation: Compilation, job: PassJob) -> dict[str, Any]:
    """`evaluate` on this rank: the loss and metrics by name, over all ranks' samples."""
    with memory_explained(model, compilation, "evaluate", _size(job)):
        return _evaluated(model, compilation, job)


def _size(job: PassJob) -> int | None:
    return None if job.source is None else job.source.batch_size


def _evaluated(model: Module, compilation: Compilation, job: PassJob) -> dict[str, Any]:
    place(model, compilation.strategy)
    source = share_of(job.source, compilation, training=False)
    name = evaluation_stage(model) or "test"
    targets = [source.target]
    stage, step = step_for(model, compilation, name, all_targets=targets, source=source)
    callbacks = with_own(job.callback_list, job.verbose)
    group = compilation.steps_per_execution
    callbacks.begin(model, pass_params("evaluate", source, job, group))
    with backend_flags(compilation), net_prepared(model, compilation), closing(callbacks):
        values = evaluate_source(model, compilation, source, job.steps, stage, step, callbacks)
    sentence = non_finite_losses(values, job.callback_list.callbacks)
    if sentence is not None and model.is_global_zero and model._fitkit.fit_state.run is None:
        warn(f"In evaluate {sentence}")
    return values


def evaluate_source(
    model: Module,
    compilation: Compilation,
    source: Source,
    steps: int | None,
    stage: Stage,
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


def run_predict(model: Module, compilation: Compilation, job: PassJob) -> Any:
    """`predict` on this rank: the outputs of all ranks' batches, joined in input order."""
    with memory_explained(model, compilation, "predict", _size(job)):
        return _predicted(model, compilation, job)


def _predicted(model: Module, compilation: Compilation, job: PassJob) -> Any:
    strategy = compilation.strategy
    place(model, strategy)
    source = share_of(job.source, compilation, training=False)
    stage, step = predict_step_for(model, compilation)
    callbacks = with_own(job.callback_list, job.verbose)
    group = compilation.steps_per_execution
    callbacks.begin(model, pass_params("predict", source, job, group))
    flags, shares = backend_flags(compilation), strategy.shares
    as_told, evaluated = net_prepared(model, compilation), model._fitkit.fit_state.evaluated()
    with flags, as_told, closing(callbacks), running(model, stage), evaluated:
        model.eval()
        callbacks.call("on_predict_begin", {})
        inference = inference_for(model, step, callbacks, "predict", source)
        together = InStep(_first(source, job.steps, shares), strategy, muted=False)
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
        muted: whether the step mutes a `RankBatch` without samples. Else fillers come as they are,
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
                yield RankBatch(last, 0, 1) if self._muted else last
