"""A module whose parameters are spread over the ranks, in place, until they come together again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fitkit.distributed.sharding.whole import as_parts, whole, whole_for_file

FSDP = "torch.distributed.fsdp"
"""Where the hooks come from that `fully_shard` leaves on a module."""


@dataclasses.dataclass
class Place:
    """Where a parameter is.

    Attributes:
        module: the submodule that has it.
        name: its name there.
        parameter: the ordinary parameter.
        shape: its own.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter
    shape: torch.Size

    def put(self, parameter: nn.Parameter) -> None:
        """Let the module have this parameter there."""
        # Recurrent layers note their weights when one is set.
        setattr(self.module, self.name, parameter)


class ShardedModule:
    """Spreads a module's parameters over the ranks; it stays the module that its users hold.

    The ordinary parameters give up their memory meanwhile, and others of torch's `DTensor` stand
    in their places. Afterwards the very same objects are back, with what was learned. A
    `state_dict()` in between is collective, and whole.

    Args:
        module: the same numbers on all ranks.
        root: the module whose call enters it.
        blocks: submodules that are gathered apart, inner ones first.
        shard: torch's `fully_shard` with its options.
        rank: this one.
        recompute: whether the blocks' activations are computed again in the backward pass.
        backup: whether rank 0 keeps the numbers, for `abandon`.

    Attributes:
        twins: the sharded parameters by the ordinary ones.
    """

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        blocks: list[nn.Module],
        shard: Callable[[nn.Module], Any],
        rank: int,
        *,
        recompute: bool,
        backup: bool,
    ) -> None:
        self.module = module
        self._rank = rank
        self._only_first = False
        self._places = [
            Place(part, name, parameter, parameter.shape)
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        self._before = [(part, type(part), set(vars(part))) for part in module.modules()]
        self._forwards = [(block, vars(block).get("forward")) for block in blocks if recompute]
        for block, _ in self._forwards:
            vars(block)["forward"] = _Recomputed(block)
        self._handles: list[Any] = []
        self._backup: dict[nn.Parameter, torch.Tensor] = {}
        self.twins: dict[nn.Parameter, nn.Parameter] = {}
        try:
            self.sharded: list[Any] = [shard(part) for part in (*blocks, root)]
        except BaseException:
            self._restore()
            raise
        for place in self._places:
            self.twins[place.parameter] = place.module._parameters[place.name]  # type: ignore[assignment]
        self._empty(keeps=backup and rank == 0)
        self._translate_state_dicts()

    def _empty(self, *, keeps: bool) -> None:
        """Let the ordinary parameters give up their memory."""
        for parameter in self.twins:
            if keeps:
                self._backup[parameter] = parameter.data.cpu()
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    def _translate_state_dicts(self) -> None:
        for part in {id(place.module): place.module for place in self._places}.values():
            # Torch sets an attribute on the first, which a method doesn't take.
            self._handles += [
                part.register_state_dict_post_hook(partial(self._give_whole)),
                part.register_load_state_dict_pre_hook(self._take_parts),
            ]

    def reshard(self) -> None:
        """Drop what a forward without a backward has gathered."""
        for part in self.sharded:
            part.reshard()

    def end(self, *, wanted: bool) -> None:
        """Make the module whole and ordinary again.

        Args:
            wanted: whether this rank needs the numbers; else its parameters stay empty.

        Ranks:
            Collective.
        """
        self.reshard()
        for parameter, twin in self.twins.items():
            numbers = whole(twin.detach())
            parameter.requires_grad_(twin.requires_grad)
            if wanted:
                parameter.data = numbers
        self._restore()

    def abandon(self) -> None:
        """Let go after a failure: rank 0 gets the numbers from before, where it kept them."""
        shapes = {place.parameter: place.shape for place in self._places}
        for parameter, twin in self.twins.items():
            parameter.requires_grad_(twin.requires_grad)
            kept = self._backup.get(parameter)
            if kept is None:
                kept = torch.full(shapes[parameter], torch.nan, dtype=parameter.dtype)
            parameter.data = kept.to(parameter.device)
        self._restore()

    def _restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        for block, forward in self._forwards:
            del vars(block)["forward"]
            if forward is not None:
                vars(block)["forward"] = forward
        for part, kind, names in self._before:
            part.__class__ = kind
            _forget(part)
            for name in [name for name in vars(part) if name not in names and _is_torchs(name)]:
                del vars(part)[name]
        for place in self._places:
            place.put(place.parameter)
        self.twins, self.sharded, self._backup = {}, [], {}

    # ------------------------------------------------------------------ state dicts

    @contextlib.contextmanager
    def whole_on_rank_zero(self) -> Iterator[None]:
        """Let the other ranks' state dicts keep their parts meanwhile."""
        self._only_first = True
        try:
            yield
        finally:
            self._only_first = False

    @property
    def wants_whole(self) -> bool:
        """Whether this rank's state dicts are whole at this moment."""
        return self._rank == 0 or not self._only_first

    def _give_whole(self, part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in part._parameters:
            if prefix + name not in state:
                continue
            found = state[prefix + name]
            state[prefix + name] = whole_for_file(found, self.wants_whole)

    def _take_parts(
        self, part: nn.Module, state: dict[str, Any], prefix: str, *others: Any
    ) -> None:
        for name, parameter in part._parameters.items():
            found = state.get(prefix + name)
            if isinstance(found, torch.Tensor) and parameter is not None:
                state[prefix + name] = as_parts(found, parameter)


class _Recomputed:
    """A block's forward whose activations are dropped, and computed again for the backward.

    Args:
        block: whose class's forward it is.
    """

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)


def _is_torchs(name: str) -> bool:
    """Whether `fully_shard` notes something on modules under that name."""
    return "fsdp" in name or "composable" in name or name.startswith("__")


def _forget(part: nn.Module) -> None:
    """Take `fully_shard`'s hooks off a submodule, which torch has no way to do."""
    from torch.distributed._composable_state import _module_state_mapping

    _module_state_mapping.pop(part, None)
    hooks = {name: held for name, held in vars(part).items() if name.endswith("_hooks")}
    numbers = [
        number
        for held in hooks.values()
        for number, hook in held.items()
        if str(getattr(hook, "__module__", "")).startswith(FSDP)
    ]
    for held in vars(part).values():
        if isinstance(held, dict):
            for number in numbers:
                held.pop(number, None)
