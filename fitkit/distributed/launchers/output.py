"""What the processes of other ranks print, shown by rank 0 with the rank before each line.

By default they print nothing: they are the same program, and would repeat rank 0. A rank's lines
come through pipes, which a thread of rank 0 reads all the time, so that a rank never waits for
anybody who would have to read first. What isn't a whole line yet is all that is kept.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO

from fitkit.arguments import check_choice
from fitkit.errors import ConfigurationError

VARIABLE = "FITKIT_RANK_OUTPUT"
CHOICES = ("rank_zero", "all")
LONGEST_LINE = 65_536
"""Bytes; a longer line is shown in parts, so that memory is bounded."""
LAST_WORDS = 4_000
"""Bytes of the standard error that are kept for the message about a rank that ended."""
LAST_LINES_S = 1.0
"""How long rank 0 waits, at a call's end, until what the others wrote is shown."""

_one_at_a_time = threading.Lock()


def check_output(output: str | None) -> None:
    """Refuse what isn't one of the choices; None leaves the choice to the environment."""
    check_choice("output", output, (None, *CHOICES))


def shows_all(output: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the other ranks' lines are shown.

    Args:
        output: what the strategy was given; None for what the environment says.

    Raises:
        ConfigurationError: the variable has another value than the choices.
    """
    if output is not None:
        return output == "all"
    asked = environment.get(VARIABLE, "").strip()
    if asked not in ("", *CHOICES):
        raise ConfigurationError(
            f"{VARIABLE}={asked!r} must be {' or '.join(map(repr, CHOICES))}. Write {VARIABLE}=all "
            "to see what the other ranks print, or unset it."
        )
    return asked == "all"


class ShownOutput:
    """Shows what a rank's process writes, until it has closed both of its streams.

    Args:
        rank: the process's.
        out, err: the pipes' ends from which its standard output and error are read.
    """

    def __init__(self, rank: int, out: IO[bytes], err: IO[bytes]) -> None:
        self._prefix = f"[rank {rank}] "
        self._open = {out.fileno(): "stdout", err.fileno(): "stderr"}
        self._pipes = (out, err)  # closed with this object
        self._parts = {"stdout": b"", "stderr": b""}  # of a line, without its end
        self._words = b""
        self._showing = threading.Lock()
        for name in self._parts:
            _write(name, [])
        self._thread = threading.Thread(target=self._run, name=f"fitkit-rank-{rank}", daemon=True)
        self._thread.start()

    def words(self) -> str:
        """The end of what the process wrote to its standard error."""
        return self._words.decode(errors="replace")

    def wait(self) -> None:
        """Wait until what was written so far is shown."""
        deadline = time.monotonic() + LAST_LINES_S
        while self._ready(0) and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._showing.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            self._showing.release()

    def wait_for_end(self) -> None:
        """Wait until all is shown, of a process that has ended."""
        self._thread.join(LAST_LINES_S)  # what the process started may hold the pipes open

    def _ready(self, timeout_ms: int | None) -> list[int]:
        found = select.poll()
        for file in list(self._open):
            found.register(file, select.POLLIN)
        return [file for file, _ in found.poll(timeout_ms)]

    def _run(self) -> None:
        while self._open:
            for file in self._ready(None):
                with self._showing:
                    self._read(file)

    def _read(self, file: int) -> None:
        name = self._open[file]
        new = os.read(file, LONGEST_LINE)
        if not new:
            del self._open[file]
            new = b"\n" if self._parts[name] else b""
        elif name == "stderr":
            self._words = (self._words + new)[-LAST_WORDS:]
        *lines, rest = (self._parts[name] + new).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        # Of a bar that draws itself again and again only the last drawing is kept.
        self._parts[name] = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        if lines:
            _write(name, [self._prefix + _as_on_a_terminal(line) for line in lines])


def _write(name: str, lines: list[str]) -> None:
    """Write lines to a stream of this process, between lines of its own."""
    # Where rank 0 has no stream, or a closed one, the rank goes on all the same.
    with _one_at_a_time, contextlib.suppress(Exception):
        stream = getattr(sys, name)
        if not getattr(stream, "line_buffering", True) or getattr(stream, "write_through", False):
            # Else a `print` of the main thread may write a part of its line, and meanwhile lets
            # this thread run.
            stream.reconfigure(line_buffering=True, write_through=False)
        for line in lines:  # one by one: the system doesn't cut what is short
            stream.write(line + "\n")
        stream.flush()


def _as_on_a_terminal(line: bytes) -> str:
    """A line as one would see it: what stands after its last return to the margin."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
