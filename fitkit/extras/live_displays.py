"""Displays that show a bar: a terminal and a notebook cell.

The lines are rich Texts, which know how wide letters are. `rich.progress` isn't used: in a narrow
terminal it cuts each column a little, and in a notebook it needs ipywidgets.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fitkit.seams.callbacks import (
    Metrics,
    Moment,
    duration,
    encodable,
    is_terminal,
    short_count,
    speed,
)

if TYPE_CHECKING:  # rich is slow to import: import it only where a bar is drawn
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

BAR_WIDTHS = (30, 20, 10)
"""A few sizes only, so that the bar stays still when a number beside it gets another digit."""

TITLE, NAME, BAR, REST, BAD = "bold", "cyan", "green", "bright_black", "bold red"


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
                redirect_stderr=is_terminal(sys.stderr),
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
