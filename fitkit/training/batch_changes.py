"""What changes whole training batches on the device, before their step, where anything does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from fitkit.data.batches import Batch
from fitkit.module import Module
from fitkit.training.step_for import Step


class ChangesBatches:
    """A base of all that may stand in `compile(batch_transforms=…)` and is a callback, too."""


class BatchChanges(Protocol):
    """Changes a training's batches.

    Attributes:
        first: the updates before the training; a resumed one has those before it was cut.
    """

    first: int

    def each(self, batches: Iterator[Any], first: int = 0) -> Iterator[Any]:
        """Return a pass's batches, each changed when it is asked for.

        Args:
            first: the first one's number in its epoch.
        """

    def __call__(self, batch: Batch, index: int = 0) -> Batch:
        """Return a batch on the device, changed.

        Ranks:
            Collective.
        """


def batch_transforms_of(
    model: Module, step: Step, callbacks: Iterable[object] = (), *, key: int | None = None
) -> BatchChanges | None:
    """Return what changes a model's training batches; None if nothing does.

    Args:
        model: with the transforms of `compile`.
        step: of the training.
        callbacks: of the run. Those that are transforms come first.
        key: of the fit, from which their draws follow. None for single batches: from the seed of
            torch's generator.
    """
    given: list[object] = [
        *(callback for callback in callbacks if isinstance(callback, ChangesBatches)),
        *(model._fitkit.compilation.given.batch_transforms or ()),
    ]
    if not given:
        return None
    from fitkit.extras.batch_transforms import applied

    return applied(model, step, given, key)
