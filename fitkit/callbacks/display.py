"""Displays for progress: a terminal, a notebook cell, or a file that gets plain lines.

The lines are rich Texts, which know how wide letters are. `rich.progress` isn't used: in a narrow
terminal it cuts each column a little, and in a notebook it needs ipywidgets.
"""

from __future__ import annotations

import dataclasses
import html
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich is slow to import: import it only where a bar is drawn
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

BAR_WIDTHS = (30, 20, 10)
"""A few sizes only, so that the bar stays still when a number beside it gets another digit."""

TITLE, NAME, BAR, REST, BAD = "bold", "cyan", "green", "bright_black", "bold red"

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


def bar_line(moment: Moment, width: int, *, ascii_only: bool = False) -> Text:
    """Return the line of a bar, at most `width` columns wide. The least important parts are dropped
    first.

    The title and the count stay longest. Then come the first metric (the loss), the time, the bar,
    the other metrics in their order, and the speeds.
    """
    from rich.text import Text

    dot = _dot(ascii_only)
    metrics = [_metric(name, text) for name, text in moment.metrics]
    speeds = [Text(speed(moment.steps_per_s))] if moment.steps_per_s else []
    if moment.samples_per_s:
        speeds.append(Text(f"{short_count(moment.samples_per_s)} samples/s"))
    time_field = Text(moment.time)
    bar = Text(" " * BAR_WIDTHS[-1]) if moment.total else None

    line, count = Text.assemble((moment.title, TITLE), " "), Text(moment.count)
    room = width - line.cell_len - count.cell_len
    kept: list[Text | None] = []
    for field in (*metrics[:1], time_field, bar, *metrics[1:], *speeds):
        if field is None:
            continue
        needed = field.cell_len + (1 if field is bar else dot.cell_len)
        if needed > room:
            break
        room -= needed
        kept.append(field)

    if bar is not None and any(field is bar for field in kept):
        size = next(size for size in BAR_WIDTHS if size - BAR_WIDTHS[-1] <= room)
        full, tip, rest = ("=", ">", ".") if ascii_only else ("━", "╸", "─")
        filled, half = divmod(int(min(1.0, moment.done / (moment.total or 1)) * size * 2), 2)
        line.append(full * filled + tip * half, BAR)
        line.append(rest * (size - filled - half), REST).append(" ")
    shown = [f for f in (*metrics, *speeds, time_field) if any(f is k for k in kept)]
    line = dot.join([line.append_text(count), *shown])
    line.truncate(width, overflow="crop")
    return line


class ResultLines:
    """The result lines of a run's epochs, in a given width. Nothing is left out.

    Once a line is too long, the validation's values stand beside the training's from then on. If
    that is still too long, the line wraps.
    """

    def __init__(self) -> None:
        self._beside = False

    def lines(
        self,
        title: str,
        elapsed_s: float,
        metrics: Metrics,
        width: int,
        *,
        ascii_only: bool = False,
    ) -> list[Text]:
        """Make the lines that stay when an epoch or an evaluation has ended."""
        from rich.text import Text

        dot = _dot(ascii_only)
        head = dot.join([Text(title, TITLE), Text(duration(elapsed_s))])
        line = dot.join([head, *(_metric(name, text) for name, text in metrics)])
        self._beside = self._beside or line.cell_len > width
        if not self._beside:
            return [line]
        values = dict(metrics)
        lines = [head]
        for name, text in metrics:
            if name.startswith("val_") and name[4:] in values:
                continue
            field = _metric(name, text)
            if (validation := values.get(f"val_{name}")) is not None:
                field = Text.assemble(field, " (", ("val ", NAME), _value(validation), ")")
            if lines[-1].cell_len + dot.cell_len + field.cell_len <= width:
                lines[-1] = dot.join([lines[-1], field])
            else:
                lines.append(Text.assemble("    ", field))
        for each in lines:
            each.truncate(width, overflow="crop")
        return lines


def _dot(ascii_only: bool) -> Text:
    from rich.text import Text

    return Text(" - " if ascii_only else " • ", REST)


def _metric(name: str, text: str) -> Text:
    from rich.text import Text

    return Text.assemble((name, NAME), " ", _value(text))


