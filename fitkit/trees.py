"""Nested data: tuples, lists, dicts, named tuples and dataclasses of tensors.

A *leaf* is whatever isn't one of those containers. Nothing here knows what a batch means.
"""

from __future__ import annotations

import copyreg
import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from fitkit.batch_kinds import kind_of
from fitkit.tensors import is_dense

Given = TypeVar("Given")


def is_named_tuple(tree: object) -> bool:
    """Whether `tree` is an instance of a named tuple."""
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floating-point or complex numbers: NumPy's `inexact`."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_container(tree: object) -> bool:
    """Whether `tree` has children, rather than being a leaf."""
    if isinstance(tree, torch.Tensor):
        return False  # what most leaves are; the questions below take longer
    return isinstance(tree, (tuple, list, Mapping)) or _is_record(tree)


def has_items(tree: Any) -> bool:
    """Whether `tree` is read as a dict: a mapping, or another object with its method."""
    # a mapping first: torch.compile doesn't trace `callable` of a dict's method
    return isinstance(tree, Mapping) or callable(getattr(tree, "items", None))


def _is_record(tree: object) -> bool:
    """Whether `tree` is an instance of a dataclass, and not the class."""
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` applied to each leaf; containers keep their types (`rebuilt`)."""
    if not is_container(tree):
        return function(tree)
    return rebuilt(tree, [map_leaves(function, child) for child in children(tree)])


def children(tree: Any) -> list[Any]:
    """Return what a container holds, in order: a mapping's values, items, or a dataclass's
    fields.
    """
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, (tuple, list)):
        return list(tree)
    return [getattr(tree, name) for name in _fields_in(tree)]


def places(tree: Any) -> list[str]:
    """Where each of a container's `children` is, as Python would write it (`['image']`, `[0]`)."""
    if isinstance(tree, Mapping):
        return [f"[{key!r}]" for key in tree]
    if isinstance(tree, (tuple, list)):
        return [f"[{index}]" for index in range(len(tree))]
    return [f".{name}" for name in _fields_in(tree)]


def _fields_in(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]


def rebuilt(tree: Any, values: list[Any]) -> Any:
    """Return a container like `tree` with other children, made without its class's constructor.

    A constructor may take other arguments, check them, or move them. Attributes stay as they are;
    one that is also the entry of its name is replaced with it. What can't be rebuilt becomes a
    plain dict, list or tuple; a dataclass is returned as it is.

    Args:
        values: as many as `children(tree)`, in that order.
    """
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(values)
    if kind is dict:
        return dict(zip(tree, values, strict=True))
    try:
        return _made_like(tree, values)
    except Exception:  # a class of the user's may raise anything
        if isinstance(tree, Mapping):
            return dict(zip(tree, values, strict=True))
        return next((base(values) for base in (tuple, list) if isinstance(tree, base)), tree)


_IN_C = types.BuiltinFunctionType
"""What `__new__` is in a class that isn't written in Python, which its subclasses need."""


def _made_like(tree: Any, values: list[Any]) -> Any:
    kind: Any = type(tree)
    pairs = list(zip(tree, values, strict=True)) if isinstance(tree, Mapping) else []
    attributes = _attributes(tree)
    if isinstance(tree, Mapping) and not isinstance(tree, (dict, UserDict)):
        made = kind(pairs)  # only its constructor knows where it keeps them
        if list(made) != list(tree):
            raise TypeError(f"{kind.__name__} takes no pairs")
        attributes = {n: value for n, value in attributes.items() if n not in _attributes(made)}
    else:
        base = next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), _IN_C))
        made = base.__new__(kind, values) if isinstance(tree, tuple) else base.__new__(kind)
    if isinstance(tree, list):
        list.extend(made, values)
    elif isinstance(tree, dict):
        put = OrderedDict.__setitem__ if isinstance(tree, OrderedDict) else dict.__setitem__
        for key, value in pairs:
            put(made, key, value)
        if isinstance(tree, defaultdict):
            made.default_factory = tree.default_factory
    elif isinstance(tree, UserDict):
        attributes["data"] = dict(pairs)
    elif not isinstance(tree, (tuple, Mapping)):
        attributes.update(zip(_fields_in(tree), values, strict=True))
    for key, value in pairs:
        if key in attributes and attributes[key] is tree[key]:
            attributes[key] = value
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def _attributes(tree: Any) -> dict[str, Any]:
    """All attributes of an object, those in slots too."""
    # As pickle finds them, with private names spelled out.
    slots = copyreg._slotnames(type(tree))  # type: ignore[attr-defined]
    found = {name: getattr(tree, name) for name in slots if hasattr(tree, name)}
    return {**found, **getattr(tree, "__dict__", {})}


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of `tree`, depth first."""
    for _, leaf in leaves_with_paths(tree):
        yield leaf


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the leaves that are tensors, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def copied(tree: Given) -> Given:
    """Return a tree with copies of its tensors, without gradients. Other leaves stay."""
    copies: Given = map_leaves(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree
    )
    return copies


def cloned(tree: Given) -> Given:
    """Return a tree with copies of its tensors, through which gradients flow. Other leaves stay."""
    clones: Given = map_leaves(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree
    )
    return clones


def kept(tree: Any) -> Any:
    """Return a tree that may be kept for longer than the batch that it comes from.

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
    """Return the memory of the numbers in a tree's tensors. A tensor that occurs twice counts
    twice.
    """
    return sum(tensor.nbytes for tensor in tensors(tree))


def leaves_with_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves with the way to each, as Python would write it (`['image'][0]`)."""
    if not is_container(tree):
        yield path, tree
        return
    for place, child in zip(places(tree), children(tree), strict=True):
        yield from leaves_with_paths(child, path + place)


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
    if len(trees) > 1 and len({isinstance(tree, torch.Tensor) for tree in trees}) > 1:
        kinds = sorted({type(tree).__name__ for tree in trees})
        raise ValueError(f"batches have outputs of unlike types: {', '.join(kinds)}")
    if isinstance(first, torch.Tensor) and is_dense(first):
        # Copy even a single one: a net may return its input, or a parameter.
        return torch.cat([tensor if tensor.ndim else tensor.reshape(1) for tensor in trees])
    if (kind := kind_of(first)) is not None:
        return kind.join(trees)
    if isinstance(first, Mapping):
        if any(list(tree) != list(first) for tree in trees):
            raise ValueError(f"batches have different keys: {list(first)} and others")
        return {key: concatenate([tree[key] for tree in trees], samples) for key in first}
    if isinstance(first, list) and are_of_samples(trees, samples):
        return [entry for tree in trees for entry in tree]
    if isinstance(first, (tuple, list)):
        columns = zip(*trees, strict=True)
        return rebuilt(first, [concatenate(list(items), samples) for items in columns])
    if _is_record(first):
        return {
            name: concatenate([getattr(tree, name) for tree in trees], samples)
            for name in _fields_in(first)
        }
    return list(trees)


def are_of_samples(lists: list[list[Any]], samples: list[int] | None) -> bool:
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
