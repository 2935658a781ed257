"""What every rank of a run needs: its share of the data, its steps, its callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fitkit.callbacks import Callback, CallbackList, ProgressBar
from fitkit.data.class_weights import ClassWeights
from fitkit.data.sharding import sharded
from fitkit.data.sources import Source
from fitkit.distributed.strategies import Strategy
from fitkit.training.jobs import PassJob
from fitkit.training.logbook import Logbook
from fitkit.training.session import caller_of, transfer_of
from fitkit.training.steps import CompiledStep
from fitkit.training.updates import Updater

if TYPE_CHECKING:
    from fitkit.model import Model
    from fitkit.training.compilation import Compilation


def compiled_step(
    model: Model,
    compilation: Compilation,
    door: Callable[..., Any],
    class_weights: ClassWeights | None = None,
    all_targets: list[Any] | None = None,
    name: str = "x",
) -> CompiledStep:
    """A step with its own logbook and meters, so that calls can nest."""
    strategy = compilation.strategy
    compilation.loss.to(strategy.device)
    return CompiledStep(
        door,
        caller_of(model),
        transfer_of(model, strategy),
        compilation.loss.begin(),
        Logbook(compilation.metrics.meters()),
        class_weights,
        all_targets,
        name,
    )


def updater_of(
    model: Model,
    compilation: Compilation,
    *,
    accumulate: int | None = None,
    after_update: Callable[[], Any] | None = None,
) -> Updater:
    """What turns the model's losses into updates."""
    model.fit_state.check(model, compilation)
    return Updater(
        compilation.strategy,
        model.fit_state,
        model.optimizer,
        compilation.trainable(model),
        accumulate=compilation.accumulate_grad_batches if accumulate is None else accumulate,
        clip_value=compilation.gradient_clip_val,
        clip_algorithm=compilation.gradient_clip_algorithm,
        after_update=after_update,
    )


def share_of(source: Source | None, compilation: Compilation, *, training: bool) -> Source:
    """This rank's part of a source.

    Ranks:
        Collective.
    """
    assert source is not None, "the job was prepared before it was launched"
    strategy: Strategy = compilation.strategy
    return sharded(
        source,
        strategy.collectives,
        training=training,
        replace_sampler=compilation.replace_sampler,
        scatter=strategy.reads_on_rank_zero,
    )


def with_own(callbacks: CallbackList, verbose: Any, *own: Callback) -> CallbackList:
    """The user's callbacks, then fitkit's: they see what the user's have added to the logs."""
    added: list[Callback] = list(own)
    if verbose != 0 and not any(isinstance(c, ProgressBar) for c in callbacks.callbacks):
        added.append(ProgressBar(verbose=verbose))
    return CallbackList([*callbacks.callbacks, *added])


@contextlib.contextmanager
def closing(callbacks: CallbackList) -> Iterator[None]:
    """Give the terminal back whatever happens."""
    try:
        yield
    finally:
        for callback in callbacks.callbacks:
            if isinstance(callback, ProgressBar):
                callback.close()


def pass_params(stage: str, source: Source, job: PassJob) -> dict[str, Any]:
    """What callbacks are told of a call of `evaluate` or `predict`."""
    return {
        "stage": stage,
        "epochs": 1,
        "initial_epoch": 0,
        "steps": job.steps or source.steps,
        "samples": source.samples,
        "batch_size": source.batch_size,
        "validation_steps": None,
        "verbose": job.verbose,
    }
