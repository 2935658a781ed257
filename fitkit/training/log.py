"""The values of a pass: its loss and metrics, what is logged, and all of them over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from fitkit.distributed.collectives import Collectives
from fitkit.errors import CheckpointError, FitkitError, warn
from fitkit.losses import Term
from fitkit.losses.compiled import of_outputs
from fitkit.metrics.compiled import CompiledMetrics
from fitkit.module import LogOptions
from fitkit.outputs import EMPTY_MEAN
from fitkit.samples import Doubts
from fitkit.scopes import Scope
from fitkit.training.logged import Logged
from fitkit.training.running_values import RunningMean


class Logbook:
    """The loss, its parts, the metrics and the logged values of one pass, by name and in order.

    It is made for the pass, and thrown away with it.

    Args:
        meters: the metrics. Their objects are lent to one pass at a time.
        scope: the pass's, with the hooks at its end.
        doubts: as the attribute.

    Attributes:
        scales: the loss weights of the parts, if these are means over different things. The loss
            is then their sum, not a mean of batches' losses.
        steps: how many steps this rank has made, without batches that have no rows.
        padding: how many of a model's own steps were padding, which doesn't count.
        samples: this rank's samples in the last batch; 0 for padding.
        seen: the samples of a model's own steps so far, on this rank.
        doubts: say once that batches' entries disagree on their samples.
        outputs: what the steps returned; None where nobody wants it.
        joined: what all ranks have noted of the pass, as `noted_by` returns it, if `reduced` has
            joined it. What a rank notes is no longer its own then.
    """

    def __init__(
        self,
        meters: CompiledMetrics,
        scope: Scope,
        doubts: Doubts | None = None,
        *,
        keeps_outputs: bool = False,
    ) -> None:
        if meters:
            scope.callback(meters.reset)
        self.loss: RunningMean = RunningMean()
        self.parts: dict[str, RunningMean] = {}
        self.scales: dict[str, float] = {}
        self.meters = meters
        self.logged: Logged = Logged(scope)
        self.steps: int = 0
        self.padding: int = 0
        self.samples: int = 0
        self.seen: int = 0
        self.doubts: Doubts = doubts or Doubts()
        self.outputs: list[Any] | None = [] if keeps_outputs else None
        self.joined: list[dict[str, Any]] = []

    def add_losses(
        self,
        loss: torch.Tensor,
        count: float | torch.Tensor | None,
        terms: Sequence[Term],
        samples: int,
    ) -> None:
        """Add a batch's loss, and the losses of its several outputs.

        Args:
            count: what the loss is the mean over; None for the batch's samples.
        """
        if any(term.count is not None for term in terms):
            self.loss.last, self.loss.last_count = loss.detach(), samples
            self.scales.update((term.name, term.scale) for term in terms)
        else:
            self.loss.add(loss.detach(), samples if count is None else count)
        if terms:
            self.add_terms(terms, samples)

    def add_terms(self, terms: Sequence[Term], samples: int) -> None:
        """Add the losses of a batch's several outputs, each the mean over its own count."""
        for term in terms:
            mean = self.parts.setdefault(term.name, RunningMean())
            mean.add(term.value.detach(), samples if term.count is None else term.count)

    def sums(self) -> dict[str, tuple[float, float]]:
        """Return the sum of the loss and of each of its parts, with what it was taken over."""
        parts = {name: part.sums() for name, part in self.parts.items() if part.last is not None}
        if self.scales or not self._has_loss:
            return parts
        return {"loss": self._loss_sums(), **parts}

    @property
    def _has_loss(self) -> bool:
        return self.loss.last is not None or self.meters.loss_sums()[1] > 0

    def _loss_sums(self) -> tuple[float, float]:
        """Return the sum of the losses and their number, including those that wait with the
        metrics.
        """
        (total, count), (more, samples) = self.loss.sums(), self.meters.loss_sums()
        return total + more, count + samples

    def results(self) -> dict[str, Any]:
        """All running values as Python floats: the loss, its parts, the metrics, the logged."""
        with self.meters.up_to_date():
            total, count = self._loss_sums()
            mean = total / count if count else self.loss.result()
            found: dict[str, Any] = {"loss": mean}
            if self.parts:
                parts = {name: part.result() for name, part in self.parts.items()}
                found["loss"] = whole_loss(parts, self.scales, found["loss"])
                found.update(of_outputs(parts))
            found = {name: value for name, value in found.items() if value is not None}
            if self.meters:
                found.update(self.meters.results())
            if self.logged.entries:
                found.update(self.logged.results())
            return found


def whole_loss(
    parts: Mapping[str, float | None], scales: dict[str, float], loss: float | None
) -> float | None:
    """Return the loss of several outputs, from their means, if these are over different things."""
    means = [(scale, parts.get(name)) for name, scale in scales.items()]
    if any(mean is EMPTY_MEAN for _, mean in means):
        return EMPTY_MEAN
    known = [scale * mean for scale, mean in means if mean is not None]
    return sum(known) if known else loss


