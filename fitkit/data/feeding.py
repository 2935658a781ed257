"""Batches brought to a GPU while it computes those before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fitkit import trees
from fitkit.data.arrays import ArraySource
from fitkit.data.sharding import Share, whole_of
from fitkit.data.streams import tensors_in

LEAD = 4
"""Batches on the device at most: the host may be that far ahead of what is computed."""

RESIDENT_FRACTION = 0.25
"""Of the device's free memory, what in-memory data may take to be there for a whole training. Free
is meant before optimizer states, gradients and activations are there."""


def fed(batches: Iterator[Any], transfer: Any, streams: Any) -> Iterator[Any]:
    """The batches on the device, each copied on a stream of its own.

    No batch is read before it is asked for, so that the place in the data and the random numbers
    drawn for them stay those of a loop without this. That costs nothing: the host starts the work
    of a step and comes for the next batch while the device computes.

    Args:
        batches: as they are read; `Share`s keep their counts.
        transfer: brings a batch to the device, as `Transfer` does; it is told which are there.
        streams: as `CudaStreams`.
    """
    computed: deque[Any] = deque()
    for batch in batches:
        inner = batch.batch if type(batch) is Share else batch
        if not goes_aside(inner):
            yield batch
            continue
        if len(computed) >= LEAD:
            streams.wait_on_host(computed.popleft())
        with streams.aside():
            moved = transfer(inner)
            arrived = streams.mark()
        streams.wait(arrived)
        for tensor in tensors_in(moved):
            streams.used_here(tensor)
        transfer.ready = moved
        if type(batch) is Share:
            batch.batch = moved
            yield batch
        else:
            yield moved
        computed.append(streams.mark())


def goes_aside(batch: Any) -> bool:
    """Whether a batch is in main memory, and its memory on the device can be told to streams.

    An object that only knows how to move itself (`.to`) is moved where it is used, and so are
    sparse and nested tensors, for which torch has no `record_stream`: nobody could say which of
    their memory another stream still reads.
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


def keep_on_device(source: Any, move: Callable[[Any], Any], free_bytes: Callable[[], int]) -> bool:
    """Bring in-memory data to the device whole, where they take a small part of its free memory.

    Args:
        source: of in-memory arrays, or a share of one; others stay as they are.
        move: brings them there.
        free_bytes: tells the device's free memory.

    Returns:
        Whether they are there now.
    """
    whole = whole_of(source)
    if not isinstance(whole, ArraySource) or not goes_aside(whole.batch):
        return False
    needed = sum(leaf.nbytes for leaf in trees.leaves(whole.batch) if leaf is not None)
    if needed > RESIDENT_FRACTION * free_bytes():
        return False
    whole.batch = move(whole.batch)
    return True
