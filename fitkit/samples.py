"""How many samples a batch has, and what a list in a batch or an output means.

Every weight of a batch (in an accumulated update, over ranks, in a logged mean) comes from here.
In this order:

1. What *says* its number: `samples`, `num_graphs` or `batch_size`, the outermost first.
2. What has *one entry per sample*: a list of dicts, of images of unlike shapes, an entry of a kind
   that counts its samples (`BatchKind`), an object with `__len__`.
3. *Rows*: the first dimension of tensors. What has no rows by nature isn't asked: a number, a
   tensor without dimensions or of one number, a list of texts or numbers.

Where entries disagree and nothing says which is right, the first one counts, targets before inputs,
and `Counted.doubt` has a sentence about it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fitkit import trees
from fitkit.batch_kinds import BatchKind, has_entries, kind_of
from fitkit.errors import warn

SAYS = ("samples", "num_graphs", "batch_size")
"""What a batch's own number is called."""

LABELS = ("labels", "label")
"""A dict's targets, which are asked before its other entries."""

NUMBERS = (numbers.Number,)
TEXTS = (str, bytes)
MOST_PARTS = 3
"""A list of so many tensors may be a batch's parts; a longer one of unlike tensors can't."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """A batch's samples.

    Attributes:
        samples: their number.
        doubt: a sentence where its entries disagree on them.
        is_shown: whether something in it shows them; otherwise it is taken for one.
    """

    samples: int
    doubt: str | None = None
    is_shown: bool = True


class Doubts:
    """Says once for a model that its batches' entries disagree on their samples.

    Only the first rank speaks. The others' doubts reach it when the ranks join a pass's values.

    Attributes:
        sentence: the first doubt; None before.
    """

    def __init__(self) -> None:
        self.sentence: str | None = None
        self._told = False

    def note(self, sentence: str, *, speaks: bool) -> None:
        """Take a doubt, and say it if no other was said.

        Args:
            speaks: whether this rank may warn.
        """
        self.sentence = self.sentence or sentence
        if speaks and not self._told:
            self._told = True
            warn(sentence, code="FK060")


class Reading(enum.Enum):
    """What the entries of a list or tuple are.

    `SAMPLES`: one entry per sample. `PARTS`: several inputs or outputs, with rows for the samples
    each. `UNCLEAR`: either. `PLAIN`: texts or numbers, which may be one per sample, or settings.
    """

    SAMPLES = "samples"
    PARTS = "parts"
    UNCLEAR = "unclear"
    PLAIN = "plain"


# ---------------------------------------------------------------------- the number


def samples_among(tree: Any) -> int:
    """Return the number of samples in inputs, targets or outputs, which aren't a whole batch."""
    if type(tree) is torch.Tensor and not tree.is_nested:
        return tree.shape[0] if tree.ndim else 1
    return _counted([("its entries", tree)]).samples


def samples_in(x: Any, y: Any) -> int:
    """Return the number of samples in a batch's inputs and targets."""
    if isinstance(y, torch.Tensor) and not y.is_nested and isinstance(x, torch.Tensor) and y.ndim:
        return y.shape[0]
    return counted_in(x, y).samples


def samples_of(batch: Any) -> int:
    """Return the number of samples in a batch of any structure."""
    return counted(batch).samples


def counted_in(x: Any, y: Any) -> Counted:
    """Return the samples of a batch's inputs and targets, targets first."""
    if _agree(y, x):
        return Counted(y.shape[0])
    return _counted([("its input", x)] if y is None else [("y", y), ("x", x)], has_target=True)


def counted(batch: Any) -> Counted:
    """Return the samples of a batch: `(x, y)`, `(x, y, weight)`, or any other structure."""
    if not has_entries(batch) or not 1 <= len(batch) <= MOST_PARTS:
        return _counted([("batch", batch)])
    has_target = len(batch) > 1
    # A list of one entry may be a list of samples.
    has_parts = type(batch) is tuple or (type(batch) is list and has_target)
    if has_parts and _agree(batch[has_target], batch[0]):
        return Counted(batch[0].shape[0])
    if (number := said_by(batch)) is not None:
        return Counted(number)
    found = reading(batch)
    if found is Reading.PLAIN or (found is Reading.SAMPLES and type(batch) is list):
        return Counted(len(batch))
    if found is Reading.UNCLEAR and type(batch) is list and not _are_rows(batch):
        return _counted([("batch", batch)])
    # Targets before inputs; a batch's third entry is asked last.
    named = [("y", part) for part in batch[1:2] if part is not None]
    named += [("x", batch[0]), *(("its third entry", part) for part in batch[2:])]
    return _counted(named, has_target=has_target)


