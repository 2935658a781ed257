"""The first 512 bytes of a file of ours: what it is, how long it is, and its digest.

They lie in HDF5's user block, which libhdf5 skips. All of a file is checked against them in plain
Python before libhdf5 sees a byte, because libhdf5 crashes or loops for ever on damaged files
(4 in 3,000 random changes), and reads changed numbers without a word.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from fitkit.checkpoint.body_writer import BodyWriter
from fitkit.checkpoint.digest import blocks_digest, plain_digest, sha256, sums
from fitkit.checkpoint.file_parts import state_of
from fitkit.errors import CheckpointError

HEADER_SIZE = 512
FORMAT_VERSION = 3

_MAGIC = b"fitkit container "
_VERSION = re.compile(rb"fitkit container ([1-9][0-9]{0,8})\n")
_HEADER = re.compile(
    rb"fitkit container ([1-9][0-9]{0,8})\nbody ([0-9]{20})\n([a-z0-9-]+) ([0-9a-f]{64})\n\0*",
    re.DOTALL,
)
# What the third line is called: version 1 hashes the body in one piece, the others in blocks.
_DIGESTS = {1: b"sha256", 2: b"blocks-sha256", 3: b"blocks-sums"}
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True)
class Verified:
    """An open file whose digest is right.

    Attributes:
        file: the file, unbuffered. Whatever takes its name meanwhile, this is what was checked.
        version: the version of its format.
        digest: the digest that its header states, in hexadecimal digits.
        size_bytes: the size of all of it.
        state: its `state_of` before it was checked.
    """

    file: BinaryIO
    version: int
    digest: str
    size_bytes: int
    state: tuple[int, int]


def seal(file: BinaryIO, body: BodyWriter | None = None) -> None:
    """Write the header of a file whose body (all after the first 512 bytes) is complete.

    Args:
        file: open to read and to write.
        body: what is still writing the body.
    """
    file.flush()
    end = file.seek(0, os.SEEK_END)
    digest = blocks_digest(file, HEADER_SIZE, end) if body is None else body.finish(end)
    hexadecimal = digest.encode("ascii")
    fields = (FORMAT_VERSION, end - HEADER_SIZE, _DIGESTS[FORMAT_VERSION], hexadecimal)
    file.seek(0)
    file.write((b"fitkit container %d\nbody %020d\n%s %s\n" % fields).ljust(HEADER_SIZE, b"\0"))


@contextlib.contextmanager
def open_verified(path: str | os.PathLike[str]) -> Iterator[Verified]:
    """Open the file at `path`, check all of its bytes, and close it when the block ends.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it can't be read, isn't ours, is of a newer fitkit, or was damaged.
    """
    name = os.fspath(path)
    with contextlib.ExitStack() as stack:
        try:
            # Before opening: opening a pipe would wait for ever.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise CheckpointError(
                    f"{name} can't be read: it isn't a file. Give the path of one."
                )
            verified = _verify(name, stack.enter_context(open(path, "rb", buffering=0)))
        except (FileNotFoundError, CheckpointError):
            raise
        except OSError as error:
            raise CheckpointError(
                f"{name} can't be read: {error.strerror or error}. Check the path and its rights."
            ) from error
        yield verified


def _verify(name: str, file: BinaryIO) -> Verified:
    header = file.read(HEADER_SIZE)
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
    if len(header) < HEADER_SIZE or fields is None or fields[3] != _DIGESTS[version]:
        raise damaged(name, "its header is incomplete or was changed")
    size_bytes = HEADER_SIZE + int(fields[2])
    state = state_of(file)
    there = state[0]
    if there < size_bytes:
        raise damaged(name, f"only {there} of its {size_bytes} bytes are there")
    if there > size_bytes:
        raise damaged(name, f"it has {there - size_bytes} bytes too many")
    digest = fields[4].decode("ascii")
    if _digest(file, version, size_bytes) != digest:
        raise damaged(name, "its content doesn't match its digest, so it was changed")
    return Verified(file, version, digest, size_bytes, state)


def _digest(file: BinaryIO, version: int, size_bytes: int) -> str:
    if version == 1:
        return plain_digest(file, HEADER_SIZE)
    checksum = sha256 if version == 2 else sums
    return blocks_digest(file, HEADER_SIZE, size_bytes, checksum)


def damaged(name: str, what: str) -> CheckpointError:
    """The error for a file of ours that isn't as it was written."""
    return CheckpointError(
        f"{name} is damaged: {what}. Nothing was loaded; use another copy or an earlier file."
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
    """The message for a file that doesn't start as ours do: what it seems to be instead."""
    if not start:
        return f"{name} is empty: nothing was ever written to it whole. Use another file."
    if start.startswith(_HDF5_SIGNATURE):
        return (
            f"{name} is an HDF5 file that fitkit didn't write. Read it with h5py, and give its "
            "arrays to the module's load_state_dict."
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
