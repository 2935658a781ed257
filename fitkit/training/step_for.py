"""Which step a pass takes: the compiled one, or the hooks that a model defines."""

from __future__ import annotations

from typing import Any

from fitkit.data.arrays import ArraySource
from fitkit.data.batches import Source
from fitkit.data.sources import targets_of
from fitkit.distributed.wrapped_model import DividedModel, WrappedModel
from fitkit.errors import ConfigurationError
from fitkit.hooks import has_own_steps
from fitkit.losses.class_weights import ClassWeights
from fitkit.module import Module
from fitkit.training.compiler import compiler_of
from fitkit.training.own_step import OwnStep
from fitkit.training.step import CompiledStep
from fitkit.training.step_context import StepContext
from fitkit.training.with_gradients import wrapped_for_evaluation

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
) -> tuple[StepContext, Step]:
    """Return a stage's step: `compile`'s, or the model's own where it has hooks for it."""
    compilation = model._fitkit.compilation
    strategy = compilation.strategy
    known = None if source is None else [targets_of(source)]
    may_count = compilation.loss.may_count(known)
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
    compiled = CompiledStep(
        model,
        wrapped,
        class_weights=class_weights,
        all_targets=all_targets,
        name=name,
        ranks=strategy.data_ranks if stage == "training" else None,
        may_count=may_count,
        keeps_batches=source is not None and isinstance(source.whole, ArraySource),
        transfer=transfer,
    )
    compiled.mover.transfer.pins = source is not None and source.whole.pins
    context = StepContext(stage, compiled.logbook.logged, compiled, transfer=transfer)
    by_turns = stage == "training" and not model._updates_all
    moves_parts = strategy.replicates and not compiled.mover.is_ours
    if not (has_own_steps(model, stage) or by_turns or moves_parts):
        return context, compiled
    return context, OwnStep(model, context, wrapped)


def predict_step_for(model: Module, source: Source | None = None) -> tuple[StepContext, Step]:
    """Return the step of `predict`."""
    wrapped = wrapped_for_evaluation(model)
    _check_undivided(model, wrapped, "predict")
    transfer = None if source is None else source.whole.transfer
    compiled = CompiledStep(
        model,
        wrapped,
        predicts=True,
        keeps_batches=source is not None and isinstance(source.whole, ArraySource),
        transfer=transfer,
    )
    compiled.mover.transfer.pins = source is not None and source.whole.pins
    context = StepContext("predict", compiled.logbook.logged, compiled, transfer=transfer)
    if has_own_steps(model, "predict"):
        return context, OwnStep(model, context, wrapped)
    return context, compiled


def _check_undivided(model: Module, wrapped: WrappedModel, stage: str) -> None:
    """Refuse steps of the model's own where ranks divide sequences: they would see parts."""
    if isinstance(wrapped, DividedModel) and has_own_steps(model, stage):
        raise ConfigurationError(
            f"{stage}_step and its hooks would see only a rank's part of each sequence under "
            "context_parallel. Give compile the loss and the metrics instead."
        )
