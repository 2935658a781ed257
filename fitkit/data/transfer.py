"""A batch on the device that computes, in the numbers that the net takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.data.arrays import as_tensors


class Transfer:
    """Moves batches: every tensor to the device, floats to the net's floating dtype.

    NumPy arrays become tensors, objects with `.to` are asked to move, other leaves stay.

    Args:
        device: where the net is.
        float_dtype: the dtype of the net's parameters.
    """

    def __init__(self, device: torch.device, float_dtype: torch.dtype) -> None:
        self.device = device
        self.float_dtype = float_dtype

    def __call__(self, batch: Any) -> Any:
        """The batch; the very same object where nothing has to move."""
        if type(batch) in (tuple, list):
            for part in batch:
                if not self._is_there(part):
                    break
            else:
                return batch
        return trees.map_leaves(self._move, batch)

    def _is_there(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.device == self.device
            and (leaf.dtype is self.float_dtype or not leaf.is_floating_point())
        )

    def _move(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            dtype = self.float_dtype if leaf.is_floating_point() else leaf.dtype
            return leaf.to(self.device, dtype, non_blocking=True)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            return as_tensors(leaf, "x", self.float_dtype).to(self.device)
        move = getattr(leaf, "to", None)
        return move(self.device) if callable(move) else leaf
