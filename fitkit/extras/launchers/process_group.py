"""What ranks say to each other by torch's process group. Objects travel with a digest."""

from __future__ import annotations

import hmac
import inspect
import io
import os
import pickle
import secrets
import struct
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fitkit.accelerators import widest_dtype
from fitkit.errors import ConfigurationError, WorkerError, with_code
from fitkit.extras.launchers import script_objects
from fitkit.extras.launchers.script_objects import is_of_script
from fitkit.seams.strategies import Collectives
from fitkit.tensors import bytes_of

TOGETHER = 25 * 2**20
"""Bytes of tensors that are broadcast in one exchange; they are copied for it."""

SECRET = "FITKIT_SECRET"
"""The variable that may hold a text which all ranks share, and nobody else has."""

PASSED_ON = (__file__, inspect.getfile(Collectives))
"""The files whose functions ask for an exchange for others."""

_key = b""
"""By which this process's messages to other ranks are known as the run's own."""


def agree_on_key(store: Store | None, rank: int) -> None:
    """Make the key of a call's messages: of `FITKIT_SECRET` and what rank 0 leaves in the store.

    Only ranks know it where either is theirs alone: the variable, or a store that nobody else can
    read (a file in a folder of the user's own).

    Args:
        store: this call's own part of one; None where torch finds its own.
        rank: of this process.
    """
    global _key
    fresh = b""
    if store is not None:
        if rank == 0:
            store.set("key", secrets.token_hex(32))
        fresh = store.get("key")
    _key = hmac.digest(os.fsencode(os.environ.get(SECRET, "")), fresh, "sha256")


