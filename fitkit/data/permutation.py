"""Orders of very many samples, computed where they are needed instead of kept in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import Sampler

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError

MANY = 1 << 24
"""The number of samples from which fitkit's own orders are computed. A list of all indices takes 40
bytes per sample on each rank (0.7 GB here, 40 GB for a billion)."""

ROUNDS = 8
"""With four rounds and large halves, a Feistel network's permutation is hard to tell from a random
one (Luby and Rackoff). The halves have few bits here, and need more rounds."""

BLOCK = 1 << 16
"""About how many indices are computed at a time: some milliseconds, and less than a megabyte."""


class Permutation:
    """A pseudorandom order of `count` samples that takes no memory.

    A Feistel network permutes the numbers below the next power of two. What comes out above
    `count` goes through it again until it is below, so the rest is a permutation, too.

    Args:
        count: how many samples there are, at least 1.
        seed: the seed of the order, at least 0.

    Reference:
        M. Luby, C. Rackoff: How to Construct Pseudorandom Permutations from Pseudorandom
        Functions, SIAM Journal on Computing 17 (1988). J. Black, P. Rogaway: Ciphers with
        Arbitrary Finite Domains, CT-RSA 2002 (method 2, cycle walking). The function of a round
        is the mixer of G. Steele, D. Lea, C. Flood: Fast Splittable Pseudorandom Number
        Generators, OOPSLA 2014 (variant 13 of D. Stafford).
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        bits = max((count - 1).bit_length(), 2)
        self._low = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << bits // 2) - 1)
        self._high_mask = np.uint64((1 << bits - bits // 2) - 1)
        self._keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the samples at these positions.

        Shapes: (P,) int64 below `count` to (P,) int64.
        """
        found = self._permuted(positions.numpy().astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self.count)):
            found[outside] = self._permuted(found[outside])
        return torch.from_numpy(found.astype(np.int64))

    def _permuted(self, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the numbers after one pass through the network. Its halves may differ by one
        bit.
        """
        low, high = numbers & self._low_mask, numbers >> self._low
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            low ^= _mixed(high + first) & self._low_mask
            high ^= _mixed(low + second) & self._high_mask
        return high << self._low | low


def _mixed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mix 64 bits so that each depends on all given ones (arithmetic modulo 2^64)."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers


class IndexBatches(Sequence[torch.Tensor]):
    """The indices of a pass's batches, computed on access. A slice of it is one again.

    Args:
        samples: the number of samples.
        batch_size: the size of each batch. The last one may be shorter.
        order: the order of the samples; None for their own.
        drop_last: whether to leave out a shorter last batch.
        numbers: the numbers of the batches in it; None for all.

    Attributes:
        batch_size: as given.
        full: how many batches have that size. They come first.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        order: Permutation | None = None,
        *,
        drop_last: bool = False,
        numbers: range | None = None,
    ) -> None:
        self._samples = samples
        self.batch_size: int = batch_size
        self._order = order
        count = samples // batch_size if drop_last else -(-samples // batch_size)
        self._numbers = range(count) if numbers is None else numbers
        last = self._numbers[-1:]
        self.full: int = len(self._numbers) - sum((n + 1) * batch_size > samples for n in last)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, chosen: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, chosen: slice) -> IndexBatches: ...

    def __getitem__(self, chosen: int | slice) -> torch.Tensor | IndexBatches:
        if isinstance(chosen, slice):
            return IndexBatches(
                self._samples, self.batch_size, self._order, numbers=self._numbers[chosen]
            )
        number = self._numbers[chosen]
        (batch,) = self._computed(range(number, number + 1))
        return batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        at_once = -(-BLOCK // self.batch_size)
        for start in range(0, len(self), at_once):
            yield from self._computed(self._numbers[start : start + at_once])

    def lists(self) -> Iterator[list[int]]:
        """Return the batches in the form that data sets and workers expect."""
        return map(torch.Tensor.tolist, self)

    def _computed(self, numbers: range) -> Sequence[torch.Tensor]:
        """Return the batches with these numbers."""
        first = torch.arange(numbers.start, numbers.stop, numbers.step) * self.batch_size
        positions = (first[:, None] + torch.arange(self.batch_size)).flatten()
        # The shorter last batch comes last here, if it is included at all.
        positions = positions[: len(positions) - max(int(positions[-1]) + 1 - self._samples, 0)]
        return (positions if self._order is None else self._order(positions)).split(self.batch_size)


class PermutationSampler(Sampler[int]):
    """Yields each index of a data set once, in a random order that takes no memory.

    `torch.utils.data.RandomSampler` makes a list of all indices, 40 bytes each. This sampler
    computes each index when it is needed, in about 80 nanoseconds. It is for data sets with
    hundreds of millions of samples. `fit` uses it by itself for a `Dataset` of 2^24 (16,777,216)
    samples or more. In your own `DataLoader` you choose the sampler. With this one, `fit` divides
    the order among ranks, and resumes within an epoch without reading what came before.

    Each pass has a new order, from a seed that is drawn from `generator`. The orders are
    pseudorandom: not every order of the samples can occur. The same is true of `torch.randperm`,
    whose seed has 64 bits, too.

    Args:
        data_source: the data set, or anything else with a length.
        generator: a random generator. Default None: torch's global one.

    Raises:
        ConfigurationError: `data_source` is empty.
        ArgumentTypeError: `data_source` has no length.

    Example:
        >>> import torch, fitkit
        >>> from torch.utils.data import DataLoader
        >>> squares = [n * n for n in range(10)]
        >>> sampler = fitkit.data.PermutationSampler(squares)
        >>> batches = DataLoader(squares, batch_size=4, sampler=sampler)
        >>> sorted(torch.cat(list(batches)).tolist()) == squares
        True

    Reference:
        J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """

    def __init__(self, data_source: Any, generator: torch.Generator | None = None) -> None:
        if not hasattr(data_source, "__len__"):
            raise ArgumentTypeError(
                f"data_source={describe(data_source)} must have a length. Give the data set that "
                "the DataLoader has."
            )
        if not len(data_source):
            raise ConfigurationError("data_source is empty: it has 0 samples.")
        self.data_source = data_source
        self.generator = generator

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        for block in IndexBatches(len(self), BLOCK, self.draw()):
            yield from block.tolist()

    def draw(self) -> Permutation:
        """Return the next pass's order."""
        seed = torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return Permutation(len(self), int(seed))
