"""Batches on their way to the device."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fitkit import trees
from fitkit.accelerators import free_and_total_bytes, has_streams
from fitkit.batch_kinds import kind_of
from fitkit.data.arrays import (
    META,
    ArraySource,
    SparseMatrix,
    as_tensors,
    is_sparse_matrix,
    wide_dtype,
)
from fitkit.data.batches import Batch, NoRows, Source
from fitkit.errors import ConfigurationError
from fitkit.tensors import is_dense

LABEL_KEYS = ("labels", "label")
"""Where a dict batch without `y` carries its targets, by Hugging Face's custom."""

SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)


IMMUTABLE = (str, bytes, int, float, bool, complex, type(None))
"""The types of leaves that nothing can write into."""


def own_copy(leaf: Any) -> Any:
    """Return a leaf of a batch in memory of its own. Gradients flow through a tensor's copy.

    An object that Python can't copy is returned as it is.
    """
    if isinstance(leaf, torch.Tensor):
        copied = leaf.clone()
        if leaf.requires_grad and not copied.requires_grad:  # gradients are off
            copied.requires_grad_()
        return copied
    if type(leaf) in IMMUTABLE:
        return leaf
    try:
        with _ClonedTensors():
            return copy.deepcopy(leaf)
    except Exception:  # a lock, a file, or whatever a class of the user's raises
        return leaf


class _ClonedTensors(TorchFunctionMode):
    """Within the block, `copy.deepcopy` clones tensors. It would copy all of the memory that a
    tensor is a part of, and refuse the results of operations.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = copied = own_copy(tensor)
            return copied
        return function(*args, **(kwargs or {}))


def own_data(batch: Batch) -> Any:
    """Return a batch's data, in memory that no other code has."""
    return trees.map_leaves(own_copy, batch.data) if batch.is_lent else batch.data


