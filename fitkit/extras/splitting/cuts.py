"""How a batch that doesn't fit is cut, by its shapes, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fitkit import trees
from fitkit.errors import ConfigurationError, OutOfMemoryError, is_out_of_memory, warn
from fitkit.extras.rows import rows_of
from fitkit.extras.splitting.refusals import without_rows
from fitkit.seams.data import Batch
from fitkit.seams.networks import Module
from fitkit.seams.passes import let_go
from fitkit.seams.steps import counter_of, unpacker_of

Found = TypeVar("Found")


@dataclasses.dataclass(slots=True)
class Part:
    """Some rows of a batch.

    Attributes:
        batch: holds them, in views of the whole batch's memory.
        first, end: their places in the whole batch.
    """

    batch: Batch
    first: int
    end: int


class Cuts:
    """How many rows the parts of a verb's batches have, and how that becomes less.

    Cuts nest: each part is halved, so that what ends at a row before does so afterwards.

    Args:
        model: computes the batches.
        verb: what it is doing, for messages.
    """

    def __init__(self, model: Module, verb: str) -> None:
        self._model, self._verb = model, verb
        self._samples_of, self._unpack = counter_of(model), unpacker_of(model)
        self._sizes: dict[tuple[Any, ...], list[int]] = {}  # of the batches that were cut
        self._said = False

    @property
    def parts(self) -> dict[str, int]:
        """In how many parts batches are computed, by their shapes in words."""
        return {_in_words(shapes): len(sizes) for shapes, sizes in self._sizes.items()}

    def sizes(self, batch: Batch) -> list[int]:
        """Return the rows of each of a batch's parts; those of one part where it wasn't cut."""
        known = self._sizes.get(_shapes(batch.data)) if self._sizes else None
        return known or [batch.samples or self._samples_of(batch.data)]

    def parts_of(self, batch: Batch, sizes: list[int]) -> Iterable[Part]:
        """Return a batch's parts. Those of a batch that only fills don't count either."""
        return (Part(batch, 0, sizes[0]),) if len(sizes) == 1 else self._cut(batch, sizes)

    def _cut(self, batch: Batch, sizes: list[int]) -> Iterator[Part]:
        rows, first = sum(sizes), 0
        others = batch.total - batch.samples  # which the first part stands for
        for size in sizes:
            end = first + size
            data = rows_of(batch.data, rows, slice(first, end))
            counted = size if batch.samples else 0
            total = counted + (others if first == 0 else 0)
            yield Part(Batch(data, counted, total, is_lent=True), first, end)
            first = end

    def tried(
        self,
        batch: Batch,
        compute: Callable[[list[int]], Found],
        undo: Callable[[Batch], object] = lambda batch: None,
    ) -> tuple[Found, list[int]]:
        """Return what a batch gives, and the sizes of the parts in which it fitted.

        Args:
            batch: the batch.
            compute: computes it in parts of these sizes.
            undo: puts back what an attempt has changed that ran out of memory.

        Raises:
            Exception: what an attempt raised, where no smaller parts can help.
        """
        sizes = self.sizes(batch)
        while True:
            failed: Exception
            try:
                return compute(sizes), sizes
            except Exception as error:
                failed = error  # this clause holds its frames, and so the activations
            sizes = self._finer(batch, sizes, failed)
            undo(batch)

    def _finer(self, batch: Batch, sizes: list[int], error: Exception) -> list[int]:
        """Return the sizes of smaller parts, and free what the failed attempt held."""
        if not is_out_of_memory(error) or max(sizes) < 2:
            raise error
        let_go(error, self._model._fitkit.compilation.strategy.device)
        found = [size for whole in sizes for size in (whole - whole // 2, whole // 2) if size]
        try:
            part = next(self._cut(batch, found)).batch.data
        except ConfigurationError as refused:
            raise OutOfMemoryError(without_rows(str(refused))) from error
        if not self._cuts_inputs(batch.data, part) or self._samples_of(part) != found[0]:
            why = "Its inputs have no row for each sample."
            raise OutOfMemoryError(without_rows(why)) from error
        return found

    def _cuts_inputs(self, data: Any, part: Any) -> bool:
        """Whether a part has less of the inputs than the batch; a graph's nodes are in each."""
        pairs = zip(*(trees.leaves(self._unpack(one)[0]) for one in (data, part)), strict=False)
        return any(whole is not less for whole, less in pairs)

    def keep(self, batch: Batch, sizes: list[int]) -> bool:
        """Compute later batches of these shapes in such parts at once, and say so once.

        Returns:
            Whether they weren't computed in these parts before.
        """
        shapes = _shapes(batch.data)
        if self._sizes.get(shapes) == sizes:
            return False
        self._sizes[shapes] = sizes
        if self._said:
            return True
        self._said = True
        world = self._model._fitkit.compilation.strategy.world
        where = f" (rank {world.rank})" if world.size > 1 else ""
        fits, rows = max(sizes), sum(sizes)
        instead = f"batch_size={fits}"
        if self._verb == "fit":
            every = self._model._fitkit.compilation.given.accumulate_grad_batches
            instead += f", accumulate_grad_batches={-(-rows // fits) * every}"
        warn(
            f"In {self._verb} a batch of {rows} rows ({_in_words(shapes)}) didn't fit into "
            f"memory{where}. It is computed in {len(sizes)} parts, as later ones of its shape are. "
            f"The numbers stay the same, and each part is a call more. To avoid it, write "
            f"{instead}.",
            code="FK069",
        )
        return True


def _shapes(data: Any) -> tuple[Any, ...]:
    """Return the shapes of a batch's leaves, or what stands for those that have none."""
    return tuple(
        tuple(leaf.shape) if hasattr(leaf, "shape") else None for leaf in trees.leaves(data)
    )


def _in_words(shapes: tuple[Any, ...]) -> str:
    return ", ".join(" x ".join(map(str, shape)) for shape in shapes if shape)
