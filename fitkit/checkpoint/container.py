"""One HDF5 file with a JSON document and numbered arrays: the form of all our HDF5 files.

```
bytes 0 to 511    header: version, length, SHA-256 of all that follows (header.py)
/document         the JSON document, as bytes (document.py)
/arrays/0 …       the arrays, each in one piece, without filters (dtypes.py)
```

`docs/checkpoint-format.md` has the details. Nothing in such a file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from fitkit.checkpoint.atomic import replacing
from fitkit.checkpoint.document import (
    LARGEST_DOCUMENT,
    ArrayDescription,
    decode_document,
    encode_document,
)
from fitkit.checkpoint.dtypes import empty_stored, file_dtype, from_stored, storable, to_stored
from fitkit.checkpoint.header import HEADER_SIZE, Verified, seal, verify
from fitkit.checkpoint.interrupts import HeldInterrupts
from fitkit.checkpoint.structure import check_count, check_numbers, open_dataset, open_group
from fitkit.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    import h5py
    from h5py.h5d import DatasetID
    from h5py.h5g import GroupID

# One form of HDF5, whatever the installed library's default is; readable since HDF5 1.8 (2008).
_LIBRARY_VERSIONS = ("v108", "v108")
_BYTE = np.dtype("u1")


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
        arrays: dense tensors or arrays of any dtype that `dtypes.py` lists.

    Raises:
        ArgumentTypeError, ConfigurationError: something in it can't be written to a file.
        CheckpointError: the file can't be written. What was at `path` is still there.
    """
    tensors = [_storable(index, array) for index, array in enumerate(arrays)]
    text = encode_document(document, tensors)
    size_bytes = len(text) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with HeldInterrupts() as interrupts, replacing(path, size_bytes) as file:
        _write_body(file, text, tensors, interrupts)
        seal(file)
        interrupts.deliver()


def _storable(index: int, array: object) -> torch.Tensor:
    try:
        return storable(array)
    except ConfigurationError as error:
        raise type(error)(f"Array {index}: {error}") from None


def _write_body(
    file: BinaryIO, text: bytes, tensors: list[torch.Tensor], interrupts: HeldInterrupts
) -> None:
    import h5py

    # Through the Python file, errors come back as Python raised them, and libhdf5 lets go of the
    # file; given a path, it can fail to close on a full disk, and keeps file and space.
    with h5py.File(file, "w", userblock_size=HEADER_SIZE, libver=_LIBRARY_VERSIONS) as hdf5:
        _write_numbers(hdf5.id, "document", _BYTE, np.frombuffer(text, _BYTE))
        arrays = hdf5.create_group("arrays").id
        for index, tensor in enumerate(tensors):
            _write_numbers(arrays, str(index), file_dtype(tensor.dtype), to_stored(tensor))
            interrupts.deliver()


def _write_numbers(
    group: GroupID, name: str, dtype: np.dtype[Any], numbers: np.ndarray[Any, Any]
) -> None:
    from h5py import h5d, h5s, h5t

    # h5py's create_dataset does the same, but takes a third of a save of many small tensors.
    space = h5s.create_simple(numbers.shape) if numbers.shape else h5s.create(h5s.SCALAR)
    dataset = h5d.create(group, name.encode("ascii"), h5t.py_create(dtype), space)
    if numbers.size:
        dataset.write(h5s.ALL, h5s.ALL, numbers)


