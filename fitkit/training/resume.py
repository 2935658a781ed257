"""A training's place in its epochs and data, and how a saved training resumes from there."""

from __future__ import annotations

import dataclasses
from typing import Any

from fitkit.arguments import describe
from fitkit.callbacks import Callback
from fitkit.checkpoint.folders import written_at
from fitkit.data.arrays import fingerprints
from fitkit.errors import CheckpointError, ConfigurationError, warn

PLACE = ("batch_size", "samples", "shuffle")
"""The facts about the data that a place in them depends on."""


@dataclasses.dataclass
class Progress:
    """A training's place, as plain data.

    Attributes:
        epoch: the epoch to continue with, from 0.
        steps: the number of steps made in it.
        number: the number of the pass over the data.
        batches: how many of the pass's batches are done, over all ranks.
        began: each rank's random state when the pass began; None before the first.
        random: each rank's random state now.
        seed: the seed of in-memory data's order; None if there is none.
        loader: the state of a loader that keeps its own; otherwise None.
        noted: what each rank has recorded of the epoch: sums, metrics' states, logged values,
            steps.
        history: the epochs' numbers, and the values by name.
        warm_up: the updates made and the target rates; None without a warmup.
        callbacks: each callback's class, what it watches, and its state, in their order.
        data: facts that the place depends on, and that identify the data; None in files of earlier
            versions.
        shares: the number of shares of the data, which may be fewer than the ranks. None in files
            of earlier versions.
        validated: the epoch's last validation within it: the `steps` and `updates` made before it,
            and its `values`. None if there was none.
    """

    epoch: int
    steps: int
    number: int
    batches: int
    began: list[dict[str, Any] | None]
    random: list[dict[str, Any]]
    seed: int | None
    loader: dict[str, Any] | None
    noted: list[dict[str, Any]]
    history: dict[str, Any]
    warm_up: dict[str, Any] | None
    callbacks: list[dict[str, Any]]
    data: dict[str, Any] | None = None
    shares: int | None = None
    validated: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any], path: str) -> Progress:
        """Read what `as_dict` returned. Names that a later version has added are ignored.

        Raises:
            CheckpointError: something is missing or has another type.
        """
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            value = data.get(item.name)
            lacks = item.name not in data and item.default is dataclasses.MISSING
            if lacks or not _fits(item.name, value):
                raise CheckpointError(
                    f"{path} has no valid {item.name!r} in its progress, so this version of "
                    "fitkit can't resume from it. Load its weights with load_weights."
                )
            values[item.name] = value
        return cls(**values)

    def of_rank(self, rank: int, what: str) -> dict[str, Any] | None:
        """A rank's entry of `began` or `random`. Rank 0's, if there were fewer ranks."""
        states: list[dict[str, Any] | None] = getattr(self, what)
        return states[rank] if rank < len(states) else None


def _fits(name: str, value: Any) -> bool:
    kinds: dict[str, Any] = {
        "epoch": int, "steps": int, "number": int, "batches": int, "began": list,
        "random": list, "noted": list, "history": dict, "callbacks": list,
    }  # fmt: skip
    if name not in kinds:
        return value is None or isinstance(value, (int, dict))
    return isinstance(value, kinds[name]) and not (kinds[name] is int and value < 0)


