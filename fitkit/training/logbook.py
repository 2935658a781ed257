"""Running means over samples, without asking the device for a number at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

FOLD_EVERY = 128
"""Values kept before they are folded into a sum: bounds memory, costs one operation."""


class RunningMean:
    """The mean of batch values, weighted by their numbers of samples, in float64.

    Adding keeps the tensor and does nothing else; the sums are made every `FOLD_EVERY`
    values, on the values' own device.
    """

    __slots__ = ("_count", "_counts", "_sum", "_values")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._values: list[torch.Tensor] = []
        self._counts: list[int] = []
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, value: torch.Tensor, samples: int) -> None:
        """Take a batch's mean over `samples` samples; `value` is a detached 0-d tensor."""
        self._values.append(value)
        self._counts.append(samples)
        if len(self._values) >= FOLD_EVERY:
            self._fold()

    def _fold(self) -> None:
        if not self._values:
            return
        values = torch.stack(self._values).double()
        counts = torch.tensor(self._counts, dtype=torch.float64, device=values.device)
        total = values @ counts
        self._sum = total if self._sum is None else self._sum + total
        self._count += sum(self._counts)
        self._values.clear()
        self._counts.clear()

    def sums(self) -> tuple[float, int]:
        """The sum over the samples so far, read from the device, and their number."""
        self._fold()
        return (0.0 if self._sum is None else self._sum.item()), self._count

    def result(self) -> float | None:
        """The mean so far, read from the device; None before the first value."""
        total, count = self.sums()
        return total / count if count else None


class Logbook:
    """The loss, its parts and the metrics of one pass, by name and in order.

    Args:
        meters: the pass's metrics.
    """

    def __init__(self, meters: Any) -> None:
        self.loss = RunningMean()
        self.parts: dict[str, RunningMean] = {}
        self.meters = meters

    def add_parts(self, parts: dict[str, torch.Tensor], samples: int) -> None:
        """Take the losses of a batch's several outputs."""
        for name, value in parts.items():
            self.parts.setdefault(name, RunningMean()).add(value.detach(), samples)

    def reset(self) -> None:
        """Begin a new pass."""
        self.loss.reset()
        for part in self.parts.values():
            part.reset()
        self.meters.reset()

    def sums(self) -> dict[str, tuple[float, int]]:
        """The sum and the number of samples of the loss and of each of its parts."""
        return {
            "loss": self.loss.sums(),
            **{name: part.sums() for name, part in self.parts.items()},
        }

    def results(self) -> dict[str, Any]:
        """All running values as Python floats: the loss, its parts, the metrics."""
        found = {"loss": self.loss.result()}
        found.update({name: part.result() for name, part in self.parts.items()})
        return {
            **{name: value for name, value in found.items() if value is not None},
            **self.meters.results(),
        }


class LazyLogs(MutableMapping[str, Any]):
    """A batch's logs: running values, made when somebody reads them.

    Args:
        read: gives the values; called at the first access.
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._values: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._values is None:
            self._values = self._read()
        return self._values

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())
