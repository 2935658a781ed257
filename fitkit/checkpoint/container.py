"""One HDF5 file with a JSON document and numbered arrays: the form of all our HDF5 files.

```
bytes 0 to 511    header: version, length, digest of all that follows (header.py)
/document         the JSON document, as bytes
/arrays/0 …       the arrays, each in one piece, without filters (arrays.py)
```

`docs/checkpoint-format.md` has the details. Nothing in such a file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from fitkit.arguments import describe
from fitkit.checkpoint.arrays import (
    Described,
    StoredArrays,
    describe_tensor,
    file_dtype,
    read_description,
    storable,
    stored_shape,
    write_array,
)
from fitkit.checkpoint.atomic import HeldInterrupts, replacing
from fitkit.checkpoint.header import HEADER_SIZE, Verified, open_verified, seal, unreadable
from fitkit.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from h5py.h5d import DatasetID
    from h5py.h5g import GroupID


# One form of HDF5, whatever the installed library's default is; readable since HDF5 1.8 (2008).
_LIBRARY_VERSIONS = ("v108", "v108")
_BYTE = np.dtype("u1")
# Larger arrays begin at multiples of a cache line, as a processor likes to read them.
_ALIGNED_BYTES = 1024
_ALIGNMENT = 64


def write_container(
    path: str | os.PathLike[str],
    document: dict[str, Any],
    arrays: Sequence[torch.Tensor | np.ndarray[Any, Any]],
) -> None:
    """Write a file with `document` and `arrays`, whole or not at all.

    Everything is checked before the file is begun. Arrays go to the disk one by one; those of
    another device or layout are copied one by one too. Ctrl-C takes effect between two arrays.

    Args:
        path: the file to create or to replace.
        document: None, booleans, numbers, strings, and lists and dicts of these; says which
            number has which meaning.
        arrays: dense tensors or arrays of any dtype that `arrays.py` lists.

    Raises:
        ArgumentTypeError, ConfigurationError: something in it can't be written to a file.
        CheckpointError: the file can't be written. What was at `path` is still there.
    """
    tensors = []
    for index, array in enumerate(arrays):
        try:
            tensors.append(storable(array))
        except ConfigurationError as error:
            raise type(error)(f"Array {index}: {error}") from None
    text = encode_document(document, tensors)
    size_bytes = len(text) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with HeldInterrupts() as interrupts, replacing(path, size_bytes) as file:
        offsets = _lay_out(file, text, tensors)
        for index, offset in offsets.items():
            write_array(file, offset, tensors[index])
            interrupts.deliver()
        seal(file)
        interrupts.deliver()


def _lay_out(file: BinaryIO, text: bytes, tensors: list[torch.Tensor]) -> dict[int, int]:
    """Write a file that lacks nothing but the arrays' numbers; says where those belong.

    libhdf5 only makes the structure. The numbers are written past it, one array after the other.

    Returns:
        The place in the file of each array that has any numbers.
    """
    import h5py
    from h5py import h5d, h5p, h5s, h5t

    # Datasets whose place is known at once, and which nothing fills.
    in_one_piece = h5p.create(h5p.DATASET_CREATE)
    in_one_piece.set_layout(h5d.CONTIGUOUS)
    in_one_piece.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    in_one_piece.set_fill_time(h5d.FILL_TIME_NEVER)
    in_one_piece.set_obj_track_times(False)  # the same content shall give the same bytes

    def create(
        group: GroupID, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> DatasetID:
        # h5py's create_dataset does the same, but takes a third of a save of many small tensors.
        space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
        return h5d.create(group, name.encode("ascii"), h5t.py_create(dtype), space, in_one_piece)

    # Through the Python file, errors come back as Python raised them, and libhdf5 lets go of the
    # file; given a path, it can fail to close on a full disk, and keeps file and space.
    with h5py.File(
        file,
        "w",
        userblock_size=HEADER_SIZE,
        libver=_LIBRARY_VERSIONS,
        alignment_threshold=_ALIGNED_BYTES,
        alignment_interval=_ALIGNMENT,
    ) as hdf5:
        document = create(hdf5.id, "document", _BYTE, (len(text),))
        document.write(h5s.ALL, h5s.ALL, np.frombuffer(text, _BYTE))
        arrays = hdf5.create_group("arrays").id
        offsets = {}
        for index, tensor in enumerate(tensors):
            shape = stored_shape(tensor.dtype, tuple(tensor.shape))
            dataset = create(arrays, str(index), file_dtype(tensor.dtype), shape)
            if tensor.numel():
                offsets[index] = dataset.get_offset()
    return offsets


class Reader:
    """A file whose bytes, structure, shapes and dtypes are checked, and its arrays one by one.

    Attributes:
        document: what was given to `write_container`.
        digest: the digest of the file's content, in hexadecimal digits.
    """

    def __init__(self, path: str, verified: Verified) -> None:
        self.digest: str = verified.digest
        self._path = path
        self._arrays = StoredArrays(verified.file, verified.state)
        self.document: dict[str, Any]
        with refusals(path):
            self.document, self._described, self._offsets = _checked_structure(verified)

    def __len__(self) -> int:
        return len(self._described)

    def place_of(self, number: int) -> int:
        """The place of what a state gives a number: the number itself.

        Raises:
            ValueError: there is none.
        """
        if not self.has(number):
            raise ValueError("its state names tensors that it doesn't have")
        return number

    def has(self, place: object) -> bool:
        """Whether there is an array of that number."""
        return type(place) is int and 0 <= place < len(self)

    def describe(self, place: int) -> Described:
        """The shape and dtype of an array; takes no memory for its numbers."""
        return self._described[place]

    def read(self, place: int) -> torch.Tensor:
        """An array as a new tensor on the CPU.

        Raises:
            CheckpointError: it can't be read.
        """
        with unreadable(self._path):
            return self._arrays.read(self._offsets[place], *self.describe(place))

    def read_into(self, place: int, tensor: torch.Tensor) -> None:
        """Copy an array into `tensor`, which has its shape and dtype, on any device.

        Raises:
            ValueError: `tensor` has another shape or dtype.
            CheckpointError: the array can't be read; `tensor` may have some of its numbers.
        """
        shape, dtype = self.describe(place)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"array {place} has shape {shape} and {dtype}, the tensor "
                f"{tuple(tensor.shape)} and {tensor.dtype}"
            )
        with unreadable(self._path):
            self._arrays.read_into(self._offsets[place], tensor)


@contextlib.contextmanager
def read_container(path: str | os.PathLike[str]) -> Iterator[Reader]:
    """Open a file after checking all of it, and close it when the block ends.

    The digest, the structure and what the document says of each array are checked here, before
    memory is taken for any array.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: fitkit didn't write it, it is damaged, or its content is impossible.
    """
    with open_verified(path) as verified:
        yield Reader(os.fspath(path), verified)


@contextlib.contextmanager
def refusals(name: str) -> Iterator[None]:
    """Turn what our checks and h5py raise into one kind of error, with the file's name."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except (ValueError, OSError, RuntimeError, KeyError, TypeError) as error:
        ours = isinstance(error, ValueError)
        reason = str(error) if ours else f"libhdf5 can't read it ({error})"
        raise CheckpointError(
            f"{name} is refused: {reason}. Its digest is right, so this isn't damage: another "
            "program, or a newer fitkit or torch, made it. Nothing was loaded."
        ) from error


