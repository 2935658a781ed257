"""An optimizer whose state is spread as its parameters are."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from fitkit import trees
from fitkit.distributed.sharding.sharded_module import ShardedModule
from fitkit.distributed.sharding.whole import as_parts, whole_on_host
from fitkit.errors import ConfigurationError

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
