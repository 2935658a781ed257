"""Nested data: tuples, lists, dicts, named tuples and dataclasses of tensors.

A *leaf* is whatever isn't one of those containers. Nothing here knows what a batch means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def is_named_tuple(tree: object) -> bool:
    """Whether `tree` is an instance of a named tuple."""
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floating-point or complex numbers: NumPy's `inexact`."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_container(tree: object) -> bool:
    """Whether `tree` has children, rather than being a leaf."""
    return isinstance(tree, (tuple, list, Mapping)) or _is_record(tree)


def _is_record(tree: object) -> bool:
    """Whether `tree` is an instance of a dataclass, and not the class."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` applied to each leaf; containers keep their types.

    A mapping whose type can't be built from pairs becomes a dict.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) is dict:
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, Mapping):
        items = [(key, map_leaves(function, value)) for key, value in tree.items()]
        try:
            mapped = type(tree)(items)  # type: ignore[call-arg]
        except TypeError:
            return dict(items)
        # A state dict has its modules' versions as an attribute, a batch its number of samples.
        if hasattr(tree, "__dict__") and hasattr(mapped, "__dict__"):
            vars(mapped).update({k: v for k, v in vars(tree).items() if k not in vars(mapped)})
        return mapped
    if is_named_tuple(tree):
        return type(tree)(*(map_leaves(function, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_leaves(function, item) for item in tree)
    if _is_record(tree):
        values = {
            field.name: map_leaves(function, getattr(tree, field.name))
            for field in dataclasses.fields(tree)
            if field.init
        }
        return dataclasses.replace(tree, **values)
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of `tree`, depth first."""
    for _, leaf in leaves_with_paths(tree):
        yield leaf


def tensors(tree: Any) -> list[torch.Tensor]:
    """The leaves that are tensors, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def kept(tree: Any) -> Any:
    """A tree that may be kept for longer than the batch that it comes from.

    Tensors in memory that a loader's workers share, or in pinned memory, are copied. Each of the
    former holds a file descriptor, and a process may have some 1,000.
    """
    if not any(map(_is_lent, leaves(tree))):
        return tree
    return map_leaves(lambda leaf: leaf.clone() if _is_lent(leaf) else leaf, tree)


def _is_lent(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_cpu or leaf.layout is not torch.strided:
        return False
    is_pinned = torch.cuda.is_available() and torch.cuda.is_initialized() and leaf.is_pinned()
    return is_pinned or (not leaf.is_nested and leaf.is_shared())


def tensor_bytes(tree: Any) -> int:
    """The memory of the numbers in a tree's tensors. A tensor that occurs twice counts twice."""
    return sum(tensor.nbytes for tensor in tensors(tree))


def leaves_with_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves with the way to each, as Python would write it (`['image'][0]`)."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves_with_paths(value, f"{path}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for index, item in enumerate(tree):
            yield from leaves_with_paths(item, f"{path}[{index}]")
    elif _is_record(tree):
        for field in dataclasses.fields(tree):
            yield from leaves_with_paths(getattr(tree, field.name), f"{path}.{field.name}")
    else:
        yield path, tree


def to_numpy(tree: Any) -> Any:
    """Turn a tree's tensors into NumPy arrays; NumPy has no bfloat16 or float8, so float32."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if leaf.layout is not torch.strided:
            leaf = leaf.to_dense()
        if leaf.dtype is torch.bfloat16 or (leaf.dtype.itemsize == 1 and leaf.is_floating_point()):
            leaf = leaf.float()
        return leaf.numpy()

    return map_leaves(convert, tree)


def _has_rows(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves(tree))


def concatenate(trees: list[Any], samples: list[int] | None = None) -> Any:
    """Join trees of one structure along dimension 0, leaf by leaf. The result is always a copy.

    Tensors without dimensions become a vector with one entry per tree. Leaves that aren't tensors
    become a list. Lists with an entry per sample, such as a detector's dicts, are joined end to
    end.

    Args:
        samples: the number of samples of each tree; None if unknown.

    Raises:
        ValueError: the trees differ in structure, or shapes differ beyond dimension 0.
    """
    first = trees[0]
    if isinstance(first, torch.Tensor):
        # Copy even a single one: a net may return its input, or a parameter.
        return torch.cat([tensor if tensor.ndim else tensor.reshape(1) for tensor in trees])
    if isinstance(first, Mapping):
        if any(list(tree) != list(first) for tree in trees):
            raise ValueError(f"batches have different keys: {list(first)} and others")
        return {key: concatenate([tree[key] for tree in trees], samples) for key in first}
    if is_named_tuple(first):
        columns = zip(*trees, strict=True)
        return type(first)(*(concatenate(list(items), samples) for items in columns))
    if isinstance(first, list) and _are_of_samples(trees, samples):
        return [entry for tree in trees for entry in tree]
    if isinstance(first, (tuple, list)):
        columns = zip(*trees, strict=True)
        return type(first)(concatenate(list(items), samples) for items in columns)
    if _is_record(first):
        return {
            field.name: concatenate([getattr(tree, field.name) for tree in trees], samples)
            for field in dataclasses.fields(first)
        }
    return list(trees)


def _are_of_samples(lists: list[list[Any]], samples: list[int] | None) -> bool:
    """Whether lists have an entry per sample: texts, or as many entries as samples in each batch.

    Lists of as many tensors with as many rows are several outputs.
    """
    if not any(_has_rows(item) for each in lists for item in each):
        return True
    if len({len(each) for each in lists}) > 1:
        return True
    if samples is None or any(len(e) != n for e, n in zip(lists, samples, strict=True)):
        return False
    if all(isinstance(item, Mapping) for each in lists for item in each):
        return True
    return not all(
        tensor.ndim and tensor.shape[0] == n
        for each, n in zip(lists, samples, strict=True)
        for tensor in tensors(each)
    )
