"""Displays for progress: a file that gets plain lines, and which one shows a bar."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from fitkit.registry import Registry

if TYPE_CHECKING:  # rich is slow to import: import it only where a bar is drawn
    from rich.console import Console

Metrics = Sequence[tuple[str, str]]
"""Names with their values as text."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """The progress of a running epoch, evaluation or prediction.

    Attributes:
        title: what runs (`"Epoch 3/10"`).
        done: batches done.
        total: all batches; None if unknown.
        phase: what it does besides training (`"validating"`).
        metrics: names with their values as text.
        steps_per_s: batches per second; None if not yet known.
        samples_per_s: samples per second; None if unknown.
        elapsed_s: seconds since the beginning.
    """

    title: str
    done: int
    total: int | None = None
    phase: str = ""
    metrics: Metrics = ()
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    elapsed_s: float = 0.0

    @property
    def time(self) -> str:
        """The time left if known, else the time elapsed."""
        if self.total is None or not self.steps_per_s:
            return f"{clock_time(self.elapsed_s)} elapsed"
        return f"{clock_time((self.total - self.done) / self.steps_per_s)} left"

    @property
    def count(self) -> str:
        """The batches done, out of how many, and the phase."""
        if self.total is None:
            count = f"{self.done} steps"
        else:
            count = f"{self.done:>{len(str(self.total))}}/{self.total}"
        return f"{self.phase} {count}" if self.phase else count


def number(value: float) -> str:
    """Return a number with four significant digits: `0.3021`, `1e-05`, `12346`, `nan`."""
    size = abs(value)
    if isinstance(value, int) and size < 10**7:
        return str(int(value))
    if not math.isfinite(value) or 0 < size < 0.01 or size >= 10**7:
        return f"{value:.4g}"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:#.4g}".rstrip(".")


def shown_metrics(logs: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Return the names and values of logs that fit on a line: numbers and short words."""
    shown = []
    for name, value in logs:
        if isinstance(value, str):
            text = value if len(value) <= 20 and value.isprintable() else ""
        elif isinstance(value, int):
            text = number(value)
        else:
            try:
                text = number(float(value))
            except (TypeError, ValueError, RuntimeError):  # a list, a tensor of several numbers
                text = ""
        if text:
            shown.append((str(name), text))
    return shown


def short_count(value: float) -> str:
    """Return a count in about three digits: `7.5`, `812`, `1.3k`, `26k`, `4.1M`."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            digits = 1 if value < 9.95 and (unit or value % 1) else 0
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def speed(steps_per_s: float) -> str:
    """Return the speed in steps per second, or in seconds per step if slow."""
    if steps_per_s >= 1:
        return f"{short_count(steps_per_s)} steps/s"
    return f"{short_count(1 / steps_per_s)} s/step"


def clock_time(seconds: float) -> str:
    """Return a time as on a clock: `0:07`, `1:02:03`, `2d 03:04:05`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}:{minutes:02}:{rest:02}"


def duration(seconds: float) -> str:
    """How long something took, mostly in five characters: `667ms`, `2.10s`, `59.9s`, `1:02`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if seconds < 59.95 else clock_time(seconds)


class Display(Protocol):
    """Shows progress.

    Attributes:
        shows_at_once: whether to show something before the first batch is done.
        interval_s: the shortest time between two calls of `show`, in seconds.
    """

    shows_at_once: bool
    interval_s: float

    def show(self, moment: Moment) -> None:
        """Show the current progress in place of the last."""

    def keep(self, title: str, elapsed_s: float, metrics: Metrics) -> None:
        """Replace the progress with a result, which stays."""

    def close(self, *, erase: bool) -> None:
        """Close the display. What it shows stays, unless `erase`."""


DISPLAYS: Registry[Callable[..., Display]] = Registry("display")
DISPLAYS.promise("fitkit.extras.live_displays:TerminalDisplay", "terminal")
DISPLAYS.promise("fitkit.extras.live_displays:NotebookDisplay", "notebook")


class LinesDisplay:
    """Plain lines in a file or a pipe, without colour or control characters.

    No line is cut to a width.
    """

    shows_at_once = False

    def __init__(self, file: IO[str], interval_s: float = float("inf")) -> None:
        self.interval_s = interval_s
        self._file = file

    def show(self, moment: Moment) -> None:
        fields = [moment.title, moment.count, *map(" ".join, moment.metrics)]
        if moment.steps_per_s:
            fields.append(speed(moment.steps_per_s))
        self._write([*fields, moment.time])

    def keep(self, title: str, elapsed_s: float, metrics: Metrics) -> None:
        self._write([title, duration(elapsed_s), *map(" ".join, metrics)])

    def close(self, *, erase: bool) -> None:
        pass

    def _write(self, fields: Iterable[str]) -> None:
        line = encodable(" - ".join(fields), getattr(self._file, "encoding", None))
        self._file.write(line + "\n")
        self._file.flush()


LINES_ONLY_INTERVAL_S = 60.0
"""A sign of life without a bar: one line per minute within a long epoch."""


def display_for(
    verbose: int | str,
    interval_s: float = 0.1,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Display | None:
    """Return the display for progress; None if nothing is shown.

    Args:
        verbose: 0, 1, 2 or `"auto"`, as in `ProgressBar`.
        interval_s: the shortest time between two drawings of a bar, in seconds.
        console: the rich console to write to; None writes to `sys.stdout`.
        clock: a function that returns seconds since any start.
    """
    file = sys.stdout if console is None else console.file
    if verbose == 0 or file is None:
        return None
    if verbose == 2:
        return LinesDisplay(file)
    if console is None and in_notebook():
        return DISPLAYS["notebook"](interval_s, clock)
    if console is not None:
        can_show_bar = console.is_terminal and not console.is_dumb_terminal
    else:
        in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        has_another_bar = hasattr(file, "rich_proxied_file")
        can_show_bar = is_terminal(file) and not (is_dumb or has_another_bar)
        can_show_bar = can_show_bar and not (verbose == "auto" and in_ci)
    if not can_show_bar:
        return LinesDisplay(file, LINES_ONLY_INTERVAL_S)
    if console is None:
        from rich.console import Console

        # Decided by isatty() alone: FORCE_COLOR makes rich take a pipe for a terminal.
        console = Console(file=file, force_terminal=True, force_jupyter=False)
    return DISPLAYS["terminal"](console, interval_s)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel (IPython in a terminal is not)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def encodable(text: str, encoding: str | None) -> str:
    """`text` with `?` for the characters that `encoding` doesn't have."""
    if text.isascii():
        return text
    encoding = encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def is_terminal(file: Any) -> bool:
    """Whether a file is a terminal."""
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):  # no isatty, or a closed file
        return False
