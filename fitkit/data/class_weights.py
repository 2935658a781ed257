"""Class weights: one weight per sample, by its label."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from fitkit.arguments import check_number, describe
from fitkit.distributed.collectives import Collectives
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn

LARGEST_CLASS = 10**6
"""The table has an entry for each class up to the largest one."""


class ClassWeights:
    """Turns labels into sample weights.

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
        self._seen: dict[torch.device, torch.Tensor] = {}  # a recorded step keeps writing to these
        self._notes_labels = True

    def __call__(self, target: Any, weight: torch.Tensor | None) -> torch.Tensor:
        """The samples' weights, multiplied by `weight` if there is one.

        Shapes: target (N,) or (N, 1) class numbers, or (N, C) one-hot; gives (N,).
        """
        if not isinstance(target, torch.Tensor):
            raise ConfigurationError(
                "class_weight needs one tensor of labels; the batch's y is "
                f"{'missing' if target is None else 'a ' + type(target).__name__}. "
                "For several outputs give sample weights."
            )
        labels = _labels(target)
        table = self._table
        if table.device != labels.device:
            table = self._table = table.to(labels.device)
        labels = labels.clamp(0, len(table) - 1)
        if self._notes_labels:
            if labels.device not in self._seen:
                self._seen[labels.device] = torch.zeros_like(table, dtype=torch.bool)
            self._seen[labels.device].index_fill_(0, labels, True)
        chosen = table[labels]
        if weight is None:
            return chosen
        return chosen.reshape(-1, *[1] * (weight.ndim - 1)) * weight

    def warn_of_missing(self, target: Any, rank: int) -> None:
        """Warn at once, on rank 0, of named classes that no label of in-memory data has."""
        if not isinstance(target, torch.Tensor) or target.ndim > 2 or target.numel() == 0:
            return
        self._notes_labels = False
        if rank == 0:
            self._warn(
                torch.isin(torch.tensor(self._named), _labels(target).cpu()).tolist(), "y has"
            )

    def warn_of_unseen(self, collectives: Collectives) -> None:
        """Warn at the first epoch's end of named classes that none of its labels had; once.

        Ranks:
            Collective: each rank has seen its own labels.
        """
        if not self._notes_labels:
            return
        self._notes_labels = False
        seen = torch.zeros(len(self._table), dtype=torch.bool)
        for part in self._seen.values():
            seen |= part.cpu()
        used, *found = collectives.sums([float(bool(self._seen)), *seen[self._named].tolist()])
        if used and collectives.rank == 0:
            self._warn([bool(count) for count in found], "the first epoch's labels have")

    def _warn(self, found: list[bool], where: str) -> None:
        missing = [label for label, there in zip(self._named, found, strict=True) if not there]
        if missing:
            warn(f"class_weight names the classes {missing}, but {where} none of them.")


def _labels(target: torch.Tensor) -> torch.Tensor:
    """Class numbers (N,) int64 of class numbers or one-hot rows."""
    if target.ndim == 2 and target.shape[1] > 1:
        return target.argmax(dim=1)
    if target.ndim == 2:
        target = target[:, 0]
    if target.ndim != 1:
        raise ConfigurationError(
            f"class_weight needs one label per sample, but y has shape {tuple(target.shape)}. "
            "Give sample weights instead."
        )
    return target.round().long() if target.is_floating_point() else target.long()
