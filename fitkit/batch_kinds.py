"""Kinds of entries in a batch whose samples aren't the rows of a plain tensor.

Packed sequences, nested and sparse tensors, a library's graphs: a `BatchKind` says what fitkit must
know of each. `KINDS` has them by the full name of a class, or of a tensor's layout. The rest of
the core asks `kind_of`, which answers None for what most batches hold.
"""

from __future__ import annotations

import functools
import importlib.metadata
import weakref
from typing import Any, ClassVar

import torch

from fitkit.errors import ConfigurationError
from fitkit.registry import Registry
from fitkit.tensors import is_dense

NESTED = "nested"
"""The name of nested tensors of torch's first kind, whose layout says nothing."""


class BatchKind:
    """A kind of entry in a batch. A subclass says how many samples an entry has.

    Attributes:
        words: what messages call an entry, with an article.
        advice: what to write if samples must be cut apart. `{place}` is the entry's name.
        has_rows: whether samples are rows, of which a shape tells the number, as with a tensor.
        is_target: whether losses take such targets.
    """

    words: str = "an entry of its own kind"
    advice: str = "Give a DataLoader that makes such batches."
    has_rows: ClassVar[bool] = False
    is_target: ClassVar[bool] = True

    def count(self, entry: Any) -> int:
        """Return the number of samples of an entry."""
        raise NotImplementedError

    def move(self, entry: Any, device: torch.device, dtype: torch.dtype) -> Any:
        """Return an entry on a device.

        Args:
            entry: in memory that no other code has.
            dtype: of the net's floating-point inputs.
        """
        return entry.to(device)

    def rows(self, entry: Any, start: int, stop: int) -> Any:
        """Return an entry of some of the samples.

        Raises:
            ConfigurationError: samples of this kind can't be cut apart.
        """
        raise ConfigurationError(
            f"A batch holds {self.words}, whose samples can't be cut apart. "
            f"{self.advice.format(place='batch')}"
        )

    @property
    def can_cut(self) -> bool:
        """Whether samples can be cut apart."""
        return type(self).rows is not BatchKind.rows

    def join(self, entries: list[Any]) -> Any:
        """Return one entry of all samples, which a net gave in several batches: a list, if entries
        can't be joined.
        """
        return entries


class _Kinds(Registry[BatchKind]):
    def __init__(self) -> None:
        super().__init__("kind of batch", group="fitkit.batch_kinds")
        self.known: weakref.WeakKeyDictionary[type, BatchKind | None] = weakref.WeakKeyDictionary()

    def add(self, name: str, entry: BatchKind, *aliases: str) -> BatchKind:
        self.known.clear()
        return super().add(name, entry, *aliases)

    def named(self, name: str) -> BatchKind | None:
        """Return what a name stands for; None if nobody has registered it."""
        return self[name] if name in self else None  # noqa: SIM401

    def of_class(self, kind: type) -> BatchKind | None:
        """Return what a class, or its nearest base, is registered as."""
        found = (self.named(f"{one.__module__}.{one.__qualname__}") for one in kind.__mro__[:-1])
        self.known[kind] = nearest = next(filter(None, found), None)
        return nearest

    @functools.cached_property
    def _packages(self) -> dict[str, importlib.metadata.EntryPoint]:
        return super()._installed()

    def _installed(self) -> dict[str, importlib.metadata.EntryPoint]:
        return self._packages  # classes are looked up within steps, and a search takes 10 ms


KINDS = _Kinds()
HOME = "fitkit.extras.batch_kinds"
KINDS.promise(f"{HOME}:PACKED", "torch.nn.utils.rnn.PackedSequence")
KINDS.promise(f"{HOME}:NESTED", NESTED)
KINDS.promise(f"{HOME}:JAGGED", "torch.jagged")
KINDS.promise(f"{HOME}:COO", "torch.sparse_coo")
for _name in ("csr", "csc", "bsr", "bsc"):
    KINDS.promise(f"{HOME}:{_name.upper()}", f"torch.sparse_{_name}")

PLAIN = frozenset({tuple, list, dict, str, bytes, int, float, bool, type(None), torch.Tensor})


def has_entries(batch: object) -> bool:
    """Whether a batch is a tuple or list of entries, and not an entry of a kind of its own."""
    kind = type(batch)
    if kind is tuple or kind is list:
        return True
    return isinstance(batch, (tuple, list)) and kind_of(batch) is None


def kind_of(entry: object) -> BatchKind | None:
    """Return the kind of an entry of a batch; None for tensors with rows, containers and others."""
    if isinstance(entry, torch.Tensor):
        if is_dense(entry):
            return None
        return KINDS.named(NESTED if entry.layout is torch.strided else str(entry.layout))
    kind = type(entry)
    if kind in PLAIN:
        return None
    return KINDS.known[kind] if kind in KINDS.known else KINDS.of_class(kind)
