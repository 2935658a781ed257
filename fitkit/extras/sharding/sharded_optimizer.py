"""Optimizers with sharded state: whole parameters are divided among the ranks, or parts of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fitkit import trees
from fitkit.errors import ConfigurationError
from fitkit.extras.sharding.sharded_module import ShardedModule
from fitkit.seams.optimizers import uses_closure, with_inner
from fitkit.seams.strategies import Collectives, OptimizerInPlace, as_parts, held_by, whole_on_host
from fitkit.tensors import bytes_of

CLOSURE = (
    "{kind} computes the loss itself, several times per step, and looks at all parameters at once: "
    "its state can't be spread over ranks. Write strategy='ddp', or take another optimizer."
)


def kept_apart(optimizer: Optimizer) -> str | None:
    """Say what an optimizer holds beside its groups that these should hold alone; None if nothing.

    Where ranks have parts of parameters or of states, they know those of the groups.
    """
    for inner in with_inner([optimizer])[1:]:
        return f"another optimizer ({type(inner).__name__})"
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    kept = optimizer.__getstate__()
    for name, value in vars(optimizer).items():
        entries = value.values() if isinstance(value, dict) else value
        is_own = name not in kept and isinstance(value, (list, tuple, dict))
        if is_own and any(id(entry) in own for entry in entries):
            return f"parameters in its attribute {name}"
    return None


def refuse_kept_apart(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps elsewhere what ranks would have in parts.

    Raises:
        ConfigurationError: with what it keeps.
    """
    if (kept := kept_apart(optimizer)) is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds {kept} beside its groups, so it can't be spread "
            "over ranks. Write strategy='ddp', or take another optimizer."
        )


