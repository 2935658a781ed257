"""The way into a module that is spread over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.distributed.router import Door, StepRouter
from fitkit.distributed.sharding.sharded_module import ShardedModule
from fitkit.errors import ConfigurationError


class RootRouter(StepRouter):
    """A router that never returns a view, whose hooks a loss that works in place would drop."""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As a `StepRouter`'s."""
        from torch.utils import _pytree

        outputs = super().forward(method, *args, **kwargs)
        leaves, form = _pytree.tree_flatten(outputs)
        if not any(map(_is_learning_view, leaves)):
            return outputs
        copies = [leaf.clone() if _is_learning_view(leaf) else leaf for leaf in leaves]
        return _pytree.tree_unflatten(copies, form)


def _is_learning_view(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._base is not None


class RootDoor(Door):
    """Enters a sharded module through its root.

    Args:
        root: the router that `fully_shard` has made the root.
        module: what it leads to.
        sharded: gives up what a forward without a backward has gathered.
    """

    def __init__(self, root: nn.Module, module: nn.Module, sharded: ShardedModule) -> None:
        super().__init__(module)
        self._root = root
        self._sharded = sharded
        self._checked = False

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        outputs = self._root(method, *args, **kwargs)
        if not torch.is_grad_enabled():
            self._sharded.reshard()
        elif not self._checked:
            _check_outputs(outputs)
            self._checked = True
        return outputs


def _check_outputs(outputs: Any) -> None:
    """Refuse outputs in which torch can't see the tensors that gradients flow back through."""
    from torch.utils import _pytree

    known = {id(leaf) for leaf in _pytree.tree_leaves(outputs)}
    unseen = [
        leaf
        for leaf in trees.leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in known
    ]
    if unseen:
        raise ConfigurationError(
            f"The net returned a {type(outputs).__name__}, in which strategy='fsdp' can't follow "
            "the gradients. Return a tensor, tuple, list or dict, or register the class with "
            "torch.utils._pytree.register_dataclass."
        )
