"""Ctrl-C at a safe moment.

A KeyboardInterrupt that arrives inside h5py is often lost: Python prints "Exception ignored in"
and goes on (24 of 40 in a trial with h5py 3.16), or leaves a file half written.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class HeldInterrupts:
    """SIGINT and SIGTERM wait while the block runs; `deliver` lets what has arrived through.

    Only handlers written in Python wait: others (the default SIGTERM) end the process at once.
    Outside the main thread nothing needs to wait, because Python runs handlers in that thread.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    def deliver(self) -> None:
        """Run the handlers of what has arrived; may raise what they raise."""
        while self._arrived:
            number, frame = self._arrived.pop(0)
            self._handlers[number](number, frame)
