"""Tensors of any dtype from the rank that has them to the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fitkit import trees
from fitkit.distributed.collectives import Collectives

PACKED_BELOW_BYTES = 2**16
"""Smaller tensors of one rank travel together: an exchange of its own costs more than a copy."""


@torch.no_grad()
def spread_from_owners(tensors: Iterable[tuple[torch.Tensor, int]], rank: int) -> None:
    """Overwrite each tensor with that of the rank that owns it.

    Args:
        tensors: each with its owner's rank; in the same order on every rank.
        rank: this one.

    Ranks:
        Collective.
    """
    small: dict[int, list[torch.Tensor]] = {}
    copies: list[tuple[list[torch.Tensor], torch.Tensor, int]] = []
    for tensor, owner in tensors:
        if tensor.numel() * tensor.element_size() < PACKED_BELOW_BYTES:
            small.setdefault(owner, []).append(tensor)
        else:
            copies.append(([tensor], _bytes_of(tensor.detach()), owner))
    for owner, held in small.items():
        copies.append((held, torch.cat([_bytes_of(tensor.detach()) for tensor in held]), owner))
    works = [dist.broadcast(flat, src=owner, async_op=True) for _, flat, owner in copies]
    for work, (held, flat, owner) in zip(works, copies, strict=True):
        work.wait()
        if owner != rank:
            _copy_back(flat, held)


def _copy_back(flat: torch.Tensor, held: list[torch.Tensor]) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in held]
    for tensor, part in zip(held, flat.split(sizes), strict=True):
        if part.data_ptr() != tensor.data_ptr():
            # A packed part may begin anywhere, and a view of other numbers may not.
            aligned = part.clone() if len(held) > 1 else part
            tensor.detach().copy_(aligned.view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, in its own memory where that is contiguous: (bytes,)."""
    return tensor.contiguous().view(-1).view(torch.uint8)


class _Described:
    """Stands for a tensor that follows: its shape and dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


class _Number:
    """A tensor of one number, and whether it was on the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = tensor.detach().cpu()
        self.on_device = tensor.device.type != "cpu"


def gathered_states(
    own: dict[int, Any],
    owners: list[int],
    collectives: Collectives,
    device: torch.device,
    *,
    wanted: bool,
    place: torch.device,
) -> dict[int, Any]:
    """The states of all ranks' parts of something.

    Args:
        own: this rank's states (trees of tensors and plain values) by their numbers.
        owners: the rank that has each, by number.
        device: this rank's.
        wanted: whether this rank wants the others'; else it gets its own alone.
        place: where the others' tensors are brought. Its own are those in use.

    Ranks:
        Collective.
    """
    told = collectives.gather({number: _described(state) for number, state in own.items()})
    whole: dict[int, Any] = {}
    for number, owner in enumerate(owners):
        if number not in told[owner]:
            continue
        is_own = owner == collectives.rank
        found = [
            _travelled(mark, leaf, owner, device, place)
            for mark, leaf in zip(
                trees.leaves(told[owner][number]),
                trees.leaves(own[number] if is_own else told[owner][number]),
                strict=True,
            )
        ]
        if is_own:
            whole[number] = own[number]
        elif wanted:
            whole[number] = _filled(told[owner][number], iter(found))
    return whole


def _filled(tree: Any, values: Iterator[Any]) -> Any:
    """A tree with other leaves."""
    return trees.map_leaves(lambda leaf: next(values), tree)


def _described(state: Any) -> Any:
    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.numel() <= 1:
            return _Number(leaf)
        return _Described(leaf)

    return trees.map_leaves(describe, state)


def _travelled(mark: Any, leaf: Any, owner: int, device: torch.device, place: torch.device) -> Any:
    """What a described leaf stands for, after its exchange where it is a tensor."""
    if isinstance(mark, _Number):
        return mark.value.to(place) if mark.on_device else mark.value
    if not isinstance(mark, _Described):
        return mark
    if isinstance(leaf, torch.Tensor):
        flat = _bytes_of(leaf.detach().to(device))
    else:
        size = torch.empty(mark.shape, dtype=mark.dtype, device="meta").nbytes
        flat = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(flat, src=owner)
    return flat.view(mark.dtype).view(mark.shape).to(place)
