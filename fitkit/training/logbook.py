"""What a pass notes: losses, metrics, and what its steps log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from fitkit.losses import Term
from fitkit.metrics.output import OutputMeters
from fitkit.training.logged import Logged
from fitkit.training.running_mean import RunningMean


class Logbook:
    """The loss, its parts, the metrics and the logged values of one pass, by name and in order.

    Args:
        meters: the pass's metrics.

    Attributes:
        scales: the loss weights of the parts, where these are means over different things: the
            loss is their sum then, not a mean of batches' losses.
        steps: how many steps this rank has made.
        fillers: how many of them only filled a place.
    """

    def __init__(self, meters: Any) -> None:
        self.loss = RunningMean()
        self.parts: dict[str, RunningMean] = {}
        self.scales: dict[str, float] = {}
        self.meters = meters
        self.logged = Logged()
        self.steps = self.fillers = 0

    def add_parts(self, parts: dict[str, torch.Tensor], samples: int) -> None:
        """Take the losses of a batch's several outputs."""
        for name, value in parts.items():
            self.parts.setdefault(name, RunningMean()).add(value.detach(), samples)

    def add_terms(self, terms: list[Term], samples: int) -> None:
        """Take the losses of a batch's several outputs, each the mean over something else."""
        for term in terms:
            mean = self.parts.setdefault(term.name, RunningMean())
            mean.add(term.value.detach(), samples if term.count is None else term.count)
            self.scales[term.name] = term.scale

    def join_loss(
        self,
        values: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        meters: OutputMeters,
        device: torch.device,
    ) -> None:
        """Let the loss of the pass's later batches be computed of many at once, with the metrics.

        Args:
            values: gives each sample's loss (N,), to be summed in float64.
            meters: with which batches wait.
            device: where they are.
        """
        totals = meters.also(values, device)

        def sums() -> tuple[float, float]:
            with meters.up_to_date():
                total, samples = totals.summed().tolist()
            return total, samples

        self.loss.also(sums)

    def reset(self) -> None:
        """Begin a new pass."""
        self.loss.reset()
        for part in self.parts.values():
            part.reset()
        self.meters.reset()
        self.logged.reset()
        self.steps = self.fillers = 0

    def sums(self) -> dict[str, tuple[float, float]]:
        """The sum of the loss and of each of its parts, and over what it was taken."""
        parts = {name: part.sums() for name, part in self.parts.items()}
        return parts if self.scales else {"loss": self.loss.sums(), **parts}

    def results(self) -> dict[str, Any]:
        """All running values as Python floats: the loss, its parts, the metrics, the logged."""
        with self.meters.up_to_date():
            parts = {name: part.result() for name, part in self.parts.items()}
            found = {"loss": whole_loss(parts, self.scales, self.loss.result()), **parts}
            return {
                **{name: value for name, value in found.items() if value is not None},
                **self.meters.results(),
                **self.logged.results(),
            }


def whole_loss(
    parts: Mapping[str, float | None], scales: dict[str, float], loss: float | None
) -> float | None:
    """The loss of several outputs, from their means where these are over different things."""
    means = [(scale, parts.get(name)) for name, scale in scales.items()]
    known = [scale * mean for scale, mean in means if mean is not None]
    return sum(known) if known else loss


class LazyLogs(MutableMapping[str, Any]):
    """A batch's logs: running values, made when somebody reads them.

    Args:
        read: gives the values; called at the first access.
        batch_loss: the batch's own loss, a 0-d tensor on the device; None where there is none.
    """

    def __init__(
        self, read: Callable[[], dict[str, Any]], batch_loss: torch.Tensor | None = None
    ) -> None:
        self._read = read
        self.batch_loss = batch_loss
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
