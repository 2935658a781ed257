"""One batch computed by a node's ranks together: each takes some rows, outputs are joined."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fitkit import trees
from fitkit.distributed.collectives import Messages, RankGroup, join_rows
from fitkit.distributed.node_state import NodeState
from fitkit.distributed.router import Door
from fitkit.distributed.rows import (
    LOSS,
    are_scalars,
    described,
    gather_by,
    join_leaves,
    mean_by,
    part_sizes,
    rows_of,
    take,
    unlike,
)

LENGTHS_AT_ONCE = 14
"""Leaves whose lengths travel with the structure's digest, in 128 bytes; seldom are there more."""


class Node:
    """The ranks of a node, and what they say to each other.

    Args:
        nodes: the ranks of every node.
        rank: this rank among all.
        device: this rank's.
        timeout: bound of each exchange; None for torch's default.

    Attributes:
        rank: this rank's place in its node.
        size: how many ranks the node has.
        own_device: this rank's.
        device: the one from which tensors are exchanged.

    Ranks:
        Collective, over all nodes.
    """

    def __init__(
        self,
        nodes: list[list[int]],
        rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        own = next(ranks for ranks in nodes if rank in ranks)
        self.rank = own.index(rank)
        self.size = len(own)
        self.own_device = device
        backend = dist.get_backend()
        self.device = device if backend == "nccl" else torch.device("cpu")
        # Tensors have a group apart from DDP's, whose exchanges run at the same time. Lengths are
        # exchanged on the CPU, so that no step waits for the device.
        self._tensors = RankGroup(nodes, rank, backend, timeout)
        is_gloo = backend == "gloo"
        self._words = self._tensors if is_gloo else RankGroup(nodes, rank, "gloo", timeout)
        self._messages = Messages(self.rank, self.size, torch.device("cpu"), self._words)

    def leave(self) -> None:
        """Leave the node's groups."""
        self._tensors.leave()
        self._words.leave()

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's list of integers; all have the same length."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._words.handle)
        return [row.tolist() for row in found]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, which can be pickled."""
        return self._messages.gather(value)

    def join(self, tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Every rank's rows (N_r, ...) one below the other, with gradients."""
        rows = tensor.to(self.device)
        if rows.dtype == torch.bool:  # gloo knows none
            return join_rows(rows.byte(), sizes, self.rank, self._tensors).bool()
        return join_rows(rows, sizes, self.rank, self._tensors)


class NodeDoor(Door):
    """Calls a module with this rank's rows of its node's batch, and joins the node's outputs.

    All ranks of a node are called with the same batch, and get the same outputs, in the order of
    the rows. Where there are fewer rows than ranks, the last ranks compute the first row once
    more, because gradients are exchanged with them; nothing of it is joined.

    With DDP's mean over all ranks, the gradients are the mean over the nodes of those that one
    process has of the node's whole batch: on the way back a row's gradients are summed over the
    node's ranks, who each have the whole loss.

    Args:
        door: the way into the module.
        node: the ranks that share a batch.
    """

    def __init__(self, door: Door, node: Node) -> None:
        super().__init__(door.net)
        self._door = door
        self._node = node
        self._device = node.own_device

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the node's ranks return, gathered (see `rows.gather`).

        Args:
            method, args, kwargs: as for `Replicas`.

        Ranks:
            Collective within the node.

        Raises:
            ConfigurationError: outputs that can't be gathered, on each of the node's ranks.
        """
        whole: Any = args[0] if method else (args, kwargs)
        samples = trees.sample_count(whole)
        weights = part_sizes(samples, self._node.size)
        part = whole
        if len(weights) > 1:
            rows = [*rows_of(weights), *[slice(0, 1)] * (self._node.size - len(weights))]
            part = take(whole, samples, rows[self._node.rank])
        own = weights[self._node.rank] if self._node.rank < len(weights) else 0
        state = NodeState(self.net, self._device, own)
        state.begin()
        try:
            if method:
                outputs = self._door(method, part, *args[1:], **kwargs)
            else:
                outputs = self._door("", *part[0], **part[1])
        except BaseException:
            state.restore()
            raise
        self.weights = weights
        exchange = _Exchange(self._node, weights, state.end())
        whole = exchange.gathered(outputs, of_a_net=not method)
        if exchange.any_changed:
            state.merge(self._node.gather(state.payload())[: len(weights)])
        return whole


class _Exchange:
    """Joins the outputs of one call.

    Args:
        node: the ranks that take part.
        weights: the numbers of samples of those that had some.
        changed: whether this rank has a state to merge.

    Attributes:
        any_changed: whether any rank has, once the outputs are gathered.
    """

    def __init__(self, node: Node, weights: list[int], changed: bool) -> None:
        self.node = node
        self.weights = weights
        self.changed = changed
        self.any_changed = False
        self.counts = node.rank < len(weights)

    def gathered(self, outputs: Any, *, of_a_net: bool) -> Any:
        """The outputs of all ranks as one.

        Raises:
            ConfigurationError: they differ in structure, or beyond dimension 0.
        """
        leaves: list[tuple[str, Any]] = []

        def note(found: list[Any], path: str) -> None:
            leaves.append((path, found[0]))

        gather_by(note, [outputs], of_a_net=of_a_net)
        lengths = self._lengths(leaves, outputs)
        others = [leaf for _, leaf in leaves if not isinstance(leaf, torch.Tensor)]
        told = self.node.gather(others) if others else []
        joined: list[Any] = []
        place = 0
        for index, (path, leaf) in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                joined.append(self._rows(leaf, [row[index] for row in lengths], path, of_a_net))
            else:
                values = [values[place] for values in told[: len(self.weights)]]
                joined.append(join_leaves(values, self.node.device))
                place += 1
        found = iter(joined)
        return gather_by(lambda _, path: next(found), [outputs], of_a_net=of_a_net)

    def _rows(self, leaf: torch.Tensor, sizes: list[int], path: str, of_a_net: bool) -> Any:
        """A leaf's rows, of all ranks."""
        rows = leaf.reshape(1) if leaf.ndim == 0 else leaf
        joined = self.node.join(rows if self.counts else rows[:0], sizes)
        if of_a_net and path in LOSS and are_scalars([leaf]):
            return mean_by(joined, self.weights)
        return joined

    def _lengths(self, leaves: list[tuple[str, Any]], outputs: Any) -> list[list[int]]:
        """Each rank's number of rows of each leaf; first of all, that the structures agree.

        A rank that joined other tensors than the rest would hang, or mix them up.
        """
        own = [_length(leaf) if self.counts else 0 for _, leaf in leaves]
        head = own[:LENGTHS_AT_ONCE]
        head += [0] * (LENGTHS_AT_ONCE - len(head))
        told = self.node.gather_numbers([_digest(leaves), self.changed, *head])
        self.any_changed = any(row[1] for row in told)
        if any(row[0] != told[0][0] for row in told):
            raise unlike(self.node.gather(_told(leaves, outputs)))
        lengths = [row[2:] for row in told]
        if len(leaves) > LENGTHS_AT_ONCE:
            more = self.node.gather_numbers(own[LENGTHS_AT_ONCE:])
            lengths = [[*row, *rest] for row, rest in zip(lengths, more, strict=True)]
        return lengths


def _length(leaf: Any) -> int:
    return (len(leaf) if leaf.ndim else 1) if isinstance(leaf, torch.Tensor) else 0


def _kind(leaf: Any) -> str:
    """What must be the same on every rank."""
    if isinstance(leaf, torch.Tensor):
        shape = "()" if leaf.ndim == 0 else f"(N, {str(tuple(leaf.shape[1:]))[1:]}"
        return f"{leaf.dtype} {shape}{' with gradient' if leaf.requires_grad else ''}"
    if isinstance(leaf, (bool, int, float, complex)):
        return "number"
    return "other"


def _digest(leaves: list[tuple[str, Any]]) -> int:
    """63 bits that differ where the structures do."""
    text = "\n".join(f"{path} {_kind(leaf)}" for path, leaf in leaves)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _told(leaves: list[tuple[str, Any]], outputs: Any) -> str:
    """A rank's outputs for the message that they are unlike."""
    listing = ", ".join(f"{path} {_kind(leaf)}".strip() for path, leaf in leaves)
    return f"{described(outputs)} ({listing})" if listing else described(outputs)