class OptimizerShards(OptimizerInPlace):
    """Deals an optimizer's parameters out to the ranks, with their state.

    Every parameter has one rank that updates it, and sends the others what came of it. In the
    optimizer's `step` the other ranks see no gradient there, and so make no state for it.

    Torch's ZeroRedundancyOptimizer spreads in the same way, but is another object than the one
    that schedulers and users hold, and has to be made from a class and its defaults.

    Args:
        optimizer: the same on all ranks, over parameters whose gradients are the same.
        collectives: the ranks.
        device: this rank's.

    Attributes:
        has_lost: whether `abandon` has dropped state, since others have the rest of it.

    Raises:
        ConfigurationError: an optimizer that can't be spread.

    Reference: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020, arXiv:1910.02054 (its first stage).
    """

    def __init__(
        self, optimizer: Optimizer, collectives: Collectives, device: torch.device
    ) -> None:
        if uses_closure(optimizer):
            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        refuse_kept_apart(optimizer)
        super().__init__(optimizer, {})
        self.has_lost: bool = False
        self._collectives = collectives
        self._device = device
        # Torch calls the hooks once more within a step that calls `super().step()`, where a
        # process has made an optimizer of that class, too: not on all ranks.
        self._depth = 0
        self._owners: dict[torch.Tensor, int] = {}
        self._loads = [0] * collectives.world_size  # numbers that each rank updates
        self._others: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # with gradients
        self._updated: list[tuple[torch.Tensor, int]] = []  # by this step, with owners
        self._add_hooks(
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        # A schedule-free one trains at other weights than those that evaluate.
        own = [getattr(optimizer, name, None) for name in ("train", "eval")]
        self._switches = ("train", "eval") if all(map(callable, own)) else ()
        for name in self._switches:
            setattr(optimizer, name, partial(self._switch, getattr(optimizer, name)))

    def abandon(self) -> None:
        self._put_gradients_back()
        self.has_lost = bool(self._owners) and bool(self.optimizer.state)
        self._backup = {} if self._owners else dict(self.optimizer.state)
        super().abandon()

    def give_back(self, state: dict[torch.Tensor, Any]) -> None:
        for name in self._switches:
            delattr(self.optimizer, name)
        self._switches = ()
        super().give_back(state)
        self._owners.clear()

    def _switch(self, own: Callable[[], Any]) -> None:
        """Switch a schedule-free optimizer: each rank changes the weights whose state it has."""
        own()
        spread_from_owners(list(self._owners.items()), self._collectives.rank)

    # ------------------------------------------------------------------ a step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure") is not None or any(callable(given) for given in args):
            raise ConfigurationError(CLOSURE.format(kind=type(optimizer).__name__))
        self._depth += 1
        if self._depth > 1:
            return
        updated = [p for p in held_by(optimizer) if p.grad is not None]
        self._give_owners([p for p in updated if p not in self._owners])
        self._updated = [(parameter, self._owners[parameter]) for parameter in updated]
        rank = self._collectives.rank
        for parameter, owner in self._owners.items():
            if owner != rank:
                self._others.append((parameter, parameter.grad))
                parameter.grad = None
                optimizer.state.pop(parameter, None)

    def _put_gradients_back(self) -> None:
        for parameter, gradient in self._others:
            parameter.grad = gradient
        self._others.clear()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._put_gradients_back()
        updated, self._updated = self._updated, []
        spread_from_owners(updated, self._collectives.rank)

    def _give_owners(self, parameters: list[torch.Tensor]) -> None:
        """Give each parameter to the rank that has least to update, the largest ones first."""
        for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            rank = self._loads.index(min(self._loads))
            self._owners[parameter] = rank
            self._loads[rank] += parameter.numel()

    # ------------------------------------------------------------------ the whole

    def _whole_states(self, *, wanted: bool) -> dict[torch.Tensor, Any]:
        return {**self.optimizer.state, **self._gathered(wanted=wanted, on_device=True)}

    def _states_for_dict(self) -> dict[torch.Tensor, Any]:
        return self._gathered(wanted=self._collectives.rank == 0, on_device=False)

    def _gathered(self, *, wanted: bool, on_device: bool) -> dict[torch.Tensor, Any]:
        spread = list(self._owners)
        local = {
            number: self.optimizer.state[parameter]
            for number, parameter in enumerate(spread)
            if self._owners[parameter] == self._collectives.rank
            and parameter in self.optimizer.state
        }
        place = self._device if on_device else torch.device("cpu")
        owners = list(self._owners.values())
        whole = gathered_states(
            local, owners, self._collectives, self._device, wanted=wanted, place=place
        )
        return {spread[number]: state for number, state in whole.items()}


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
            copies.append(([tensor], bytes_of(tensor), owner))
    for owner, held in small.items():
        copies.append((held, torch.cat([bytes_of(tensor) for tensor in held]), owner))
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


class _Tensor:
    """Stands for another rank's tensor; one number comes along, others travel afterwards."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.on_device = tensor.device.type != "cpu"
        self.value = tensor.detach().cpu() if tensor.numel() <= 1 else None


def _described(leaf: Any) -> Any:
    return _Tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf


def gathered_states(
    local: dict[int, Any],
    owners: list[int],
    collectives: Collectives,
    device: torch.device,
    *,
    wanted: bool,
    place: torch.device,
) -> dict[int, Any]:
    """Return the states of all ranks' parts of something.

    Args:
        local: this rank's states (trees of tensors and plain values) by their numbers.
        owners: the rank that has each, by number.
        device: this rank's.
        wanted: whether this rank wants the others'; else it gets its own alone.
        place: where the others' tensors are brought. Its own are those in use.

    Ranks:
        Collective.
    """

    def take(leaf: Any, owner: int, sent: Iterator[Any]) -> Any:
        mine = next(sent, None)
        if not isinstance(leaf, _Tensor):
            return leaf
        if leaf.value is not None:
            return leaf.value.to(place) if leaf.on_device else leaf.value
        if isinstance(mine, torch.Tensor):
            flat = bytes_of(mine.to(device))
        else:
            size = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").nbytes
            flat = torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=owner)
        return flat.view(leaf.dtype).view(leaf.shape).to(place) if mine is None else mine

    described = {number: trees.map_leaves(_described, state) for number, state in local.items()}
    everyones = collectives.gather(described)
    whole: dict[int, Any] = {}
    for number, owner in enumerate(owners):
        if number in everyones[owner]:
            is_local = owner == collectives.rank
            sent = iter(trees.leaves(local[number]) if is_local else ())
            found = trees.map_leaves(
                partial(take, owner=owner, sent=sent), everyones[owner][number]
            )
            if is_local or wanted:
                whole[number] = local[number] if is_local else found
    return whole


TOGETHER = ("foreach", "fused")
"""Options of torch's optimizers that update parameters together."""


class SpreadOptimizer(OptimizerInPlace):
    """An optimizer over a sharded module's parameters, whose state is spread as they are.

    Its groups hold the sharded parameters instead of the ordinary ones.

    Args:
        optimizer: over the ordinary parameters; its state is the same on all ranks.
        module: whose parameters they are.
        backup: whether this rank keeps the state, for `abandon`.
        one_by_one: whether parameters are updated each by itself, because torch can't update
            together what lies on different meshes.

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
        refuse_kept_apart(optimizer)
        super().__init__(optimizer, module.twins)
        self._module = module
        before = dict(optimizer.state)
        twins = self._twins
        spread = {twins[p]: self._spread(state, twins[p]) for p, state in before.items()}
        self._backup = before if backup else {}
        self._replace(twins, spread)
        self._options: list[dict[str, Any]] = []
        if one_by_one:
            for group in optimizer.param_groups:
                given = {name: value for name, value in group.items() if name in TOGETHER}
                self._options.append(given)
                group.update(dict.fromkeys(given, False))
        self._add_hooks(
            optimizer.register_load_state_dict_pre_hook(self._take_parts),
        )

    def give_back(self, state: dict[torch.Tensor, Any]) -> None:
        self._restore_options(self.optimizer.param_groups)
        super().give_back(state)

    def _restore_options(self, groups: list[dict[str, Any]]) -> None:
        for group, given in zip(groups, self._options, strict=False):
            group.update(given)

    def _spread(self, state: Any, twin: Any) -> Any:
        """Return a parameter's state, each of its tensors spread as the parameter is."""

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

    def _whole_states(self, *, wanted: bool) -> dict[torch.Tensor, Any]:
        whole = self._states(whole_on_host)
        return {self._ordinary[twin]: state for twin, state in whole.items()} if wanted else {}

    def _states_for_dict(self) -> dict[torch.Tensor, Any]:
        return self._states(self._module.for_state_dict)

    def _states(self, give: Callable[[Any], Any]) -> dict[torch.Tensor, Any]:
        return {
            twin: {name: trees.map_leaves(give, value) for name, value in held.items()}
            for twin, held in self.optimizer.state.items()
        }

    def _whole_state_dict(self, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in packed["param_groups"]]
        self._restore_options(groups)
        return super()._whole_state_dict(optimizer, {**packed, "param_groups": groups})

    def _take_parts(self, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        held = held_by(optimizer)
        states = {
            number: self._spread(state, held[number]) for number, state in packed["state"].items()
        }
        return {**packed, "state": states}
