"""Torch's flags that `compile` was given, for the length of a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fitkit.training.compilation import Compilation


class ProcessFlag:
    """A flag of torch's, which holds for the whole process, as calls want it.

    Calls nest, and those of several threads overlap: the one that began last says what the flag
    is, and what the first one found is back when none is left.

    Args:
        put: sets the flag.
        kept: notes what the flag is; gives what puts that back.
    """

    def __init__(self, put: Callable[[Any], None], kept: Callable[[], Callable[[], None]]) -> None:
        self._put = put
        self._kept = kept
        self._put_back: Callable[[], None] | None = None
        self._wanted: list[list[Any]] = []
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def held(self, value: Any) -> Iterator[None]:
        """Have the flag set meanwhile; None leaves it."""
        if value is None:
            yield
            return
        own = [value]
        with self._lock:
            if not self._wanted:
                self._put_back = self._kept()
            self._put(value)
            self._wanted.append(own)
        try:
            yield
        finally:
            with self._lock:
                self._wanted = [other for other in self._wanted if other is not own]
                if self._wanted:
                    self._put(self._wanted[-1][0])
                elif self._put_back is not None:
                    self._put_back()


def _set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def _benchmark_kept() -> Callable[[], None]:
    before = torch.backends.cudnn.benchmark
    return lambda: _set_benchmark(before)


def _set_deterministic(value: bool | str) -> None:
    torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn")


def _deterministic_kept() -> Callable[[], None]:
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return lambda: torch.use_deterministic_algorithms(strict, warn_only=warn_only)


def _matmul_precision_kept() -> Callable[[], None]:
    """Torch has two ways to say it, which know of each other only half: after
    `torch.backends.cuda.matmul.fp32_precision = …` its older getters raise until both say the same.
    Compilers ask the older ones, so the older setter, which sets both, is what is used here; both
    are put back."""
    backends: Any = torch.backends
    newer = [
        (backend, backend.fp32_precision)
        for backend in (backends.cuda.matmul, backends.mkldnn.matmul)
    ]
    older: str | None = None
    with contextlib.suppress(RuntimeError):  # the newer way was used to say something else
        older = torch.get_float32_matmul_precision()

    def put_back() -> None:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for backend, precision in newer:
            backend.fp32_precision = precision

    return put_back


BENCHMARK = ProcessFlag(_set_benchmark, _benchmark_kept)
DETERMINISTIC = ProcessFlag(_set_deterministic, _deterministic_kept)
MATMUL_PRECISION = ProcessFlag(torch.set_float32_matmul_precision, _matmul_precision_kept)


@contextlib.contextmanager
def backend_flags(compilation: Compilation) -> Iterator[None]:
    """Set torch's flags that `compile` was given: cuDNN's benchmark mode, deterministic algorithms,
    the precision of matrix products. What it wasn't given stays as it is."""
    with (
        BENCHMARK.held(compilation.benchmark),
        DETERMINISTIC.held(compilation.deterministic),
        MATMUL_PRECISION.held(compilation.matmul_precision),
    ):
        yield
