"""Registries of names: how fitkit resolves strings such as `"adam"`."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.foreign_names import no_attribute, rows

Entry = TypeVar("Entry")


def normalise(name: str) -> str:
    """Return the form in which names are compared: lower case, without `_`, `-` and blanks."""
    return name.strip().lower().replace("_", "").replace("-", "").replace(" ", "")


def nearest(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Up to `most` of `names` that may be what `name` means, best first.

    A slip of the pen, or a name of which only some words were written: `"validation"` for
    `"validation_data"`. What merely looks alike isn't one: of `"class_weight"` and `"loss_weights"`
    each word counts, and so does each digit of `"top5"`.
    """
    slips: dict[str, tuple[int, str]] = {}
    parts: dict[str, tuple[int, str]] = {}
    for known in names:
        count, form = _slips_of_names(name, known), normalise(known)
        if count is not None:
            slips.setdefault(form, (count, known))
        elif _is_part(name, known):
            parts.setdefault(form, (len(form), known))
    found = sorted((slips or parts).values(), key=lambda one: one[0])
    return [known for _, known in found[:most]]


def _words(name: str) -> list[str]:
    """`["cross", "entropy", "loss"]` of `"CrossEntropyLoss"` and of `"cross_entropy_loss"`."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return [word.lower() for word in found]


def _slips_of_names(name: str, known: str) -> int | None:
    """Return how many slips of the pen part two names; None where they are different names."""
    words, others = _words(name), _words(known)
    if len(words) != len(others) or len(words) == 1:  # written as one word, perhaps
        return _slips(normalise(name), normalise(known), short=5)
    each = [_slips(*pair) for pair in zip(words, others, strict=True)]
    return sum(slips or 0 for slips in each) if None not in each else None


def _slips(word: str, other: str, short: int = 3) -> int | None:
    """Return how many slips of the pen part two words; None where they are different words.

    Args:
        word, other: in lower case.
        short: in a word of at most so many letters, as in an acronym, each has a meaning: one may
            only be left out, swapped with the next, or be the plural's.
    """
    if re.findall(r"\d+", word) != re.findall(r"\d+", other):
        return None
    length = min(len(word), len(other))
    if abs(len(word) - len(other)) > 2:
        return None
    slips = _edits(word, other)
    if length <= short and slips:
        is_left_out = len(word) < len(other)
        is_same = is_left_out or word == f"{other}s" or sorted(word) == sorted(other)
        return slips if slips == 1 and is_same else None
    return slips if slips <= (1 if length <= 8 else 2) else None


def _edits(form: str, other: str) -> int:
    """Return the least number of letters to add, leave out, change or swap with the next."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(form, 1):
        last, row, before = row, [i], row if i == 1 else before
        for j, wanted in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and form[i - 2] == wanted:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before = last
    return row[-1]


def _is_part(name: str, known: str) -> bool:
    """Whether all words of a name are words of a known one, which has more; or one of the two is
    short for the other, as `"eps"` and `"poly"` are.
    """
    others = _words(known)
    if len(name) > 3 and normalise(known).startswith(normalise(name)):
        return True
    if len(others) == 1 == len(_words(name)) and len(known) > 2:
        return name.lower().startswith(others[0]) and len(name) >= 2 * len(known)
    return len(normalise(name)) > 3 and all(
        any(_slips(word, other, short=5) in (0, 1) for other in others) for word in _words(name)
    )


def did_you_mean(name: str, names: Iterable[str], most: int = 3) -> str:
    """Return the sentence ` Did you mean …?` for an unknown name; empty if no name is near."""
    close = " or ".join(map(repr, nearest(name, names, most)))
    return f" Did you mean {close}?" if close else ""


def _instead(kind: str, form: str) -> str:
    """Return what to write for a peer's name, whose spelling doesn't matter; empty for others."""
    named = rows().get(kind, {}).items()
    return next((words for (_, theirs), words in named if normalise(theirs) == form), "")


LISTED = 24
"""The most names that a message lists. With more, it lists the nearest, and where to find all."""


def unknown_name(
    kind: str, name: str, names: Iterable[str], hint: str = "", page: str = ""
) -> ConfigurationError:
    """Return the error for an unknown name: the nearest five, all names, a hint.

    Args:
        kind: the kind of thing that has the name.
        name: the unknown name.
        names: the known names.
        hint: a sentence at the end of the message.
        page: the page that lists all names, if there are more than `LISTED`.
    """
    known = sorted(set(names))
    alone = re.sub(rf"_?{kind}$", "", name, flags=re.IGNORECASE)  # "mae_loss"
    is_known = normalise(alone) in map(normalise, known)
    suggestion = did_you_mean(alone if is_known else name, known, most=5)
    if page and suggestion and len(known) > LISTED:
        listing = f"The names are listed in {page}."
    else:
        listing = f"Known: {', '.join(repr(item) for item in known)}."
    ending = f" {hint}" if hint else ""
    return ConfigurationError(
        f"{kind}={name!r} is not a known {kind}.{suggestion} {listing}{ending}", code="FK028"
    )


