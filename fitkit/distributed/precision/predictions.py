"""A net's outputs in a dtype in which losses and metrics keep their digits."""

from __future__ import annotations

from typing import Any

import torch

from fitkit import trees

HALF_TYPES = (torch.float16, torch.bfloat16)


def widened(tree: Any) -> Any:
    """`tree` with half-precision tensors in float32, differentiably; others as they are.

    A tree without any is returned itself, so that a net's own output class survives.
    """
    if isinstance(tree, torch.Tensor):
        return _wide(tree)
    if any(_is_half(leaf) for leaf in trees.leaves(tree)):
        return trees.map_leaves(_wide, tree)
    return tree


def _wide(leaf: Any) -> Any:
    return leaf.float() if _is_half(leaf) else leaf


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in HALF_TYPES
