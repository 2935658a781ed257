"""A net's summary: its rows and totals, and how they look as a table."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 80
WIDEST = 120


@dataclasses.dataclass(frozen=True)
class Row:
    """A module in the table.

    Attributes:
        name: its name in the module that holds it; empty for the net itself.
        type: its class's name.
        level: how deep it is nested; 0 is the net.
        output: the shape of its (first) output; empty where it didn't run.
        parameters: the numbers in its parameters, without those counted in another row. A
            module whose children have no rows has them in its own. None: not yet known.
        trainable: `"yes"`, `"no"`, `"partly"`, or empty without parameters, children included.
        calls: how often it ran.
        multiply_adds: of all its calls, forward, without those counted in another row; 0 where
            it didn't run. See `Summary.multiply_adds`.
        reused: whether the same module has a row above.
        shared: whether some of its own parameters are counted in a row above.
        is_group: whether its children have rows.
    """

    name: str
    type: str
    level: int
    output: str
    parameters: int | None
    trainable: str
    calls: int = 0
    multiply_adds: int = 0
    reused: bool = False
    shared: bool = False
    is_group: bool = False


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `summarize` found; `str()` gives the table in plain ASCII, 80 columns wide.

    Attributes:
        rows: the modules, each before its children.
        parameters: the numbers in all parameters; shared ones count once.
        trainable: those of them that training may change.
        non_trainable: the others.
        buffers: the numbers in all buffers.
        unknown: how many parameters get their shape with the first batch only.
        parameter_bytes: the parameters' memory by type (`{"float32": 4096}`).
        buffer_bytes: the buffers' memory.
        input: the input's shape; empty without an example.
        input_bytes: the input's memory.
        activation_bytes: about what the forward pass keeps for the backward pass: the
            outputs of all modules that called no other. None without an example.
        multiply_adds: the multiplications with an addition of one forward pass with the example:
            those of matrix products, convolutions and attention. What has no product of
            matrices (norms, activations) or no known formula counts as none. None without an
            example.
        hidden_below: the level of the last rows, where there are deeper modules.
    """

    rows: list[Row]
    parameters: int
    trainable: int
    non_trainable: int
    buffers: int
    unknown: int
    parameter_bytes: dict[str, int]
    buffer_bytes: int
    input: str = ""
    input_bytes: int = 0
    activation_bytes: int | None = None
    multiply_adds: int | None = None
    hidden_below: int | None = None

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = PLAIN_WIDTH) -> str:
        """The table in plain ASCII, at most `width` columns wide."""
        file = io.StringIO()
        console = _console(file, width=width, color_system=None, force_terminal=False)
        console.print(self._table(ascii_only=True))
        lines = file.getvalue().replace("…", "~").splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def print(
        self, file: IO[str] | None = None, *, print_fn: Callable[[str], Any] | None = None
    ) -> None:
        """Print the table: with rich in a terminal, else as `str()`.

        Args:
            file: where to; None is `sys.stdout`.
            print_fn: called with the text instead.
        """
        if print_fn is not None:
            print_fn(str(self))
            return
        file = sys.stdout if file is None else file
        encoding = getattr(file, "encoding", None) or "utf-8"
        is_terminal = hasattr(file, "isatty") and file.isatty()
        if is_terminal and encoding.lower().startswith("utf"):
            console = _console(file, force_terminal=True)
            console.print(self._table(ascii_only=False), width=min(console.width, WIDEST))
        else:
            file.write(str(self).encode(encoding, "replace").decode(encoding) + "\n")

    def _table(self, *, ascii_only: bool) -> RenderableType:
        from rich.box import Box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        line = "-" if ascii_only else "─"
        rule = Box(f"    \n    \n {line}{line} \n" + "    \n" * 5, ascii=ascii_only)
        layers = Table(box=rule, show_edge=False, pad_edge=False, header_style="bold")
        layers.add_column("Layer", min_width=12)
        if self.input:
            layers.add_column("Output shape", min_width=12)
        layers.add_column("Parameters", justify="right", no_wrap=True)
        layers.add_column("Trainable", no_wrap=True)
        if self.multiply_adds:
            layers.add_column("Mult-adds", justify="right", no_wrap=True)
        times = "x" if ascii_only else "×"
        for row in self.rows:
            repeated = f" {times}{row.calls}" if row.calls > 1 and not row.reused else ""
            name = Text.assemble("  " * row.level, (f"{row.name} ", "bold") if row.name else "")
            name.append(f"({row.type})" if row.name else row.type, "cyan").append(repeated)
            cells = [name, *([Text(row.output)] if self.input else [])]
            for cell in cells:
                cell.no_wrap, cell.overflow = True, "ellipsis"
            dim = "" if row.trainable == "yes" else "bright_black"
            cells += [Text(_parameters_text(row), dim), Text(row.trainable, dim)]
            if self.multiply_adds:
                cells.append(Text(human_count(row.multiply_adds) if row.multiply_adds else ""))
            layers.add_row(*cells)
        totals = Table.grid(padding=(0, 2))
        totals.add_column(no_wrap=True)
        totals.add_column(justify="right", no_wrap=True)
        totals.add_column()
        for total in self._totals():
            totals.add_row(*total)
        parts: list[RenderableType] = [layers, "", totals]
        if self.hidden_below is not None:
            parts.insert(
                1,
                f"Deeper modules are counted in their parents; depth={self.hidden_below + 1} "
                "shows more.",
            )
        return Group(*parts)

    def _totals(self) -> Iterator[tuple[str, str, str]]:
        notes = [f"{human_bytes(size)} ({name})" for name, size in self.parameter_bytes.items()]
        if self.unknown:
            notes.append(f"{self.unknown} tensors not yet known")
        yield "Parameters", f"{self.parameters:,}", ", ".join(notes)
        yield "Trainable", f"{self.trainable:,}", ""
        yield "Non-trainable", f"{self.non_trainable:,}", ""
        yield "Buffers", f"{self.buffers:,}", human_bytes(self.buffer_bytes) * bool(self.buffers)
        if self.activation_bytes is not None:
            yield "Input", "", f"{human_bytes(self.input_bytes)}, {self.input}"
            kept = human_bytes(self.activation_bytes)
            yield "Activations", "", f"about {kept}, forward and kept for backward"
        if self.multiply_adds:
            yield "Mult-adds", f"{self.multiply_adds:,}", "forward, with this input"


def human_bytes(size: float) -> str:
    """An amount of memory as people read it: `512 B`, `4.0 KiB`, `97.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_count(number: int) -> str:
    """A large number in four digits at most: `812`, `1.50 k`, `23.1 M`, `4.06 G`."""
    size = float(number)
    for unit in ("", " k", " M", " G", " T"):
        if size < 999.5 or unit == " T":
            break
        size /= 1000
    digits = 0 if not unit or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f}{unit}"


def _console(file: IO[str], **options: Any) -> Console:
    """A console that takes text as it is, whatever brackets and numbers stand in it."""
    from rich.console import Console

    return Console(
        file=file, markup=False, highlight=False, emoji=False, force_jupyter=False, **options
    )


def _parameters_text(row: Row) -> str:
    if row.reused:
        return "(reused)"
    if row.parameters is None:
        return "not yet known"
    if row.is_group and not row.parameters:
        return ""
    return f"{row.parameters:,}" + (" + shared" if row.shared else "")
