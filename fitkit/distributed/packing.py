"""Python objects as bytes for another rank, and back: what is no tensor when ranks talk.

Whoever unpickles bytes runs what they say. So each message carries a digest that only the ranks of
a run can make (HMAC-SHA256, with the run's key), and it is checked before anything is unpickled.
Numbers of tensors and arrays lie beside the pickle: they run nothing, and need no digest. (Pickle
by itself also writes each tensor as a file of torch's: a millisecond for a small batch.)

A message: the digest, the number of parts, each part's length, the exchange that it belongs to,
the pickle, and the arrays, each at a multiple of 64 bytes. The digest is of all before the arrays.
"""

from __future__ import annotations

import hmac
import io
import pickle
import struct
from typing import Any

import numpy as np
import torch

from fitkit.errors import WorkerError

DIGEST = 32
ALIGNMENT = 64


def pack(value: Any, key: bytes, exchange: str) -> torch.Tensor:
    """A value that can be pickled, as (bytes,) uint8 on the CPU.

    Args:
        key: the run's.
        exchange: which one it is for, and whose value it is.
    """
    buffer = io.BytesIO()
    arrays: list[memoryview] = []
    # A true value keeps an array in the pickle: one whose memory isn't in one piece.
    _Pickler(buffer, 5, buffer_callback=lambda array: _is_taken(array, arrays)).dump(value)
    name, stream = exchange.encode(), buffer.getbuffer()
    lengths = [len(name), len(stream), *map(len, arrays)]
    head = struct.pack(f"<{1 + len(lengths)}Q", len(lengths), *lengths)
    starts = _starts(lengths)
    packed = torch.empty(starts[-1], dtype=torch.uint8)
    memory = packed.numpy().data
    end = DIGEST + len(head) + len(name) + len(stream)
    memory[DIGEST:end] = b"".join((head, name, stream))
    memory[:DIGEST] = hmac.digest(key, memory[DIGEST:end], "sha256")
    for start, array in zip(starts, arrays, strict=False):
        memory[start : start + len(array)] = array
    return packed


def unpack(packed: torch.Tensor, key: bytes, exchange: str, sender: int) -> Any:
    """The value of `pack`'s bytes; what follows them is left alone.

    Args:
        key: the run's.
        exchange: which one the ranks are in here.
        sender: the rank whose message it is, for errors.

    Raises:
        WorkerError: the run's ranks didn't make the message, or not for this exchange. Nothing of
            it has been unpickled then.
    """
    memory = packed.cpu().numpy().data
    lengths, end = _lengths(memory)
    signed = memory[DIGEST:end]
    if not lengths or not hmac.compare_digest(
        hmac.digest(key, signed, "sha256"), bytes(memory[:DIGEST])
    ):
        raise WorkerError(
            f"What came as rank {sender}'s message was refused and not unpickled: its digest "
            "shows that no rank of this run made it, or that it was changed on the way. Another "
            "program may stand between the ranks (or FITKIT_SECRET isn't the same for all). "
            "SECURITY.md says what ranks need of a network.",
            sender,
        )
    stream = end - lengths[1]
    name = bytes(memory[stream - lengths[0] : stream]).decode()
    if name != exchange:
        raise WorkerError(
            f"The ranks are in different exchanges ({exchange} here, {name} on rank {sender}): one "
            "of them makes a call that the others don't, for example under "
            "`if model.is_global_zero:`.",
            sender,
        )
    starts = _starts(lengths)
    arrays = [memory[at : at + n] for at, n in zip(starts, lengths[2:], strict=False)]
    return pickle.loads(memory[stream:end], buffers=arrays)


def _starts(lengths: list[int]) -> list[int]:
    """Where each array begins, and where the last one ends."""
    end = DIGEST + 8 * (1 + len(lengths)) + lengths[0] + lengths[1]
    starts = []
    for length in lengths[2:]:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + length
    return [*starts, end]


def _lengths(memory: memoryview) -> tuple[list[int], int]:
    """The parts' lengths and the pickle's end; no lengths where they don't fit the message."""
    count = struct.unpack_from("<Q", memory, DIGEST)[0] if len(memory) >= DIGEST + 8 else 0
    if not 2 <= count <= (len(memory) - DIGEST - 8) // 8:
        return [], 0
    lengths = list(struct.unpack_from(f"<{count}Q", memory, DIGEST + 8))
    end = DIGEST + 8 * (1 + count) + lengths[0] + lengths[1]
    return (lengths, end) if _starts(lengths)[-1] <= len(memory) else ([], 0)


def _is_taken(array: pickle.PickleBuffer, arrays: list[memoryview]) -> bool:
    try:
        arrays.append(array.raw())
    except BufferError:
        return True
    return False


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if not plain or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
            return NotImplemented
        flat = value.contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor, (flat, value.dtype, tuple(value.shape))


def _tensor(flat: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)
