"""What every rank of a run needs: its share of the data, its steps, its callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from fitkit.callbacks import Callback, CallbackList, ProgressBar
from fitkit.checkpoint import check_fused_state
from fitkit.data.batches import Source
from fitkit.data.class_weights import ClassWeights
from fitkit.data.sharding import sharded
from fitkit.data.sources import drawn_from
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.precision import match_state
from fitkit.distributed.strategies import Strategy
from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.errors import warn
from fitkit.hooks import has_own_steps, overridden
from fitkit.module import Module
from fitkit.optimizers import check_trainable, fuse, held_by
from fitkit.training.jobs import PassJob
from fitkit.training.log import Logbook
from fitkit.training.optimizing import configures_its_own
from fitkit.training.own_steps import OwnPredictStep, OwnStep
from fitkit.training.session import caller_of, match_strides, mover_of
from fitkit.training.stage import Stage
from fitkit.training.steps import CompiledStep, PredictStep
from fitkit.training.updates import Updater

if TYPE_CHECKING:
    from fitkit.training.compilation import Compilation


Step = CompiledStep | OwnStep
"""A batch's step: as `compile` describes it, or by the model's own hooks."""


def compiled_step(
    model: Module,
    compilation: Compilation,
    wrapped: WrappedModel,
    class_weights: ClassWeights | None = None,
    all_targets: list[Any] | None = None,
    name: str = "x",
    ranks: Collectives | None = None,
    *,
    may_count: bool = True,
) -> CompiledStep:
    """A step with its own logbook and meters, so that calls can nest."""
    strategy = compilation.strategy
    compilation.loss.to(strategy.device)
    return CompiledStep(
        wrapped,
        caller_of(model),
        mover_of(model, strategy),
        strategy.precision,
        compilation.loss.begin(),
        Logbook(compilation.metrics.begin()),
        class_weights,
        all_targets,
        name,
        ranks,
        may_count=may_count,
    )


def step_for(
    model: Module,
    compilation: Compilation,
    stage: str,
    *,
    class_weights: ClassWeights | None = None,
    all_targets: list[Any] | None = None,
    name: str = "x",
    source: Source | None = None,
) -> tuple[Stage, Step]:
    """The step of a stage: `compile`'s, or the model's own where it has hooks for the stage."""
    strategy = compilation.strategy
    known = None if source is None else [drawn_from(source)]
    may_count = compilation.loss.may_count(known)
    if stage != "training":
        wrapped = strategy.wrap_for_evaluation(model)
    else:
        wrapped = strategy.wrap_for_training(
            model,
            averages=learns_alone(model),
            may_count=may_count or has_own_steps(model, stage),
        )
    ranks = strategy.shares if stage == "training" else None
    compiled = compiled_step(
        model, compilation, wrapped, class_weights, all_targets, name, ranks, may_count=may_count
    )
    running = Stage(stage, compiled.logbook.logged, compiled)
    running.transferred = compiled.mover.transfer
    by_turns = stage == "training" and not learns_alone(model)
    moves_parts = strategy.replicates and overridden(model, "transfer_batch_to_device")
    if not (has_own_steps(model, stage) or by_turns or moves_parts):
        return running, compiled
    own = OwnStep(
        model,
        running,
        wrapped,
        compiled.mover,
        compiled.logbook,
        strategy.shares,
        partial(strategy.precision.forward, strategy.device.type),
        optional_loss=not model.automatic_optimization,
    )
    return running, own


def learns_alone(model: Module) -> bool:
    """Whether one optimizer makes one update a step, as wrappers like DDP's want it."""
    return model.automatic_optimization and len(model._fitkit.fit_state.optimizers) <= 1


def predict_step_for(model: Module, compilation: Compilation) -> tuple[Stage, Any]:
    """The step of `predict`."""
    strategy = compilation.strategy
    wrapped, mover = strategy.wrap_for_evaluation(model), mover_of(model, strategy)
    compiled = PredictStep(wrapped, caller_of(model), mover, strategy.precision)
    stage = Stage("predict", predicting=compiled, transferred=mover.transfer)
    if has_own_steps(model, "predict"):
        around = partial(strategy.precision.forward, strategy.device.type)
        return stage, OwnPredictStep(model, stage, wrapped, mover, around)
    return stage, compiled


