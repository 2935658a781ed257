"""Batches on their way to the device."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from fitkit import trees
from fitkit.accelerators import free_and_total_bytes, has_streams
from fitkit.data.arrays import (
    META,
    ArraySource,
    SparseMatrix,
    as_tensors,
    is_sparse_matrix,
    wide_dtype,
)
from fitkit.data.batches import NoRows, Source
from fitkit.errors import ConfigurationError

LABEL_KEYS = ("labels", "label")
"""Where a dict batch without `y` carries its targets, by Hugging Face's custom."""

SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


class Watched(NamedTuple):
    """A tensor in the user's memory, as it was before the first batch's forward."""

    tensor: torch.Tensor
    version: int
    values: torch.Tensor


class Transfer:
    """Moves batches: every tensor to the device, floating-point inputs to the net's dtype.

    If the net is in half precision, targets and weights stay in float32. Integer targets become
    int64, which torch's losses require. NumPy arrays become tensors. Objects with `.to` are asked
    to move. Other leaves stay.

    Args:
        device: the net's device.
        float_dtype: the dtype of the net's parameters.
        memory_format: the format of floating-point inputs with four dimensions. None leaves it.
        labels: the entries of dict batches that are targets.

    Attributes:
        ready: a batch that is already on the device, moved by the code that set this attribute.
        pin: a function that pins a tensor in main memory, so that the device can fetch it. None if
            copies needn't run in parallel with computation.

    A batch cut from arrays shares their memory. A net that changes its inputs in place (a first
    layer with `inplace=True`) would change the user's data. `note_writes` checks for this after the
    first batch. If so, the first batch is restored and later ones are copied.
    """

    def __init__(
        self,
        device: torch.device,
        float_dtype: torch.dtype,
        memory_format: torch.memory_format | None = None,
        labels: Iterable[str] = LABEL_KEYS,
    ) -> None:
        self.device = device
        # Copies to Apple's GPUs may be overtaken by changes of their source (pytorch#83015).
        self._may_be_behind: bool = device.type != "mps"
        self.labels: tuple[str, ...] = tuple(labels)
        self.memory_format = memory_format
        self.ready: Any = None
        self.pin: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.float_dtype = float_dtype
        self.wide_dtype: torch.dtype = wide_dtype(float_dtype)
        self._copies = self._leaves_inputs = False
        self._watched: list[Watched] | None = []

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device. The same object if nothing has to move."""
        if batch is self.ready and batch is not None:
            return batch
        if type(batch) in (tuple, list) and batch:
            x, *rest = batch
            if self._leaves_inputs and self._is_there(x) and self._are_there(rest):
                return batch
            if len(batch) > 1:
                return (self._inputs(x), *(trees.map_leaves(self._target, part) for part in rest))
            return (self._inputs(x),)
        return self._inputs(batch)

    def note_writes(self) -> None:
        """Check after the first batch's forward whether the net changed its inputs."""
        changed = [one for one in self._watched or () if one.tensor._version != one.version]
        self._copies = bool(changed)
        self._watched = changed or None
        self._leaves_inputs = not changed

    def undo_writes(self) -> None:
        """Restore the first batch's memory, but not before its backward is done."""
        for watched in self._watched or ():
            with torch.no_grad():
                watched.tensor.copy_(watched.values)
        self._watched = None if self._copies else self._watched

    def _is_there(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.device == self.device
            and (leaf.dtype is self.float_dtype or not leaf.is_floating_point())
            and (self.memory_format is None or leaf.ndim != 4)
        )

    def _are_there(self, targets: list[Any]) -> bool:
        for leaf in targets:
            if not isinstance(leaf, torch.Tensor) or leaf.device != self.device:
                return False
            if leaf.dtype is not torch.int64 and leaf.dtype is not self.wide_dtype:
                return False
        return True

    def _inputs(self, x: Any) -> Any:
        moved = trees.map_leaves(self._input, x)
        if isinstance(x, Mapping):
            for key in self.labels:
                if key in moved:
                    moved[key] = trees.map_leaves(self._target, x[key])
        return moved

    def _input(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            dtype = self.float_dtype if leaf.is_floating_point() else leaf.dtype
            moved = self._laid_out(self._sent(leaf, dtype))
            return self._guarded(moved) if moved is leaf else moved
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            tensor = as_tensors(leaf, "x", self.float_dtype)
            return self._guarded(self._laid_out(self._sent(tensor, tensor.dtype)))
        if is_sparse_matrix(leaf):
            return self._input(leaf.toarray())
        move = getattr(leaf, "to", None)
        return move(self.device) if callable(move) else leaf

    def _sent(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the device. Doesn't wait for the copy if the device can fetch it."""
        if tensor.is_meta and self.device.type != "meta":
            raise ConfigurationError(META.format(name="A batch's entry"))
        if self.pin is not None and tensor.device.type == "cpu":
            tensor = self.pin(tensor.to(dtype))
        return tensor.to(self.device, dtype, non_blocking=self._may_be_behind)

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.memory_format is None or tensor.ndim != 4 or not tensor.is_floating_point():
            return tensor
        return tensor.contiguous(memory_format=self.memory_format)

    def _guarded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the user's memory, guarded against a net that writes into it."""
        if self._copies:
            return tensor.clone()
        if self._watched is not None and not tensor.is_inference():
            self._watched.append(Watched(tensor, tensor._version, tensor.clone()))
        return tensor

    def _target(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            dtype = self.wide_dtype if leaf.is_floating_point() else leaf.dtype
            dtype = torch.int64 if dtype in SMALL_INTEGERS else dtype
            return self._sent(leaf, dtype)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            tensor = as_tensors(leaf, "y", self.wide_dtype, target=True)
            return self._sent(tensor, tensor.dtype)
        if is_sparse_matrix(leaf):
            return self._target(leaf.toarray())
        move = getattr(leaf, "to", None)
        return move(self.device) if callable(move) else leaf


class Streams:
    """A stream for copies, besides the one on which the device computes.

    All copies ask this object about streams, so that a fake of it can test the order of events
    without a GPU.

    Args:
        device: a device of a type that has streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device)

    def aside(self, *, after: bool = False) -> AbstractContextManager[Any]:
        """Run what is started within the block on the copy stream.

        Args:
            after: whether it waits for everything computed so far.
        """
        if after:
            self._side.wait_stream(self._current())
        return self._side

    def mark(self) -> torch.Event:
        """Return an event after all work started so far on the current stream."""
        return self._current().record_event()

    def wait(self, mark: torch.Event) -> None:
        """Let the current stream wait for a mark. The host doesn't wait."""
        self._current().wait_event(mark)

    def wait_on_host(self, mark: torch.Event) -> None:
        """Wait for a mark on the host."""
        mark.synchronize()

    def used_here(self, tensor: Any) -> None:
        """Keep a tensor's memory until the current stream is done with it.

        Args:
            tensor: a tensor made on the other stream, or anything with torch's `record_stream`.
        """
        tensor.record_stream(self._current())

    def start_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's copy in pinned memory. Its values are there when the stream is done."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in main memory that the device can fetch by itself."""
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def free_bytes(self) -> int:
        """Return the device's free memory; 0 where its type doesn't say."""
        return (free_and_total_bytes(self._device) or (0, 0))[0]

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def tensors_in(tree: Any) -> Iterator[Any]:
    """Return the leaves whose memory streams must know about: tensors, and objects that hold
    some.
    """
    return (leaf for leaf in trees.leaves(tree) if hasattr(leaf, "record_stream"))


LEAD = 4
"""The most batches on the device: the host may be that far ahead of the computation."""

RESIDENT_FRACTION = 0.25
"""The fraction of the device's free memory that in-memory data may take for a whole training. Free
means before optimizer states, gradients and activations exist."""


class Mover:
    """Moves batches to the device, by `Transfer` or by the model's own hook.

    Args:
        transfer: fitkit's way.
        own: the model's `transfer_batch_to_device`, if overridden. It is called in the step, on the
            stream that computes.
        streams: a function that makes the device's streams, for copies in parallel with
            computation. Default: `Streams`, on a device that has them.
    """

    def __init__(
        self,
        transfer: Transfer,
        own: Callable[..., Any] | None = None,
        streams: Callable[[torch.device], Any] | None = None,
    ) -> None:
        self.transfer = transfer
        self._own = own
        self.move: Callable[[Any], Any] = (
            transfer if own is None else lambda batch: moved_by(own, batch, transfer.device)
        )
        if streams is None and has_streams(transfer.device):
            streams = Streams
        self._make_streams = streams if own is None else None
        self._streams: Any = None

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device."""
        return self.move(batch)

    @property
    def is_ours(self) -> bool:
        """Whether fitkit moves batches, and not a hook of the model."""
        return self._own is None

    def leaves(self, batch: Any) -> bool:
        """Whether a batch's parts are tensors in which nothing changes, as in others like it.

        A batch that is on the device already comes back as it is whatever its parts are.
        """
        parts = batch if type(batch) in (tuple, list) else ()
        are_tensors = bool(parts) and all(isinstance(part, torch.Tensor) for part in parts)
        return are_tensors and self._own is None and self.transfer(batch) is batch

    def bring_each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Copy a pass's batches to a GPU while it computes. On other devices, yield them.

        No batch is read before it is asked for. So the place in the data and the random numbers
        drawn for them are those of a simple loop. This costs nothing: the host starts a step's work
        and asks for the next batch while the device computes.

        Args:
            batches: `Batch`es as they are read, and `NoRows`.
        """
        return batches if self._device_streams() is None else self._copied_aside(batches)

    def _copied_aside(self, batches: Iterator[Any]) -> Iterator[Any]:
        streams, computed = self._streams, deque[Any]()
        for batch in batches:
            if batch is NoRows or not goes_aside(batch.data):
                yield batch
                continue
            if len(computed) >= LEAD:
                streams.wait_on_host(computed.popleft())
            with streams.aside():
                moved = self.transfer(batch.data)
                arrived = streams.mark()
            streams.wait(arrived)
            for tensor in tensors_in(moved):
                streams.used_here(tensor)
            self.transfer.ready = batch.data = moved
            yield batch
            computed.append(streams.mark())

    def bring_whole(self, source: Source) -> bool:
        """Copy in-memory data to a GPU as a whole, if they take a small part of its free memory.

        Args:
            source: a source that is read more than once.

        Returns:
            Whether they are there now.
        """
        streams, whole = self._device_streams(), source.whole
        if streams is None or not isinstance(whole, ArraySource) or not goes_aside(whole.batch):
            return False
        if any(isinstance(leaf, SparseMatrix) for leaf in trees.leaves(whole.batch)):
            return False
        needed = sum(leaf.nbytes for leaf in trees.leaves(whole.batch) if leaf is not None)
        if needed > RESIDENT_FRACTION * streams.free_bytes():
            return False
        whole.batch = Transfer(self.transfer.device, self.transfer.float_dtype)(whole.batch)
        return True

    def _device_streams(self) -> Any:
        """Return the device's streams; None if batches aren't copied in parallel with
        computation.
        """
        if self._streams is None and self._make_streams is not None:
            self._streams = self._make_streams(self.transfer.device)
            self.transfer.pin = self._streams.pinned
        return self._streams


def moved_by(own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
    """Return a batch moved by a hook, which may also take Lightning's index of the loader: 0."""
    return own(batch, device, *([0] if len(inspect.signature(own).parameters) > 2 else []))


def goes_aside(batch: Any) -> bool:
    """Whether a batch is in main memory, and streams can track its memory on the device.

    An object that only has `.to` is moved where it is used. So are sparse and nested tensors,
    because torch has no `record_stream` for them: nothing could tell which of their memory another
    stream still reads.
    """
    moves = False
    for leaf in trees.leaves(batch):
        if hasattr(leaf, "record_stream") or hasattr(leaf, "__array__"):
            if isinstance(leaf, torch.Tensor) and not _is_dense_on_cpu(leaf):
                return False
            moves = True
        elif callable(getattr(leaf, "to", None)):
            return False
    return moves


def _is_dense_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested
