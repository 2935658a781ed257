"""Checks of a file's HDF5 structure, before any of its data is read.

HDF5 can say that a dataset's numbers are in another file, in `/etc/passwd`, computed, packed, or a
billion times as large as the file. Plain h5py follows all of these. Here only hard links lead to
datasets of plain numbers that lie in the file as they are. This is the one place that opens
datasets, and each is looked at by h5py's low-level functions: the high-level ones follow links.

Every function raises ValueError with the reason for a refusal.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from h5py.h5d import DatasetID
    from h5py.h5g import GroupID


def open_group(parent: GroupID, name: str, count: int) -> GroupID:
    """The group `name` of `parent`, which has exactly `count` members."""
    from h5py import h5g

    group = _open_linked(parent, name)
    if not isinstance(group, h5g.GroupID):
        raise ValueError(f"{name!r} isn't a group")
    check_count(group, name, count)
    return group


def check_count(group: GroupID, name: str, count: int) -> None:
    """Refuse a group with more or fewer members than `count`."""
    found = group.get_num_objs()
    if found != count:
        raise ValueError(f"the group {name!r} has {found} members instead of {count}")


def open_dataset(parent: GroupID, name: str) -> DatasetID:
    """The dataset `name` of `parent`, whose numbers lie in one piece in this file."""
    from h5py import h5d

    dataset = _open_linked(parent, name)
    if not isinstance(dataset, h5d.DatasetID):
        raise ValueError(f"{name!r} isn't a dataset")
    # The layout comes first: asking a virtual dataset for its shape may open other files.
    properties = dataset.get_create_plist()
    if properties.get_layout() == h5d.VIRTUAL:
        raise ValueError(f"{name!r} is a virtual dataset, whose numbers are in other files")
    if properties.get_external_count():
        raise ValueError(f"{name!r} has external storage: its numbers are in other files")
    if properties.get_nfilters():
        raise ValueError(f"{name!r} is compressed or filtered, which fitkit never writes")
    if properties.get_layout() != h5d.CONTIGUOUS:
        raise ValueError(f"{name!r} isn't stored in one piece")
    return dataset


def check_numbers(
    dataset: DatasetID,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...] | None,
    file_bytes: int,
) -> tuple[int, ...]:
    """Refuse a dataset of another type or shape, or of a size that the file can't have.

    Args:
        shape: what is expected; None takes any vector.
        file_bytes: the size of the whole file.

    Returns:
        The dataset's shape.
    """
    from h5py import h5s, h5t

    # equal() refuses strings, references, compounds and enumerations as well as odd floats.
    if not dataset.get_type().equal(h5t.py_create(dtype)):
        raise ValueError(f"{name!r} isn't of type {dtype.name}, as its document says")
    space = dataset.get_space()
    if space.get_simple_extent_type() not in (h5s.SCALAR, h5s.SIMPLE):
        raise ValueError(f"{name!r} has no shape")
    found = tuple(space.shape)
    if shape is None and len(found) != 1:
        raise ValueError(f"{name!r} has {len(found)} dimensions instead of one")
    if shape is not None and found != shape:
        raise ValueError(f"{name!r} has the shape {found}, and its document says {shape}")
    _check_storage(dataset, name, math.prod(found) * dtype.itemsize, file_bytes)
    return found


def _check_storage(dataset: DatasetID, name: str, size_bytes: int, file_bytes: int) -> None:
    if size_bytes == 0:
        return
    stored = dataset.get_storage_size()
    if stored != size_bytes:
        raise ValueError(f"{name!r} declares {size_bytes} bytes and the file holds {stored} of it")
    offset = dataset.get_offset()
    if offset is None or offset + size_bytes > file_bytes:
        raise ValueError(f"{name!r} declares {size_bytes} bytes, more than the file has")


def _open_linked(parent: GroupID, name: str) -> Any:
    from h5py import h5a, h5l, h5o

    encoded = name.encode("ascii")
    if not parent.links.exists(encoded):
        raise ValueError(f"{name!r} is missing")
    kind = parent.links.get_info(encoded).type
    if kind == h5l.TYPE_EXTERNAL:
        raise ValueError(f"{name!r} is an external link, which leads to another file")
    if kind != h5l.TYPE_HARD:
        raise ValueError(f"{name!r} is a soft link")
    found = h5o.open(parent, encoded)
    if h5a.get_num_attrs(found):
        raise ValueError(f"{name!r} has attributes, which fitkit never writes")
    return found
