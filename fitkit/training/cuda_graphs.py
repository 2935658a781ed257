"""Work on a CUDA device, recorded and repeated by torch's `CUDAGraph`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class CudaGraphs:
    """Records and repeats work on a CUDA device.

    Args:
        device: where it is done, whichever device is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._recorder = torch.cuda.Stream(device)

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do work as it has to be done before it is recorded: beside the default stream."""
        side, main = self._side, torch.cuda.current_stream(self._device)
        side.wait_stream(main)
        try:
            with torch.cuda.stream(side):
                work()
        finally:
            main.wait_stream(side)

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What repeats some work, and the memory of its results; nothing is computed yet."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with self._recording(graph, pool):
                results = work()
        except BaseException:
            self._forget_failure(pool)
            raise
        return graph.replay, results

    @contextlib.contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        # Torch's own stream for this is the current device's, of the first time that it was asked.
        # And torch leaves its stream the current one where a recording fails: the outer `with`
        # doesn't. Other threads (a loader's that pins memory) may allocate meanwhile.
        recorder = self._recorder
        with (
            torch.cuda.stream(recorder),
            torch.cuda.graph(graph, pool, recorder, capture_error_mode="thread_local"),
        ):
            yield

    def _forget_failure(self, pool: Any) -> None:
        """Put right what a recording that failed may leave behind, by torch's version.

        The allocator would wait for its end before it uses memory again that several streams have
        read. And random numbers would be refused ("Offset increment outside graph capture"), until
        another recording has ended well.
        """
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._recorder.device_index, pool)
        with contextlib.suppress(Exception):
            handle = torch.cuda.graph_pool_handle()
            with self._recording(torch.cuda.CUDAGraph(), handle):
                torch.zeros((), device=self._device)