def _padded(packed: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(packed, (0, length - len(packed)))


class ProcessGroup:
    """The collectives of torch's default process group. Objects travel with a digest (`pack`).

    Args:
        device: this rank's device. Objects and numbers go through main memory, unless the group
            carries only what is on the device, as one of the user's making may.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        carried = [entry.split(":")[0] for entry in dist.get_backend_config().split(",")]
        self._device = torch.device("cpu") if "cpu" in carried else device
        self._carries_all = "cpu" in carried
        self._count = 0

    def _next(self, kind: str) -> str:
        """Return the name of the next exchange, the same on all ranks: no message passes for
        another. The function that asks for it is in it, for ranks that have made equally many.
        """
        self._count += 1
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename in PASSED_ON:
            frame = frame.f_back
        asks = "" if frame is None else frame.f_code.co_name
        return f"{kind} {self._count} in {asks} of rank "

    def gather(self, value: Any) -> list[Any]:
        exchange = self._next("gather")
        packed = pack(value, _key, f"{exchange}{self.rank}").to(self._device)
        size = torch.tensor([len(packed)], device=self._device)
        sizes = [torch.empty_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size)
        longest = int(torch.cat(sizes).max())  # the exchange needs equal shapes
        parts = [packed.new_empty(longest) for _ in sizes]
        dist.all_gather(parts, _padded(packed, longest))
        return [unpack(part, _key, f"{exchange}{r}", r) for r, part in enumerate(parts)]

    def collect(self, value: Any) -> list[Any] | None:
        exchange = self._next("collect")
        packed = pack(value, _key, f"{exchange}{self.rank}").to(self._device)
        longest = torch.tensor([len(packed)], device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        packed = _padded(packed, int(longest))
        if self.rank:
            dist.gather(packed, dst=0)
            return None
        parts = [torch.empty_like(packed) for _ in range(self.world_size)]
        dist.gather(packed, parts, dst=0)
        return [unpack(part, _key, f"{exchange}{r}", r) for r, part in enumerate(parts)]

    def broadcast(self, value: Any) -> Any:
        exchange = self._next("broadcast") + "0"
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self.rank == 0:
            packed = pack(value, _key, exchange).to(self._device)
            size.fill_(len(packed))
        dist.broadcast(size, src=0)
        if self.rank:
            packed = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(packed, src=0)
        return unpack(packed, _key, exchange, 0) if self.rank else value

    def scatter(self, values: list[Any] | None) -> Any:
        exchange = self._next("scatter") + "0 for rank "
        packed = None
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self._device)
        if values is not None:
            packed = [
                pack(value, _key, f"{exchange}{rank}").to(self._device)
                for rank, value in enumerate(values)
            ]
            sizes = torch.tensor([len(part) for part in packed], device=self._device)
        dist.broadcast(sizes, src=0)
        longest = int(sizes.max())
        if packed is not None:
            packed = [_padded(part, longest) for part in packed]
        mine = torch.empty(longest, dtype=torch.uint8, device=self._device)
        dist.scatter(mine, packed, src=0)
        return unpack(mine, _key, f"{exchange}{self.rank}", 0)

    def sums(self, numbers: list[float]) -> list[float]:
        packed = torch.tensor(numbers, dtype=widest_dtype(self._device), device=self._device)
        if self._device.type != "cpu":
            dist.all_reduce(packed)
            return list(packed.tolist())
        # Not the exchange by which gradients travel: gloo ends the process of a rank to which
        # another sends more than it waits for, as where that one makes a backward pass instead.
        received = packed.new_empty(self.world_size, len(packed))
        dist.all_to_all_single(received, packed.expand_as(received).contiguous())
        return list(received.sum(0).tolist())

    @torch.no_grad()
    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        dense = []
        for tensor in tensors:
            if hasattr(tensor, "__tensor_flatten__"):
                # Quantized by torchao, which can't be exchanged but by what it is made of.
                names = tensor.__tensor_flatten__()[0]
                self.broadcast_tensors([getattr(tensor, name) for name in names])
                continue
            dense.append(tensor.detach())
        if not self._carries_all:
            self._broadcast_by_device([tensor for tensor in dense if tensor.is_cpu])
            dense = [tensor for tensor in dense if not tensor.is_cpu]
        # Those of one dtype together, as DDP does; also where a tensor's memory isn't contiguous.
        if dense:
            broadcast: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]  # DDP's own
            broadcast(dist.group.WORLD, dense, TOGETHER, 0)

    def _broadcast_by_device(self, tensors: list[torch.Tensor]) -> None:
        """Broadcast tensors in main memory by a group that carries only what is on the device."""
        for tensor in tensors:
            there = tensor.to(self._device)
            dist.broadcast(there, src=0)
            tensor.copy_(there)

    @torch.no_grad()
    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for held in by_dtype.values():
            self._mean_of(held)

    def _mean_of(self, held: list[torch.nn.Parameter]) -> None:
        """Average the gradients of parameters of one dtype, in one exchange."""
        whole = _packed_in(held)
        if whole is not None:
            dist.all_reduce(whole)
            whole /= self.world_size
            return
        used = [parameter.grad is not None for parameter in held]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
        packed = pack_gradients(gradients, used)
        dist.all_reduce(packed)
        packed /= self.world_size
        *means, users = unpack_gradients(packed, gradients)
        torch._foreach_copy_(gradients, means)
        if all(used):
            return  # without waiting for a GPU
        for parameter, gradient, share in zip(held, gradients, users.tolist(), strict=True):
            if share:
                parameter.grad = gradient

    def join_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        shapes = self.gather((len(tensor), tuple(tensor.shape[1:]), str(tensor.dtype)))
        if len({(shape, dtype) for _, shape, dtype in shapes}) > 1:
            raise ConfigurationError(
                "The ranks' tensors can't be joined row by row: (rows, shape of a row, dtype) by "
                f"rank are {shapes}. Give all_gather tensors that differ in dimension 0 alone."
            )
        return join_rows(tensor, [rows for rows, _, _ in shapes], self.rank)


def pack_gradients(gradients: Sequence[torch.Tensor], used: Sequence[bool]) -> torch.Tensor:
    """Gradients of one dtype as ranks exchange them: one after the other in one tensor.

    Args:
        used: whether each of them is there; those that aren't are 0. These flags come last.
    """
    flags = torch.tensor(used, dtype=gradients[0].dtype, device=gradients[0].device)
    return torch.cat([*(gradient.reshape(-1) for gradient in gradients), flags])


def unpack_gradients(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of packed gradients, in the shapes of some tensors, and last the flags."""
    *parts, flags = packed.split([*(tensor.numel() for tensor in like), len(like)])
    return [*(part.view_as(one) for part, one in zip(parts, like, strict=True)), flags]


def _packed_in(held: list[torch.nn.Parameter]) -> torch.Tensor | None:
    """Return what the gradients of all these parameters were unpacked from; None where it isn't
    one.
    """
    first = held[0].grad
    whole = None if first is None else first._base
    if whole is None or whole.ndim != 1:
        return None
    place = 0
    for parameter in held:
        gradient = parameter.grad
        if gradient is None or gradient._base is not whole or gradient.storage_offset() != place:
            return None
        place += gradient.numel()
    return whole if whole.numel() == place + len(held) else None


def join_rows(tensor: torch.Tensor, sizes: list[int], rank: int) -> torch.Tensor:
    """Return the rows of all ranks one below the other, with gradients.

    Args:
        tensor: this rank's rows.
        sizes: every rank's number of rows.
        rank: this one.

    Shapes: (N_r, ...) on rank r to (sum of N_r, ...).

    Ranks:
        Collective, and so is the backward pass, which sums the gradients that the ranks have of
        the same rows.
    """
    joined: torch.Tensor = _JoinRows.apply(tensor, sizes, rank)
    return joined


class _JoinRows(torch.autograd.Function):
    """Rows of all ranks; their gradients are summed over the ranks on the way back.

    torch's own functions for this are deprecated in 2.13, in favour of private ones.
    """

    @staticmethod
    def forward(
        context: Any,
        tensor: torch.Tensor,
        sizes: list[int],
        rank: int,
    ) -> torch.Tensor:
        context.rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        most = max(sizes)
        padded = tensor.new_zeros(most, *tensor.shape[1:])  # the exchange needs equal shapes
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed)
        return summed[context.rows], None, None


DIGEST = 32
ALIGNMENT = 64


def pack(value: Any, key: bytes, exchange: str) -> torch.Tensor:
    """Return a value that can be pickled, as (bytes,) uint8 on the CPU.

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
    """Return the value of `pack`'s bytes; what follows them is left alone.

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
            with_code(
                f"The ranks are in different exchanges ({exchange} here, {name} on rank {sender}): "
                "one of them makes a call that the others don't, for example under "
                "`if model.is_global_zero:`.",
                "FK043",
            ),
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
    """Return the parts' lengths and the pickle's end; no lengths where they don't fit the
    message.
    """
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


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if is_of_script(value):
            return script_objects.reduced(value)
        if not plain or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
            return super().reducer_override(value)
        return _tensor, (bytes_of(value).numpy(), value.dtype, tuple(value.shape))


def _tensor(flat: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)
