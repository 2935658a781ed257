"""A training that was cut: where it is, and how it goes on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fitkit.arguments import describe
from fitkit.errors import CheckpointError, ConfigurationError
from fitkit.random_states import random_state
from fitkit.training.check_state import check_callback_state
from fitkit.training.log import noted_by
from fitkit.training.progress import Progress, copy_lists, seed_of, set_seed_of, warn_of_other_ranks

if TYPE_CHECKING:
    from fitkit.callbacks import Callback
    from fitkit.training.fit_run import FitRun


def _words(data: dict[str, Any]) -> str:
    return ", ".join(f"{name}={describe(value)}" for name, value in data.items())


def check_data(source: Any, progress: Progress) -> None:
    """Refuse other data than those within which a training was cut.

    Raises:
        ConfigurationError: they have another size or order.
    """
    now = _kind_of_data(source)
    if progress.batches and progress.data is not None and progress.data != now:
        raise ConfigurationError(
            f"The training was cut within the data, which had {_words(progress.data)}, but now "
            f"they have {_words(now)}. Give the data as before, or go on from a checkpoint of an "
            "epoch's end."
        )


def take_place(run: FitRun, progress: Progress) -> None:
    """Go on in the data where a training was cut."""
    rank = run.collectives.rank
    warn_of_other_ranks(progress, run.collectives.world_size)
    check_data(run.source, progress)
    place = run.stream.position
    place.number, place.batches = progress.number, progress.batches
    # Where there are more ranks than before, rank 0's has all that an order follows from.
    place.began = progress.of_rank(rank, "began") or progress.of_rank(0, "began")
    set_seed_of(run.source, progress.seed)
    run.stream.take_loader_state(progress.loader)
    run.steps_before = -(-progress.steps * (progress.shares or len(progress.random)) // run.shares)
    run.carried = progress.noted if progress.steps else []


def progress_of(run: FitRun) -> Progress:
    """Where the training is.

    Ranks:
        Collective.
    """
    if not run.is_between_groups:
        every = run.model._fitkit.fit_state.accumulate
        raise ConfigurationError(
            f"A checkpoint can't be saved while batches wait for others to make an update: {every} "
            f"make one. Save after a batch for which (batch + 1) % {every} == 0, or by "
            "fitkit.callbacks.ModelCheckpoint, which waits."
        )
    is_between = run.logs is not None or run.steps_done == 0
    book, place = run.step.logbook, run.stream.position
    noted = (
        {}
        if is_between
        else noted_by(book, run.steps_done - run.steps_before, run.collectives.rank)
    )
    told = run.collectives.gather((place.began, random_state(run.stream.generators)))
    # Ranks of one share have noted the same.
    noted_by_share = run.strategy.shares.gather(noted)
    new_pass = run.logs is not None and run.job.steps_per_epoch is None
    epochs, values = list(run.history.epoch), copy_lists(run.history.history)
    if run.logs is not None and run.epoch not in epochs:
        # The history comes after the callbacks, one of which may be asking.
        epochs.append(run.epoch)
        for name, value in run.logs.items():
            values.setdefault(name, []).append(value)
    return Progress(
        epoch=run.epoch + (run.logs is not None),
        steps=0 if is_between else run.steps_done,
        number=place.number + new_pass,
        batches=0 if new_pass else place.batches,
        began=[began for began, _ in told],
        random=[random for _, random in told],
        seed=seed_of(run.source),
        loader=run.stream.loader_state(ends_pass=new_pass),
        noted=[] if is_between else [*run.carried, *noted_by_share],
        history={"epoch": epochs, "history": values},
        # One that is over would set the rates anew, which a scheduler has changed since.
        warm_up=None if run.warm_up is None or run.warm_up.is_over else run.warm_up.state(),
        callbacks=[
            {**_kind(callback), "state": callback.state_dict()}
            for callback in run.job.callback_list.callbacks
        ],
        data=_kind_of_data(run.source),
        shares=run.shares,
    )


def _kind(callback: Callback) -> dict[str, Any]:
    """What tells a callback among others: a state is of use only to one that watches the same."""
    monitor = getattr(callback, "monitor", None)
    watched = monitor if isinstance(monitor, str) else getattr(monitor, "name", None)
    return {"class": type(callback).__name__, "monitor": watched}


def _kind_of_data(source: Any) -> dict[str, Any]:
    """What the place in the data depends on."""
    whole = source.whole
    return {
        "batch_size": whole.batch_size,
        "samples": whole.samples,
        "shuffle": getattr(whole, "shuffle", None),
    }


def restore(run: FitRun) -> None:
    """Give history and callbacks what they had, after their beginning."""
    progress = run.resumed
    if progress is None:
        return
    run.history.epoch = list(progress.history["epoch"])
    run.history.history = copy_lists(progress.history["history"])
    states = list(progress.callbacks)
    for callback in run.job.callback_list.callbacks:
        kept = next((s for s in states if _kind(callback).items() <= s.items()), None)
        if kept is not None:
            states.remove(kept)
            _give_state(callback, kept["state"])


def _give_state(callback: Callback, state: Any) -> None:
    try:
        check_callback_state(callback, state)
        callback.load_state_dict(state)
    except Exception as error:
        name = type(callback).__name__
        raise CheckpointError(
            f"{name} can't go on from its state in the checkpoint ({type(error).__name__}: "
            f"{error}). Make it as it was, leave it out, or begin anew on the weights alone "
            "(load_weights)."
        ) from error
