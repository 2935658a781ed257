"""In what two files differ, and so why two runs do."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fitkit.extras.inspection import clean, holds_checkpoints
from fitkit.extras.run_folder import RESUME, read_record
from fitkit.extras.run_steps import parting, read_steps
from fitkit.seams.files import (
    OpenWeights,
    decode_state,
    open_stored,
    open_weights,
    refusals,
    weights_in,
)

if TYPE_CHECKING:
    from rich.console import Console

SMALL = 8192
"""So many numbers of a state's tensor are read at most: those of an optimizer tell nothing more
than the weights do."""

MISSING = "–"


MOVING = (" now", " as the pass began")
"""The ends of the names of values that change during a run."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing in which two files differ.

    Attributes:
        part: `"versions"`, `"settings"`, `"rates"`, `"seeds"`, `"data"`, `"progress"`,
            `"history"`, or `"environment"` of runs' folders.
        name: of the thing.
        one, other: what each file has; `"–"` where it has none. Of the history there is the first
            epoch that differs.
    """

    part: str
    name: str
    one: str
    other: str


@dataclasses.dataclass(frozen=True)
class WeightDifference:
    """In what two files' weights differ, in the order of the net's layers.

    Attributes:
        compared: tensors that both have, in the same shape.
        differing: how many of those have other numbers.
        first: the name of the first of these; "" where there is none.
        largest: the largest difference between two numbers of it.
        relative: the norm of its difference, as a part of its norm.
        elsewhere: names that one file alone has, or in another shape.
    """

    compared: int
    differing: int
    first: str
    largest: float
    relative: float
    elsewhere: tuple[str, ...]

    def __str__(self) -> str:
        found = f"all {self.compared} tensors have the same numbers, bit for bit"
        if self.differing:
            found = (
                f"{self.differing} of {self.compared} tensors differ; the first is {self.first}, "
                f"by {self.largest:.2g} at most ({self.relative:.1g} of its size)"
            )
        if self.elsewhere:
            names = ", ".join(self.elsewhere[:4]) + (" …" if len(self.elsewhere) > 4 else "")
            found += f"; in one file alone, or in other shapes: {names}"
        return f"{found}."


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    differences: tuple[Difference, ...]
    weights: WeightDifference
    has_states: bool

    @property
    def same(self) -> bool:
        """Whether nothing differs that was compared."""
        weights = self.weights
        return not (self.differences or weights.differing or weights.elsewhere)

    @property
    def summary(self) -> str:
        """One sentence on why."""
        parts = list(dict.fromkeys(found.part for found in self.differences))
        causes = [part for part in parts if part not in ("progress", "history", "environment")]
        if not self.has_states:
            return "Weights alone are compared: at least one of both files holds nothing else."
        if self.same:
            return "Nothing differs."
        if causes:
            return f"What the runs were given differs: {', '.join(causes)}."
        if "progress" in parts:
            return "Both were given the same, and are at different places of their trainings."
        return (
            "Both were given the same, as far as files say it: look at the code, the data's order "
            "in a loader of your own, and what fitkit.verify finds."
        )


def compare(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Comparison:
    """Compare two checkpoints, or files of weights.

    Weights are read one tensor at a time, and of the state what is small.

    Raises:
        FileNotFoundError, CheckpointError, ConfigurationError: as `load_weights`.
    """
    with contextlib.ExitStack() as files:
        (mine, facts), (others, other_facts) = (_opened(path, files) for path in (one, other))
        has_states = all(("progress", "updates") in each for each in (facts, other_facts))
        found = _differences(facts, other_facts) if has_states else []
        return Comparison(tuple(found), _weights(mine, others), has_states)


def print_comparison(
    one: str | os.PathLike[str], other: str | os.PathLike[str], console: Console
) -> None:
    """Print in what two files differ.

    Raises:
        FileNotFoundError, CheckpointError, ConfigurationError: as `compare`.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = compare(one, other)
    console.print(Text(found.summary, "bold"))
    steps = [read_steps(path) if os.path.isdir(path) else None for path in (one, other)]
    if steps[0] is not None and steps[1] is not None:
        console.print(Text(parting(*steps)))
    if found.differences:
        heads = ("", "", *(clean(os.fspath(path)) for path in (one, other)))
        table = Table(box=box.SIMPLE_HEAD)
        for head in heads:
            table.add_column(Text(head), overflow="fold")
        last = ""
        for row in found.differences:
            cells = ("" if row.part == last else row.part, row.name, row.one, row.other)
            table.add_row(*(Text(clean(cell)) for cell in cells))
            last = row.part
        console.print(table)
    console.print(Text(clean(f"Weights: {found.weights}")))


Facts = dict[tuple[str, str], str]
"""What a file says, by part and name."""


def _differences(facts: Facts, others: Facts) -> list[Difference]:
    """Return what differs and tells something, in the order of `_facts`."""
    names = dict.fromkeys((*facts, *others))
    parts = list(dict.fromkeys(part for part, _ in names))
    found = [
        Difference(part, name, facts.get((part, name), MISSING), others.get((part, name), MISSING))
        for part, name in sorted(names, key=lambda key: parts.index(key[0]))
        if facts.get((part, name)) != others.get((part, name))
    ]
    if any(row.part == "progress" for row in found):
        found = [row for row in found if not row.name.endswith(MOVING)]
    epochs = [row.name.rpartition(" ")[0] for row in found if row.part == "history"]
    return [
        row for row in found if row.part != "history" or row.name.rpartition(" ")[0] == epochs[0]
    ]


