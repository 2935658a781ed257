"""The results of `fitkit.verify`: rows, causes, and the table."""

from __future__ import annotations

import dataclasses
import html
import io
import math

COUNTED = "return {'loss': loss, 'count': the labels that count} from a training_step."

REASONS = {
    "augmentation": (
        "gives another sample when it is read again under the same seed.",
        "Draw from torch's, NumPy's or Python's global generator, or from a generator that is an "
        "attribute of the data set. Give others the seed fitkit.data.sample_seed(), in "
        "__getitem__.",
    ),
    "dropout": (
        "draws different random numbers for each part, process or kernel, and not by torch's "
        "operations for single rows.",
        "You need not change it. Everything else was compared with this layer in evaluation mode.",
    ),
    "batch_norm": (
        "normalises each part of a batch by itself.",
        "Use GroupNorm or LayerNorm, or keep it in evaluation mode (layer.eval()); on several "
        "devices compile(sync_batchnorm=True).",
    ),
    "layer": (
        "gives a sample a different output when the rest of its batch differs.",
        "Let it look at each sample alone, or train on undivided batches.",
    ),
    "unsteady": (
        "gives different outputs for the same input, weights and seeds.",
        "Draw from torch's global generator, and keep what changes in a buffer.",
    ),
    "forgotten": (
        "keeps state that the checkpoint does not contain.",
        "Keep it in a buffer (register_buffer), or in get_extra_state and set_extra_state.",
    ),
    "ignored_labels": (
        "is a mean over the labels that count, and the parts have different numbers of them.",
        f"Give the loss by name (loss='cross_entropy' ignores -100), or {COUNTED}",
    ),
    "samples": (
        "holds other numbers of samples than fitkit counts in it, by which its parts are weighed.",
        "Let your collate_fn set samples on the batch, or return {'loss': loss, 'count': samples} "
        "from a training_step.",
    ),
    "sum": (
        "is a sum over the samples, and parts are averaged.",
        "Return the mean over the samples.",
    ),
    "loss": (
        "isn't a mean over the samples. It depends on how the batch is cut, but no output does.",
        f"Return the mean over the samples. If the loss is another mean, {COUNTED} If it needs the "
        "whole batch, as a contrastive loss does, train on undivided batches.",
    ),
    "metric": (
        "isn't a mean over the samples, and can't be joined over batches.",
        "Give it by name or as a torchmetrics.Metric, which see all samples.",
    ),
    "kernels": (
        "The kernels add in a different order each time.",
        "With compile(deterministic=True) both runs are equal, bit for bit.",
    ),
    "gradients": (
        "No layer's output differs, but gradients do: by kernels, or a loss that draws.",
        "Try compile(deterministic=True).",
    ),
    "rounding": (
        "As much is rounded off as the updates change.",
        "Write precision='32-true', or train at a higher rate.",
    ),
    "by_rank": (
        "With accumulation on one process the numbers are equal, so something differs by rank.",
        "",
    ),
    "by_kernel": ("No layer draws numbers: the kernels compute something else.", ""),
    "not_finite": (
        "isn't finite any more.",
        "See fitkit.callbacks.TerminateOnNaN, and try a lower rate.",
    ),
}
"""What is said of a cause, and what to write."""

KINDS = {
    "augmentation": "data", "unsteady": "kernels", "gradients": "kernels", "forgotten": "state",
    "sum": "loss", "by_rank": "unknown", "by_kernel": "kernels", "not_finite": "rounding",
}  # fmt: skip
"""The kind of a cause, where it isn't the reason's name."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """The cause of a difference, found by an experiment.

    Attributes:
        kind: `"dropout"` (any layer that draws random numbers), `"batch_norm"`, `"layer"` (another
            one that mixes samples) or `"samples"` (fitkit counts a batch's samples wrongly). Or
            `"ignored_labels"`, `"loss"`, `"metric"`, `"data"`, `"kernels"`, `"state"` (missing in
            the checkpoint), `"rounding"`, `"device"` (an accelerator computes something else),
            `"error"` or `"unknown"`.
        place: the name of the layer, the metric or the part of the data; "" if there is none.
        words: what it does.
        advice: what to write.
    """

    kind: str
    place: str
    words: str
    advice: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.place, self.words, self.advice) if part)


def cause_of(reason: str, place: str = "") -> Cause:
    """Return the cause that `REASONS` describes."""
    return Cause(KINDS.get(reason, reason), place, *REASONS[reason])


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: `"data"`, `"augmentation"`, `"repeat"`, `"accumulated"`, `"processes"`,
            `"evaluation"`, `"compiled"`, `"resumed"` or `"precision"`; and `"device"`, if
            `verify` got `against`.
        what: the name in words.
        ok: whether both sides are equal; None if it wasn't run.
        digits: how many digits are equal, relative to what the updates changed (in an evaluation:
            to the values). Infinite if all bits are equal, None if nothing was compared.
        first: the first parameter or value that differs; "" if none does.
        causes: the causes of the difference.
        note: why it wasn't run, or how it was.
    """

    name: str
    what: str
    ok: bool | None
    digits: float | None = None
    first: str = ""
    causes: tuple[Cause, ...] = ()
    note: str = ""

    @property
    def equal(self) -> str:
        """How equal both sides are, in words."""
        if self.digits is None:
            return "not run" if self.ok is None else "no"
        if math.isinf(self.digits):
            return "bit for bit"
        count = math.floor(self.digits)
        if count == 0:
            return "to less than 1 digit" if self.ok else "no"
        digits = f"{count} digit{'' if count == 1 else 's'}"
        return f"to {digits}" if self.ok else f"no ({digits})"


def digits_of(difference: float) -> float:
    """Return the number of equal digits for a relative difference."""
    return math.inf if difference == 0.0 else max(0.0, -math.log10(difference))


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. `str()` gives the table.

    Attributes:
        rows: the comparisons, in the order in which they were made.
        title: the number of updates and samples, and the precision of the comparison.
    """

    rows: tuple[Row, ...]
    title: str

    @property
    def ok(self) -> bool:
        """Whether all comparisons that were run are equal."""
        return all(row.ok is not False for row in self.rows)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of all differences, each once, in the order of the rows."""
        return tuple(dict.fromkeys(cause for row in self.rows for cause in row.causes))

    def __getitem__(self, name: str) -> Row:
        """Return the row of that name."""
        return {row.name: row for row in self.rows}[name]

    @property
    def table(self) -> str:
        """The rows as text."""
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("run", "equal", "why, and what to write", box=box.SIMPLE_HEAD)
        said: set[Cause] = set()
        for row in self.rows:
            reasons = [
                f"{c.place or c.words}: as above." if c in said else str(c) for c in row.causes
            ]
            reasons.append(row.note)
            said.update(row.causes)
            if row.first and not row.ok:
                reasons.insert(0, f"{row.first} is the first that differs.")
            cells = (row.what, row.equal, "\n".join(filter(None, reasons)))
            table.add_row(*map(Text, cells))
        file = io.StringIO()
        console = Console(file=file, width=100)
        console.print(Text(self.title))
        console.print(table)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()

    def __str__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.table)}</pre>"
