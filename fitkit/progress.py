"""How far a training is, as plain data."""

from __future__ import annotations

import dataclasses

from fitkit.errors import CheckpointError
from fitkit.typing import PlainData


@dataclasses.dataclass
class Progress:
    """How far a training is, as plain data.

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
        data: facts that decide the data's order, and that identify the data.
        shares: the number of shares of the data, which may be fewer than the ranks.
        validated: the epoch's last validation within it: the `steps` and `updates` made before it,
            and its `values`. None if there was none.
    """

    epoch: int
    steps: int
    number: int
    batches: int
    began: list[PlainData | None]
    random: list[PlainData]
    seed: int | None
    loader: PlainData | None
    noted: list[PlainData]
    history: PlainData
    warm_up: PlainData | None
    callbacks: list[PlainData]
    data: PlainData
    shares: int
    validated: PlainData | None

    def as_dict(self) -> PlainData:
        """Plain data for a file."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: PlainData, path: str) -> Progress:
        """Read what `as_dict` returned. Names that a later version has added are ignored.

        Raises:
            CheckpointError: something is missing. `check_progress` refuses invalid values.
        """
        values: PlainData = {}
        for item in dataclasses.fields(cls):
            if item.name not in data:
                raise CheckpointError(
                    f"{path} has no {item.name!r} in its progress, so this version of "
                    "fitkit can't resume from it. Load its weights with load_weights."
                )
            values[item.name] = data[item.name]
        return cls(**values)

    def of_rank(self, rank: int, what: str) -> PlainData | None:
        """Return a rank's entry of `began` or `random`. Rank 0's, if there were fewer ranks."""
        states: list[PlainData | None] = getattr(self, what)
        return states[rank] if rank < len(states) else None
