"""An optimizer of which each rank makes a part of the step, and keeps that part's state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fitkit import trees
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.spread.in_place import as_parts, whole_on_host
from fitkit.distributed.spread.module import ShardedModule
from fitkit.errors import ConfigurationError

CLOSURE = (
    "{kind} computes the loss itself, several times a step, and looks at all parameters at once: "
    "its state can't be spread over ranks. Write strategy='ddp', or take another optimizer."
)


class OptimizerShards:
    """Spreads an optimizer's state over the ranks, in place, until `end` or `abandon`.

    Every parameter has one rank that updates it, and sends the others what came of it. In the
    optimizer's `step` the other ranks see no gradient there, and so make no state for it. The
    object stays what it is: its groups, schedulers, loss scaling and hooks go on. While it is
    spread, its `state_dict()` is collective, and whole on rank 0.

    Torch's ZeroRedundancyOptimizer spreads in the same way, but is another object than the one
    that schedulers and users hold, and has to be made from a class and its defaults.

    Args:
        optimizer: the same on all ranks, over parameters whose gradients are the same.
        collectives: the ranks.
        device: this rank's.

    Raises:
        ConfigurationError: an optimizer that can't be spread.

    Reference: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020, arXiv:1910.02054 (its first stage).
    """

    def __init__(
        self, optimizer: Optimizer, collectives: Collectives, device: torch.device
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        self.optimizer = optimizer
        self._collectives = collectives
        self._device = device
        self._owners: dict[torch.Tensor, int] = {}
        self._loads = [0] * collectives.world_size  # numbers that each rank updates
        self._others: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # with gradients
        self._updated: list[tuple[torch.Tensor, int]] = []  # by this step, with owners
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._whole_state_dict),
        ]
        # A schedule-free one trains at other weights than those that evaluate.
        own = [getattr(optimizer, name, None) for name in ("train", "eval")]
        self._switches = ("train", "eval") if all(map(callable, own)) else ()
        for name in self._switches:
            setattr(optimizer, name, functools.partial(self._switch, getattr(optimizer, name)))

    @property
    def has_parts(self) -> bool:
        """Whether this rank has dropped what belongs to others."""
        return bool(self._owners)

    def owner_of(self, parameter: torch.Tensor) -> int | None:
        """The rank that updates a parameter; None before its first update."""
        return self._owners.get(parameter)

    def end(self, *, wanted: bool) -> None:
        """Make the optimizer whole and ordinary again.

        Args:
            wanted: whether this rank needs the whole state; else it keeps its part.

        Ranks:
            Collective.
        """
        self._release()
        whole = self._gathered(wanted=wanted, on_device=True)
        for parameter, state in whole.items():
            self.optimizer.state[parameter] = state
        self._owners.clear()

    def abandon(self) -> bool:
        """Let go after a failure, when the others may be gone.

        Returns:
            Whether state was lost: what this rank had of it is dropped then.
        """
        self._release()
        for parameter, gradient in self._others:
            parameter.grad = gradient
        self._others.clear()
        lost = self.has_parts and bool(self.optimizer.state)
        if self.has_parts:
            self.optimizer.state.clear()
        self._owners.clear()
        return lost

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for name in self._switches:
            delattr(self.optimizer, name)
        self._switches = ()

    def _switch(self, own: Callable[[], Any]) -> None:
        """Switch a schedule-free optimizer: each rank changes the weights whose state it has."""
        own()
        spread_from_owners(list(self._owners.items()), self._collectives.rank)

    # ------------------------------------------------------------------ a step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(callable(given) for given in args):
            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        updated = [p for p in _held_by(optimizer) if p.grad is not None]
        self._give_owners([p for p in updated if p not in self._owners])
        self._updated = [(parameter, self._owners[parameter]) for parameter in updated]
        rank = self._collectives.rank
        for parameter, owner in self._owners.items():
            if owner != rank:
                self._others.append((parameter, parameter.grad))
                parameter.grad = None
                optimizer.state.pop(parameter, None)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._others:
            parameter.grad = gradient
        self._others.clear()
        updated, self._updated = self._updated, []
        spread_from_owners(updated, self._collectives.rank)

    def _give_owners(self, parameters: list[torch.Tensor]) -> None:
        """Give each parameter to the rank that has least to update, the largest ones first."""
        for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            rank = self._loads.index(min(self._loads))
            self._owners[parameter] = rank
            self._loads[rank] += parameter.numel()

    # ------------------------------------------------------------------ the whole

    def _whole_state_dict(self, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        """A state dict with all ranks' parts, on rank 0."""
        whole = self._gathered(wanted=self._collectives.rank == 0, on_device=False)
        numbers = {parameter: number for number, parameter in enumerate(_held_by(optimizer))}
        states = {**packed["state"], **{numbers[p]: state for p, state in whole.items()}}
        return {**packed, "state": dict(sorted(states.items()))}

    def _gathered(self, *, wanted: bool, on_device: bool) -> dict[torch.Tensor, Any]:
        spread = list(self._owners)
        own = {
            number: self.optimizer.state[parameter]
            for number, parameter in enumerate(spread)
            if self._owners[parameter] == self._collectives.rank
            and parameter in self.optimizer.state
        }
        place = self._device if on_device else torch.device("cpu")
        owners = list(self._owners.values())
        whole = gathered_states(
            own, owners, self._collectives, self._device, wanted=wanted, place=place
        )
        return {spread[number]: state for number, state in whole.items()}


