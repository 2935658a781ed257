"""How far a training is in its epochs and data, and how a saved training continues from there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from fitkit.arguments import describe
from fitkit.callbacks import Callback, History
from fitkit.checkpoint.folders import written_at
from fitkit.data.arrays import fingerprints
from fitkit.data.batches import Source, Stream
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.errors import CheckpointError, ConfigurationError, warn
from fitkit.module import Module
from fitkit.progress import Progress
from fitkit.random_states import random_state, set_random_state
from fitkit.training.log import noted_by
from fitkit.training.own_step import Step, StepContext
from fitkit.training.rates import Rates
from fitkit.training.settings import FitArguments
from fitkit.typing import FilePath, PlainData, Values

Entry = TypeVar("Entry")

KINDS: dict[type, tuple[type, ...]] = {
    bool: (bool,), int: (int,), float: (int, float), str: (str,),
}  # fmt: skip
"""By the type of what fitkit's own callbacks keep, the types that a file may have for it."""

ORDER = ("batch_size", "samples", "shuffle")
"""The facts about the data that decide which samples were used before an interruption."""


class Training(Protocol):
    """The running `Fit`, as far as its progress is concerned. See there for the attributes."""

    model: Module
    arguments: FitArguments
    strategy: Strategy
    collectives: Collectives
    data_rank_count: int
    source: Source
    stream: Stream
    context: StepContext
    step: Step
    rates: Rates
    epoch: int
    steps_done: int
    steps_before: int
    noted_before: list[PlainData]
    logs: Values | None
    history: History
    validated: PlainData | None
    resumed: Progress | None

    @property
    def is_between_updates(self) -> bool: ...


def restore_history(history: History, progress: Progress) -> None:
    """Give a history the epochs so far."""
    history.epoch = list(progress.history["epoch"])
    history.history = copy_lists(progress.history["history"])
    history.validations = list(progress.history.get("validations", []))