def _value(text: str) -> tuple[str, str]:
    return text, BAD if text in ("nan", "inf", "-inf") else ""


class TerminalDisplay:
    """A bar in the last line of a terminal, by rich. Printed text goes above it.

    Args:
        console: the terminal.
        interval_s: the shortest time between two calls of `show`, in seconds.

    Attributes:
        shows_at_once: whether to show something before the first batch is done.
    """

    shows_at_once = True

    def __init__(self, console: Console, interval_s: float = 0.1) -> None:
        self.interval_s = interval_s
        self._console = console
        self._live: Live | None = None
        self._results = ResultLines()

    def show(self, moment: Moment) -> None:
        """Show the current progress in place of the last."""
        ascii_only = self._console.options.ascii_only
        content = self._joined([bar_line(moment, self._console.width, ascii_only=ascii_only)])
        if self._live is None:
            from rich.live import Live

            self._live = Live(
                content,
                console=self._console,
                auto_refresh=False,
                # If stderr goes to a file, rich would redirect it into the terminal.
                redirect_stderr=_is_terminal(sys.stderr),
            )
            self._live.start()
            # rich hides the cursor: a killed process would leave a terminal without one.
            self._console.show_cursor(True)
        self._live.update(content, refresh=True)

    def keep(self, title: str, elapsed_s: float, metrics: Metrics) -> None:
        """Replace the progress with a result, which stays."""
        console = self._console
        ascii_only = console.options.ascii_only
        content = self._joined(
            self._results.lines(title, elapsed_s, metrics, console.width, ascii_only=ascii_only)
        )
        if self._live is None:
            console.print(content)
        else:
            self._live.update(content)
            self.close(erase=False)

    def close(self, *, erase: bool) -> None:
        """Close the display. What it shows stays, unless `erase`."""
        live, self._live = self._live, None
        if live is not None:
            live.transient = erase
            live.stop()

    def _joined(self, lines: Sequence[Text]) -> Text:
        """Lines as one text, in the terminal's encoding."""
        from rich.text import Text

        text = Text("\n", no_wrap=True, overflow="crop").join(lines)
        text.plain = encodable(text.plain, self._console.encoding)
        return text


class NotebookDisplay:
    """One output of a notebook cell, updated in place. It needs only IPython.

    Same interface as `TerminalDisplay`.
    """

    shows_at_once = True
    width = 100
    lines_while_running = 50

    def __init__(
        self, interval_s: float = 0.25, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval_s: float = max(0.25, interval_s)
        self._clock = clock
        self._handle: Any = None
        self._results = ResultLines()
        self._lines: list[str] = []
        self._current = ""
        self._last_result_s = -float("inf")

    def show(self, moment: Moment) -> None:
        self._current = bar_line(moment, self.width).plain
        self._update(self._lines[-self.lines_while_running :])

    def keep(self, title: str, elapsed_s: float, metrics: Metrics) -> None:
        lines = self._results.lines(title, elapsed_s, metrics, self.width)
        self._lines += [line.plain for line in lines]
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
    """Plain lines in a file or a pipe, without colour or control characters.

    Same interface as `TerminalDisplay`, but no line is cut to a width.
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


Display = TerminalDisplay | NotebookDisplay | LinesDisplay

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
        return NotebookDisplay(interval_s, clock)
    if console is not None:
        can_show_bar = console.is_terminal and not console.is_dumb_terminal
    else:
        in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
        is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
        has_another_bar = hasattr(file, "rich_proxied_file")
        can_show_bar = _is_terminal(file) and not (is_dumb or has_another_bar)
        can_show_bar = can_show_bar and not (verbose == "auto" and in_ci)
    if not can_show_bar:
        return LinesDisplay(file, LINES_ONLY_INTERVAL_S)
    if console is None:
        from rich.console import Console

        # Decided by isatty() alone: FORCE_COLOR makes rich take a pipe for a terminal.
        console = Console(file=file, force_terminal=True, force_jupyter=False)
    return TerminalDisplay(console, interval_s)


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
    except (AttributeError, ValueError):  # no isatty, or a closed file
        return False
