"""Random numbers of a net by the rows of its batch, so that nets with dropout compare exactly.

A layer that draws gives each part of a batch, and each process, other numbers. Here what is drawn
for a row is a function of the row, whatever batch it is in. So a net with dropout computes the same
for a batch and for its parts, if nothing else differs. It works below autograd, on torch's
operations, so that it reaches attention, recurrent layers and functions too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitkit.accelerators import is_accelerator
from fitkit.extras.verification.cutting import SEED
from fitkit.seams.callbacks import Callback

aten = torch.ops.aten

Call = tuple[Any, tuple[int, ...]]
"""An operation that draws, and the shape of what it draws."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the rows of a batch are in what is drawn: `times` entries each of a dimension."""

    dimension: int
    times: int


Places = list[Place | None]
"""One for each operation of a batch that draws; None for numbers that all rows share."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Which rows of which update a batch has."""

    update: int
    start: int
    stop: int


def places_in(whole: list[Call], part: list[Call], rows: int, rows_of_part: int) -> Places | None:
    """Return where the rows are, by what a batch and a part of it draw; None if it can't be seen.

    Args:
        whole, part: the calls in their order.
        rows, rows_of_part: how many rows both have.
    """
    if [operation for operation, _ in whole] != [operation for operation, _ in part]:
        return None
    if not all(operation in DRAWS for operation, _ in whole):
        return None
    places: Places = []
    for (_, shape), (_, other) in zip(whole, part, strict=True):
        apart = [d for d, (m, n) in enumerate(zip(shape, other, strict=False)) if m != n]
        if len(shape) != len(other) or len(apart) > 1:
            return None
        if not apart:
            places.append(None)
            continue
        times = shape[apart[0]] // rows
        if (times * rows, times * rows_of_part) != (shape[apart[0]], other[apart[0]]):
            return None
        places.append(Place(apart[0], times))
    return places


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits so that each depends on all given ones (C. Wellons's lowbias32), in int64."""
    numbers = numbers & 0xFFFFFFFF
    numbers = ((numbers ^ (numbers >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    numbers = ((numbers ^ (numbers >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


def uniform_by_row(key: int, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return numbers from 0 to 1, each a hash of the key, its row's number and its place.

    Shapes: (N,) int64 to (N, count) float32.
    """
    of_rows = _mixed(_mixed(rows + (key & 0xFFFFFFFF)) ^ (key >> 32))
    of_places = torch.arange(count, device=rows.device) * 0x9E3779B9
    bits = _mixed(_mixed(of_rows[:, None] + of_places[None]) + of_rows[:, None])
    return (bits >> 8).to(torch.float32) * 2.0**-24  # so that none is rounded to 1


class Rows(TorchDispatchMode):
    """Draws by rows, in place of all operations that draw.

    Each call has a key from torch's generator. A batch that is computed again in the backward pass
    finds it again.

    Args:
        rows: the numbers of the batch's rows, (N,) int64.
        places: where they are.
    """

    def __init__(self, rows: torch.Tensor, places: Places) -> None:
        super().__init__()
        self._rows, self._places = rows, places
        self._call = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        draw = DRAWS.get(function.overloadpacket)
        if draw is None:
            return function(*args, **(kwargs or {}))
        return draw(self, args, kwargs or {})

    def uniform(self, shape: Any, device: torch.device) -> torch.Tensor:
        """Return numbers from 0 to 1 of this shape."""
        key = int(torch.empty((), dtype=torch.int64).random_())
        place = self._places[self._call % len(self._places)]
        self._call += 1
        shape = list(shape)
        if place is None or shape[place.dimension] != place.times * len(self._rows):
            alone = torch.zeros(1, dtype=torch.int64, device=device)
            return uniform_by_row(key, alone, math.prod(shape)).reshape(shape)
        rows, at = self._rows.to(device), place.dimension
        drawn = uniform_by_row(key, rows, math.prod(shape) // max(len(rows), 1))
        apart = [len(rows), *shape[:at], place.times, *shape[at + 1 :]]
        return drawn.reshape(apart).movedim(0, at).reshape(shape)

    def normal(self, shape: Any, device: torch.device) -> torch.Tensor:
        """Return numbers with mean 0 and variance 1."""
        inside = self.uniform(shape, device).double().clamp(2.0**-25, 1 - 2.0**-25)
        return torch.special.ndtri(inside)


def _bernoulli_(mode: Rows, args: Any, kwargs: Any) -> Any:
    chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    return args[0].copy_(mode.uniform(args[0].shape, args[0].device) < chance)


def _bernoulli(mode: Rows, args: Any, kwargs: Any) -> Any:
    chance = args[1] if len(args) > 1 else kwargs.get("p", args[0])
    return (mode.uniform(args[0].shape, args[0].device) < chance).to(args[0].dtype)


def _native_dropout(mode: Rows, args: Any, kwargs: Any) -> Any:
    given, chance = args[0], args[1]
    kept = mode.uniform(given.shape, given.device) >= chance
    return given * kept / (1 - chance if chance < 1 else 1), kept


def _like(draw: str) -> Callable[[Rows, Any, Any], Any]:
    def drawn(mode: Rows, args: Any, kwargs: Any) -> Any:
        given = args[0]
        device = kwargs.get("device") or given.device
        return getattr(mode, draw)(given.shape, device).to(kwargs.get("dtype") or given.dtype)

    return drawn


def _new(draw: str) -> Callable[[Rows, Any, Any], Any]:
    def drawn(mode: Rows, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device") or torch.device("cpu")
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return getattr(mode, draw)(args[0], device).to(dtype)

    return drawn


def _uniform_(mode: Rows, args: Any, kwargs: Any) -> Any:
    low = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
    high = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
    return args[0].copy_(mode.uniform(args[0].shape, args[0].device) * (high - low) + low)


def _normal_(mode: Rows, args: Any, kwargs: Any) -> Any:
    mean = args[1] if len(args) > 1 else kwargs.get("mean", 0.0)
    deviation = args[2] if len(args) > 2 else kwargs.get("std", 1.0)
    return args[0].copy_(mode.normal(args[0].shape, args[0].device) * deviation + mean)


def _exponential_(mode: Rows, args: Any, kwargs: Any) -> Any:
    rate = args[1] if len(args) > 1 else kwargs.get("lambd", 1.0)
    inside = mode.uniform(args[0].shape, args[0].device).clamp(min=2.0**-25)
    return args[0].copy_(-torch.log(inside) / rate)


DRAWS: dict[Any, Callable[[Rows, Any, Any], Any]] = {
    aten.bernoulli_: _bernoulli_,
    aten.bernoulli: _bernoulli,
    aten.native_dropout: _native_dropout,
    aten.rand_like: _like("uniform"),
    aten.randn_like: _like("normal"),
    aten.rand: _new("uniform"),
    aten.randn: _new("normal"),
    aten.uniform_: _uniform_,
    aten.normal_: _normal_,
    aten.exponential_: _exponential_,
}
"""What draws by rows in the place of torch's operations. A net with others draws as ever."""


class Calls(TorchDispatchMode):
    """Records the operations that draw, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Call] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        first = args[0] if args else ()
        before = _drawn_from(first)
        found = function(*args, **kwargs)
        if packet in DRAWS or before != _drawn_from(first):
            shape = first.shape if isinstance(first, torch.Tensor) else first
            self.seen.append((packet, tuple(shape) if isinstance(shape, (tuple, list)) else ()))
        return found


def _drawn_from(given: Any) -> list[bytes]:
    """Return the states of the generators that an operation may draw from."""
    states = [torch.default_generator.get_state()]
    if isinstance(given, torch.Tensor) and is_accelerator(given.device):
        states.append(torch.get_device_module(given.device).get_rng_state(given.device))
    return [state.cpu().numpy().tobytes() for state in states]


class InBatches(Callback):
    """Enters a mode for the length of each training batch, its backward pass included."""

    stops_alike = True

    def __init__(self) -> None:
        self._entered: TorchDispatchMode | None = None

    def mode(self, batch: int) -> TorchDispatchMode:
        """Return the mode of a batch."""
        raise NotImplementedError

    def on_train_begin(self, logs: Any = None) -> None:
        self.add_cleanup(self._leave)  # after an error within a batch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._entered = self.mode(batch)
        self._entered.__enter__()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._entered is not None:
            self._entered.__exit__(None, None, None)
            self._entered = None


class Recorded(InBatches):
    """Records what draws in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()

    def mode(self, batch: int) -> TorchDispatchMode:
        return self.calls


class Masks(InBatches):
    """Lets a net draw by rows.

    Args:
        places: where a batch's rows are in what is drawn.
        pieces: the rows of each batch, in the order in which the data give them.
        seed: of the numbers.
    """

    def __init__(self, places: Places, pieces: list[Piece], seed: int = SEED) -> None:
        super().__init__()
        self._places, self._pieces, self._seed = places, pieces, seed

    def mode(self, batch: int) -> TorchDispatchMode:
        # The ranks get the pieces in turn.
        piece = self._pieces[batch * self.model.world_size + self.model.global_rank]
        torch.manual_seed((self._seed + piece.update) % 2**31)
        return Rows(torch.arange(piece.start, piece.stop), self._places)