def _agree(y: Any, x: Any) -> bool:
    """Whether two plain tensors have equally many rows."""
    return (
        type(y) is torch.Tensor
        and type(x) is torch.Tensor
        and not (y.is_nested or x.is_nested)
        and y.ndim > 0
        and x.ndim > 0
        and y.shape[0] == x.shape[0]
    )


def _are_rows(items: Any) -> bool:
    """Whether they are tensors with equally many rows."""
    return all(map(_is_array, items)) and len({item.shape[0] for item in items}) == 1


def _counted(parts: list[tuple[str, Any]], *, has_target: bool = False) -> Counted:
    said = _said(parts)
    if said:
        return _first_of(said)
    entries = [entry for place, part in parts for entry in _entries(place, part, has_target)]
    of_samples = [entry for entry in entries if entry.kind is Reading.SAMPLES]
    if of_samples:
        return _first_of([(entry.place, entry.number) for entry in of_samples])
    rows = [entry for entry in entries if entry.kind is Reading.PARTS]
    unclear = [entry for entry in entries if entry.kind is Reading.UNCLEAR]
    plain = [entry for entry in entries if entry.kind is Reading.PLAIN]
    if rows:
        first = _chosen(rows)
        others = [(e.place, e.number) for e in rows if not e.may_have(first.number)]
        others += [(e.place, e.number) for e in unclear if not e.may_have(first.number)]
        return _first_of([(first.place, first.number), *others])
    if unclear:
        return _of_unclear(unclear, [entry.number for entry in plain])
    return Counted(plain[0].number) if plain else Counted(1, is_shown=False)


def _chosen(rows: list[_Entry]) -> _Entry:
    """Return the entry whose rows count: a single row may be a setting, such as a temperature."""
    several = [entry for entry in rows if not entry.is_single]
    return (several or rows)[0]


def _of_unclear(unclear: list[_Entry], confirmed: list[int]) -> Counted:
    first = unclear[0]
    for number in (*confirmed, *first.numbers):
        if all(entry.may_have(number) for entry in unclear):
            is_open = first.is_open and len(unclear) == 1 and number not in confirmed
            return Counted(number, _open(first) if is_open else None)
    return _first_of([(entry.place, entry.number) for entry in unclear])


def _open(entry: _Entry) -> str:
    others = ", ".join(str(number) for number in entry.numbers[1:])
    return (
        f"A list in a batch can be read in two ways ({entry.place}): each entry is a sample, or a "
        f"part with rows for all samples ({others}). fitkit counts {entry.number} samples. {REMEDY}"
    )


REMEDY = (
    "If that is wrong, let your collate_fn set samples on the batch, or return "
    "{'loss': loss, 'count': samples} from a training_step."
)


def _first_of(found: list[tuple[str, int]]) -> Counted:
    """Return the first number; with a doubt if another one differs."""
    place, number = found[0]
    for other, differs in found[1:]:
        if differs != number:
            return Counted(
                number,
                f"The entries of a batch disagree on its samples: {place} has {number}, {other} "
                f"has {differs}. fitkit counts {place}. {REMEDY}",
            )
    return Counted(number)


# ---------------------------------------------------------------------- what says its number


def _said(parts: list[tuple[str, Any]]) -> list[tuple[str, int]]:
    """Return the numbers that objects say, of the outermost level at which one does."""
    level = parts
    while level:
        found = [(place, n) for place, tree in level if (n := said_by(tree)) is not None]
        if found:
            return found
        level = [child for place, tree in level for child in _children(place, tree)]
    return []


_SILENT: set[tuple[type, str]] = set()
"""Properties that compute something else than a number. They may be costly, so ask them once."""


def said_by(tree: Any) -> int | None:
    """Return the samples that a batch or a part of it says to have; None if it doesn't say."""
    kind = type(tree)
    if kind in _PLAIN_TYPES or isinstance(tree, (torch.Tensor, type, *NUMBERS)):
        return None
    if kind_of(tree) is not None:
        return None
    for name in SAYS:
        value = tree.get(name) if kind is dict else _attribute(tree, kind, name)
        if (number := _number(value)) is not None:
            return number
    return None


_PLAIN_TYPES = frozenset({tuple, list, str, bytes, bytearray, set, frozenset, type(None)})


def _attribute(tree: Any, kind: type, name: str) -> Any:
    """Return an attribute, or a mapping's entry; a property that gave something else than a number
    or None isn't asked again.
    """
    own = getattr(kind, name, None)
    computes = isinstance(own, (property, functools.cached_property))
    if callable(own) or (computes and (kind, name) in _SILENT):
        return None
    try:
        value = getattr(tree, name, None)
        if value is None and isinstance(tree, Mapping) and name in tree:
            value = tree[name]
    except Exception as error:
        value = error
    if computes and value is not None and _number(value) is None:
        _SILENT.add((kind, name))
    return value


