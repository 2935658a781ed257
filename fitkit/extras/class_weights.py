"""Class weights: one weight per sample or position, by its label."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from fitkit.arguments import check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn
from fitkit.extras.class_labels import Labels
from fitkit.seams.losses import weighted_mean
from fitkit.seams.strategies import Collectives

LARGEST_CLASS = 10**6
"""The table has an entry for each class up to the largest one."""


class WeightTable:
    """Turns labels into weights. `begin` says how targets are read as labels.

    Args:
        weights: a dict from class to weight. Classes that it doesn't name weigh 1.

    Raises:
        ArgumentTypeError, ConfigurationError: a key isn't a class number, or a weight is negative
            or not a number.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        if not isinstance(weights, Mapping) or not weights:
            raise ArgumentTypeError(
                f"class_weight={describe(weights)} must be a dict of class number → weight, "
                "for example {0: 1.0, 1: 2.5}."
            )
        for label, weight in weights.items():
            if isinstance(weight, Mapping):
                raise ConfigurationError(
                    f"class_weight has a dict for {label!r}. It is one dict of class number → "
                    "weight, for a net with one loss. For several outputs give a dict of "
                    "sample_weight by output."
                )
            if isinstance(label, bool) or not isinstance(label, numbers.Integral) or label < 0:
                raise ConfigurationError(
                    f"class_weight has the key {label!r}; keys are class numbers from 0."
                )
            check_number(f"class_weight[{label}]", weight, minimum=0)
        if max(weights) > LARGEST_CLASS:
            raise ConfigurationError(
                f"class_weight has the class {max(weights)}; classes above {LARGEST_CLASS} aren't "
                "supported. Give sample weights instead."
            )
        # One entry beyond the largest class stands for all classes that aren't named.
        table = torch.ones(max(int(label) for label in weights) + 2)
        for label, weight in weights.items():
            table[int(label)] = float(weight)
        self._table = table
        self._named = sorted(int(label) for label in weights)
        self._labels: Labels | None = None
        self._dims = 0  # of the first batch's targets
        self._everything: tuple[Any, int] = (None, 0)  # all targets, and the rank
        self._is_over = False  # whether the first epoch is
        self._seen: torch.Tensor | None = None  # by class; the last entry: what can't be read

    def expect(self, target: Any, rank: int) -> None:
        """Take the targets of in-memory data: `begin` looks at all of them."""
        self._everything = (target, rank)

    def begin(self, labels: Labels, target: torch.Tensor, values: torch.Tensor) -> None:
        """Take the way in which targets are read, found by the first batch.

        Args:
            target: the first batch's.
            values: the loss's values of that batch, which the weights multiply.

        Raises:
            ConfigurationError: some label can't be read so, or the values have another shape.
        """
        self._labels, self._dims = labels, target.ndim
        self._table = self._table.to(target.device)
        everything, rank = self._everything
        in_memory = isinstance(everything, torch.Tensor) and everything.numel() > 0
        for known in (target, everything) if in_memory else (target,):
            if bool(labels.misfit(known)):
                raise labels.refusal()
        try:
            weighted_mean(values, self(target, None))
        except ConfigurationError:
            raise ConfigurationError(
                f"class_weight finds labels of shape {tuple(labels(target).shape)} in y, but the "
                f"loss has values of shape {tuple(values.shape)}. Let the loss return one value "
                "for each label, or give sample_weight instead."
            ) from None
        if not in_memory:
            self._seen = torch.zeros(len(self._table) + 1, device=target.device, dtype=torch.bool)
        elif rank == 0:
            found = torch.isin(torch.tensor(self._named), labels(everything).cpu())
            self._warn(found.tolist(), "y has")

    def __call__(self, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the weights of the labels in a batch, multiplied by `weight` if there is one.

        Shapes: those of the labels, (N,), (N, 1) or (N, ...); with a weight of more dimensions,
        that weight's.
        """
        assert self._labels is not None
        more = target.ndim - self._dims
        is_other = more > 0 and 1 not in target.shape[1:]
        if is_other or (more < 0 and self._labels.axis is not None):
            raise self._labels.refusal()
        labels, table = self._labels(target), self._table
        if table.device != labels.device:  # of a replica
            table = table.to(labels.device)
        chosen = table[self._places(labels)]
        if weight is None:
            return chosen
        if chosen.shape != weight.shape and len(chosen) == chosen.numel():
            chosen = chosen.reshape(-1, *[1] * (weight.ndim - 1))
        elif weight.ndim < chosen.ndim:
            weight = weight.reshape(*weight.shape, *[1] * (chosen.ndim - weight.ndim))
        return chosen * weight

    def note(self, target: torch.Tensor) -> None:
        """Note the labels of a batch of data that aren't in memory.

        Raises:
            ConfigurationError: some label can't be read, and finding that needs no waiting.
        """
        seen = self._seen
        if seen is None or self._labels is None:
            return
        labels = self._places(self._labels(target)).flatten().to(seen.device)
        seen[:-1].index_fill_(0, labels, True)
        seen[-1] |= self._labels.misfit(target).to(seen.device)
        if seen.is_cpu and seen[-1]:
            raise self._labels.refusal()

    def check_seen(self, collectives: Collectives) -> None:
        """Warn at the first epoch's end of named classes that none of its labels had; once.

        Raises:
            ConfigurationError: some label wasn't one.

        Ranks:
            Collective: each rank has seen its own labels.
        """
        everything, _ = self._everything
        if (isinstance(everything, torch.Tensor) and everything.numel() > 0) or self._is_over:
            return
        self._is_over = True
        seen, self._seen = self._seen, None
        flags = [0.0] * (len(self._named) + 1)
        if seen is not None:
            flags = [float(flag) for flag in seen[[*self._named, -1]].tolist()]
        used, *found, wrong = collectives.sums([float(seen is not None), *flags])
        if wrong:
            assert self._labels is not None
            raise self._labels.refusal()
        if used and collectives.rank == 0:
            self._warn([bool(count) for count in found], "the first epoch's labels have")

    def _places(self, labels: torch.Tensor) -> torch.Tensor:
        """Where labels' weights are in the table: those that are no classes weigh 1."""
        last = len(self._table) - 1
        return torch.where(labels < 0, last, labels.clamp(max=last))

    def _warn(self, found: list[bool], where: str) -> None:
        missing = [label for label, there in zip(self._named, found, strict=True) if not there]
        if missing:
            warn(f"class_weight names the classes {missing}, but {where} none of them.")
