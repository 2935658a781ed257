"""Which step a pass takes: the compiled one, or the hooks that a model defines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from fitkit.data.arrays import ArraySource
from fitkit.data.batches import Source
from fitkit.data.sources import targets_of
from fitkit.distributed.wrapped_model import DividedModel, WrappedModel
from fitkit.errors import ConfigurationError
from fitkit.hooks import has_own_steps
from fitkit.losses.class_weights import ClassWeights
from fitkit.metrics.compiled import CompiledMetrics
from fitkit.module import Module
from fitkit.scopes import Scope
from fitkit.training.compiler import compiler_of
from fitkit.training.first_batch import DataFacts
from fitkit.training.log import Logbook
from fitkit.training.own_step import OwnStep
from fitkit.training.step import CompiledStep
from fitkit.training.step_context import StepContext
from fitkit.training.with_gradients import wrapped_for_evaluation

NO_METRICS = CompiledMetrics()

Step = CompiledStep | OwnStep
"""A batch's step: as `compile` describes it, or by the model's own hooks."""


def step_for(
    model: Module,
    stage: str,
    *,
    class_weights: ClassWeights | None = None,
    all_targets: list[Any] | None = None,
    name: str = "x",
    source: Source | None = None,
) -> Step:
    """Return a stage's step: `compile`'s, or the model's own where it has hooks for it.

    Args:
        model: the model.
        stage: `"training"`, `"validation"`, `"test"` or `"predict"`, whose step has no loss.
        class_weights: weights by label.
        all_targets: those of data in memory, whose labels are checked.
        name: the data's name for messages.
        source: the data; None for single batches.
    """
    compilation, predicts = model._fitkit.compilation, stage == "predict"
    strategy = compilation.strategy
    may_count = False
    if not predicts:
        known = None if source is None else [targets_of(source)]
        may_count = compilation.loss.may_count(known)
    if stage == "training" and strategy.data_ranks.world_size > 1:
        # A rank whose data are its own knows its own labels only.
        may_count = strategy.data_ranks.sums([float(may_count)])[0] > 0
    counts = may_count or has_own_steps(model, stage)
    if stage == "training":
        if (outer := model._fitkit.fit_state.run) is not None:
            outer.follow_freezing()  # a callback trains the model, by that run's wrapper
        compiler = compiler_of(model)
        wrapped = strategy.wrap_for_training(
            model,
            averages=model._updates_all,
            may_count=counts,
            compiles=compiler is not None and compiler.compiles_updates(model),
            apart=compilation.given.out_of_memory == "split",
        )
    else:
        wrapped = wrapped_for_evaluation(model)
    _check_undivided(model, wrapped, stage)
    transfer = None if source is None else source.whole.transfer
    keeps_batches = source is not None and isinstance(source.whole, ArraySource)
    is_divided = source is not None and (source.steps != 1 or strategy.world.size > 1)
    kind, own_kind = _kinds_of(model, stage)
    compiled = kind(
        model,
        wrapped,
        DataFacts(name, all_targets or (), keeps_batches),
        predicts=predicts,
        class_weights=class_weights,
        ranks=strategy.data_ranks if stage == "training" else None,
        may_count=may_count,
        joins=is_divided and stage != "training",
        transfer=transfer,
    )
    compiled.mover.transfer.pins = source is not None and source.whole.pins
    # Values are read after each batch, or after the only one.
    is_read = source is None or (stage != "training" and source.steps == 1)
    if compiled.meters is not None:
        compiled.meters.waits = not is_read
    by_turns = stage == "training" and not model._updates_all
    moves_parts = not predicts and strategy.replicates and not compiled.mover.is_ours
    if not (has_own_steps(model, stage) or by_turns or moves_parts):
        return compiled
    return own_kind(model, stage, compiled, wrapped, transfer)


def new_context(
    model: Module,
    stage: str,
    step: Step,
    scope: Scope,
    backward: Callable[..., None] | None = None,
) -> StepContext:
    """Return what a new pass of a step is to the code in it, with nothing in its record.

    Args:
        scope: the pass's, with the hooks at its end.
        backward: as in `StepContext`.
    """
    doubts = model._fitkit.doubts
    if isinstance(step, OwnStep):
        meters = step.compiled.meters or NO_METRICS
        record = Logbook(meters, scope, doubts, keeps_outputs=step.keeps)
        turns = threading.Lock()
        return StepContext(
            stage,
            step.compiled,
            record,
            transfer=step.transfer,
            backward=backward,
            replicas=turns,
        )
    # Callbacks alone see this one, and none of them moves a batch or calls backward by it.
    return StepContext(stage, step, Logbook(step.meters or NO_METRICS, scope, doubts))


def _kinds_of(
    model: Module, stage: str
) -> tuple[Callable[..., CompiledStep], Callable[..., OwnStep]]:
    """Return what makes a stage's steps, the compiled and the model's own. A training's parts are
    its updates' matter.
    """
    if stage == "training" or model._fitkit.compilation.given.out_of_memory == "raise":
        return CompiledStep, OwnStep
    from fitkit.extras.splitting import OwnStepInParts, StepInParts

    return partial(StepInParts, stage), OwnStepInParts


def _check_undivided(model: Module, wrapped: WrappedModel, stage: str) -> None:
    """Refuse steps of the model's own where ranks divide sequences: they would see parts."""
    if isinstance(wrapped, DividedModel) and has_own_steps(model, stage):
        raise ConfigurationError(
            f"{stage}_step and its hooks would see only a rank's part of each sequence under "
            "context_parallel. Give compile the loss and the metrics instead."
        )