def _number(value: Any) -> int | None:
    """Return a whole number from 0; the first entry of a size."""
    if isinstance(value, torch.Size):
        value = value[0] if value else None
    if isinstance(value, torch.Tensor) and value.is_cpu and value.ndim == 0:
        value = None if value.is_floating_point() or value.is_complex() else value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    number = int(value)
    return number if number >= 0 else None


# ---------------------------------------------------------------------- entries


@dataclasses.dataclass(frozen=True)
class _Entry:
    """What a part of a batch shows of its samples.

    Attributes:
        place: where it is.
        kind: `SAMPLES` for one entry per sample, `PARTS` for rows, or `UNCLEAR` or `PLAIN`.
        numbers: the numbers that it may have; the first is the likely one.
        is_single: whether it has a single number, and may be a setting.
        second: a target's number agrees with it though it stands second (time first).
        is_open: whether nothing about it tells which of several numbers is right.
    """

    place: str
    kind: Reading
    numbers: tuple[int, ...]
    is_single: bool = False
    second: int | None = None
    is_open: bool = False

    @property
    def number(self) -> int:
        return self.numbers[0]

    def may_have(self, number: int) -> bool:
        return self.is_single or number in self.numbers or number == self.second


def _entries(place: str, tree: Any, has_target: bool) -> Iterable[_Entry]:
    if isinstance(tree, torch.Tensor):
        yield from _of_tensor(place, tree, has_target)
    elif (kind := kind_of(tree)) is not None:
        yield _Entry(place, _as_read(kind), (kind.count(tree),))
    elif isinstance(tree, (tuple, list)) and not trees.is_named_tuple(tree):
        yield from _of_sequence(place, tree, has_target)
    elif _is_sized_record(tree) and (size := _length(tree)) is not None:
        yield _Entry(place, Reading.SAMPLES, (size,))
    elif trees.is_container(tree):
        for name, child in _children(place, tree):
            yield from _entries(name, child, has_target)
    elif (rows := _rows(tree)) is not None:
        yield _Entry(place, Reading.PARTS, (rows,))
    elif not isinstance(tree, (*TEXTS, *NUMBERS, type)) and (size := _length(tree)) is not None:
        yield _Entry(place, Reading.SAMPLES, (size,))
    elif hasattr(tree, "__dict__") and not isinstance(tree, (type, torch.nn.Module)):
        for name, child in vars(tree).items():
            if isinstance(child, torch.Tensor):
                yield from _of_tensor(f"{place}.{name}", child, has_target=False)


def _of_tensor(place: str, tensor: torch.Tensor, has_target: bool) -> Iterable[_Entry]:
    kind = kind_of(tensor)
    if kind is not None and not kind.has_rows:
        yield _Entry(place, _as_read(kind), (kind.count(tensor),))
    elif tensor.ndim:
        is_single = not (has_target and place.startswith("y")) and tensor.shape == (1,)
        second = tensor.shape[1] if has_target and place == "x" and tensor.ndim > 1 else None
        yield _Entry(place, Reading.PARTS, (tensor.shape[0],), is_single, second)


def _as_read(kind: BatchKind) -> Reading:
    return Reading.PARTS if kind.has_rows else Reading.SAMPLES


def _of_sequence(place: str, items: Any, has_target: bool) -> Iterable[_Entry]:
    kind, size = reading(items), len(items)
    if kind is Reading.SAMPLES or kind is Reading.PLAIN:
        yield _Entry(place, kind, (size,))
        return
    children = [
        entry
        for name, child in _children(place, items)
        for entry in _entries(name, child, has_target)
    ]
    rows = {entry.number for entry in children if not entry.is_single}
    if kind is Reading.PARTS or (len(rows) > 1 and type(items) is tuple):
        yield from children
    elif len(rows) > 1:  # the first may be the inputs, and the second the targets
        yield _Entry(place, Reading.UNCLEAR, (size, *rows), is_open=True)
    elif rows:
        are_tensors = all(map(_is_array, items))
        of_rows = rows.pop()
        likely = (of_rows, size) if are_tensors or type(items) is tuple else (size, of_rows)
        is_open = not are_tensors or (size > MOST_PARTS and type(items) is list)
        yield _Entry(place, kind, likely, is_open=is_open and size != of_rows)
    else:
        yield from children


def _children(place: str, tree: Any) -> list[tuple[str, Any]]:
    """Return what is in a container, each with its place: targets first, and nothing of lists of
    samples.

    Also what is in an object, as far as it is an object that may say its number.
    """
    if isinstance(tree, torch.Tensor) or kind_of(tree) is not None:
        return []
    if isinstance(tree, Mapping):
        keys = sorted(tree, key=lambda key: key not in LABELS)
        return [(f"{place}[{key!r}]", tree[key]) for key in keys]
    if trees.is_named_tuple(tree):
        return [(f"{place}.{name}", getattr(tree, name)) for name in tree._fields]
    if isinstance(tree, (tuple, list)) and reading(tree) in (Reading.SAMPLES, Reading.PLAIN):
        return []
    if trees.is_container(tree):
        named = zip(trees.places(tree), trees.children(tree), strict=True)
        return [(place + name, child) for name, child in named]
    return []