def _checked_structure(verified: Verified) -> tuple[dict[str, Any], list[Described], list[int]]:
    """The document, what it says of each array, and where each one's numbers begin."""
    import h5py
    from h5py import h5a, h5g, h5s

    # libhdf5 reads the very file that was checked, by our open file and not by its path.
    with h5py.File(verified.file, "r") as hdf5:
        if hdf5.userblock_size != HEADER_SIZE:
            raise ValueError("its HDF5 part doesn't begin after the header")
        root = h5g.open(hdf5.id, b"/")
        _check_count(root, "/", 2)
        if h5a.get_num_attrs(root):
            raise ValueError("'/' has attributes, which fitkit never writes")
        dataset = _open_numbers(root, "document", _BYTE, None, verified.state.size_bytes)
        (length,) = dataset.shape
        if length > LARGEST_DOCUMENT:
            raise ValueError(
                f"its document takes {length / 1e6:.1f} MB, more than any that fitkit writes"
            )
        text = np.empty(length, _BYTE)
        if length:
            dataset.read(h5s.ALL, h5s.ALL, text)
        document, described = decode_document(text.tobytes())
        total = length + sum(
            math.prod(stored_shape(dtype, shape)) * file_dtype(dtype).itemsize
            for shape, dtype in described
        )
        if total > verified.state.size_bytes:
            raise ValueError(f"its arrays declare {total} bytes, more than the file has")
        arrays = _open_linked(root, "arrays")
        if not isinstance(arrays, h5g.GroupID):
            raise ValueError("'arrays' isn't a group")
        _check_count(arrays, "arrays", len(described))
        offsets = []
        for index, (shape, dtype) in enumerate(described):
            stored = file_dtype(dtype), stored_shape(dtype, shape)
            dataset = _open_numbers(arrays, str(index), *stored, verified.state.size_bytes)
            offsets.append(int(dataset.get_offset() or 0))
    return document, described, offsets


