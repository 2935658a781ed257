"""Running means over what counts, without asking the device for a number at each step."""

from __future__ import annotations

from collections.abc import Callable

import torch

FOLD_EVERY = 128
"""Values kept before they are folded into a sum: bounds memory, costs one operation."""


class RunningMean:
    """The mean of batch values, weighed by what each is the mean over, in float64.

    On a GPU adding keeps the tensor and does nothing else; the sums are made every `FOLD_EVERY`
    values, there. A CPU's are read at once: nobody waits for that, whereas small tensors that are
    kept lie in the gaps where a net's next activations would be, which then move through memory
    that no cache holds (9 % of a small net's time).
    """

    __slots__ = ("_count", "_counted", "_counts", "_elsewhere", "_read", "_sum", "_values", "last")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.last: torch.Tensor | None = None
        self._values: list[torch.Tensor] = []
        self._counts: list[float | torch.Tensor] = []
        self._sum: torch.Tensor | None = None
        self._read = 0.0
        self._count: float = 0
        self._counted: float | torch.Tensor = 0  # on the device
        self._elsewhere: Callable[[], tuple[float, float]] | None = None

    def also(self, sums: Callable[[], tuple[float, float]]) -> None:
        """Count what is summed up elsewhere, too, until `reset`.

        Args:
            sums: gives the sum over the samples there, and their number.
        """
        self._elsewhere = sums

    def add(self, value: torch.Tensor, count: float | torch.Tensor) -> None:
        """Take a batch's mean; one over nothing changes nothing, though it is NaN.

        Args:
            value: a detached tensor ().
            count: what it is the mean over: samples, or a tensor () on the device.
        """
        self.last = value
        if is_at_hand(value):
            if isinstance(count, torch.Tensor):
                count = count.item()
            if count:
                self._read += value.item() * count
                self._count += count
            return
        self._values.append(value)
        self._counts.append(count)
        if len(self._values) >= FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        if not self._values:
            return
        device = self._values[0].device
        values = torch.stack([value.to(device) for value in self._values]).double()
        if any(isinstance(count, torch.Tensor) for count in self._counts):
            counts = torch.stack([torch.as_tensor(c, device=device).double() for c in self._counts])
            self._counted = self._counted + counts.sum()
        else:
            counts = torch.tensor(self._counts, dtype=torch.float64)
            self._count += sum(map(float, self._counts))
        counts = counts.to(device, non_blocking=True)  # a GPU isn't waited for
        total = torch.where(counts > 0, values, 0.0) @ counts
        self._sum = total if self._sum is None else self._sum + total
        self._values.clear()
        self._counts.clear()

    def sums(self) -> tuple[float, float]:
        """The sum over what counted so far, read from the device, and how much that was."""
        self._fold()
        total = self._read + (0.0 if self._sum is None else self._sum.item())
        counted = self._counted
        count = self._count + (counted.item() if isinstance(counted, torch.Tensor) else counted)
        if self._elsewhere is not None:
            more, samples = self._elsewhere()
            total, count = total + more, count + samples
        return total, count

    def result(self) -> float | None:
        """The mean so far, read from the device; None before the first value."""
        total, count = self.sums()
        return total / count if count else None


def is_at_hand(value: torch.Tensor) -> bool:
    """Whether reading a number waits for nothing: it is in main memory, on this rank."""
    return value.is_cpu and type(value) is torch.Tensor
