"""A batch cut into parts along dimension 0, and the parts' outputs as one again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from fitkit import trees
from fitkit.errors import ConfigurationError
from fitkit.samples import samples_among
from fitkit.seams.batches import kind_of
from fitkit.seams.strategies import mean_by

LOSS = ("['loss']", ".loss")
"""Where a net's own loss is among its outputs."""


def part_sizes(samples: int, parts: int) -> list[int]:
    """How many of `samples` each of at most `parts` parts gets, the larger ones first.

    Fewer samples than parts make fewer parts; none make one part of none.
    """
    parts = max(min(parts, samples), 1)
    size, larger = divmod(samples, parts)
    return [size + (index < larger) for index in range(parts)]


def split(tree: Any, parts: int, samples: int | None = None) -> list[Any]:
    """Return a batch of n samples as at most `parts` batches of nearly the same size.

    Tensors (n, ...) are cut along dimension 0 (as views of the same memory). So are lists of n
    things other than tensors, and tuples of n strings, which a `DataLoader` makes of captions.
    Everything else is in every part.

    Args:
        tree: any tree of tensors. Its first tensor with at least one dimension determines n.
            Without one there is one part.
        parts: the number of parts.
        samples: n, if it is known.

    Raises:
        ConfigurationError: an entry whose samples can't be cut apart, such as a `PackedSequence`.
    """
    samples = samples_among(tree) if samples is None else samples
    sizes = part_sizes(samples, parts)
    if len(sizes) == 1:
        return [tree]
    ends = itertools.accumulate(sizes)
    return [
        rows_of(tree, samples, slice(end - size, end))
        for size, end in zip(sizes, ends, strict=True)
    ]


def rows_of(tree: Any, samples: int, rows: slice) -> Any:
    """Return the given rows of a batch of so many samples; see `split`."""
    if (kind := kind_of(tree)) is not None:
        return kind.rows(tree, rows.start, rows.stop)
    if _is_column(tree, samples):
        return tree[rows]
    if not trees.is_container(tree):
        return tree
    return trees.rebuilt(tree, [rows_of(child, samples, rows) for child in trees.children(tree)])


def _is_column(tree: Any, samples: int) -> bool:
    """Whether the entries of `tree` are those of a batch's samples."""
    shape = getattr(tree, "shape", None)
    if shape is not None:
        return len(shape) > 0 and shape[0] == samples
    if type(tree) is list and len(tree) == samples:
        return not any(trees.is_container(item) or hasattr(item, "shape") for item in tree)
    return type(tree) is tuple and len(tree) == samples and _are_texts(tree)


def _are_texts(items: Any) -> bool:
    return bool(items) and all(isinstance(item, (str, bytes)) for item in items)


# ---------------------------------------------------------------------- outputs


def gather(
    outputs: list[Any], device: torch.device | None = None, weights: list[Any] | None = None
) -> Any:
    """Return what the replicas returned, as one.

    Tensors (N_r, ...) are joined along dimension 0. Tensors without dimensions, numbers and
    flags become a vector with one entry per replica, also where there is one replica only. None
    stays None. Containers are joined by their structure and keep their types, but lists of strings
    end to end. Anything else becomes a list with one entry per replica.

    Args:
        outputs: one tree a replica.
        device: where the joined tensors are; None for the first replica's.
        weights: what each replica's loss was the mean over, where the outputs are those of a
            whole net: a scalar `loss` among them, as Hugging Face's models give, becomes the mean
            by them.

    Raises:
        ConfigurationError: outputs of different structure, or shapes that differ beyond
            dimension 0.
    """

    def joined(outputs: list[Any], path: str) -> Any:
        first = outputs[0]
        if all(type(tree) is list and _are_texts(tree) for tree in outputs):
            return [text for texts in outputs for text in texts]
        if trees.is_container(first):
            places = trees.places(first)
            if any(not trees.is_container(t) or trees.places(t) != places for t in outputs):
                raise _unlike(outputs, path)
            parts = zip(*map(trees.children, outputs), strict=True)
            values = [
                joined(list(part), path + place) for place, part in zip(places, parts, strict=True)
            ]
            return trees.rebuilt(first, values)
        if any(trees.is_container(leaf) or (leaf is None) != (first is None) for leaf in outputs):
            raise _unlike(outputs, path)
        if first is None:
            return None
        try:
            gathered = _joined_leaves(outputs, device)
        except (RuntimeError, ValueError) as error:
            raise _unlike(outputs, path) from error
        are_scalars = all(isinstance(leaf, torch.Tensor) and leaf.ndim == 0 for leaf in outputs)
        is_loss = weights is not None and path in LOSS and are_scalars
        return mean_by(gathered, weights or []) if is_loss else gathered

    first = outputs[0]
    if weights is not None and _is_plain_object(first):
        filled = copy.copy(first)
        vars(filled).update(joined([vars(output) for output in outputs], ""))
        return filled
    return joined(outputs, "")


def _joined_leaves(leaves: list[Any], device: torch.device | None) -> Any:
    """Return the leaves in one place of the replicas' outputs, as `gather` says.

    Raises:
        ValueError: tensors with and without dimensions.
        RuntimeError: shapes that differ beyond dimension 0.
    """
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        if len({leaf.ndim == 0 for leaf in leaves}) > 1:
            raise ValueError("some have no dimension")
        rows = [leaf.reshape(1) if leaf.ndim == 0 else leaf for leaf in leaves]
        target = leaves[0].device if device is None else device
        if len(rows) == 1:
            return rows[0].to(target)
        if target.type == "cuda" and all(row.is_cuda for row in rows):
            return torch.nn.parallel.gather(rows, target)  # torch has it for CUDA alone
        return torch.cat([row.to(target) for row in rows])
    if all(isinstance(leaf, (bool, int, float, complex)) for leaf in leaves):
        return torch.tensor(leaves, device=device)
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise ValueError("some aren't tensors")
    return list(leaves)


def _is_plain_object(output: Any) -> bool:
    """Whether it is an object with a tensor `loss` or `logits`, but no container."""
    if trees.is_container(output) or isinstance(output, torch.Tensor):
        return False
    named = [getattr(output, name, None) for name in ("loss", "logits")]
    return any(isinstance(value, torch.Tensor) for value in named) and hasattr(output, "__dict__")


def _unlike(outputs: list[Any], path: str) -> ConfigurationError:
    """Return the error for outputs that can't be joined, with the place where."""
    texts = [_described(tree) for tree in outputs]
    first = texts[0]
    index, other = next(
        ((index, text) for index, text in enumerate(texts) if text != first),
        (len(texts) - 1, first),
    )
    place = f" at {path}" if path else ""
    return ConfigurationError(
        f"The replicas' outputs can't be joined{place}: replica 0 returned {first}, replica "
        f"{index} {other}. Every replica must return the same structure, with tensors whose "
        "shapes differ in dimension 0 only; pad them to one size, or reduce them to a scalar."
    )


def _described(output: Any) -> str:
    """Return what a replica returned, for a message."""
    if isinstance(output, torch.Tensor):
        return f"a tensor {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with keys {list(output)}"
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of {len(output)}"
    return "None" if output is None else f"a {type(output).__name__}"