def _check_count(group: GroupID, name: str, count: int) -> None:
    found = group.get_num_objs()
    if found != count:
        raise ValueError(f"the group {name!r} has {found} members instead of {count}")


def _open_linked(parent: GroupID, name: str) -> Any:
    """What has that name in a group, in this very file and without attributes."""
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


def _open_numbers(
    parent: GroupID,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...] | None,
    file_bytes: int,
) -> DatasetID:
    """A dataset whose numbers lie in one piece in this file, of the type and shape expected.

    Args:
        shape: what is expected; None takes any vector.
        file_bytes: the size of the whole file.
    """
    from h5py import h5d, h5s, h5t

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
    size_bytes = math.prod(found) * dtype.itemsize
    if size_bytes:
        stored = dataset.get_storage_size()
        if stored != size_bytes:
            raise ValueError(
                f"{name!r} declares {size_bytes} bytes and the file holds {stored} of it"
            )
        offset = dataset.get_offset()
        if offset is None or offset + size_bytes > file_bytes:
            raise ValueError(f"{name!r} declares {size_bytes} bytes, more than the file has")
    return dataset


# Parsed JSON takes some 20 times its size in memory: 16 MiB keep that below 500 MB, and hold the
# names of more than 200,000 tensors.
LARGEST_DOCUMENT = 16 << 20


def check_plain_data(value: object, place: str) -> None:
    """Refuse what JSON wouldn't give back as it is, naming where it stands.

    None, booleans, ints, floats, strings, lists, and dicts with string keys pass. Tuples don't:
    they would come back as lists.
    """
    try:
        _check_plain_data(value, place)
    except RecursionError:
        raise ConfigurationError(f"{place} is nested too deeply, or contains itself.") from None


def _check_plain_data(value: object, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigurationError(
                    f"{place} has the key {describe(key)}, and a file holds only strings as keys. "
                    "Write it as a string."
                )
            _check_plain_data(item, f"{place}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain_data(item, f"{place}[{index}]")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise ConfigurationError(
            f"{place}={describe(value)} can't be written to a file: only pickle could store a "
            f"{type(value).__name__}, and pickles can run code when they are read. Use None, "
            "booleans, numbers, strings, and lists and dicts of these.",
            code="FK057",
        )


def encode_document(document: dict[str, Any], tensors: list[torch.Tensor]) -> bytes:
    """Write the document as JSON, with what `tensors` are.

    Raises:
        ConfigurationError: `document` isn't plain data, or is too large.
    """
    check_plain_data(document, "document")
    arrays = [describe_tensor(tensor) for tensor in tensors]
    # Escaped to ASCII, so that a lone surrogate in a string can be written too.
    whole = {"arrays": arrays, "content": document}
    text = json.dumps(whole, separators=(",", ":")).encode("ascii")
    if len(text) > LARGEST_DOCUMENT:
        raise ConfigurationError(
            f"What is to be saved beside the arrays takes {len(text) / 1e6:.1f} MB as JSON, and "
            f"at most {LARGEST_DOCUMENT / 1e6:.1f} MB can be read again. Store long lists of "
            "numbers as tensors."
        )
    return text


def decode_document(text: bytes) -> tuple[dict[str, Any], list[Described]]:
    """Return the document and what the arrays are.

    Raises:
        ValueError: the document isn't one that `encode_document` could have made.
    """
    try:
        # Of bytes, json would take UTF-16 and UTF-32 too.
        parsed = json.loads(text.decode("ascii"), object_pairs_hook=without_repetition)
    except RecursionError:
        raise ValueError("its document is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its document can't be read ({error})") from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("content"), dict):
        raise ValueError("its document has no content")
    arrays = parsed.get("arrays")
    if not isinstance(arrays, list):
        raise ValueError("its document doesn't describe the arrays")
    described = [read_description(item, f"array {index}") for index, item in enumerate(arrays)]
    return parsed["content"], described


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object that JSON gives by `pairs`; ValueError where a name stands in it twice."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name stands in it twice")
    return mapping