class Reader:
    """A file whose bytes, structure, shapes and dtypes are checked, and its arrays one by one.

    Attributes:
        document: what was given to `write_container`.
        digest: the SHA-256 of the file's content, in hexadecimal digits.
    """

    def __init__(
        self,
        path: str,
        digest: str,
        document: dict[str, Any],
        descriptions: list[ArrayDescription],
        datasets: list[DatasetID],
    ) -> None:
        self.document = document
        self.digest = digest
        self._path = path
        self._descriptions = descriptions
        self._datasets = datasets

    def __len__(self) -> int:
        return len(self._descriptions)

    def describe(self, index: int) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of array `index`; takes no memory for its numbers."""
        return self._descriptions[index].shape, self._descriptions[index].dtype

    def read(self, index: int) -> torch.Tensor:
        """Array `index` as a new tensor on the CPU.

        Raises:
            CheckpointError: it can't be read.
        """
        description = self._descriptions[index]
        stored = empty_stored(description.dtype, description.shape)
        with _refusals(self._path):
            if stored.numel():
                self._datasets[index].read(_all(), _all(), stored.numpy())
            return from_stored(stored, description.dtype)

    def read_into(self, index: int, tensor: torch.Tensor) -> None:
        """Copy array `index` into `tensor`, which has its shape, on any device.

        Raises:
            ValueError: `tensor` has another shape or dtype.
            CheckpointError: the array can't be read; `tensor` is as it was.
        """
        shape, dtype = self.describe(index)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"array {index} has shape {shape} and {dtype}, the tensor "
                f"{tuple(tensor.shape)} and {tensor.dtype}"
            )
        values = self.read(index)
        with torch.no_grad():
            tensor.copy_(values)


@contextlib.contextmanager
def read_container(path: str | os.PathLike[str]) -> Iterator[Reader]:
    """Open a file after checking all of it, and close it when the block ends.

    The digest, the structure and what the document says of each array are checked here, before
    memory is taken for any array.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it isn't a file of ours, was damaged, or holds what ours never hold.
    """
    name = os.fspath(path)
    verified = verify(path)
    with contextlib.ExitStack() as stack:
        with _refusals(name):
            hdf5 = stack.enter_context(_open_hdf5(name, verified))
            reader = _checked_reader(name, verified, hdf5)
        yield reader


@contextlib.contextmanager
def _open_hdf5(name: str, verified: Verified) -> Iterator[h5py.File]:
    import h5py

    # Files are never changed once they have their name, so no lock is needed; network file
    # systems often can't lock.
    with h5py.File(name, "r", locking=False) as hdf5:
        # Another process may have put a new file there since the digest was checked.
        if not verified.is_still(os.stat(name)):
            raise CheckpointError(f"{name} was replaced while it was read. Read it again.")
        yield hdf5


def _checked_reader(name: str, verified: Verified, hdf5: h5py.File) -> Reader:
    from h5py import h5g

    if hdf5.userblock_size != HEADER_SIZE:
        raise ValueError("its HDF5 part doesn't begin after the header")
    root = h5g.open(hdf5.id, b"/")
    check_count(root, "/", 2)
    text = _read_document(root, verified.size_bytes)
    document, descriptions = decode_document(text)
    total = len(text) + sum(description.size_bytes for description in descriptions)
    if total > verified.size_bytes:
        raise ValueError(f"its arrays declare {total} bytes, more than the file has")
    arrays = open_group(root, "arrays", len(descriptions))
    datasets = [open_dataset(arrays, str(index)) for index in range(len(descriptions))]
    for index, (dataset, description) in enumerate(zip(datasets, descriptions, strict=True)):
        dtype, shape = file_dtype(description.dtype), description.stored_shape
        check_numbers(dataset, str(index), dtype, shape, verified.size_bytes)
    return Reader(name, verified.digest, document, descriptions, datasets)


def _read_document(root: GroupID, file_bytes: int) -> bytes:
    dataset = open_dataset(root, "document")
    (size_bytes,) = check_numbers(dataset, "document", _BYTE, None, file_bytes)
    if size_bytes > LARGEST_DOCUMENT:
        raise ValueError(
            f"its document takes {size_bytes / 1e6:.1f} MB, more than any that fitkit writes"
        )
    text = np.empty(size_bytes, _BYTE)
    if size_bytes:
        dataset.read(_all(), _all(), text)
    return text.tobytes()


def _all() -> Any:
    from h5py import h5s

    return h5s.ALL


@contextlib.contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn what our checks and h5py raise into one kind of error, with the file's name."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except ValueError as error:
        raise _refused(name, str(error)) from error
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise _refused(name, f"libhdf5 can't read it ({error})") from error


def _refused(name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is refused: {reason}. Its digest is right, so this is no accident: another "
        "program, or a newer fitkit or torch, made it. Nothing was loaded."
    )
