"""Torch's process-wide flags that `compile` sets for the length of calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class ProcessFlag:
    """Sets what is one for the whole process, such as a flag of torch's, for the length of calls.

    Calls may nest, and calls in several threads may overlap. The call that began last decides the
    flag's value. When the last call ends, the value that the first call found is restored.

    Args:
        put: sets the flag.
        restorer: reads the flag; returns a function that restores that value.
    """

    def __init__(
        self, put: Callable[[Any], None], restorer: Callable[[], Callable[[], None]]
    ) -> None:
        self._put = put
        self._restorer = restorer
        self._put_back: Callable[[], None] = lambda: None
        self._wanted: list[list[Any]] = []
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def held(self, value: object) -> Iterator[None]:
        """Set the flag for the length of a block."""
        entry = [value]
        with self._lock:
            if not self._wanted:
                self._put_back = self._restorer()
            self._put(value)
            self._wanted.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._wanted = [other for other in self._wanted if other is not entry]
                if self._wanted:
                    self._put(self._wanted[-1][0])
                else:
                    self._put_back()


def _set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def _benchmark_restorer() -> Callable[[], None]:
    before = torch.backends.cudnn.benchmark
    return lambda: _set_benchmark(before)


def _set_deterministic(value: bool | str) -> None:
    torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn")


def _deterministic_restorer() -> Callable[[], None]:
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return lambda: torch.use_deterministic_algorithms(strict, warn_only=warn_only)


def _matmul_precision_restorer() -> Callable[[], None]:
    """Read the matmul precision from both of torch's APIs; return a function that restores both.

    The two APIs are only partly in sync. After `torch.backends.cuda.matmul.fp32_precision = …` the
    older getters raise until both APIs agree. Compilers call the older getters. So the older setter
    is used here, which sets both.
    """
    backends: Any = torch.backends
    newer = [
        (backend, backend.fp32_precision)
        for backend in (backends.cuda.matmul, backends.mkldnn.matmul)
    ]
    older: str | None = None
    with contextlib.suppress(RuntimeError):  # the newer API has another value
        older = torch.get_float32_matmul_precision()

    def put_back() -> None:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for backend, precision in newer:
            backend.fp32_precision = precision

    return put_back


BENCHMARK = ProcessFlag(_set_benchmark, _benchmark_restorer)


DETERMINISTIC = ProcessFlag(_set_deterministic, _deterministic_restorer)


MATMUL_PRECISION = ProcessFlag(torch.set_float32_matmul_precision, _matmul_precision_restorer)