def _held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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


TOGETHER = ("foreach", "fused")
"""Options of torch's optimizers that update parameters together."""


class SpreadOptimizer:
    """An optimizer over a sharded module's parameters, in place, until `end` or `abandon`.

    The object stays what it is: its groups hold the sharded parameters instead of the ordinary
    ones, and its state is spread as they are. Meanwhile its `state_dict()` is collective, and
    whole.

    Args:
        optimizer: over the ordinary parameters; its state is the same on all ranks.
        module: whose parameters they are.
        backup: whether this rank keeps the state, for `abandon`.
        one_by_one: whether parameters are updated each by itself, because torch can't update
            together what lies on different meshes.

    Attributes:
        has_stepped: whether it has made an update since.

    Raises:
        ConfigurationError: its state can't be spread.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: ShardedModule,
        *,
        backup: bool,
        one_by_one: bool = False,
    ) -> None:
        twins: dict[Any, Any] = dict(module.twins)
        self.optimizer = optimizer
        self._module = module
        self._ordinary: dict[torch.Tensor, torch.Tensor] = {t: p for p, t in module.twins.items()}
        before = {parameter: optimizer.state[parameter] for parameter in list(optimizer.state)}
        spread = {
            twins[parameter]: self._spread(state, parameter, twins[parameter])
            for parameter, state in before.items()
        }
        self._backup = before if backup else {}
        self._replace(twins, spread)
        self.has_stepped = False
        self._options: list[dict[str, Any]] = []
        if one_by_one:
            for group in optimizer.param_groups:
                given = {name: value for name, value in group.items() if name in TOGETHER}
                self._options.append(given)
                group.update(dict.fromkeys(given, False))
        self._handles = [
            optimizer.register_step_post_hook(self._note_step),
            optimizer.register_state_dict_post_hook(self._give_whole),
            optimizer.register_load_state_dict_pre_hook(self._take_parts),
        ]

    def end(self, *, wanted: bool) -> None:
        """Make the optimizer ordinary again.

        Args:
            wanted: whether this rank needs the state, in main memory; else it has none.

        Ranks:
            Collective.
        """
        self._release()
        state: dict[torch.Tensor, Any] = {}
        for twin, held in list(self.optimizer.state.items()):
            found = {name: trees.map_leaves(whole_on_host, value) for name, value in held.items()}
            if wanted:
                state[self._ordinary[twin]] = found
        self._replace(self._ordinary, state)

    def abandon(self) -> None:
        """Let go after a failure: rank 0 gets the state from before, where it kept it."""
        self._release()
        self._replace(self._ordinary, self._backup)

    def _note_step(self, *arguments: Any) -> None:
        self.has_stepped = True

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        for group, given in zip(self.optimizer.param_groups, self._options, strict=False):
            group.update(given)

    def _replace(self, others: dict[Any, Any], state: dict[Any, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [others[parameter] for parameter in group["params"]]
        self.optimizer.state.clear()
        self.optimizer.state.update(state)

    def _spread(self, state: Any, parameter: torch.Tensor, twin: Any) -> Any:
        """A parameter's state, each of its tensors spread as the parameter is."""

        def spread(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.ndim == 0:
                return leaf.clone()  # an update counts in place, and the backup shall not
            if leaf.shape != twin.shape:
                raise ConfigurationError(
                    f"{type(self.optimizer).__name__} keeps a tensor of shape "
                    f"{tuple(leaf.shape)} for a parameter of shape {tuple(twin.shape)}: it can't "
                    "be spread over ranks as the parameter is. Write strategy='ddp_sharded'."
                )
            return as_parts(leaf, twin)

        return {name: trees.map_leaves(spread, value) for name, value in state.items()}

    # ------------------------------------------------------------------ state dicts

    def _give_whole(self, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        give = self._module.for_state_dict
        states = {
            number: {name: trees.map_leaves(give, value) for name, value in state.items()}
            for number, state in packed["state"].items()
        }
        groups = [dict(group) for group in packed["param_groups"]]
        for group, given in zip(groups, self._options, strict=False):
            group.update(given)
        return {**packed, "state": states, "param_groups": groups}

    def _take_parts(self, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {
            number: self._spread(state, held[number], held[number])
            for number, state in packed["state"].items()
        }
        return {**packed, "state": states}
