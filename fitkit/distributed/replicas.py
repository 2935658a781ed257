"""Replicas of a module in one process: a batch's parts computed by threads, side by side."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.distributed.module_copies import (
    Replica,
    attributes_of,
    check_can_replicate,
    keep_buffers,
    merge_metrics,
    replicate,
    warn_of_lost_state,
)
from fitkit.distributed.router import Door
from fitkit.distributed.rows import gather, part_sizes, split

AUTOCAST_KINDS = ("cpu", "cuda")

Part = tuple[tuple[Any, ...], dict[str, Any]]
"""A replica's arguments, by position and by keyword."""


class Replicas(Door):
    """Calls a module's methods with a batch divided among replicas.

    Each call copies the module for every part of the batch. The first replica runs in the
    caller's thread, the others in threads of their own, in the caller's gradient and autocast
    modes. The gradients of one backward pass over the gathered outputs are those of one device,
    as far as the method treats samples apart; batch normalization sees a part's statistics.

    On CPU all replicas draw from one generator of random numbers, in the order in which their
    threads come to it: with dropout, two runs from the same seed differ.

    A module that has `_begin_replica(device, samples)` gets it called on each replica before the
    method, and one that has `_end_replicas(replicas)` gets it called once after all have ended.

    Args:
        module: what is replicated. It stays on the first device.
        devices: of the replicas; on CPU the same one several times.
        strategy: its name, for messages.
        warned: the lost attributes that were warned of before.

    Attributes:
        net: the module.
        weights: the number of samples of each replica in the last call.

    Raises:
        ConfigurationError: a module that can't be replicated.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: tuple[torch.device, ...],
        strategy: str = "dp",
        warned: set[str] | None = None,
    ) -> None:
        check_can_replicate(module)
        super().__init__(module)
        self._devices = devices
        self._strategy = strategy
        self._warned: set[str] = set() if warned is None else warned
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the replicas return, gathered (see `rows.gather`).

        Args:
            method: `""` calls the module itself, and all arguments are divided together. Of
                another method's arguments the first is the batch, the others go to every
                replica as they are.

        Raises:
            ConfigurationError: outputs that can't be gathered.
            Exception: the first replica's that failed, as it raised it.
        """
        if method:
            parts = [((part, *args[1:]), kwargs) for part in split(args[0], len(self._devices))]
            samples = trees.sample_count(args[0])
        else:
            parts = split((args, kwargs), len(self._devices))
            samples = trees.sample_count((args, kwargs))
        self.weights = weights = part_sizes(samples, len(self._devices))
        replicas = replicate(self.net, list(self._devices[: len(parts)]))
        for replica, size in zip(replicas, weights, strict=True):
            if hasattr(type(replica.module), "_begin_replica"):
                replica.module._begin_replica(replica.device, size)
        begun = [attributes_of(replica.module) for replica in replicas]
        outputs = self._run(replicas, weights, method, parts)
        for attributes in begun:
            warn_of_lost_state(attributes, method, self._strategy, self._warned)
        if len(set(self._devices)) > 1:
            keep_buffers(self.net, replicas[0].module)
        merge_metrics(replicas)
        if hasattr(type(self.net), "_end_replicas"):
            whole: Any = self.net
            whole._end_replicas([replica.module for replica in replicas])
        if method:
            return gather(outputs, replicas[0].device)
        counts: list[Any] = []
        if self.weigh is not None:
            inputs = [kwargs or (args[0] if len(args) == 1 else args) for args, kwargs in parts]
            counts = [self.weigh(*pair) for pair in zip(outputs, inputs, strict=True)]
        is_known = bool(counts) and None not in counts
        return gather(outputs, replicas[0].device, counts if is_known else weights)

    def _run(
        self, replicas: list[Replica], weights: list[int], method: str, parts: list[Part]
    ) -> list[Any]:
        """Each replica's outputs for its part."""
        modes = _Modes(replicas)

        def run(index: int) -> Any:
            replica = replicas[index]
            with modes.on(replica.device):
                args, kwargs = parts[index] if index == 0 else _moved(parts[index], replica.device)
                entry = getattr(replica.module, method) if method else replica.module
                return entry(*args, **kwargs)

        futures = [
            # Each thread needs a copy of the caller's context for its own.
            self._pool().submit(contextvars.copy_context().run, run, index)
            for index in range(1, len(replicas))
        ]
        try:
            outputs, error = [run(0)], None
        except BaseException as raised:
            outputs, error = [], raised
        wait(futures)  # also after an error: the others still compute with the module
        errors = [error, *(future.exception() for future in futures)]
        failed = next((index for index, found in enumerate(errors) if found is not None), None)
        if failed is None:
            return outputs + [future.result() for future in futures]
        try:
            raise _naming_replica(errors[failed], failed, replicas, weights)
        finally:
            # An error's frames hold this one, which would hold the error and all that they hold.
            del error, errors, futures

    def _pool(self) -> ThreadPoolExecutor:
        """The threads, which end with this object."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._devices) - 1, "fitkit-replica")
        return self._threads


def _moved(tree: Any, device: torch.device) -> Any:
    """A part of a batch on a replica's device."""
    if device.type == "cpu":
        return tree

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return trees.map_leaves(move, tree)


def _naming_replica(
    error: Any, index: int, replicas: list[Replica], weights: list[int]
) -> BaseException:
    """An error with a note that says which replica raised it; Python 3.10 has no notes."""
    if hasattr(error, "add_note"):
        count = len(replicas)
        error.add_note(
            f"Raised by replica {index} (of 0 to {count - 1}) on {replicas[index].device}, with "
            f"{weights[index]} of the batch's {sum(weights)} samples."
        )
    found: BaseException = error
    return found


class _Modes:
    """The modes of the thread that makes this, for other threads: torch keeps them by thread.

    Args:
        replicas: whose devices' streams are kept, too.
    """

    def __init__(self, replicas: list[Replica]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        # Autocast keeps cast weights in one place for all threads. Which replicas share a cast, and
        # so how gradients are rounded, would be a matter of chance.
        self._cache = torch.is_autocast_cache_enabled() and len(replicas) == 1
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in AUTOCAST_KINDS
            if torch.is_autocast_enabled(kind)
        ]
        self._streams = {
            replica.device: torch.cuda.current_stream(replica.device)
            for replica in replicas
            if replica.device.type == "cuda"
        }

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """The same modes in this thread, and the device's stream."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._cache))
            if device in self._streams:
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield
