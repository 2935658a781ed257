"""One HDF5 file with a JSON document and numbered arrays: the form of all our HDF5 files.

```
bytes 0 to 511    header: version, size, the document's place, digest of all (header.py)
/arrays/0 …       the arrays, each in one piece, without filters (arrays.py)
/document         the JSON document, as bytes; says where each array begins
```

libhdf5 writes the structure, for other programs. Our reader goes from the header to the document
and from there to the arrays, so that libhdf5 never sees a foreign byte.
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
from fitkit.checkpoint.header import HEADER_SIZE, Span, Verified, open_verified, seal, unreadable
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

    All but the document's size is checked before the file is begun. Arrays go to the disk one by
    one; those of another device or layout are copied one by one too. Ctrl-C takes effect between
    two arrays.

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
    check_plain_data(document, "document")
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with HeldInterrupts() as interrupts, replacing(path, size_bytes) as file:
        place, offsets = _lay_out(file, document, tensors)
        for offset, tensor in zip(offsets, tensors, strict=True):
            write_array(file, offset, tensor)
            interrupts.deliver()
        seal(file, place)
        interrupts.deliver()


def _lay_out(
    file: BinaryIO, content: dict[str, Any], tensors: list[torch.Tensor]
) -> tuple[Span, list[int]]:
    """Write a file that lacks nothing but the arrays' numbers and the header.

    libhdf5 only makes the structure. The numbers are written past it, one array after the other.

    Returns:
        Where the document is, and where each array begins.
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
        arrays = hdf5.create_group("arrays").id
        offsets = []
        for index, tensor in enumerate(tensors):
            shape = stored_shape(tensor.dtype, tuple(tensor.shape))
            dataset = create(arrays, str(index), file_dtype(tensor.dtype), shape)
            # Without numbers, it has no place.
            offsets.append(dataset.get_offset() if tensor.numel() else 0)
        text = encode_document(content, tensors, offsets)
        document = create(hdf5.id, "document", _BYTE, (len(text),))
        document.write(h5s.ALL, h5s.ALL, np.frombuffer(text, _BYTE))
        place = Span(document.get_offset(), len(text))
    return place, offsets


class Reader:
    """A file whose bytes, document, shapes and dtypes are checked, and its arrays one by one.

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
            place, size_bytes = verified.document, verified.state.size_bytes
            if place.length > LARGEST_DOCUMENT:
                raise ValueError(
                    f"its document takes {place.length / 1e6:.1f} MB, more than any that fitkit "
                    "writes"
                )
            if place.offset + place.length > size_bytes:
                raise ValueError("its document isn't in the file")
            with unreadable(path):
                text = self._arrays.read(place.offset, (place.length,), torch.uint8)
            found = decode_document(text.numpy().tobytes(), size_bytes)
            self.document, self._described, self._offsets = found

    def __len__(self) -> int:
        return len(self._described)

    def place_of(self, number: int) -> int:
        """Return the place of what a state gives a number: the number itself.

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
        """Return the shape and dtype of an array; takes no memory for its numbers."""
        return self._described[place]

    def read(self, place: int) -> torch.Tensor:
        """Return an array as a new tensor on the CPU.

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

    The digest and what the document says of each array are checked here, before memory is taken
    for any array.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: fitkit didn't write it, it is damaged, or its content is impossible.
    """
    with open_verified(path) as verified:
        yield Reader(os.fspath(path), verified)


@contextlib.contextmanager
def refusals(name: str) -> Iterator[None]:
    """Turn what our checks raise into one kind of error, with the file's name."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(
            f"{name} is refused: {error}. Its digest is right, so this isn't damage: another "
            "program, or a newer fitkit or torch, made it. Nothing was loaded."
        ) from error


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


def encode_document(
    content: dict[str, Any], tensors: list[torch.Tensor], offsets: list[int]
) -> bytes:
    """Write the document as JSON, with what `tensors` are and where each begins.

    Raises:
        ConfigurationError: it is too large.
    """
    arrays = [
        {**describe_tensor(tensor), "offset": offset}
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    # Escaped to ASCII, so that a lone surrogate in a string can be written too.
    whole = {"arrays": arrays, "content": content}
    text = json.dumps(whole, separators=(",", ":")).encode("ascii")
    if len(text) > LARGEST_DOCUMENT:
        raise ConfigurationError(
            f"What is to be saved beside the arrays takes {len(text) / 1e6:.1f} MB as JSON, and "
            f"at most {LARGEST_DOCUMENT / 1e6:.1f} MB can be read again. Store long lists of "
            "numbers as tensors."
        )
    return text


def decode_document(
    text: bytes, size_bytes: int
) -> tuple[dict[str, Any], list[Described], list[int]]:
    """Return the content, what the arrays are, and where each begins.

    Args:
        size_bytes: that of the whole file, in which each array has to lie. Together they have to
            be no larger.

    Raises:
        ValueError: no file of that size could have this document.
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
    offsets = [item.get("offset") for item in arrays]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in described]
    if len(text) + sum(sizes) > size_bytes:
        raise ValueError(f"its arrays declare {sum(sizes)} bytes, more than the file has")
    for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if type(offset) is not int or not 0 <= offset <= size_bytes - size:
            raise ValueError(f"array {index} isn't in the file")
    return parsed["content"], described, offsets


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object that JSON gives by `pairs`; ValueError where a name stands in it twice."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name stands in it twice")
    return mapping
