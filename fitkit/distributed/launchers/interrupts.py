"""Ctrl-C while the main thread is inside an exchange with other ranks."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

GRACE_S = 2.0
"""How long after Ctrl-C an exchange may go on before the other ranks are ended."""


@contextlib.contextmanager
def ended_by_interrupt(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` where Ctrl-C finds this process inside an exchange.

    Python runs no handler while C++ waits; ended ranks break the exchange off.

    Args:
        end: ends the other ranks; called in a thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            while byte := reading.recv(1):
                if byte[0] == signal.SIGINT and not over.wait(GRACE_S):
                    end()

    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="fitkit-interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        # Closing isn't enough: processes that were forked meanwhile hold it open.
        writing.shutdown(socket.SHUT_RDWR)
        writing.close()
        thread.join(GRACE_S)
        reading.close()