# ---------------------------------------------------------------------- the rule on lists


def reading(items: Any) -> Reading:
    """Return what the entries of a list or tuple are.

    - Entries of unlike kinds are parts. So are tensors with equally many rows, and objects that
      say their numbers of samples.
    - Dicts of the same keys, pairs, objects, and tensors that differ in their rows alone, are
      samples. Two or three in a tuple may also be parts.
    - Dicts and pairs whose tensors all have equally many rows may be either.

    Args:
        items: a list or tuple.
    """
    if not items or len({*map(_kind, items)}) != 1:
        return Reading.PLAIN if items and all(map(_is_plain, items)) else Reading.PARTS
    first = items[0]
    if _is_plain(first) or (isinstance(first, torch.Tensor) and not first.ndim):
        return Reading.PLAIN
    if _is_array(first):
        return _reading_of_arrays(items)
    if (kind := kind_of(first)) is not None and not kind.has_rows:
        return Reading.PARTS
    if len(items) <= MOST_PARTS and all(said_by(item) is not None for item in items):
        return Reading.PARTS
    if not trees.is_container(first):
        return Reading.SAMPLES
    if isinstance(first, Mapping) and any(set(item) != set(first) for item in items):
        return Reading.PARTS if len(items) <= MOST_PARTS else Reading.SAMPLES
    if type(first) is list or len(items) <= MOST_PARTS or isinstance(first, Mapping):
        return _reading_of_containers(items)
    return Reading.SAMPLES


def _reading_of_arrays(items: Any) -> Reading:
    first, shapes = items[0], {tuple(item.shape) for item in items}
    if len({shape[0] for shape in shapes}) == 1:
        alike = len(shapes) == 1 and len({item.dtype for item in items}) == 1
        return Reading.UNCLEAR if alike else Reading.PARTS
    if len({len(shape) for shape in shapes}) > 1 or any(i.dtype != first.dtype for i in items):
        return Reading.PARTS
    return Reading.UNCLEAR if len(items) <= MOST_PARTS else Reading.SAMPLES


def _reading_of_containers(items: Any) -> Reading:
    """Return samples, unless all that the containers have are tensors of equally many rows."""
    if type(items) is tuple and all(type(item) is list for item in items):
        return Reading.PARTS  # columns: a sample is rarely a list
    are_pairs = len(items) <= MOST_PARTS and all(type(item) in (tuple, list) for item in items)
    if are_pairs and len({tuple(map(_kind, item)) for item in items}) > 1:
        return Reading.PARTS
    found = [leaf for item in items for leaf in trees.leaves(item) if leaf is not None]
    if not found or not all(_is_array(leaf) and len(leaf.shape) for leaf in found):
        has_pairs = all(type(item) in (tuple, list) for item in items)
        rows = {leaf.shape[0] for leaf in found if _is_array(leaf) and len(leaf.shape)}
        if has_pairs and len(items) <= MOST_PARTS and len(rows) == 1 and type(items) is tuple:
            return Reading.PARTS
        return Reading.SAMPLES
    if len({leaf.shape[0] for leaf in found}) == 1:
        has_lists = all(type(item) is list for item in items)
        return Reading.PARTS if has_lists else Reading.UNCLEAR
    return Reading.SAMPLES


def _kind(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return torch.Tensor if _is_array(item) else "nested"
    if isinstance(item, TEXTS):
        return str
    if isinstance(item, NUMBERS):
        return int
    return type(item)


def _is_plain(item: Any) -> bool:
    return item is None or isinstance(item, (*TEXTS, *NUMBERS))


def _is_array(item: Any) -> bool:
    """Whether it has a shape, which can be read, and a dtype."""
    if isinstance(item, torch.Tensor):
        kind = kind_of(item)
        return kind is None or kind.has_rows
    return isinstance(getattr(item, "shape", None), tuple) and hasattr(item, "dtype")


def _rows(item: Any) -> int | None:
    shape = getattr(item, "shape", None)
    if isinstance(shape, tuple) and shape and isinstance(shape[0], numbers.Integral):
        return int(shape[0])
    return None


def _is_sized_record(item: Any) -> bool:
    """Whether it is of a dataclass that says its length, such as a batch of graphs."""
    return trees.is_container(item) and not isinstance(item, (tuple, list, Mapping))


def _length(item: Any) -> int | None:
    measure: Callable[[Any], int] | None = getattr(type(item), "__len__", None)
    try:
        return None if measure is None else int(measure(item))
    except Exception:
        return None
