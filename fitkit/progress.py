"""How far a training is: its loop advances it, a checkpoint has it, a resumed fit begins there."""

from __future__ import annotations

import dataclasses

from fitkit.errors import CheckpointError
from fitkit.typing import PlainData

LATER = ("key", "orders")
"""What files of earlier versions lack."""


@dataclasses.dataclass
class Progress:
    """How far a training is, as plain data.

    A checkpoint has that of all ranks (`Fit.checkpoint_progress`). In a fit each rank has its own
    (`for_rank`), with one entry in the lists of all ranks. The fit keeps `epoch`,
    `steps`, `number`, `batches`, `began` and `validated` up to date. The others are where it was
    resumed.

    Attributes:
        epoch: the epoch to continue with, from 0.
        steps: the number of its batches that are done, with those without rows.
        number: the number of the pass over the data.
        batches: how many of the pass's batches are done, over all ranks.
        shares: the number of shares of the data, which may be fewer than the ranks.
        began: each rank's random state when the pass began; None before the first.
        key: from which the random numbers of samples follow; None in older files.
        orders: each rank's state of the numbers from which the next pass's order is drawn; None
            before the first.
        noted: what each rank has recorded of the epoch: sums, metrics' states, logged values,
            steps. In a fit, what was recorded before it was resumed.
        validated: the epoch's last validation within it: the `steps` and `updates` made before it,
            and its `values`. None if there was none.
        random: each rank's random state now.
        seed: the seed of in-memory data's order; None if there is none.
        loader: the state of a loader that keeps its own; otherwise None.
        history: the epochs' numbers, and the values by name.
        warm_up: the updates made and the target rates; None without a warmup.
        callbacks: each callback's class, what it watches, and its state, in their order.
        data: facts that decide the data's order, and that identify the data.
    """

    epoch: int = 0
    steps: int = 0
    number: int = 0
    batches: int = 0
    shares: int = 1
    began: list[PlainData | None] = dataclasses.field(default_factory=lambda: [None])
    noted: list[PlainData] = dataclasses.field(default_factory=list)
    validated: PlainData | None = None
    random: list[PlainData] = dataclasses.field(default_factory=list)
    seed: int | None = None
    loader: PlainData | None = None
    history: PlainData = dataclasses.field(default_factory=dict)
    warm_up: PlainData | None = None
    callbacks: list[PlainData] = dataclasses.field(default_factory=list)
    data: PlainData = dataclasses.field(default_factory=dict)
    key: int | None = None
    orders: list[PlainData | None] = dataclasses.field(default_factory=list)

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
                if item.name in LATER:
                    continue
                raise CheckpointError(
                    f"{path} has no {item.name!r} in its progress, so this version of "
                    "fitkit can't resume from it. Load its weights with load_weights."
                )
            values[item.name] = data[item.name]
        return cls(**values)

    def for_rank(self, rank: int, shares: int) -> Progress:
        """Return where a rank continues a saved training.

        A rank that is new has rank 0's state at the pass's beginning, which determines the data's
        order.

        Args:
            rank: its number.
            shares: into how many shares the data are divided now.
        """
        validated = self.validated
        if validated is not None:
            validated = {**validated, "steps": self._steps_with(shares, validated["steps"])}
        own = slice(rank, rank + 1)
        return dataclasses.replace(
            self,
            steps=self._steps_with(shares, self.steps),
            shares=shares,
            began=self.began[own] or self.began[:1] or [None],
            noted=list(self.noted) if self.steps else [],
            validated=validated,
            random=self.random[own],
            orders=self.orders[own] or self.orders[:1],
        )

    def _steps_with(self, shares: int, steps: int) -> int:
        return -(-steps * self.shares // shares)

    def go_on(self, steps: int, *, counts: bool) -> None:
        """Take how many steps of the epoch are done.

        Args:
            counts: whether the pass's batches follow from that.
        """
        if counts:
            self.batches += (steps - self.steps) * self.shares
        self.steps = steps

    def end_epoch(self, *, ends_pass: bool) -> None:
        """Go on to the next epoch."""
        self.epoch, self.steps = self.epoch + 1, 0
        self.noted, self.validated = [], None
        if ends_pass:
            self.number, self.batches = self.number + 1, 0
