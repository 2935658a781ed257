"""A value over a pass: the mean of what batches gave, or the sum, least or largest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fitkit.accelerators import widest_dtype
from fitkit.outputs import EMPTY_MEAN
from fitkit.shortcuts import Shortcut

FOLD_EVERY = 128
"""The most values kept before they are added to a sum: bounds memory, costs one operation."""


READ_AT_ONCE = Shortcut("values on a CPU read at once")

NEVER = 2**62
"""Stands on the device for the number of a value that doesn't exist."""


class RunningMean:
    """The mean of batch values, each weighted by what it is the mean over, in `widest_dtype`.

    On a GPU, adding only keeps the tensor. The sums are made there every `FOLD_EVERY` values. A
    CPU's values are read at once, because nothing waits for that. Kept small tensors would lie in
    the gaps where a net's next activations would be. These would then move through memory that no
    cache holds (9 % of a small net's time).

    Attributes:
        last: the last value.
        last_count: what it is the mean over.
        added: how many values were added.
    """

    __slots__ = (
        "_bad", "_bad_there", "_count", "_counted", "_counts", "_read", "_sum", "_values", "added",
        "last", "last_count",
    )  # fmt: skip

    def __init__(self) -> None:
        self.added: int = 0
        self.last: torch.Tensor | None = None
        self.last_count: float | torch.Tensor = 0
        self._values: list[torch.Tensor] = []
        self._counts: list[float | torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._read = 0.0
        self._count: float = 0
        self._counted: float | torch.Tensor = 0  # on the device
        # The number of the first value that isn't finite: of those read at once, and of others.
        self._bad: int | None = None
        self._bad_there: torch.Tensor | None = None

    def add(self, value: torch.Tensor, count: float | torch.Tensor) -> None:
        """Add a batch's mean. A mean over nothing changes nothing, though it is NaN.

        Args:
            value: a detached tensor ().
            count: what it is the mean over: samples, or a tensor () on the device.
        """
        self.last, self.last_count = value, count
        self.added += 1
        if is_at_hand(value) and READ_AT_ONCE.is_on:
            if isinstance(count, torch.Tensor):
                count = count.item()
            if count:
                number = value.item()
                if number - number and self._bad is None:  # 0 for finite numbers only
                    self._bad = self.added - 1
                self._read += number * count
                self._count += count
            return
        self._values.append(value)
        self._counts.append(count)
        if len(self._values) >= FOLD_EVERY:
            self._fold()

    def add_each(self, values: torch.Tensor, count: int) -> None:
        """Add several batches' means (k,), each over this many samples."""
        if not (is_at_hand(values) and READ_AT_ONCE.is_on):
            for value in values.unbind():
                self.add(value, count)
            return
        self.last, self.last_count = values[-1], count
        for number in values.tolist():
            if number - number and self._bad is None:
                self._bad = self.added
            self.added += 1
            self._read += number * count
            self._count += count

    def _fold(self) -> None:
        device = self._values[0].device
        dtype = widest_dtype(device)
        values = torch.stack([value.to(device) for value in self._values]).to(dtype)
        if any(isinstance(count, torch.Tensor) for count in self._counts):
            each = [torch.as_tensor(count, device=device) for count in self._counts]
            counts = torch.stack([count.to(dtype) for count in each])
            self._counted = self._counted + counts.sum()
        else:
            counts = torch.tensor(self._counts, dtype=dtype)
            self._count += sum(map(float, self._counts))
        counts = counts.to(device, non_blocking=True)  # a GPU isn't waited for
        counted = torch.where(counts > 0, values, 0.0)
        total = counted @ counts
        self._sum = total if self._sum is None else self._sum + total
        numbers = torch.arange(self.added - len(self._values), self.added, device=device)
        bad = torch.where(counted.isfinite(), NEVER, numbers).min()
        self._bad_there = bad if self._bad_there is None else bad.minimum(self._bad_there)
        self._values.clear()
        self._counts.clear()

    def sums(self) -> tuple[float, float]:
        """Return the sum over what counted so far, read from the device, and its count."""
        if self._values:
            self._fold()
        total = self._read + (0.0 if self._sum is None else self._sum.item())
        counted = self._counted
        return total, self._count + (
            counted.item() if isinstance(counted, torch.Tensor) else counted
        )

    def first_bad(self) -> int | None:
        """Return the number, from 0, of the first value that counts and isn't finite, read from the
        device; None if there is none.
        """
        if self._values:
            self._fold()
        there = NEVER if self._bad_there is None else int(self._bad_there.item())
        first = min(there, NEVER if self._bad is None else self._bad)
        return None if first == NEVER else first

    def result(self) -> float | None:
        """Return the mean so far, read from the device; None before the first value.

        `EMPTY_MEAN` if nothing counted.
        """
        total, count = self.sums()
        if count:
            return total / count
        return None if self.last is None else EMPTY_MEAN


def is_at_hand(value: torch.Tensor) -> bool:
    """Whether a number can be read without waiting: it is in main memory, on this rank."""
    return value.is_cpu and type(value) is torch.Tensor


class Running:
    """A value over a pass: the mean over samples, or the sum, least or largest of all values.

    Args:
        reduce_fx: one of `REDUCTIONS`.
    """

    def __init__(self, reduce_fx: str) -> None:
        self._reduce_fx = reduce_fx
        self._mean = RunningMean()
        self._value: torch.Tensor | None = None

    def add(self, value: torch.Tensor, samples: int) -> None:
        """Add a value, a detached 0-d tensor."""
        if self._reduce_fx == "mean":
            self._mean.add(value, samples)
            return
        value = value.to(widest_dtype(value.device))
        pair = _PAIRWISE[self._reduce_fx]
        self._value = value if self._value is None else pair(self._value, value)

    def state(self) -> tuple[float, float]:
        """Return this rank's state, as (number, samples). No samples: nothing."""
        if self._reduce_fx == "mean":
            return self._mean.sums()
        return (0.0, 0) if self._value is None else (self._value.item(), 1)


_PAIRWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