def updaters_of(
    model: Module,
    compilation: Compilation,
    *,
    accumulate: int | None = None,
    after_update: Callable[[Optimizer], Callable[[], Any] | None] = lambda optimizer: None,
) -> list[Updater]:
    """What turns the model's losses into updates: one for each optimizer.

    Args:
        accumulate: instead of what `compile` was given.
        after_update: gives for an optimizer what to call after each of its updates.
    """
    state, strategy = model._fitkit.fit_state, compilation.strategy
    trainable = compilation.trainable(model)
    check_trainable(trainable)
    optimizers = state.optimizers_for(model, compilation)
    is_named = compilation.optimizer.is_name and not configures_its_own(model, compilation)
    if is_named:
        fuse(optimizers[0], model)
    for optimizer in optimizers:
        check_fused_state(optimizer)
        match_state(optimizer)
        match_strides([optimizer])
        strategy.precision.check_optimizer(optimizer)
    several = len(optimizers) > 1
    scalings = state.scalings_for(strategy, len(optimizers) if model.automatic_optimization else 1)
    return [
        Updater(
            strategy,
            state,
            optimizer,
            held_by(optimizer) if several else trainable,
            accumulate=compilation.accumulate_grad_batches if accumulate is None else accumulate,
            clip_value=compilation.gradient_clip_val,
            clip_algorithm=compilation.gradient_clip_algorithm,
            after_update=after_update(optimizer),
            exchanges=several,
            scaling=scaling,
            is_named=is_named,
            outside=[] if several else compilation.loss_parameters(),
        )
        for optimizer, scaling in zip_longest(optimizers, scalings)
    ]


def share_of(source: Source | None, compilation: Compilation, *, training: bool) -> Source:
    """This rank's part of a source.

    Ranks:
        Collective.
    """
    assert source is not None, "the job was prepared before it was launched"
    strategy: Strategy = compilation.strategy
    return sharded(
        source,
        strategy.shares,
        training=training,
        replace_sampler=compilation.replace_sampler,
        scatter=strategy.reads_on_rank_zero,
    )


def with_own(callbacks: CallbackList, verbose: Any, *own: Callback) -> CallbackList:
    """The user's callbacks, then fitkit's, which see what the user's have added to the logs.

    At the end those that come last: what saves has to see what all others have done. A backup is
    the very last: a run goes on from it with the files that the others wrote.
    """

    def place(callback: Callback) -> tuple[bool, bool]:
        last = callback.comes_last
        return last, last and bool(getattr(callback, "restores", False))

    added: list[Callback] = list(own)
    if verbose != 0 and not any(isinstance(c, ProgressBar) for c in callbacks.callbacks):
        added.append(ProgressBar(verbose=verbose))
    together = [*callbacks.callbacks, *added]
    return CallbackList(sorted(together, key=place))


@contextlib.contextmanager
def closing(callbacks: CallbackList) -> Iterator[None]:
    """Give the terminal back whatever happens."""
    try:
        yield
    finally:
        for callback in callbacks.callbacks:
            if isinstance(callback, ProgressBar):
                callback.close()


def tell_of(error: BaseException, callbacks: CallbackList) -> None:
    """Call `on_exception`; what fails in it is a warning, and hides neither error nor others."""
    for hook in callbacks.hooks("on_exception"):
        try:
            hook(error)
        except Exception as another:
            warn(f"on_exception failed: {type(another).__name__}: {another}")


def pass_params(stage: str, source: Source, job: PassJob, group: int = 1) -> dict[str, Any]:
    """What callbacks are told of a call of `evaluate` or `predict`.

    Args:
        group: batches between two calls of the batch hooks.
    """
    return {
        "stage": stage,
        "epochs": 1,
        "initial_epoch": 0,
        "steps": job.steps or source.steps,
        "samples": source.samples,
        "batch_size": source.batch_size,
        "steps_per_execution": group,
        "validation_steps": None,
        "verbose": job.verbose,
    }
