"""What a run records of each update, by which two runs that part are compared."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import xxhash

from fitkit.extras.bad_numbers import indices_of_pass
from fitkit.extras.watches import BatchLosses
from fitkit.outputs import EMPTY_MEAN
from fitkit.seams.callbacks import Logs, from_all_ranks, run_of
from fitkit.seams.files import replacing
from fitkit.tensors import bytes_of

STEPS = "steps.npy"
"""The file's name."""

ROW = np.dtype([
    ("update", "<i8"), ("epoch", "<i8"), ("loss", "<f8"), ("rate", "<f8"), ("samples", "<u8"),
    ("weights", "<u8"),
])  # fmt: skip
"""A row of the file, for an update: its number, the epoch, the mean of its batches' losses over the
ranks, the first group's rate after it, a digest of its samples' indices whatever their order (0
where they aren't known), and one of the weights after it at an epoch's end (0 elsewhere)."""


def _with_key(state: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a random state, with the numbers of NumPy's generator in another form."""
    if state is None:
        return None
    numpy = state["numpy"]
    key = convert(map(int, numpy["state"]["key"]))
    return {**state, "numpy": {**numpy, "state": {**numpy["state"], "key": key}}}


def _as_key(numbers: Iterable[int]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.fromiter(numbers, np.uint32)


class RunSteps:
    """Collects the rows of a training. Losses are read from the device at an epoch's end.

    A run that is resumed within an epoch lacks the update after which its checkpoint was saved:
    another callback saved it before this one had seen that update.
    """

    def __init__(self) -> None:
        self.rows: np.ndarray[Any, np.dtype[np.void]] = np.zeros(0, ROW)
        self._losses = BatchLosses()
        # Of each batch: its number, the update, the rate, the pass and its place in it.
        self._batches: list[tuple[int, int, float, int, int]] = []
        self._began: dict[int, Any] = {}  # of each pass, the random state in which it began

    def add(self, model: Any, batch: int, logs: Logs) -> None:
        """Note a batch, after its step."""
        run, state = run_of(model), model._fitkit.fit_state
        assert run is not None
        self._losses.add(batch, logs)
        update = state.updates + (not run.is_between_updates)
        progress = run.progress
        place = -(-progress.batches // progress.shares) - 1  # among this rank's
        rate = float(state.optimizers[0].param_groups[0]["lr"])
        self._batches.append((batch, update, rate, progress.number, place))
        if progress.number not in self._began:
            self._began[progress.number] = progress.began[0]

    def state(self) -> list[Any]:
        """Return what has been noted of this epoch, as plain data."""
        batches = [list(one) for one in self._batches]
        began = [[number, _with_key(state, list)] for number, state in self._began.items()]
        return [batches, self._losses.state(), began]

    def restore(self, state: list[Any]) -> None:
        """Go on from what `state` returned."""
        self._batches = [(int(b), int(u), float(r), int(n), int(p)) for b, u, r, n, p in state[0]]
        self._losses.restore(state[1])
        self._began = {int(number): _with_key(began, _as_key) for number, began in state[2]}

    def end_epoch(self, model: Any, epoch: int) -> None:
        """Make an epoch's rows of what was noted.

        Ranks:
            Collective.
        """
        run: Any = run_of(model)
        batches, self._batches = self._batches, []
        losses = {batch: loss for batch, loss in self._losses.take() if loss is not EMPTY_MEAN}
        known: dict[tuple[int, int], int] = {}
        for number, began in self._began.items():
            of_pass = [place for *_, of, place in batches if of == number]
            places = range(min(of_pass, default=0), max(of_pass, default=-1) + 1)
            indices = indices_of_pass(run, number, began, places)
            for place, digest in zip(indices, _digests([*indices.values()]), strict=True):
                known[number, place] = digest
        self._began.clear()
        mine = [(losses.get(b), known.get((n, place), 0)) for b, _, _, n, place in batches]
        found = [one for one in from_all_ranks(model, mine) if len(one) == len(batches)]
        numbers = np.array([update for _, update, *_ in batches], np.int64)
        updates, firsts, at = np.unique(numbers, return_index=True, return_inverse=True)
        rows = np.zeros(len(updates), ROW)
        rows["update"], rows["epoch"] = updates, epoch
        rows["rate"] = np.array([rate for _, _, rate, *_ in batches], np.float64)[firsts]
        total, count = np.zeros(len(updates)), np.zeros(len(updates))
        for one in found:
            there = [loss is not None for loss, _ in one]
            np.add.at(total, at, [0.0 if loss is None else loss for loss, _ in one])
            np.add.at(count, at, there)
            np.add.at(rows["samples"], at, np.array([digest for _, digest in one], np.uint64))
        with np.errstate(invalid="ignore"):  # an update without a loss has none
            rows["loss"] = total / count
        if len(rows):
            rows["weights"][-1] = _digest_of_weights(model)
        self.rows = np.concatenate([self.rows[self.rows["epoch"] < epoch], rows])

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the rows to the run's folder, whole or not at all."""
        buffer = io.BytesIO()
        np.save(buffer, self.rows)
        content = buffer.getvalue()
        with replacing(os.path.join(folder, STEPS), len(content)) as file:
            file.write(content)


def _digests(batches: list[torch.Tensor]) -> list[int]:
    """Return a digest of each batch's samples; those of its parts add up to that of the whole."""
    if not batches:
        return []
    x = torch.cat(batches).numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)  # splitmix64, of Steele et al., 2014
    sums = np.zeros(len(x) + 1, np.uint64)
    np.cumsum(x ^ (x >> np.uint64(31)), out=sums[1:])
    ends = np.cumsum([0, *(one.shape[0] for one in batches)])
    found: list[int] = (sums[ends[1:]] - sums[ends[:-1]]).tolist()
    return found


def _digest_of_weights(model: Any) -> int:
    """Return a digest of a net's tensors on this rank; 0 where they are spread over ranks."""
    digest = xxhash.xxh3_64()
    for name, tensor in model._weights_module().state_dict().items():
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "full_tensor"):
            return 0
        digest.update(name.encode())
        digest.update(bytes_of(tensor.detach()).cpu().numpy().data)
    return digest.intdigest()


def read_steps(folder: str | os.PathLike[str]) -> np.ndarray[Any, np.dtype[np.void]] | None:
    """Return a run folder's rows; None where it has none that can be read."""
    try:
        rows = np.load(os.path.join(folder, STEPS), allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return rows if getattr(rows, "dtype", None) == ROW and rows.ndim == 1 else None


def parting(one: Any, other: Any) -> str:
    """Return where two runs part, and what parted first.

    Args:
        one, other: the rows of each.
    """
    _, mine, theirs = np.intersect1d(one["update"], other["update"], return_indices=True)
    a, b = one[mine], other[theirs]
    if not len(a):
        return "The runs' steps have no update in common."
    loss = ~((a["loss"] == b["loss"]) | (np.isnan(a["loss"]) & np.isnan(b["loss"])))
    known = (a["samples"] != 0) & (b["samples"] != 0)
    samples, rate = known & (a["samples"] != b["samples"]), a["rate"] != b["rate"]
    weights = (a["weights"] != b["weights"]) & (a["weights"] != 0) & (b["weights"] != 0)
    apart = np.flatnonzero(loss | samples | rate | weights)
    if not len(apart):
        return f"The steps are equal up to update {a['update'][-1]:,}."
    at = apart[0]
    words = [
        ("other samples" if samples[at] else "same samples") if known[at] else "samples unknown",
        f"other rates ({a['rate'][at]:.6g}, {b['rate'][at]:.6g})" if rate[at] else "same rates",
        f"other loss ({a['loss'][at]:.6g}, {b['loss'][at]:.6g})" if loss[at] else "same loss",
    ]
    why = "the data's order" if samples[at] else "the rates" if rate[at] else ""
    if not why:
        why = "code, weights or hardware" if known[at] else "the data, code, weights or hardware"
    if not (loss[at] or samples[at] or rate[at]):
        words.append("other weights after it")
    ends = [n for n in range(at) if a["weights"][n] and a["weights"][n] == b["weights"][n]]
    before = f"; weights were equal at epoch {a['epoch'][ends[-1]] + 1}'s end" if ends else ""
    return f"They part at update {a['update'][at]:,}: {', '.join(words)} → {why}{before}."
