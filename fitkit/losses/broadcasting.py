"""Whether a user's loss broadcasts (N, 1) predictions with (N,) targets to (N, N).

The commonest silent mistake with losses of one's own: `((prediction - target) ** 2).mean()` then
averages every prediction against every target, and the net learns the mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fitkit.errors import ConfigurationError

Origin = frozenset[str]
PREDICTION: Origin = frozenset({"prediction"})
TARGET: Origin = frozenset({"target"})


def check_broadcast(label: str, function: Callable[..., Any], prediction: Any, target: Any) -> None:
    """Refuse a loss that pairs every prediction with every target.

    Only a pair of shapes (N, 1) and (N,) is suspicious. Then `function` is evaluated once more, on
    copies, with the random state put back; what it raises is left to the evaluation that counts.
    """
    if not _is_suspicious(prediction, target):
        return
    copies = prediction.detach().clone(), target.detach().clone()
    watch = _PairingWatch(*copies)
    devices = [prediction.device.index or 0] if prediction.is_cuda else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.no_grad(), watch:
                function(*copies)
        except Exception:  # whatever a user's function may raise: the real call shows it
            return
    if watch.found:
        count = prediction.shape[0]
        raise ConfigurationError(
            f"{label} broadcasts a prediction of shape {tuple(prediction.shape)} and a target of "
            f"shape {tuple(target.shape)} to ({count}, {count}): every prediction meets every "
            "target. Bring both to one shape in it, with target.reshape(prediction.shape)."
        )


def _is_suspicious(prediction: Any, target: Any) -> bool:
    if not isinstance(prediction, torch.Tensor) or not isinstance(target, torch.Tensor):
        return False
    column, row = sorted((prediction.shape, target.shape), key=len, reverse=True)
    return len(row) == 1 and row[0] > 1 and column == (*row, 1)


class _PairingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Watches for an operation that makes (N, N) of (N, 1) from one side and (N,) from the other.

    Each tensor's origin (prediction, target, both) is followed through the operations: a loss may
    well compare the targets with one another, `target[:, None] == target`.
    """

    def __init__(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.found = False
        self._row = (prediction.shape[0],)
        # Tensors are kept beside their origins, because Python uses a freed object's id again.
        self._origins: dict[int, tuple[torch.Tensor, Origin]] = {
            id(prediction): (prediction, PREDICTION),
            id(target): (target, TARGET),
        }
        self._columns_spread: set[Origin] = set()
        self._rows_spread: set[Origin] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        origin: Origin = frozenset().union(*(self._origin(tensor) for tensor in inputs))
        for output in tree_leaves(result):
            if isinstance(output, torch.Tensor):
                self._origins[id(output)] = (output, origin)
                if output.shape == self._row * 2:
                    self._note(inputs)
        return result

    def _origin(self, tensor: torch.Tensor) -> Origin:
        return self._origins.get(id(tensor), (tensor, frozenset()))[1]

    def _note(self, inputs: list[torch.Tensor]) -> None:
        """Remember what was spread to (N, N): by one operation, or each side by its own expand."""
        one_operation = len(inputs) > 1
        columns: set[Origin] = set() if one_operation else self._columns_spread
        rows: set[Origin] = set() if one_operation else self._rows_spread
        for tensor in inputs:
            if tensor.shape == (*self._row, 1):
                columns.add(self._origin(tensor))
            elif tensor.shape == self._row:
                rows.add(self._origin(tensor))
        if (PREDICTION in columns and TARGET in rows) or (TARGET in columns and PREDICTION in rows):
            self.found = True