class LazyLogs(MutableMapping[str, Any]):
    """A batch's logs: running values, computed when they are read.

    Args:
        read: a function that returns the values, called at the first access.
        batch_loss: the batch's own loss, a 0-d tensor on the device; None if there is none.
        batch_count: what it is the mean over.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        batch_loss: torch.Tensor | None = None,
        batch_count: float | torch.Tensor = 0,
    ) -> None:
        self._read = read
        self.batch_loss = batch_loss
        self.batch_count = batch_count
        self._values: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._values is None:
            self._values = self._read()
        return self._values

    def __getitem__(self, name: str) -> Any:
        return self._all()[name]

    def __setitem__(self, name: str, value: object) -> None:
        self._all()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def reduced(
    logbook: Logbook, collectives: Collectives, carried: list[dict[str, Any]] | None = None
) -> tuple[dict[str, Any], int]:
    """Return the logbook's values over the samples of all ranks, the same on each of them.

    Sums and counts travel, never means: each sample counts once, on whichever rank. A name
    that a rank doesn't have counts no samples there.

    Args:
        carried: what was noted of this pass before it was cut, the same on every rank.

    Returns:
        The values by name, and the number of steps of all ranks.

    Raises:
        ConfigurationError: ranks logged different names with `sync_dist`.

    Ranks:
        Collective: one exchange; a second where a rank saw no batch at all.
    """
    if collectives.world_size == 1 and not carried and not logbook.logged.has_metrics:
        return logbook.results(), logbook.steps
    gathered = logbook.joined = [
        *(carried or ()),
        *collectives.gather(
            {**noted_by(logbook, collectives.rank), "doubt": logbook.doubts.sentence}
        ),
    ]
    for one in gathered:
        if one.get("doubt") is not None:
            logbook.doubts.note(one["doubt"], speaks=collectives.rank == 0)
    try:
        values = _merged(logbook, collectives, gathered)
        logbook.logged.give_back()
        return values
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if not carried or isinstance(error, FitkitError):
            raise
        raise CheckpointError(
            "The epoch's values in the checkpoint don't match those of the resumed epoch "
            f"({type(error).__name__}: {error}). Restart the epoch from its weights "
            "(load_weights), or use an earlier checkpoint."
        ) from error


def _merged(
    logbook: Logbook, collectives: Collectives, gathered: list[dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """Return the values and the number of steps, from what each rank has noted."""
    values = _means([one["sums"] for one in gathered])
    scales = {name: scale for one in gathered for name, scale in one.get("scales", {}).items()}
    loss = whole_loss(values, scales, values.get("loss"))
    values.pop("loss", None)
    values = {**({} if loss is None else {"loss": loss}), **of_outputs(values)}
    metrics: dict[str, Any] = {}
    states = [one["metrics"] for one in gathered if one["metrics"] is not None]
    if logbook.meters.state() is not None:
        logbook.meters.merge(states)
        metrics = logbook.meters.results()
    all_logged = [one["logged"] for one in gathered]
    logged = logbook.logged.merge(
        all_logged,
        [one["steps"] - one.get("padding", 0) for one in gathered],
        [one.get("rank", 0) for one in gathered],
    )
    if len(states) not in (0, len(gathered)) or _lacks_metrics(all_logged):
        # A rank without batches never learned which metrics there are.
        everyone = collectives.gather((metrics, logged))
        # A rank's own, if it has them: sent, `EMPTY_MEAN` is a NaN like any other.
        metrics = metrics or next((found for found, _ in everyone if found), {})
        logged = max((found for _, found in everyone), key=len)
    counted = {
        LogOptions(**state["options"]).names(name)[1]
        for states in all_logged
        for name, state in states.items()
        if state["metric"] is not None and state["options"]["on_epoch"]
    }
    if (lost := counted - logged.keys()) and collectives.rank == 0:
        warn(
            f"The epoch's logs lack {', '.join(sorted(lost))}. The checkpoint was saved after the "
            "epoch's last batch, so no batch logs the torchmetrics object again. Log a tensor, or "
            "save at the end of the epoch."
        )
    return {**values, **metrics, **logged}, sum(one["steps"] for one in gathered)


def warn_of_empty(values: Mapping[str, Any], when: str) -> bool:
    """Warn of means over nothing.

    Args:
        values: a pass's values.
        when: the beginning of the sentence: "In epoch 1".

    Returns:
        Whether there are any.
    """
    names = [name for name, value in values.items() if value is EMPTY_MEAN]
    if names:
        warn(
            f"{when} nothing counts for {', '.join(names)}: all labels are ignored, all weights "
            "are 0, or what a metric compares is missing (samples of several classes, numbers that "
            "differ). Then the value is nan. Look at the labels and weights of these data."
        )
    return bool(names)


def noted_by(logbook: Logbook, rank: int) -> dict[str, Any]:
    """Return what this rank has noted of a pass, as plain data."""
    with logbook.meters.up_to_date():  # the waiting batches are counted once
        return {
            "sums": logbook.sums(),
            "scales": dict(logbook.scales),
            "metrics": logbook.meters.state(),
            "logged": logbook.logged.state(),
            "steps": logbook.steps,
            "padding": logbook.padding,
            "rank": rank,
        }


def _means(all_sums: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Return the ranks' sums by name, divided by their counts: never a mean of means."""
    means = {}
    for name in dict.fromkeys(name for sums in all_sums for name in sums):
        pairs = [sums[name] for sums in all_sums if name in sums]
        count = sum(count for _, count in pairs)
        means[name] = sum(total for total, _ in pairs) / count if count else EMPTY_MEAN
    return means


def _lacks_metrics(all_logged: list[dict[str, Any]]) -> bool:
    """Whether some rank logged no torchmetrics object where another did."""
    kinds = [{name for name, state in one.items() if state["metric"]} for one in all_logged]
    return any(kind != kinds[0] for kind in kinds)
