"""Parameters, gradients and optimizer state spread over the ranks: torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit import trees
from fitkit.arguments import check_choice, check_count, check_flag, describe
from fitkit.distributed.precision import MixedPrecision
from fitkit.distributed.router import Door, StepRouter
from fitkit.distributed.sharding.blocks import blocks_of
from fitkit.distributed.sharding.refusals import check_trains
from fitkit.distributed.sharding.sharded_module import ShardedModule
from fitkit.distributed.sharding.spread_optimizer import SpreadOptimizer
from fitkit.distributed.sharding.whole import whole_for_file
from fitkit.distributed.strategies.ddp import DDP
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.notices import warn


class FSDP(DDP):
    """Each rank keeps a part of every parameter, gradient and optimizer state while `fit` runs.

    A block's parameters come together when it computes, forward and backward, and its gradients
    are averaged as they are dealt out again. The weights are those of `DDP`. Before and after
    `fit` the model is an ordinary one, with the same parameters and the same optimizer.

    Args:
        wrap: what is gathered as one: `"blocks"` (default) for repeated blocks, such as a
            transformer's layers; an int for submodules of at least so many parameters; a class
            or a tuple of classes; None for the whole net at once.
        reshard_after_forward: whether a block's parameters are dropped between its forward and
            its backward. False needs their memory, and saves an exchange (ZeRO's second stage).
        shard_size: ranks that share one copy of the net (a divisor of their number), for
            example those of a node; the groups exchange gradients only. None for all ranks.
        activation_checkpointing: whether the blocks' activations are dropped, and computed
            again in the backward pass.
        backup: whether rank 0 keeps weights and optimizer state from before `fit` in main memory.
            A training that fails leaves the model with these; without them its weights are lost.
        process_group_backend, timeout: as for `DDP`.

    Reference: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
    2023, arXiv:2304.11277.
    """

    name = "fsdp"
    starts = "workers"

    def __init__(
        self,
        wrap: str | int | type[nn.Module] | tuple[type[nn.Module], ...] | None = "blocks",
        *,
        reshard_after_forward: bool = True,
        shard_size: int | None = None,
        activation_checkpointing: bool = False,
        backup: bool = True,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        _check_wrap(wrap)
        check_flag("reshard_after_forward", reshard_after_forward)
        check_count("shard_size", shard_size, minimum=2, optional=True)
        check_flag("activation_checkpointing", activation_checkpointing)
        check_flag("backup", backup)
        self.wrap = wrap
        self.reshard_after_forward = reshard_after_forward
        self.shard_size = shard_size
        self.activation_checkpointing = activation_checkpointing
        self.backup = backup
        self._module: ShardedModule | None = None
        self._optimizers: list[SpreadOptimizer] = []
        self._root: RootDoor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_module": None, "_optimizers": [], "_root": None}

    @property
    def evaluates_in_step(self) -> bool:
        return self._module is not None

    # ------------------------------------------------------------------ the module

    def place(self, module: nn.Module) -> None:
        if self._module is None:  # a callback may evaluate in the middle of a training
            super().place(module)

    def begin_training(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        if self.collectives.world_size == 1:
            return
        check_trains(module, optimizers, self.name)
        rank = self.collectives.rank
        router = StepRouter(module)
        self._module = ShardedModule(
            module,
            router,
            blocks_of(module, self.wrap),
            self._sharder(),
            rank,
            recompute=self.activation_checkpointing,
            backup=self.backup,
        )
        self._root = RootDoor(router, module, self._module)
        for optimizer in optimizers:
            self._optimizers.append(
                SpreadOptimizer(optimizer, self._module, backup=self.backup and rank == 0)
            )

    def _sharder(self) -> Any:
        """Torch's `fully_shard` with this run's mesh and number types."""
        # They take over a second to import.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        size, kind = self.collectives.world_size, self.device.type
        within = size if self.shard_size is None else self.shard_size
        if size % within:
            raise ConfigurationError(
                f"shard_size={within} doesn't divide the {size} ranks into equal groups. Write a "
                f"divisor of {size}, or leave it out."
            )
        if within == size:
            mesh = init_device_mesh(kind, (size,))
        else:
            mesh = init_device_mesh(
                kind, (size // within, within), mesh_dim_names=("replicate", "shard")
            )
        full, half = MixedPrecisionPolicy(), None
        if isinstance(self.precision, MixedPrecision):
            # The step's autocast looks after inputs; gradients are averaged in full precision.
            half = MixedPrecisionPolicy(
                param_dtype=self.precision.half,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )

        def shard(part: nn.Module) -> Any:
            # Batch normalisation takes no half weights beside its running statistics.
            keeps = any(buffer.is_floating_point() for buffer in part.buffers())
            return fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=full if half is None or keeps else half,
            )

        return shard

    def for_file(self, make: Callable[[], Any]) -> Any:
        module = self._module
        if module is None:
            return make()
        is_first = self.collectives.rank == 0
        with module.whole_on_rank_zero():
            # Callbacks keep spread tensors too (averages of weights).
            return trees.map_leaves(lambda leaf: whole_for_file(leaf, is_first), make())

    def door(self, module: nn.Module) -> Door:
        return self._root or self.plain_door(module)

    def evaluation_door(self, module: nn.Module) -> Door:
        return self._root or self.plain_door(module)

    # ------------------------------------------------------------------ learning

    def exchange_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Nothing is left to do: each backward averages, of an accumulated group too."""
        if self._module is None:
            super().exchange_gradients(parameters)

    def end_training(self) -> None:
        if self._module is None:
            return
        # Workers' copies are thrown away; other ranks go on with theirs.
        wanted = self.collectives.rank == 0 or not self.reads_on_rank_zero
        while self._optimizers:
            self._optimizers[-1].end(wanted=wanted)
            self._optimizers.pop()
        self._module.end(wanted=wanted)
        self._module, self._root = None, None

    def finish(self) -> None:
        super().finish()
        module, self._module, self._root = self._module, None, None
        optimizers, self._optimizers = self._optimizers, []
        for optimizer in optimizers:
            optimizer.abandon()
        if module is None:
            return
        module.abandon()
        if self.world.rank == 0 and any(one.has_stepped for one in optimizers):
            warn(
                "The training was cut while the net was spread over the ranks. "
                + (
                    "Its weights and its optimizer are those from before fit."
                    if self.backup
                    else "Its weights are lost (backup=False)."
                )
                + " To go on as if nothing had happened, write fit(…, resume_from=…) with a "
                "checkpoint."
            )


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


def _check_wrap(wrap: Any) -> None:
    if wrap is None or isinstance(wrap, str):
        check_choice("wrap", wrap, ("blocks", None))
        return
    kinds = wrap if isinstance(wrap, tuple) and wrap else (wrap,)
    if all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        return
    if isinstance(wrap, (tuple, bool)) or not isinstance(wrap, int):
        raise ArgumentTypeError(
            f"wrap={describe(wrap)} must be 'blocks', a number of parameters, a module class, a "
            "tuple of module classes, or None."
        )
    check_count("wrap", wrap)
