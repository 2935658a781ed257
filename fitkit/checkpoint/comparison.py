"""What a file of weights has and a module wants, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fitkit.checkpoint.dtypes import dtype_name
from fitkit.checkpoint.formats import WeightSource
from fitkit.errors import CheckpointError

# More names than this are counted, not listed: a large net's wouldn't fit on a screen.
_LISTED = 20
# How the names of `get_extra_state`'s entries end in torch.
_EXTRA_STATE = "_extra_state"


class LoadedWeights(NamedTuple):
    """What a load left out.

    Attributes:
        missing: names that the file doesn't have; the module kept its values.
        unexpected: names that only the file has.
        skipped: names whose tensors differ in shape; the module kept its values.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """The names in a file and in a module, sorted by what can be done with them.

    Attributes:
        fitting: what can be loaded.
        mismatched: what differs in shape or in kind of dtype, with a description each.
        missing: what only the module has.
        unexpected: what only the file has.
    """

    fitting: tuple[str, ...]
    mismatched: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def outcome(self) -> LoadedWeights:
        """What is left out when all that fits is loaded."""
        return LoadedWeights(self.missing, self.unexpected, tuple(self.mismatched))

    def check(
        self, path: str, module: torch.nn.Module, *, strict: bool, skip_mismatch: bool
    ) -> None:
        """Raise one CheckpointError that lists all that doesn't fit and isn't tolerated."""
        problems = []
        remedies = []
        if strict and (self.missing or self.unexpected):
            problems.append(listing("missing in the file", self.missing))
            problems.append(listing("in the file only", self.unexpected))
            remedies.append("strict=False (what both have)")
        if self.mismatched and not skip_mismatch:
            lines = [f"{name}: {what}" for name, what in self.mismatched.items()]
            problems.append(listing("of another shape or kind", lines))
            remedies.append("skip_mismatch=True (all but what differs)")
        if problems:
            raise CheckpointError(
                f"{path} doesn't fit this {type(module).__name__}; nothing was loaded."
                f"{''.join(problems)}\n"
                f"{self._prefix_hint()}Load it into the module that it was saved from, or load its "
                f"weights by load_weights with {' and '.join(remedies)}."
            )

    def _prefix_hint(self) -> str:
        """A sentence where all names differ by one prefix, the most frequent slip."""
        for longer, shorter, where in (
            (self.unexpected, self.missing, "in the file"),
            (self.missing, self.unexpected, "in the module"),
        ):
            prefix = _common_prefix(longer, shorter)
            if prefix:
                return f"All names {where} begin with {prefix!r}, and the others don't. "
        return ""

    def describe_skipped(self, path: str) -> str:
        """The warning for what `skip_mismatch` leaves out."""
        lines = [f"{name}: {what}" for name, what in self.mismatched.items()]
        return f"{path}: the module keeps its own values{listing('for', lines)}"


def compare(source: WeightSource, expected: Mapping[str, Any]) -> Comparison:
    """Compare an open file with a module's state dict; reads no tensor."""
    found = source.describe()
    names = found.keys() | source.extra.keys()
    mismatched = {
        name: reason
        for name, value in expected.items()
        if name in names and (reason := _mismatch(name, found.get(name), value))
    }
    return Comparison(
        fitting=tuple(name for name in expected if name in names and name not in mismatched),
        mismatched=mismatched,
        missing=tuple(name for name in expected if name not in names),
        unexpected=tuple(name for name in (*found, *source.extra) if name not in expected),
    )


def _mismatch(
    name: str, found: tuple[tuple[int, ...], torch.dtype] | None, expected: object
) -> str:
    """Why what was found can't become what is expected; empty where it can."""
    if name.endswith(_EXTRA_STATE):
        return ""  # its form may change from call to call; set_extra_state decides
    if not isinstance(expected, torch.Tensor):
        return "the file has a tensor, the module none" if found else ""
    wanted = (tuple(expected.shape), expected.dtype)
    if found is None:
        return f"the file has no tensor, the module {_words(*wanted)}"
    if found[0] != wanted[0] or not _convertible(found[1], expected.dtype):
        return f"the file has {_words(*found)}, the module {_words(*wanted)}"
    return ""


def _convertible(source: torch.dtype, target: torch.dtype) -> bool:
    both_floating = source.is_floating_point and target.is_floating_point
    return source == target or both_floating or (source.is_complex and target.is_complex)


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)} {shape}"


def listing(title: str, lines: tuple[str, ...] | list[str]) -> str:
    """The lines under a title with their number, indented; nothing where there are none."""
    if not lines:
        return ""
    more = [f"… and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return f"\n  {title} ({len(lines)}):\n    " + "\n    ".join([*lines[:_LISTED], *more])


def _common_prefix(longer: tuple[str, ...], shorter: tuple[str, ...]) -> str:
    """What stands before the names of `shorter` in `longer`, where that is all that differs."""
    if not shorter or len(longer) != len(shorter) or not longer[0].endswith(shorter[0]):
        return ""
    prefix = longer[0][: len(longer[0]) - len(shorter[0])]
    same = {prefix + name for name in shorter} == set(longer)
    return prefix if same else ""
