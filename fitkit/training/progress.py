"""Where a training is: what a checkpoint keeps of it beside weights, optimizers and schedulers."""

from __future__ import annotations

import dataclasses
from typing import Any

from fitkit.errors import CheckpointError, warn


@dataclasses.dataclass
class Progress:
    """A training's place, as plain data.

    Attributes:
        epoch: the epoch to go on with, from 0.
        steps: how many of its steps are made.
        number: of the pass over the data.
        batches: how many of the pass's batches are done, over all ranks.
        began: each rank's random state when the pass began; None before the first.
        random: each rank's random state now.
        seed: of in-memory data's order; None where it has none.
        loader: the state of a loader that keeps its own; None elsewhere.
        noted: what each rank has noted of the epoch: sums, metrics' states, logged values, steps.
        history: the epochs' numbers, and the values by name.
        warm_up: updates made and rates aimed at; None where there is no warm-up.
        callbacks: each one's class, what it watches, and its state, in their order.
        data: what the place in them depends on; None in files of earlier versions.
        shares: among how many the data were dealt out, which may be fewer than the ranks; None in
            files of earlier versions.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any], path: str) -> Progress:
        """What `as_dict` gave; names that a later version has added are left out.

        Raises:
            CheckpointError: something is missing or of another type.
        """
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            value = data.get(item.name)
            lacks = item.name not in data and item.default is dataclasses.MISSING
            if lacks or not _fits(item.name, value):
                raise CheckpointError(
                    f"{path} has a progress without a usable {item.name!r}: this version of fitkit "
                    "can't go on from it. Load its weights with load_weights."
                )
            values[item.name] = value
        return cls(**values)

    def of_rank(self, rank: int, what: str) -> dict[str, Any] | None:
        """A rank's entry of `began` or `random`; rank 0's, where it had fewer ranks."""
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
    """A dict of lists that shares no list with the given one."""
    return {name: list(entries) for name, entries in values.items()}


def seed_of(source: Any) -> int | None:
    """The seed of in-memory data's order, from a source or the one that it is a share of."""
    found: int | None = getattr(source.whole, "seed", None)
    return found


def set_seed_of(source: Any, seed: int | None) -> None:
    """Give in-memory data the seed that `seed_of` found."""
    whole = source.whole
    if seed is not None and hasattr(whole, "seed"):
        whole.seed = seed


def warn_of_other_ranks(progress: Progress, ranks: int) -> None:
    """Say that a training goes on with another number of ranks."""
    if len(progress.random) != ranks:
        warn(
            f"The training goes on with {ranks} ranks instead of {len(progress.random)}: each of "
            "the epoch's remaining samples is used once, but in other batches than before."
        )
