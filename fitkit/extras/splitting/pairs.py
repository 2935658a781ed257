"""Whether a loss may be computed in parts: the joined outputs' loss is the parts' weighed one."""

from __future__ import annotations

from typing import Any

import torch

from fitkit import trees
from fitkit.errors import is_out_of_memory
from fitkit.seams.losses import undone
from fitkit.seams.networks import Guest
from fitkit.seams.steps import CompiledStep, Outcome, OwnStep

WITHIN = 1e-5
"""How far the two may be apart, of their size. Rounding gives 1e-7, losses over pairs 6e-5 to 1."""


class JoinedLoss:
    """Compares the loss of a batch's joined outputs with the losses of its parts.

    Losses that compare a batch's samples with one another can't be computed in parts.

    Args:
        step: computes the loss.
    """

    def __init__(self, step: CompiledStep | OwnStep) -> None:
        assert isinstance(step, CompiledStep)
        assert step.loss is not None
        self._loss, self._may_count = step.loss, step.may_count
        self._values: list[list[Any]] = []  # of each part: outputs, targets and weights
        self._means: list[list[tuple[float, float, float]]] = []  # a value, count and scale each
        self._samples: list[int] = []

    @staticmethod
    def can_compare(step: object) -> bool:
        """Whether a step's loss is a function of outputs and targets that isn't known already."""
        if not isinstance(step, CompiledStep) or (loss := step.loss) is None:
            return False
        if type(step.guest) is not Guest:  # which may add to it
            return False
        return loss.own is None and loss.has_user_code and not loss.takes_inputs

    def take(self, outcome: Outcome, samples: int) -> None:
        """Keep a part's values, without their graph."""
        parts = [outcome.outputs, outcome.target, outcome.weight]
        self._values.append(trees.map_leaves(_detached, parts))
        self._samples.append(samples)
        terms: list[Any] = [(term.value, term.count, term.scale) for term in outcome.terms]
        self._means.append(
            [
                (value.item(), float(samples if count is None else count), scale)
                for value, count, scale in terms or [(outcome.loss, outcome.count, 1.0)]
            ]
        )

    def difference(self) -> float:
        """Return how far the joined outputs' loss is from the weighed parts', of its size.

        Returns:
            0 where the joined outputs don't fit into memory.
        """
        whole = 0.0
        for mean in zip(*self._means, strict=True):
            counted = sum(count for _, count, _ in mean)
            parts = sum(value * count for value, count, _ in mean if count)
            whole += mean[0][2] * parts / counted if counted else 0.0
        try:
            joined = [self._joined(list(parts)) for parts in zip(*self._values, strict=True)]
            with torch.no_grad(), undone(self._loss):
                value, _, _ = self._loss.computed(*joined, counts=self._may_count, is_part=True)
        except Exception as error:
            if is_out_of_memory(error):
                return 0.0
            raise
        return abs(float(value) - whole) / max(abs(whole), abs(float(value)), 1e-12)

    def _joined(self, parts: list[Any]) -> Any:
        return None if parts[0] is None else trees.concatenate(parts, self._samples)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