class Registry(Generic[Entry]):
    """The names of one kind, and what they stand for. Case, `_` and `-` don't matter.

    Args:
        kind: the argument's name, as users write it (`"loss"`).
        hint: a sentence that ends the error for an unknown name.
        group: the group of entry points by which installed packages add names. Each is loaded when
            its name is looked up. None for no such names.
        page: the page that lists all names, if there are many.
        accepts: whether an entry is of the right kind. Each look-up asks. None accepts all.
        expected: what `accepts` asks for, as it follows "which isn't" in the error.
    """

    def __init__(
        self,
        kind: str,
        hint: str = "",
        group: str | None = None,
        page: str = "",
        accepts: Callable[[Any], bool] | None = None,
        expected: str = "",
    ) -> None:
        self.kind = kind
        self.hint = hint
        self.page = page
        self.group = group
        self.accepts = accepts
        self.expected = expected
        self._entries: dict[str, Entry] = {}
        self._spelling: dict[str, str] = {}
        self._promised: dict[str, importlib.metadata.EntryPoint] = {}

    def promise(self, home: str, *names: str) -> None:
        """Register names whose entry is imported when one of them is looked up.

        Args:
            home: where the entry is, as `"package.module:name"`.
            names: its names.
        """
        for name in names:
            point = importlib.metadata.EntryPoint(name, home, self.group or self.kind)
            self._promised[normalise(name)] = point
            self._spelling[normalise(name)] = name

    def add(self, name: str, entry: Entry, *aliases: str) -> Entry:
        """Register `entry` under `name` and `aliases`; returns it.

        A class or function that is defined again, as by a notebook's cell, replaces the former.
        """
        for spelling in (name, *aliases):
            form = normalise(spelling)
            if form in self._spelling and _origin(self._found(spelling)) != _origin(entry):
                raise ValueError(f"{self.kind} {spelling!r} is there already. Choose another name.")
            self._entries[form] = entry
            self._spelling[form] = spelling
        return entry

    def __contains__(self, name: str) -> bool:
        form = normalise(name)
        return form in self._spelling or form in self._installed()

    def holds(self, name: str, entry: object) -> bool:
        """Whether a registered name stands for `entry`. No installed package is looked for."""
        return normalise(name) in self._spelling and self._found(name) is entry

    def __iter__(self) -> Iterator[str]:
        yield from self._spelling.values()
        for form, point in self._installed().items():
            if form not in self._spelling:
                yield point.name

    def __getitem__(self, name: str) -> Entry:
        """Look up a name.

        Raises:
            ConfigurationError: the name is unknown (the message has the nearest and all names), or
                an installed package's entry point can't be imported.
            ArgumentTypeError: what was registered isn't of this registry's kind.
        """
        entry = self._found(name)
        if self.accepts is not None and not self.accepts(entry):
            raise ArgumentTypeError(
                f"{self.kind}={name!r} is registered as {_described(entry)}, which isn't "
                f"{self.expected}."
            )
        return entry

    def _found(self, name: str) -> Entry:
        """Return what was registered under a name, of whatever kind it is."""
        form = normalise(name)
        if form in self._entries:
            return self._entries[form]
        if form in self._promised:
            self._entries[form] = self._promised[form].load()
        else:
            point = self._installed().get(form)
            if point is None and (theirs := _instead(self.kind, form)):
                raise ConfigurationError(
                    f"{self.kind}={name!r} isn't fitkit's. {theirs}", code="FK093"
                )
            if point is None:
                raise unknown_name(self.kind, name, self, self.hint, self.page)
            try:
                self.add(point.name, point.load())
            except Exception as error:
                raise ConfigurationError(
                    f"{self.kind}={name!r} is the entry point {point.value!r} (group "
                    f"{self.group!r}) of an installed package, but can't be imported: {error!r}."
                ) from error
        return self._entries[form]

    def _installed(self) -> dict[str, importlib.metadata.EntryPoint]:
        """Return the entry points of installed packages by the form of their names."""
        if self.group is None:
            return {}
        found = importlib.metadata.entry_points(group=self.group)
        return {normalise(point.name): point for point in found}


def subclass_of(*bases: type, or_maker: bool = False) -> Callable[[Any], bool]:
    """Return what says whether an entry is a subclass of `bases`, or a function if `or_maker`."""

    def accepts(entry: Any) -> bool:
        return issubclass(entry, bases) if isinstance(entry, type) else or_maker and callable(entry)

    return accepts


def imported_on_demand(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module that imports some of its names when one asks for them.

    Args:
        module: the module's name.
        homes: where each name is: a module, or `"module:name"`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise no_attribute(f"module {module!r}", module, name)
        home, _, attribute = homes[name].partition(":")
        found = importlib.import_module(home)
        value = getattr(found, attribute) if attribute else found
        setattr(sys.modules[module], name, value)
        return value

    return get


def _described(entry: Any) -> str:
    """Return what an entry is, in words for a message."""
    name = getattr(entry, "__qualname__", None)
    if name is not None:
        return f"the {'class' if isinstance(entry, type) else 'function'} {name}"
    return repr(entry) if isinstance(entry, str) else f"an object of {type(entry).__qualname__}"


def _origin(entry: Any) -> Any:
    """Where a class or function is defined; for any other object, the object."""
    name = getattr(entry, "__qualname__", None)
    return entry if name is None else (entry.__module__, name)
