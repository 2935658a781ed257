"""What an algorithm decides: how ranks that train a module keep together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fitkit.extras.launchers.group import RankGroup
from fitkit.seams.precisions import Precision
from fitkit.seams.strategies import Collectives
from fitkit.tensors import FlatTensors


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of `size` bytes.

    Reference: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations, 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    return 2 * all_gather_bytes(size, ranks)


def all_gather_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends so that all have `size` bytes of which each had an equal part;
    a reduce-scatter sends as many."""
    return size * (ranks - 1) / ranks


class Peers:
    """The ranks that exchange vectors; every method is collective among them.

    Args:
        collectives: of the ranks.
        timeout: bound of each exchange in a group of its own; None for torch's default.
        group: None for torch's default group.
    """

    def __init__(
        self, collectives: Collectives, timeout: timedelta | None, group: RankGroup | None = None
    ) -> None:
        self.rank: int = collectives.rank
        self.size: int = collectives.world_size
        self._collectives = collectives
        self._timeout = timeout
        self._group = group

    @property
    def _handle(self) -> Any:
        return None if self._group is None else self._group.handle

    def mean(self, vector: torch.Tensor) -> None:
        """Replace a vector by its mean over the ranks."""
        dist.all_reduce(vector, group=self._handle)
        vector.div_(self.size)

    def begin_sum(self, vector: torch.Tensor) -> Any:
        """Begin to replace a vector by its sum over the ranks; it isn't to be touched meanwhile.

        Returns:
            torch's `Work`, to be waited for.
        """
        return dist.all_reduce(vector, group=self._handle, async_op=True)

    def swap(self, tensor: torch.Tensor, others: list[int]) -> list[torch.Tensor]:
        """Send a tensor to some ranks, which send theirs to this one; what they sent."""
        received = [torch.empty_like(tensor) for _ in others]
        calls = [dist.P2POp(dist.isend, tensor, other, self._handle) for other in others]
        calls += [
            dist.P2POp(dist.irecv, place, other, self._handle)
            for other, place in zip(others, received, strict=True)
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return received

    def deal(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r: (R, K); what the ranks sent to this one, in rank order: (R, K)."""
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self._handle)
        return received

    def join(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's row (K,), in rank order: (R, K)."""
        joined = row.new_empty(self.size, len(row))
        dist.all_gather(list(joined.unbind(0)), row, group=self._handle)
        return joined

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that can be pickled), in rank order."""
        return self._collectives.gather(value)

    def apart(self) -> Peers:
        """Return the same ranks in a group of their own, whose exchanges pass those of others
        by.
        """
        backend = dist.get_backend_config()
        group = RankGroup([list(range(self.size))], self.rank, backend, self._timeout)
        return Peers(self._collectives, self._timeout, group)

    def leave(self) -> None:
        """Give that group up."""
        if self._group is not None:
            self._group.leave()


class Algorithm:
    """How ranks keep together while they learn; here: as DDP does, by the mean of gradients.

    Its constructor takes the algorithm's options. What belongs to a run is set by `begin` and
    has names with an underscore: it stays in this process.

    Attributes:
        name: as users write it.
        keeps_apart: whether the ranks' weights differ between two averagings by the strategy.
        wraps: whether gradients are averaged by DDP's wrapper, at least at first.
        compresses: whether `mean` averages gradients, in place of an exact all-reduce.
    """

    name = ""
    keeps_apart = False
    wraps = True
    compresses = False

    _peers: Peers
    _weights: FlatTensors
    _updates = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the options alone."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def check(self, size: int, precision: Precision, device: torch.device) -> None:
        """Refuse ranks or number types that the algorithm can't work with.

        Args:
            size: the number of ranks.

        Raises:
            ConfigurationError: with what to write instead.
        """

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        """Bytes that a rank sends for an update, on average once warm-ups are over.

        Args:
            size: of all gradients, in bytes; weights have as many.
            numbers: how many numbers they hold.
        """
        return all_reduce_bytes(size, ranks)

    def check_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Refuse optimizers that the algorithm can't work with.

        Raises:
            ConfigurationError: with what to write instead.
        """

    def begin(
        self,
        peers: Peers,
        parameters: list[torch.nn.Parameter],
        optimizers: list[Optimizer],
        updates: int,
    ) -> None:
        """Begin a training, from weights that are equal on all ranks.

        Args:
            parameters: those that may learn, in the same order on every rank.
            optimizers: theirs.
            updates: how many were made before; the same on every rank.

        Ranks:
            Collective, as all that follows.
        """
        self._peers = peers
        self._updates = updates
        self.resume(parameters)

    @property
    def averages_gradients(self) -> bool:
        """Whether the next update needs the mean of gradients; the same on every rank."""
        return self.wraps

    def mean(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the mean of a vector of gradients over the ranks, if the algorithm
        `compresses`.
        """
        raise NotImplementedError

    @final
    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> bool:
        """Replace gradients by their `mean`, where steps go past DDP's wrapper.

        Returns:
            Whether that is done; if not, they are averaged without compression.
        """
        held = [parameter for parameter in parameters if parameter.requires_grad]
        if not (self.compresses and held):
            return self.compresses
        users = torch.tensor([float(p.grad is not None) for p in held], device=held[0].device)
        self._peers.mean(users)
        used = [p for p, share in zip(held, users.tolist(), strict=True) if share]
        for parameter in used:  # one that other ranks used counts as zero here
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = FlatTensors(p.grad for p in used if p.grad is not None)
        if used:
            gradients.write(self.mean(gradients.read()))
        return True

    def after_update(self) -> None:
        """Act after an update of the weights."""
        self._updates += 1

    def flush(self) -> None:
        """End what is under way, before the strategy averages what ranks hold apart."""

    def resume(self, parameters: list[torch.nn.Parameter]) -> None:
        """Begin, or continue, from weights that are equal on all ranks.

        Args:
            parameters: the parameters that can learn now.
        """
        self._weights = FlatTensors(parameters)

    def end(self) -> None:
        """Drop what the training needed; it may have failed, and nobody may be waited for."""

    def leave(self) -> None:
        """Leave process groups of the algorithm's own."""