def copy_lists(values: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
    """Return a copy of a dict of lists, with new lists."""
    return {name: list(entries) for name, entries in values.items()}


def progress_of(run: Training) -> Progress:
    """How far a training is, as a checkpoint stores it.

    Args:
        run: the running `Fit`.

    Raises:
        ConfigurationError: batches wait for others to make an update with them.

    Ranks:
        Collective.
    """
    if not run.is_between_updates:
        every = run.model._fitkit.fit_state.accumulate
        raise ConfigurationError(
            f"A checkpoint can't be saved between two updates, and {every} batches make one "
            f"update. Save after a batch for which (batch + 1) % {every} == 0, or use "
            "fitkit.callbacks.ModelCheckpoint, which waits for the update."
        )
    has_ended = run.logs is not None
    is_within = not has_ended and run.steps_done > 0
    logbook, noted = run.step.logbook, []
    if is_within:
        noted = logbook.joined
        if not noted:
            own = noted_by(logbook, run.steps_done - run.steps_before, run.collectives.rank)
            # Ranks that see the same data have noted the same values.
            noted = [*run.noted_before, *run.strategy.log_ranks.gather(own)]
    position, source = run.stream.position, run.source
    drawn = random_state(run.stream.generators, _replicas(run))
    everyones = run.collectives.gather((position.began, drawn))
    begins_pass = has_ended and run.arguments.steps_per_epoch is None
    epochs, values = list(run.history.epoch), copy_lists(run.history.history)
    if run.logs is not None and run.epoch not in epochs:
        # The history is updated after the callbacks, one of which may be saving now.
        epochs.append(run.epoch)
        for name, value in run.logs.items():
            values.setdefault(name, []).append(value)
    return Progress(
        epoch=run.epoch + has_ended,
        steps=run.steps_done if is_within else 0,
        number=position.number + begins_pass,
        batches=0 if begins_pass else position.batches,
        began=[began for began, _ in everyones],
        random=[random for _, random in everyones],
        seed=getattr(source.whole, "seed", None),
        loader=run.stream.loader_state(ends_pass=begins_pass),
        noted=noted,
        history={
            "epoch": epochs,
            "history": values,
            "validations": list(run.history.validations),
        },
        warm_up=run.rates.state(),
        callbacks=states_of(run.arguments.callback_list.callbacks),
        data=facts_of(source),
        shares=run.data_rank_count,
        validated=run.validated if is_within else None,
    )


def continue_from(run: Training, progress: Progress) -> None:
    """Continue in the data where a training was interrupted.

    Args:
        run: the `Fit` that continues. No epoch has begun.
        progress: where the training was interrupted.
    """
    ranks, rank = run.collectives.world_size, run.collectives.rank
    if len(progress.random) != ranks:
        warn(
            f"Training continues with {ranks} ranks instead of {len(progress.random)}. Each "
            "remaining sample of the epoch is used once, but in other batches than before."
        )
    check_data(run.source, progress)
    position = run.stream.position
    position.number, position.batches = progress.number, progress.batches
    # Ranks that are new use rank 0's state, which determines the data's order.
    position.began = progress.of_rank(rank, "began") or progress.of_rank(0, "began")
    if progress.seed is not None and hasattr(run.source.whole, "seed"):
        run.source.whole.seed = progress.seed
    run.stream.take_loader_state(progress.loader)

    def steps_here(steps: int) -> int:
        """Return a number of steps of the saved training, as steps of as many ranks as now."""
        return -(-steps * progress.shares // run.data_rank_count)

    run.steps_before = steps_here(progress.steps)
    run.noted_before = progress.noted if progress.steps else []
    if progress.validated is not None:
        steps = steps_here(progress.validated["steps"])
        run.validated = {**progress.validated, "steps": steps}


@contextlib.contextmanager
def epoch_continued(run: Training, epoch: int) -> Iterator[None]:
    """Surround an epoch's beginning, so that an interrupted training continues exactly.

    Within an interrupted epoch, the callbacks' hooks at its beginning ran before the interruption.
    What they log, draw and set now is undone.
    """
    progress = run.resumed
    if progress is None or epoch != progress.epoch:
        yield
        return
    random = progress.of_rank(run.collectives.rank, "random")
    if run.steps_before == 0:
        _restore_random_state(run, random)
        yield
        return
    state = run.model._fitkit.fit_state
    weights = state.stored_weights
    with state.settings_restored():
        yield
    run.context.waiting.clear()
    state.train(weights)
    _restore_random_state(run, random)


def _restore_random_state(run: Training, random: PlainData | None) -> None:
    if random is not None:
        set_random_state(random, run.stream.generators, _replicas(run))


def _replicas(run: Training) -> Sequence[torch.device] | None:
    """Return the devices of a process that computes on several; None for the rank's own."""
    return run.strategy.devices if run.strategy.replicas > 1 else None


def _words(data: PlainData) -> str:
    return ", ".join(f"{name}={describe(value)}" for name, value in data.items())


def check_data(source: Source, progress: Progress) -> None:
    """Refuse data that differ from those of the saved training.

    Raises:
        ConfigurationError: they have another size or order.
    """
    if not progress.batches:
        return
    now, then = _order_of(source), {name: progress.data.get(name) for name in ORDER}
    if then != now:
        raise ConfigurationError(
            f"The checkpoint was saved in the middle of an epoch over data with {_words(then)}, "
            f"but now the data have {_words(now)}. Give the same data, or resume from a "
            "checkpoint saved at the end of an epoch.",
            code="FK058",
        )


def _kind(callback: Callback) -> PlainData:
    """Return what identifies a callback: a state is useful only to one that watches the same."""
    monitor = getattr(callback, "monitor", None)
    watched = monitor if isinstance(monitor, str) else getattr(monitor, "name", None)
    return {"class": type(callback).__name__, "monitor": watched}


def _order_of(source: Source) -> PlainData:
    """Return the facts by `ORDER`, of data or of the whole that they are a shard of."""
    whole = source.whole
    values = (whole.batch_size, whole.samples, getattr(whole, "shuffle", None))
    return dict(zip(ORDER, values, strict=True))


def facts_of(source: Source) -> PlainData:
    """Return the facts that decide the data's order, and that identify the data."""
    loader = getattr(source.whole, "loader", None)
    if loader is None:
        given = getattr(source.whole, "iterable", source.whole)
        return {
            **_order_of(source),
            "kind": "arrays" if given is source.whole else type(given).__name__,
            "digests": fingerprints(getattr(given, "batch", ())),
        }
    dataset = loader.dataset
    return {
        **_order_of(source),
        "kind": type(dataset).__name__,
        "sampler": type(loader.sampler).__name__,
        "workers": loader.num_workers,
        "digests": fingerprints(getattr(dataset, "tensors", ())),
    }


def states_of(callbacks: list[Callback]) -> list[PlainData]:
    """Each callback's class, what it watches, and its state."""
    return [{**_kind(callback), "state": callback.state_dict()} for callback in callbacks]


def give_states(callbacks: list[Callback], states: list[PlainData]) -> None:
    """Give callbacks the states that `states_of` returned for callbacks of their kind."""
    left = list(states)
    for callback in callbacks:
        stored = next((state for state in left if _kind(callback).items() <= state.items()), None)
        if stored is not None:
            left.remove(stored)
            _give_state(callback, stored["state"])


def _give_state(callback: Callback, state: PlainData) -> None:
    try:
        check_callback_state(callback, state)
        callback.load_state_dict(state)
    except Exception as error:
        name = type(callback).__name__
        raise CheckpointError(
            f"{name} can't resume from its state in the checkpoint ({type(error).__name__}: "
            f"{error}). Create it as before, leave it out, or load only the weights "
            "(load_weights)."
        ) from error


def check_callback_state(callback: Callback, state: object) -> None:
    """Refuse values of fitkit's own callbacks that have another type than they keep.

    Raises:
        ValueError: with the name.
    """
    if not type(callback).__module__.startswith("fitkit.") or not isinstance(state, dict):
        return
    for name, there in callback.state_dict().items():
        kinds = KINDS.get(type(there))
        found = state.get(name)
        wrong = kinds is not None and name in state and not isinstance(found, kinds)
        if wrong or (kinds is not None and type(found) is bool and type(there) is not bool):
            raise ValueError(
                f"{name} is {describe(found)}, but a value like {describe(there)} is expected"
            )


class Saver(Protocol):
    """A callback that knows the newest checkpoint that it has saved."""

    def last_path(self) -> str | None: ...


def checkpoint_to_resume(asked: FilePath | None, callbacks: list[Callback]) -> FilePath | None:
    """Return the path of the checkpoint to resume from; None to start from the beginning.

    Args:
        asked: the argument of `fit`: a path, `"last"` or None.
        callbacks: the callbacks. Those that save have `last_path()`, and those that restore by
            themselves also have `restores = True`.

    Raises:
        ConfigurationError: `"last"`, but no callback saves checkpoints.
        CheckpointError: callbacks have checkpoints, and all are damaged.
    """
    is_last = isinstance(asked, str) and asked == "last"
    savers: list[Saver] = [one for one in callbacks if hasattr(one, "last_path")]
    if is_last and not savers:
        raise ConfigurationError(
            "resume_from='last' needs a callback that saves checkpoints (ModelCheckpoint or "
            "BackupAndRestore). Give one, or the checkpoint's path."
        )
    found = _newest([c for c in savers if is_last or getattr(c, "restores", False)])
    # A backup is of this very training, which began from the given path.
    return asked if found is None and not is_last else found


def _newest(savers: Sequence[Saver]) -> str | None:
    """Return the newest checkpoint that callbacks know; None if there is none.

    Raises:
        CheckpointError: there are some, and all are damaged.
    """
    paths: list[str] = []
    problems: list[CheckpointError] = []
    for saver in savers:
        try:
            path = saver.last_path()
        except CheckpointError as error:
            problems.append(error)
        else:
            paths += [] if path is None else [path]
    if problems and not paths:
        raise problems[0]
    newest = max(paths, key=lambda path: written_at(path) or 0, default=None)
    for problem in problems:
        warn(f"{problem} Training continues from {newest}.")
    return newest
