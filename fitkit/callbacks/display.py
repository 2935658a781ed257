"""Where progress is shown: a terminal, a notebook's cell, or a file that gets plain lines."""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from fitkit.arguments import check_choice
from fitkit.callbacks.progress_line import (
    Moment,
    ResultLines,
    Span,
    bar_line,
    moment_line,
    plain,
    result_line,
)
from fitkit.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.segment import Segments

Metrics = Sequence[tuple[str, str]]

ENVIRONMENT = "FITKIT_VERBOSE"
LINES_ONLY_INTERVAL_S = 60.0
"""A sign of life where there is no bar: a line a minute within a long epoch."""


class Display(Protocol):
    """A place for progress.

    Attributes:
        interval_s: the shortest time between two calls of `show`, in seconds.
        shows_at_once: whether a beginning is shown before the first batch is done.
    """

    interval_s: float
    shows_at_once: bool

    def show(self, moment: Moment) -> None:
        """Show where things are, in place of what was shown before."""

    def keep(self, title: str, elapsed_s: float, metrics: Metrics) -> None:
        """Put a result in place of what was shown; it stays."""

    def close(self, *, erase: bool) -> None:
        """Give the place back. What is shown now stays, unless `erase`."""


class TerminalDisplay:
    """A bar in the last line of a terminal, by rich; what is printed goes above it."""

    shows_at_once = True

    def __init__(self, console: Console, interval_s: float = 0.1) -> None:
        self.interval_s = interval_s
        self._console = console
        self._live: Live | None = None
        self._results = ResultLines()

    def show(self, moment: Moment) -> None:
        ascii_only = self._console.options.ascii_only
        content = self._rendered([bar_line(moment, self._console.width, ascii_only=ascii_only)])
        if self._live is None:
            self._live = self._started(content)
        self._live.update(content, refresh=True)

    def keep(self, title: str, elapsed_s: float, metrics: Metrics) -> None:
        console = self._console
        lines = self._results.lines(
            title, elapsed_s, metrics, console.width, ascii_only=console.options.ascii_only
        )
        content = self._rendered(lines)
        if self._live is None:
            console.print(content)
        else:
            self._live.update(content)
            self.close(erase=False)

    def close(self, *, erase: bool) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.transient = erase
            live.stop()

    def _started(self, content: Segments) -> Live:
        from rich.live import Live

        live = Live(
            content,
            console=self._console,
            auto_refresh=False,
            # Where stderr goes to a file, rich would take it from there into the terminal.
            redirect_stderr=_is_terminal(sys.stderr),
        )
        live.start()
        # rich hides the cursor: a process that gets killed would leave a terminal without one.
        self._console.show_cursor(True)
        return live

    def _rendered(self, lines: Sequence[Sequence[Span]]) -> Segments:
        """Lines for rich; ready segments take it half the time that a Text does."""
        from rich.segment import Segment, Segments
        from rich.style import Style

        encoding = self._console.encoding
        segments = []
        for line in lines:
            for text, style in line:
                segments.append(Segment(encodable(text, encoding), Style.parse(style)))
            segments.append(Segment.line())
        return Segments(segments)


class NotebookDisplay:
    """One output of a notebook's cell, updated in place; it needs IPython alone."""

    shows_at_once = True
    width = 100
    lines_while_running = 50

    def __init__(
        self, interval_s: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval_s = max(0.25, interval_s)
        self._clock = clock
        self._handle: Any = None
        self._results = ResultLines()
        self._lines: list[str] = []
        self._current = ""
        self._last_result_s = -float("inf")

    def show(self, moment: Moment) -> None:
        self._current = plain(bar_line(moment, self.width))
        self._update(self._lines[-self.lines_while_running :])

    def keep(self, title: str, elapsed_s: float, metrics: Metrics) -> None:
        self._lines += map(plain, self._results.lines(title, elapsed_s, metrics, self.width))
        self._current = ""
        if self._clock() - self._last_result_s >= self.interval_s:
            self._last_result_s = self._clock()
            self._update(self._lines[-self.lines_while_running :])

    def close(self, *, erase: bool) -> None:
        if erase:
            self._current = ""
        if self._handle is not None or self._lines:
            self._update(self._lines)

    def _update(self, shown: list[str]) -> None:
        from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

        left_out = len(self._lines) - len(shown)
        lines = [f"… {left_out} lines above are shown at the end"] if left_out else []
        lines += [*shown, *([self._current] if self._current else [])]
        text = "\n".join(lines)
        styled = f'<pre style="margin:0;line-height:1.3">{html.escape(text)}</pre>'
        content = {"text/plain": text, "text/html": styled}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class LinesDisplay:
    """Plain lines in a file or a pipe: no colour, no control characters."""

    shows_at_once = False

    def __init__(self, file: IO[str], interval_s: float = float("inf")) -> None:
        self.interval_s = interval_s
        self._file = file

    def show(self, moment: Moment) -> None:
        self._write(plain(moment_line(moment)))

    def keep(self, title: str, elapsed_s: float, metrics: Metrics) -> None:
        self._write(plain(result_line(title, elapsed_s, metrics, ascii_only=True)))

    def close(self, *, erase: bool) -> None:
        pass

    def _write(self, line: str) -> None:
        self._file.write(encodable(line, getattr(self._file, "encoding", None)) + "\n")
        self._file.flush()


def display_for(
    verbose: int | str,
    interval_s: float = 0.1,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Display | None:
    """The place for progress; None where nothing is to be shown.

    Args:
        verbose: 0, 1, 2 or `"auto"`, as `ProgressBar` has it.
        interval_s: the shortest time between two drawings of a bar, in seconds.
        console: the rich console to write to; None writes to `sys.stdout`.
        clock: seconds from any beginning.
    """
    file = sys.stdout if console is None else console.file
    if verbose == 0 or file is None:
        return None
    if verbose == 2:
        return LinesDisplay(file)
    if console is None and in_notebook():
        return NotebookDisplay(interval_s, clock)
    bar = _can_show_bar(file) if console is None else _console_can_show_bar(console)
    if verbose == "auto" and console is None and _in_ci():
        bar = False
    if not bar:
        return LinesDisplay(file, LINES_ONLY_INTERVAL_S)
    if console is None:
        from rich.console import Console

        # Asked for by isatty() alone: FORCE_COLOR makes rich take a pipe for a terminal.
        console = Console(file=file, force_terminal=True, force_jupyter=False)
    return TerminalDisplay(console, interval_s)


def chosen_verbose(verbose: int | str) -> int | str:
    """`verbose` as it counts: `"auto"` gives way to the environment's FITKIT_VERBOSE.

    Raises:
        ConfigurationError: neither 0, 1, 2 nor `"auto"`.
    """
    if isinstance(verbose, bool):
        verbose = int(verbose)
    check_choice("verbose", verbose, (0, 1, 2, "auto"))
    asked = os.environ.get(ENVIRONMENT, "").strip().lower()
    if verbose != "auto" or asked in ("", "auto"):
        return verbose
    if asked not in ("0", "1", "2"):
        raise ConfigurationError(
            f"The environment has {ENVIRONMENT}={asked!r}, which must be 0, 1, 2 or auto."
        )
    return int(asked)


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


def _is_terminal(file: Any) -> bool:
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):  # no such thing, or a closed file
        return False


def _can_show_bar(file: Any) -> bool:
    """Whether a bar can be drawn there: a terminal, and no other live display is in it."""
    if not _is_terminal(file) or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return False
    return not hasattr(file, "rich_proxied_file")


def _console_can_show_bar(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
