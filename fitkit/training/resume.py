"""What a resumed fit is given: the same data, the callbacks' states, and a checkpoint's path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from fitkit.arguments import describe
from fitkit.callbacks import Callback
from fitkit.checkpoint.disk import written_at
from fitkit.data.arrays import fingerprints
from fitkit.data.batches import Source
from fitkit.errors import CheckpointError, ConfigurationError, warn
from fitkit.module import Module
from fitkit.progress import Progress
from fitkit.scopes import Scope
from fitkit.typing import FilePath, PlainData

KINDS: dict[type, tuple[type, ...]] = {
    bool: (bool,), int: (int,), float: (int, float), str: (str,),
}  # fmt: skip
"""By the type of what fitkit's own callbacks keep, the types that a file may have for it."""

ORDER = ("batch_size", "samples", "shuffle")
"""The facts about the data that decide which samples were used before an interruption."""


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
    for callback, state in _matched(callbacks, states):
        _give_state(callback, state)


def may_refuse(callbacks: list[Callback], progress: Progress) -> bool:
    """Whether code of others may refuse a state, when the data and callbacks get theirs."""
    return progress.loader is not None or any(
        not type(callback).__module__.startswith("fitkit.")
        and type(callback).load_state_dict is not Callback.load_state_dict
        for callback, _ in _matched(callbacks, progress.callbacks)
    )


@contextlib.contextmanager
def undone_until_begun(model: Module, undo: Scope | None) -> Iterator[None]:
    """Undo a load after an error, unless the training has gone on before it."""
    state = model._fitkit.fit_state
    state.undo = undo
    try:
        yield
    except BaseException:
        if state.undo is not None:
            state.undo.close()
        raise
    finally:
        state.undo = None


def _matched(
    callbacks: list[Callback], states: list[PlainData]
) -> list[tuple[Callback, PlainData]]:
    left, found = list(states), []
    for callback in callbacks:
        stored = next((state for state in left if _kind(callback).items() <= state.items()), None)
        if stored is not None:
            left.remove(stored)
            found.append((callback, stored["state"]))
    return found


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