def copy_lists(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A copy of a dict of lists, with new lists."""
    return {name: list(entries) for name, entries in values.items()}


def seed_of(source: Any) -> int | None:
    """The seed of in-memory data's order, from a source or from the whole that it is a shard of."""
    found: int | None = getattr(source.whole, "seed", None)
    return found


def set_seed_of(source: Any, seed: int | None) -> None:
    """Set the seed that `seed_of` returned."""
    whole = source.whole
    if seed is not None and hasattr(whole, "seed"):
        whole.seed = seed


def warn_of_other_ranks(progress: Progress, ranks: int) -> None:
    """Warn that a training continues on another number of ranks."""
    if len(progress.random) != ranks:
        warn(
            f"Training continues with {ranks} ranks instead of {len(progress.random)}. Each "
            "remaining sample of the epoch is used once, but in other batches than before."
        )


def _words(data: dict[str, Any]) -> str:
    return ", ".join(f"{name}={describe(value)}" for name, value in data.items())


def check_data(source: Any, progress: Progress) -> None:
    """Refuse data that differ from those of the saved training.

    Raises:
        ConfigurationError: they have another size or order.
    """
    if not progress.batches or progress.data is None:
        return
    now, then = _place_in(source), {name: progress.data.get(name) for name in PLACE}
    if then != now:
        raise ConfigurationError(
            f"The checkpoint was saved in the middle of an epoch over data with {_words(then)}, "
            f"but now the data have {_words(now)}. Give the same data, or resume from a "
            "checkpoint saved at the end of an epoch.",
            code="FK058",
        )


def _kind(callback: Callback) -> dict[str, Any]:
    """What identifies a callback: a state is useful only to one that watches the same."""
    monitor = getattr(callback, "monitor", None)
    watched = monitor if isinstance(monitor, str) else getattr(monitor, "name", None)
    return {"class": type(callback).__name__, "monitor": watched}


def _place_in(source: Any) -> dict[str, Any]:
    """The facts that the place in the data depends on."""
    whole = source.whole
    values = (whole.batch_size, whole.samples, getattr(whole, "shuffle", None))
    return dict(zip(PLACE, values, strict=True))


def kind_of_data(source: Any) -> dict[str, Any]:
    """The facts that the place in the data depends on, and that identify the data."""
    loader = getattr(source.whole, "loader", None)
    if loader is None:
        given = getattr(source.whole, "iterable", source.whole)
        return {
            **_place_in(source),
            "kind": "arrays" if given is source.whole else type(given).__name__,
            "digests": fingerprints(getattr(given, "batch", ())),
        }
    dataset = loader.dataset
    return {
        **_place_in(source),
        "kind": type(dataset).__name__,
        "sampler": type(loader.sampler).__name__,
        "workers": loader.num_workers,
        "digests": fingerprints(getattr(dataset, "tensors", ())),
    }


def states_of(callbacks: list[Callback]) -> list[dict[str, Any]]:
    """Each callback's class, what it watches, and its state."""
    return [{**_kind(callback), "state": callback.state_dict()} for callback in callbacks]


def give_states(callbacks: list[Callback], states: list[dict[str, Any]]) -> None:
    """Give callbacks the states that `states_of` returned for callbacks of their kind."""
    left = list(states)
    for callback in callbacks:
        kept = next((state for state in left if _kind(callback).items() <= state.items()), None)
        if kept is not None:
            left.remove(kept)
            _give_state(callback, kept["state"])


def _give_state(callback: Callback, state: Any) -> None:
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


def check_callback_state(callback: Any, state: Any) -> None:
    """Refuse values of fitkit's own callbacks that have another type than they keep.

    Raises:
        ValueError: with the name.
    """
    if not type(callback).__module__.startswith("fitkit.") or not isinstance(state, dict):
        return
    for name, there in callback.state_dict().items():
        kinds: Any = {bool: bool, int: int, float: (int, float), str: str}.get(type(there))
        found = state.get(name)
        wrong = kinds is not None and name in state and not isinstance(found, kinds)
        if wrong or (kinds is not None and type(found) is bool and type(there) is not bool):
            raise ValueError(
                f"{name} is {describe(found)}, but a value like {describe(there)} is expected"
            )


def checkpoint_to_resume(asked: Any, callbacks: list[Any]) -> Any:
    """The path of the checkpoint to resume from; None to start from the beginning.

    Args:
        asked: the argument of `fit`: a path, `"last"` or None.
        callbacks: the callbacks. Those that save have `last_path()`, and those that restore by
            themselves also have `restores = True`.

    Raises:
        ConfigurationError: `"last"`, but no callback saves checkpoints.
        CheckpointError: callbacks have checkpoints, and all are damaged.
    """
    is_last = isinstance(asked, str) and asked == "last"
    savers = [c for c in callbacks if hasattr(c, "last_path")]
    if is_last and not savers:
        raise ConfigurationError(
            "resume_from='last' needs a callback that saves checkpoints (ModelCheckpoint or "
            "BackupAndRestore). Give one, or the checkpoint's path."
        )
    found = _newest([c for c in savers if is_last or getattr(c, "restores", False)])
    # A backup is of this very training, which began from the given path.
    return asked if found is None and not is_last else found


def _newest(savers: list[Any]) -> str | None:
    """The newest checkpoint that callbacks know; None if there is none.

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
