"""An epoch's seconds as a table, with what to do about the largest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fitkit.callbacks.part_clock import REST
from fitkit.callbacks.run_parts import (
    BACKWARD,
    CALLBACKS,
    DATA,
    DEVICE,
    FORWARD,
    METRICS,
    OPTIMIZER,
    RANKS,
    VALIDATION,
)

TITLES = {
    DATA: "waiting for data",
    DEVICE: "host to device",
    FORWARD: "forward and loss",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    METRICS: "metrics and logs",
    CALLBACKS: "callbacks",
    RANKS: "waiting for ranks",
    VALIDATION: "validation",
    REST: "the rest",
}
"""The parts in the table's order, and what it calls them."""

NOTABLE = {
    DATA: 0.2,
    DEVICE: 0.1,
    OPTIMIZER: 0.3,
    METRICS: 0.15,
    CALLBACKS: 0.1,
    RANKS: 0.15,
    VALIDATION: 0.4,
    REST: 0.25,
}
"""From which share of the time on there is something to say about a part."""

ADVICE = {
    DEVICE: "give the DataLoader pin_memory=True, and x in the dtype that the net takes.",
    OPTIMIZER: "larger batches or accumulate_grad_batches make fewer updates.",
    METRICS: "name metrics (metrics=['accuracy']) instead of giving objects, or give those that "
    "only the validation needs to evaluate().",
    RANKS: "some ranks have more work or slower data than others: see their columns; larger "
    "batches or accumulate_grad_batches make fewer exchanges.",
    VALIDATION: "validate less often (validation_freq=5), on fewer batches (validation_steps), or "
    "in larger ones (validation_batch_size).",
    REST: "the steps are so short that the loop counts: take larger batches.",
}
IN_THE_NET = (
    "the net itself takes the time: larger batches, precision='bf16-mixed' or jit_compile=True on "
    "a GPU, more devices."
)
UNFUSED = "name the optimizer in compile (optimizer='adam'), or give yours fused=True; "


@dataclasses.dataclass
class Facts:
    """What is known of a run, for advice.

    Attributes:
        is_loader: whether the batches come from a `DataLoader`.
        workers: of the loader.
        in_memory: whether the batches are cut from tensors that are there.
        may_fuse: whether the optimizer could update all weights in one kernel, and doesn't.
    """

    is_loader: bool = False
    workers: int = 0
    in_memory: bool = False
    may_fuse: bool = False

    @property
    def about_data(self) -> str:
        """What to do where the training waits for data."""
        if self.in_memory:
            return "the steps are so short that taking rows counts: take larger batches."
        if not self.is_loader:
            return (
                "give fit arrays or tensors that are in memory, or a DataLoader with num_workers."
            )
        if self.workers == 0:
            return (
                "give the DataLoader num_workers=4 and persistent_workers=True, or give fit the "
                "arrays themselves where they fit in memory."
            )
        return (
            f"give the DataLoader more than {self.workers} workers or a larger prefetch_factor, or "
            "make what a sample takes cheaper."
        )


def table(
    title: str,
    ranks: Sequence[dict[str, float]],
    facts: Facts,
    callbacks: dict[str, float],
) -> str:
    """An epoch as text: rank 0's seconds by part, beside those of the rank that others wait for.

    Args:
        title: the first line.
        ranks: seconds by part of each rank.
        facts: where the batches come from.
        callbacks: rank 0's seconds of each callback, by class.
    """
    slowest = slowest_of(ranks)
    shown = sorted({0, slowest})
    lines = [title]
    if len(ranks) > 1:
        heads = [f"rank {rank}" + " (the slowest)" * (rank == slowest) for rank in shown]
        lines.append(" " * 18 + "".join(f"{head:>24}" for head in heads))
    for part, name in TITLES.items():
        if any(part in seconds for seconds in ranks):
            lines.append(f"{name:18}" + "".join(_cell(ranks[rank], part) for rank in shown))
    lines += [f"-> {line}" for line in advice(ranks[0], facts, callbacks)]
    return "\n".join(lines)


def _cell(seconds: dict[str, float], part: str) -> str:
    """A part's seconds and share of the whole."""
    spent = seconds.get(part, 0.0)
    return f"{spent:12,.3f} s {spent / max(sum(seconds.values()), 1e-9):9.1%}"


def slowest_of(ranks: Sequence[dict[str, float]]) -> int:
    """The rank that waited least for others."""
    return min(range(len(ranks)), key=lambda rank: ranks[rank].get(RANKS, 0.0))


def with_waits(ranks: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The ranks' seconds with the waits inside their backward passes as waits.

    Gradients are exchanged within the backward pass: a rank that is there early waits in it for
    the last. What a rank's takes longer than the shortest one is taken for that wait.
    """
    shortest = min(seconds.get(BACKWARD, 0.0) for seconds in ranks)
    found = []
    for seconds in ranks:
        wait = seconds.get(BACKWARD, 0.0) - shortest
        moved = {BACKWARD: shortest, RANKS: seconds.get(RANKS, 0.0) + wait} if wait > 0 else {}
        found.append({**seconds, **moved})
    return found


def advice(seconds: dict[str, float], facts: Facts, callbacks: dict[str, float]) -> list[str]:
    """What to do about the parts that take a notable share, the largest first."""
    whole = max(sum(seconds.values()), 1e-9)
    shares = {part: spent / whole for part, spent in seconds.items()}
    lines = []
    for part in sorted(shares, key=lambda part: -shares[part]):
        if shares[part] < NOTABLE.get(part, 2.0):
            continue
        text = ADVICE.get(part, "")
        if part == DATA:
            text = facts.about_data
        elif part == OPTIMIZER and facts.may_fuse:
            text = UNFUSED + text
        elif part == CALLBACKS:
            longest = max(callbacks, key=lambda name: callbacks[name], default="")
            text = f"most of it in {longest}: let it act less often"
            saves = "Checkpoint" in longest or "Backup" in longest
            text += " (asynchronous=True saves beside the training)." if saves else "."
        lines.append(f"{shares[part]:.0%} {TITLES[part]}: {text}")
    if shares.get(FORWARD, 0.0) + shares.get(BACKWARD, 0.0) >= 0.8:
        lines.append(f"{shares[FORWARD] + shares[BACKWARD]:.0%} forward and backward: {IN_THE_NET}")
    return lines