class Transfer:
    """Moves batches: every tensor to the device, floating-point inputs to the net's dtype.

    If the net is in half precision, targets and weights stay in float32. Integer targets become
    int64, which torch's losses require. NumPy arrays become tensors. Objects with `.to` are asked
    to move. Other leaves stay.

    What needn't move is copied if the batch is lent. The code that gets a batch may write into it,
    and the user's data, later batches and epochs must not see that.

    Args:
        device: the net's device.
        float_dtype: the dtype of the net's parameters.
        memory_format: the format of floating-point inputs with four dimensions. None leaves it.
        labels: the entries of dict batches that are targets.

    Attributes:
        ready: a batch that is already on the device, moved by the code that set this attribute.
        pin: a function that copies a tensor into pinned memory, from which the device can fetch it.
            None if copies needn't run in parallel with computation.
        pins: whether a lent tensor that is pinned is a new one in each batch. The device may still
            fetch it when the next batch is read.
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
        self.pins: bool = False
        self.float_dtype = float_dtype
        self.wide_dtype: torch.dtype = wide_dtype(float_dtype)

    def __call__(self, batch: Any, *, is_lent: bool) -> Any:
        """Return the batch on the device.

        Args:
            batch: the batch, as the data gave it.
            is_lent: whether other code may have its memory. If not, the same object is returned if
                nothing has to move.
        """
        if not is_lent and batch is self.ready and batch is not None:
            return batch
        if type(batch) in (tuple, list) and batch:
            x, *rest = batch
            if self._is_there(x) and self._are_there(rest):
                return tuple(map(own_copy, batch)) if is_lent else batch
            parts = (self._each(partial(self._target, is_lent), part, is_lent) for part in rest)
            return (self._inputs(x, is_lent), *parts)
        return self._inputs(batch, is_lent)

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

    def _inputs(self, x: Any, is_lent: bool) -> Any:
        if isinstance(x, torch.Tensor):
            return self._input(is_lent, x)
        moved = self._each(partial(self._input, is_lent), x, is_lent)
        if isinstance(x, Mapping):
            for key in self.labels:
                if key in moved:
                    moved[key] = self._each(partial(self._target, is_lent), x[key], is_lent)
        return moved

    def _each(self, move: Callable[[Any], Any], tree: Any, is_lent: bool) -> Any:
        """Move a tree: leaves by `move`, and entries of their own kind as these say."""
        if isinstance(tree, torch.Tensor):
            return move(tree)
        if (kind := kind_of(tree)) is not None:
            own = trees.map_leaves(own_copy, tree) if is_lent else tree
            return kind.move(own, self.device, self.float_dtype)
        if not trees.is_container(tree):
            return move(tree)
        children = [self._each(move, child, is_lent) for child in trees.children(tree)]
        return trees.rebuilt(tree, children)

    def _input(self, is_lent: bool, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            dtype = self.float_dtype if leaf.is_floating_point() else leaf.dtype
            moved = self._laid_out(self._sent(leaf, dtype, is_lent))
            return own_copy(moved) if is_lent and _share(moved, leaf) else moved
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            return self._input(is_lent, as_tensors(leaf, "x", self.float_dtype))
        return self._object(is_lent, leaf, self._input)

    def _target(self, is_lent: bool, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            dtype = self.wide_dtype if leaf.is_floating_point() else leaf.dtype
            dtype = torch.int64 if dtype in SMALL_INTEGERS else dtype
            moved = self._sent(leaf, dtype, is_lent)
            return own_copy(moved) if is_lent and _share(moved, leaf) else moved
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            return self._target(is_lent, as_tensors(leaf, "y", self.wide_dtype, target=True))
        return self._object(is_lent, leaf, self._target)

    def _object(self, is_lent: bool, leaf: Any, as_array: Callable[[bool, Any], Any]) -> Any:
        """Return what is neither a tensor nor an array of numbers.

        Args:
            as_array: moves the array of a sparse matrix.
        """
        if is_sparse_matrix(leaf):
            return as_array(False, leaf.toarray())
        own = own_copy(leaf) if is_lent else leaf  # an object may move itself in place
        move = getattr(own, "to", None)
        return move(self.device) if callable(move) else own

    def _sent(self, tensor: torch.Tensor, dtype: torch.dtype, is_lent: bool) -> torch.Tensor:
        """Return a tensor on the device. Doesn't wait for the copy if the device can fetch it."""
        if tensor.is_meta and self.device.type != "meta":
            raise ConfigurationError(META.format(name="A batch's entry"))
        if self.pin is not None and tensor.device.type == "cpu":
            converted = tensor.to(dtype)
            is_kept = converted is tensor and is_lent and not self.pins
            if is_kept or not converted.is_pinned():
                tensor = self.pin(converted)
        return tensor.to(self.device, dtype, non_blocking=self._may_be_behind)

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.memory_format is None or tensor.ndim != 4 or not tensor.is_floating_point():
            return tensor
        return tensor.contiguous(memory_format=self.memory_format)


def _share(moved: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether a tensor that was moved still has the memory that it had."""
    if moved is given or type(given) is torch.Tensor:
        return moved is given
    # A subclass may return itself in a new object.
    return moved.device == given.device and moved.data_ptr() == given.data_ptr()


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
        """Return a tensor's copy in pinned memory, which the device can fetch by itself."""
        if tensor.is_pinned():  # then `pin_memory` would return the tensor itself
            return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return tensor.pin_memory()

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
        if streams is None and has_streams(transfer.device):
            streams = Streams
        self._make_streams = streams if own is None else None
        self._streams: Any = None

    def __call__(self, batch: Batch) -> Any:
        """Return a batch's data on the device, in memory that no other code has."""
        if self._own is not None:
            return moved_by(self._own, own_data(batch), self.transfer.device)
        return self.transfer(batch.data, is_lent=batch.is_lent)

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
        if not are_tensors or self._own is not None:
            return False
        return self.transfer(batch, is_lent=False) is batch

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
                moved = self.transfer(batch.data, is_lent=batch.is_lent)
                arrived = streams.mark()
            streams.wait(arrived)
            for tensor in tensors_in(moved):
                streams.used_here(tensor)
            self.transfer.ready = batch.data = moved
            batch.is_lent = False
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
        lent = whole.batch
        send = Transfer(self.transfer.device, self.transfer.float_dtype)
        whole.batch = send(lent, is_lent=True)
        if any(leaf is not None and leaf.is_pinned() for leaf in trees.leaves(lent)):
            streams.wait_on_host(streams.mark())  # the user may fill that memory again
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
    return tensor.device.type == "cpu" and is_dense(tensor)