def _opened(path: str | os.PathLike[str], files: contextlib.ExitStack) -> tuple[OpenWeights, Facts]:
    """Return a file's weights, and what it says beside them; of a run's folder, its newest
    checkpoint.
    """
    record = read_record(path) if os.path.isdir(path) else None
    if record is not None:
        path = os.path.join(path, RESUME)
    name = os.fspath(path)
    if not holds_checkpoints(path):
        return files.enter_context(open_weights(path)), {}
    stored = files.enter_context(open_stored(path))

    def read(number: int) -> torch.Tensor:
        place = stored.place_of(number)
        shape, _ = stored.describe(place)
        if math.prod(shape) > SMALL:
            return torch.empty(1)  # stands for what isn't read
        return stored.read(place)

    state: Any = None
    with refusals(name):
        state = decode_state(stored.document.get("state"), read)
    facts = {
        (part, key): _text(value)
        for part, key, value in _facts(stored.document.get("software"), state)
    }
    for key, value in _dict(_dict(record).get("environment")).items():
        facts["environment", str(key)] = _text(value)
    return weights_in(name, stored), facts


def _facts(software: Any, state: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield what a checkpoint says of its run: part, name and value."""
    state = _dict(state)
    for name, value in _dict(software).items():
        yield "versions", str(name), value
    for name, value in _dict(state.get("settings")).items():
        yield "settings", str(name), value
    training, progress = _dict(state.get("training")), _dict(state.get("progress"))
    optimizers = _list(training.get("optimizers"))
    for number, entry in enumerate(map(_dict, optimizers)):
        before = f"{number}: " if len(optimizers) > 1 else ""
        yield "rates", f"{before}optimizer", entry.get("class")
        for name, value in _dict(entry.get("options")).items():
            yield "rates", f"{before}{name}", value
        groups = _list(_dict(entry.get("state")).get("param_groups"))
        for place, group in enumerate(map(_dict, groups)):
            within = f"group {place} " if len(groups) > 1 else ""
            for name, value in group.items():
                if name != "params":
                    ends = " now" if name == "lr" else ""
                    yield "rates", f"{before}{within}{name}{ends}", value
    for entry in map(_dict, _list(training.get("schedulers"))):
        yield "rates", "scheduler", entry.get("class")
    yield "rates", "rate factor", training.get("rate_factor", 1.0)
    if progress:
        yield "seeds", "order of arrays", progress.get("seed")
        drawn = _list(progress.get("random"))
        for rank, now in enumerate(map(_dict, drawn)):
            of_rank = f" on rank {rank}" if rank else ""
            yield "seeds", f"torch's{of_rank}", _torch_seed(now.get("torch"))
        began = _list(progress.get("began"))
        for library in ("python", "numpy", "torch", "own"):
            # A loader that shuffles draws its pass's order from these.
            states = [_dict(each).get(library) for each in began]
            whose = "the loader's own numbers" if library == "own" else f"{library}'s numbers"
            yield "seeds", f"{whose} as the pass began", _digest(states)
        data = _dict(progress.get("data"))
        for name, value in data.items():
            if name == "digests":
                for path, digest in _dict(value).items():
                    place = {"[0]": "x", "[1]": "y", "[2]": "sample_weight"}.get(path, path)
                    yield "data", str(place), digest
            else:
                yield "data", str(name), value
        yield "data", "ranks that share them", progress.get("shares")
        for name in ("epoch", "steps", "number", "batches"):
            named = "pass over the data" if name == "number" else name
            yield "progress", named, progress.get(name)
        yield "progress", "ranks", len(drawn)
    if "updates" in training:
        yield "progress", "updates", training["updates"]
    history = _dict(progress.get("history"))
    values = _dict(history.get("history"))
    for place, epoch in enumerate(_list(history.get("epoch"))):
        for name, series in values.items():
            if place < len(_list(series)) and isinstance(epoch, int):
                yield "history", f"epoch {epoch + 1} {name}", series[place]


def _torch_seed(state: Any) -> int | None:
    """Return the number that torch's generator was seeded with, with which its state begins."""
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.numel() < 8:
        return None
    return int.from_bytes(bytes(state.reshape(-1)[:8].tolist()), "little")


def _digest(value: Any) -> str:
    """Return a short digest of plain data and tensors."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, (torch.Tensor, np.ndarray)):
            found.update(np.asarray(item).tobytes())
        elif isinstance(item, dict):
            for key, part in item.items():
                found.update(str(key).encode())
                add(part)
        elif isinstance(item, (list, tuple)):
            for part in item:
                add(part)
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()[:12]


def _text(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        single = value.numel() == 1 if isinstance(value, torch.Tensor) else value.size == 1
        return f"{value.item():.6g}" if single else _digest(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value[:12]))}{', …' if len(value) > 12 else ''}]"
    return str(value)[:200]


def _dict(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _weights(one: OpenWeights, other: OpenWeights) -> WeightDifference:
    """Compare tensors one by one."""
    mine, others = one.describe(), other.describe()
    shared = [n for n, (shape, _) in mine.items() if n in others and others[n][0] == shape]
    alone = [name for name in dict.fromkeys((*mine, *others)) if name not in shared]
    differing, first, largest, relative = 0, "", 0.0, 0.0
    for name in shared:
        a, b = one.read(name), other.read(name)
        if a.dtype == b.dtype and torch.equal(a, b):
            continue
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        apart = torch.where((a == b) | ((a != a) & (b != b)), 0.0, a - b)
        if not bool(apart.any()):
            continue
        differing += 1
        if differing == 1:
            first, largest = name, float(apart.abs().max())
            relative = float(apart.norm() / a.norm()) if float(a.norm()) else math.inf
    return WeightDifference(len(shared), differing, first, largest, relative, tuple(alone))
