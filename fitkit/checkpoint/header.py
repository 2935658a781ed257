"""The first 512 bytes of fitkit's files: what it is, its size, its document's place, its digest.

They lie in HDF5's user block, which libhdf5 skips. A reader needs nothing else to find all that is
in the file. So libhdf5 never reads one: on damaged files it crashes or loops for ever (4 in 3,000
random changes), and silently reads changed numbers.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import xxhash

from fitkit.checkpoint import remote
from fitkit.checkpoint.arrays import FileState, state_of
from fitkit.checkpoint.remote import is_url
from fitkit.errors import CheckpointError

HEADER_SIZE = 512
FORMAT_VERSION = 1

_MAGIC = b"fitkit file "
_VERSION = re.compile(rb"fitkit file ([1-9][0-9]{0,8})\n")
_HEADER = re.compile(
    rb"fitkit file 1\nsize ([0-9]{20})\ndocument ([0-9]{20}) ([0-9]{20})\n"
    rb"xxh3-128 ([0-9a-f]{32})\n\0*"
)
#: What stands in a digest's place while it is computed.
NO_DIGEST = "0" * 32
# How files began that were written before the first release.
_FORMER_MAGIC = (b"fitkit container ", b"fitkit file 1\nbody ")
_BLOCK_BYTES = 1 << 20
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class Span(NamedTuple):
    """A part of a file: its first byte, and the number of its bytes."""

    offset: int
    length: int


@dataclass(frozen=True)
class Verified:
    """An open file whose digest is right.

    Attributes:
        file: the file, unbuffered. Whatever takes its name meanwhile, this is what was checked.
        digest: the digest that its header states, in hexadecimal digits.
        document: where its document is, by its header.
        state: its `state_of` before it was checked.
    """

    file: BinaryIO
    digest: str
    document: Span
    state: FileState


def digest_of(file: BinaryIO, start: int, before: bytes = b"") -> str:
    """Return the XXH3-128, in hexadecimal digits, of `before` and of what a file has from `start`
    on.
    """
    digest = xxhash.xxh3_128(before)
    block = memoryview(bytearray(_BLOCK_BYTES))
    file.seek(start)
    while count := file.readinto(block):  # type: ignore[attr-defined]
        digest.update(block[:count])
    return digest.hexdigest()


def seal(file: BinaryIO, document: Span) -> None:
    """Write the header of a file that is complete but for its first 512 bytes.

    The digest is of what is read back from the file: whatever changed an array while it was
    written, the two agree.

    Args:
        file: open to read and to write.
        document: where its document is.
    """
    size_bytes = file.seek(0, os.SEEK_END)
    digest = digest_of(file, HEADER_SIZE, _header(size_bytes, document, NO_DIGEST))
    file.seek(0)
    file.write(_header(size_bytes, document, digest))


def _header(size_bytes: int, document: Span, digest: str) -> bytes:
    lines = (
        f"fitkit file {FORMAT_VERSION}\nsize {size_bytes:020d}\n"
        f"document {document.offset:020d} {document.length:020d}\nxxh3-128 {digest}\n"
    )
    return lines.encode("ascii").ljust(HEADER_SIZE, b"\0")


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Return an ordinary file, open to read, without a buffer; of a URL's, a private copy.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it can't be read, or is a pipe or another thing than a file.
    """
    name = os.fspath(path)
    if is_url(path):
        with remote.urls.downloaded(str(path)) as local:
            return open(local, "rb", buffering=0)
    try:
        # Before opening: opening a pipe would wait for ever.
        if stat.S_ISREG(os.stat(path).st_mode):
            return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{name} can't be read: {error.strerror or error}. Check the path and its rights."
        ) from error
    raise CheckpointError(f"{name} can't be read: it isn't a file. Give the path of one.")


@contextlib.contextmanager
def open_verified(path: str | os.PathLike[str]) -> Iterator[Verified]:
    """Open the file at `path`, check all of its bytes, and close it when the block ends.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it can't be read, isn't ours, is of a newer fitkit, or was damaged.
    """
    name = os.fspath(path)
    with open_file(path) as file:
        with unreadable(name):
            verified = _verify(name, file)
        yield verified


def _verify(name: str, file: BinaryIO) -> Verified:
    header = file.read(HEADER_SIZE)
    if header.startswith(_FORMER_MAGIC):
        raise former(name)
    if not header.startswith(_MAGIC):
        raise CheckpointError(_foreign(name, header, file.read(len(_HDF5_SIGNATURE))))
    found = _VERSION.match(header)
    version = int(found[1]) if found else 0
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{name} can't be read: its format is version {version}, and this fitkit "
            f"reads versions up to {FORMAT_VERSION}. Upgrade fitkit."
        )
    fields = _HEADER.fullmatch(header)
    if len(header) < HEADER_SIZE or fields is None:
        raise damaged(name, "its header is incomplete or was changed")
    size_bytes, document = int(fields[1]), Span(int(fields[2]), int(fields[3]))
    state = state_of(file)
    there = state.size_bytes
    if there < size_bytes:
        raise damaged(name, f"only {there} of its {size_bytes} bytes are there")
    if there > size_bytes:
        raise damaged(name, f"it has {there - size_bytes} bytes too many")
    digest = fields[4].decode("ascii")
    if digest_of(file, HEADER_SIZE, _header(size_bytes, document, NO_DIGEST)) != digest:
        raise damaged(name, "its content doesn't match its digest, so it was changed")
    return Verified(file, digest, document, state)


def former(name: str) -> CheckpointError:
    """Return the error for a file in a format that was left before the first release."""
    return CheckpointError(
        f"{name} can't be read: it was made by a version of fitkit before 0.1. Save it again with "
        "this one."
    )


def damaged(name: str, what: str) -> CheckpointError:
    """Return the error for a file of fitkit's that was changed after it was written."""
    return CheckpointError(
        f"{name} is damaged: {what}. Nothing was loaded; use another copy or an earlier file.",
        code="FK052",
    )


@contextlib.contextmanager
def unreadable(name: str) -> Iterator[None]:
    """Turn errors while a checked file's arrays are read into CheckpointErrors with its name."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(
            f"{name} is damaged or was changed: it {error}. Use another copy or an earlier file."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{name} can't be read: {error.strerror or error}. Use another copy."
        ) from error


def _foreign(name: str, start: bytes, next_bytes: bytes) -> str:
    """Return the message for a file that doesn't start as ours do: what it seems to be instead."""
    if not start:
        return f"{name} is empty: nothing was ever written to it whole. Use another file."
    if start.startswith(_HDF5_SIGNATURE):
        return (
            f"{name} is an HDF5 file that fitkit didn't write. Read it with h5py, and give its "
            "arrays to the module's load_state_dict. Keras's own: model.net.load_weights(path)."
        )
    if next_bytes == _HDF5_SIGNATURE:
        return (
            f"{name} is an HDF5 file without fitkit's header: it was never finished, was damaged, "
            "or isn't fitkit's. Use another file."
        )
    if start.startswith(b"PK\x03\x04") or re.match(rb"\x80[\x02-\x05]", start):
        return (
            f"{name} is a zip archive or a pickle, as torch.save writes, not a file of fitkit's. "
            "Such files can run code when they are read; where you trust it, give what "
            "torch.load(path, weights_only=True) returns to the module's load_state_dict."
        )
    return f"{name} isn't a file that fitkit wrote, or its first bytes are damaged. Use another."
