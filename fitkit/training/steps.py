"""Which step computes the batches of a pass: the compiled one, or the model's own."""

from __future__ import annotations

from typing import Any

from fitkit.data.arrays import ArraySource
from fitkit.data.batches import Source
from fitkit.data.class_weights import ClassWeights
from fitkit.data.sources import targets_of
from fitkit.errors import ConfigurationError
from fitkit.hooks import has_own_steps, overridden
from fitkit.module import Module
from fitkit.training.context import StepContext
from fitkit.training.jit.programs import compiles_updates, traces_gradients
from fitkit.training.own_step import OwnPredictStep, OwnStep, Step
from fitkit.training.step import CompiledStep, PredictStep


def step_for(
    model: Module,
    stage: str,
    *,
    class_weights: ClassWeights | None = None,
    all_targets: list[Any] | None = None,
    name: str = "x",
    source: Source | None = None,
) -> tuple[StepContext, Step]:
    """The step of a stage: `compile`'s, or the model's own where it has hooks for the stage."""
    compilation = model._fitkit.compilation
    strategy = compilation.strategy
    _check_undivided(model, stage)
    known = None if source is None else [targets_of(source)]
    may_count = compilation.loss.may_count(known)
    counts = may_count or has_own_steps(model, stage)
    wrapped = None
    if stage != "training":
        wrapped = strategy.wrap_for_evaluation(model)
    elif compiles_updates(model) and traces_gradients():
        wrapped = strategy.wrap_for_compiling(model, may_count=counts)
    if wrapped is None:
        averages = model._updates_all
        wrapped = strategy.wrap_for_training(model, averages=averages, may_count=counts)
    compiled = CompiledStep(
        model,
        wrapped,
        class_weights=class_weights,
        all_targets=all_targets,
        name=name,
        ranks=strategy.data_ranks if stage == "training" else None,
        may_count=may_count,
        keeps_batches=source is not None and isinstance(source.whole, ArraySource),
    )
    context = StepContext(stage, compiled.logbook.logged, compiled)
    by_turns = stage == "training" and not model._updates_all
    moves_parts = strategy.replicates and overridden(model, "transfer_batch_to_device")
    if not (has_own_steps(model, stage) or by_turns or moves_parts):
        return context, compiled
    return context, OwnStep(model, context, wrapped)


def predict_step_for(model: Module) -> tuple[StepContext, Any]:
    """The step of `predict`."""
    _check_undivided(model, "predict")
    wrapped = model._fitkit.compilation.strategy.wrap_for_evaluation(model)
    compiled = PredictStep(model, wrapped)
    context = StepContext("predict", predicting=compiled)
    if has_own_steps(model, "predict"):
        return context, OwnPredictStep(model, context, wrapped)
    return context, compiled


def _check_undivided(model: Module, stage: str) -> None:
    """Refuse steps of the model's own where ranks divide sequences: they would see parts."""
    if model._fitkit.compilation.strategy.context_parallel > 1 and has_own_steps(model, stage):
        raise ConfigurationError(
            f"{stage}_step and its hooks would see only a rank's part of each sequence under "
            "context_parallel. Give compile the loss and the metrics instead."
        )
