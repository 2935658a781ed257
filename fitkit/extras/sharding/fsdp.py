"""Fully sharded data parallelism: parameters, gradients and optimizer state, by torch's FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.optim import Optimizer

from fitkit import trees
from fitkit.accelerators import has_streams
from fitkit.arguments import check_count, check_flag
from fitkit.errors import ConfigurationError, warn
from fitkit.extras.activation_checkpointing import check_blocks, matching
from fitkit.extras.ddp import DDP
from fitkit.extras.first_forward import refusing_writes
from fitkit.extras.launchers.group import RankGroup
from fitkit.extras.sharding.sharded_module import ShardedModule, blocks_of, check_trains, check_wrap
from fitkit.extras.sharding.sharded_optimizer import SpreadOptimizer
from fitkit.extras.unfilled import Unfilled
from fitkit.random_states import random_state, set_random_state
from fitkit.seams.precisions import MixedPrecision
from fitkit.seams.strategies import (
    Assignment,
    Collectives,
    DividedModel,
    Engine,
    StepRouter,
    Strategy,
    WrappedModel,
    whole_on_host,
)

if TYPE_CHECKING:
    from fitkit.extras.parallel.tensor import TensorParallel


class FSDP(DDP):
    """Shards every parameter, gradient and optimizer state over the ranks while `fit` runs.

    A block's parameters are gathered when it computes, forward and backward, and its gradients are
    averaged as they are sharded again. The weights are the same as with `DDP`. Before and after
    `fit`, the model is an ordinary one with the same parameters and the same optimizer.

    Args:
        wrap: what is gathered together. `"blocks"` (default) means repeated blocks, such as a
            transformer's layers. An int means submodules with at least so many parameters. A class
            or a tuple of classes means those. None means the whole net at once.
        reshard_after_forward: whether a block's parameters are freed between its forward and its
            backward. False needs their memory, and saves an exchange (ZeRO's second stage).
        shard_size: the number of ranks that share one copy of the net (a divisor of all ranks), for
            example those of a node. The groups exchange gradients only. None for all ranks.
        activation_checkpointing: whether the blocks drop their activations and compute them again
            in the backward pass. Pass a class or a tuple of classes to choose the submodules.
        tensor_parallel: how many neighbouring ranks compute a batch together (a divisor of all
            ranks). The others share the data. Default 1.
        tensor_parallel_plan: the submodules that these ranks divide, by name in the net, and how:
            `"colwise"` (a layer's outputs), `"rowwise"` (its inputs), or a `ParallelStyle` of
            `torch.distributed.tensor.parallel`. `*` stands for one part of a name.
        context_parallel: how many neighbouring ranks divide each sequence of tokens (a divisor of
            all ranks). Each computes its part. Attention by `scaled_dot_product_attention` sees
            the whole sequence. Default 1.
        cpu_offload: whether parameters, gradients and optimizer state are kept in main memory,
            where updates are made, too. A device holds a block's parameters only while it computes.
            For accelerators only.
        backup: whether rank 0 keeps weights and optimizer state from before `fit` in main memory.
            If a training fails, the model gets these back. Without them its weights are lost.
        process_group_backend, timeout, output: as for `DDP`.

    Reference: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel,
    2023, arXiv:2304.11277.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", accelerator="cpu", devices=2,
        ...               strategy=fitkit.strategies.FSDPStrategy())
    """

    name = "fsdp"
    starts = "workers"
    has_engine = True

    def __init__(
        self,
        wrap: str | int | type[nn.Module] | tuple[type[nn.Module], ...] | None = "blocks",
        *,
        reshard_after_forward: bool = True,
        shard_size: int | None = None,
        activation_checkpointing: bool | type[nn.Module] | tuple[type[nn.Module], ...] = False,
        tensor_parallel: int = 1,
        tensor_parallel_plan: Mapping[str, Any] | None = None,
        context_parallel: int = 1,
        cpu_offload: bool = False,
        backup: bool = True,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = None,
        output: str | None = None,
    ) -> None:
        super().__init__(process_group_backend, timeout, output=output)
        check_wrap(wrap)
        check_blocks("activation_checkpointing", activation_checkpointing)
        reshard_after_forward = check_flag("reshard_after_forward", reshard_after_forward)
        shard_size = check_count("shard_size", shard_size, minimum=2, optional=True)
        tensor_parallel = check_count("tensor_parallel", tensor_parallel)
        if tensor_parallel > 1 or tensor_parallel_plan is not None:
            from fitkit.extras.parallel.tensor import check_plan

            check_plan(tensor_parallel, tensor_parallel_plan)
        if tensor_parallel > 1 and shard_size is not None:
            raise ConfigurationError(
                "shard_size and tensor_parallel each divide the ranks into groups. Give one."
            )
        context_parallel = check_count("context_parallel", context_parallel)
        if tensor_parallel > 1 and context_parallel > 1:
            raise ConfigurationError(
                "tensor_parallel and context_parallel each let neighbouring ranks compute a batch "
                "together. Give one."
            )
        cpu_offload = check_flag("cpu_offload", cpu_offload)
        backup = check_flag("backup", backup)
        self.wrap = wrap
        self.reshard_after_forward = reshard_after_forward
        self.shard_size = shard_size
        self.activation_checkpointing = activation_checkpointing
        self.tensor_parallel: int = tensor_parallel
        self.context_parallel: int = context_parallel
        self.ranks_per_batch: int = tensor_parallel * context_parallel
        self.tensor_parallel_plan = tensor_parallel_plan
        self.cpu_offload = cpu_offload
        self.backup = backup
        self._unfilled: Unfilled | None = None  # between `place` and a training's end
        self._context: RankGroup | None = None  # between `join` and `leave`

    def check_groups(self, ranks: int) -> None:
        """Refuse rank counts that the given groups can't divide."""
        copy = None if ranks == 1 else self.shard_size  # nothing is sharded on one rank
        groups = {
            "tensor_parallel": self.tensor_parallel,
            "context_parallel": self.context_parallel,
            "shard_size": copy,
        }
        for name, size in groups.items():
            if size is not None and ranks % size:
                raise ConfigurationError(
                    f"{name}={size} doesn't divide the {ranks} ranks into equal groups. Write a "
                    f"divisor of {ranks}, or leave it out."
                )

    # ------------------------------------------------------------------ the ranks

    def connect(self, assignment: Assignment) -> Strategy:
        super().connect(assignment)
        self.check_groups(self.world.size)
        self._check_offload()
        reasons = {
            "16-mixed": "scales losses, which can't be undone in gradients that tensor_parallel "
            "divides",
            "fp8-mixed": "needs layers whose sizes are multiples of 16, and tensor_parallel "
            "divides them",
        }
        precision = assignment.precision.name
        if self.tensor_parallel > 1 and precision in reasons:
            raise ConfigurationError(
                f"precision={precision!r} {reasons[precision]}. Write precision='bf16-mixed' or "
                "'32-true'."
            )
        return self

    def _check_offload(self) -> None:
        """Refuse to offload from main memory to main memory."""
        if self.cpu_offload and self.device.type == "cpu":
            raise ConfigurationError(
                "cpu_offload=True moves to main memory what accelerators have no room for, but "
                "the devices are CPUs, whose memory that is. Leave it out."
            )

    def join(self, store: Store | None = None) -> None:
        super().join(store)
        ranks = self.collectives
        if self.context_parallel > 1 and ranks.world_size > 1:
            from fitkit.extras.parallel.context import context_group

            self._context = context_group(
                self.context_parallel, ranks.world_size, ranks.rank, self.timeout
            )

    def leave(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.leave()
        super().leave()

    # ------------------------------------------------------------------ the module

    def place(self, module: nn.Module, *, for_training: bool = False) -> None:
        if self.engine is not None:  # a callback may evaluate during a training
            return
        if for_training and self.collectives.world_size > 1:
            self.precision.convert(module)
            self._unfilled = Unfilled(module)
        else:
            super().place(module)

    @property
    def log_ranks(self) -> Collectives:
        return self.data_ranks if self._context is None else self.collectives

    @property
    def evaluates_in_step(self) -> bool:
        return self._context is not None or super().evaluates_in_step

    def wrap_for_training(self, module: nn.Module, **options: bool) -> WrappedModel:
        parts = self._with_parts(super().wrap_for_training(module, **options))
        if isinstance(parts, DividedModel) and isinstance(self.engine, FSDPEngine):
            self.engine.attending = parts.attending
        return parts

    def wrap_for_evaluation(self, module: nn.Module) -> WrappedModel:
        return self._with_parts(super().wrap_for_evaluation(module))

    def _with_parts(self, whole: WrappedModel) -> WrappedModel:
        """Return the model as it is called if ranks divide sequences among them."""
        if self._context is None or isinstance(whole, DividedModel):
            return whole
        from fitkit.extras.parallel.context import SequenceParts

        return SequenceParts(
            whole,
            self.context_parallel,
            self.collectives.rank,
            self._context,
            self.precision.compute_dtype,
        )

    def engine_for(self, module: nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        if self.collectives.world_size == 1:
            return None
        check_trains(module, optimizers, self.name, compiles=True)
        return FSDPEngine(self, module, optimizers, self._unfilled)

    def finish(self) -> None:
        super().finish()
        unfilled, self._unfilled = self._unfilled, None
        if unfilled is not None and self.world.rank == 0:
            unfilled.fill()  # values that a refused training has left out


class FSDPEngine(Engine):
    """Shards a module and its optimizers by `fully_shard`.

    Args:
        strategy: the training's strategy, with its options.
        module: the same on all ranks, except for values that are still to come.
        optimizers: the optimizers of its parameters.
        unfilled: the submodules without values.
    """

    replaces_ddp = evaluates_in_step = may_leave_out = True
    attending: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def __init__(
        self,
        strategy: FSDP,
        module: nn.Module,
        optimizers: list[Optimizer],
        unfilled: Unfilled | None,
    ) -> None:
        self._strategy = strategy
        self._collectives = strategy.collectives
        self._unfilled = unfilled
        self._divided: TensorParallel | None = None
        self._has_checked = False  # that torch sees the outputs' gradients
        self._has_stepped = False
        rank, together = strategy.collectives.rank, strategy.tensor_parallel > 1
        if strategy.ranks_per_batch > 1:
            self._draw_alike()
        blocks = blocks_of(module, strategy.wrap)
        self._root = RootRouter(WrappedModel(module))
        try:
            self._module = ShardedModule(
                module,
                self._root,
                blocks,
                self._prepare,
                self._sharder(module),
                rank,
                recomputed=matching(module, blocks, strategy.activation_checkpointing),
                backup=strategy.backup,
            )
            self.in_place = (self._module,)
            backup = strategy.backup and rank == 0
            for optimizer in optimizers:
                spread = SpreadOptimizer(
                    optimizer, self._module, backup=backup, one_by_one=together
                )
                self.in_place = (*self.in_place, spread)
        except BaseException:
            self.abandon()
            raise

    def _prepare(self, parts: list[nn.Module]) -> None:
        """Bring submodules' own tensors to the device, with rank 0's values."""
        if self._unfilled is not None and self._collectives.rank == 0:
            self._unfilled.fill(parts)
        device = self._strategy.device
        tensors: dict[int, torch.Tensor] = {}
        for part in parts:
            part._apply(lambda tensor: tensor.to(device), recurse=False)
            held = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            tensors.update((id(tensor), tensor) for tensor in held)
        self._collectives.broadcast_tensors(list(tensors.values()))
        if self._divided is not None:
            self._divided.divide(parts)

    def _sharder(self, module: nn.Module) -> Any:
        """torch's `fully_shard` with this run's mesh and number types."""
        # They take over a second to import.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        strategy = self._strategy
        size, kind = self._collectives.world_size, strategy.device.type
        within = size if strategy.shard_size is None else strategy.shard_size
        if strategy.tensor_parallel > 1:
            from fitkit.extras.parallel.tensor import TensorParallel

            shape = size // strategy.tensor_parallel, strategy.tensor_parallel
            both = init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor"))
            mesh = both["data"]
            net: Any = getattr(module, "_weights_module", lambda: module)()
            plan = strategy.tensor_parallel_plan or {}
            self._divided = TensorParallel(net, plan, both["tensor"], self._collectives)
        elif within == size:
            mesh = init_device_mesh(kind, (size,))
        else:
            mesh = init_device_mesh(
                kind, (size // within, within), mesh_dim_names=("replicate", "shard")
            )
        full, half = MixedPrecisionPolicy(), None
        if isinstance(strategy.precision, MixedPrecision):
            # The step's autocast handles inputs. Gradients are averaged in full precision.
            half = MixedPrecisionPolicy(
                param_dtype=strategy.precision.compute_dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )

        offload = OffloadPolicy()
        if strategy.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=has_streams(strategy.device))

        def shard(part: nn.Module) -> Any:
            # Batch normalization takes no half weights with its running statistics.
            keeps = any(buffer.is_floating_point() for buffer in part.buffers())
            return fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=strategy.reshard_after_forward,
                mp_policy=full if half is None or keeps else half,
                offload_policy=offload,
            )

        return shard

    def _draw_alike(self) -> None:
        """Make ranks that compute a batch together draw the same random numbers."""
        states = self._collectives.gather(random_state())
        rank = self._collectives.rank
        set_random_state(states[rank - rank % self._strategy.ranks_per_batch])

    def wrap(self, module: nn.Module) -> WrappedModel:
        return WrappedModel(module, self._call)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module through the root module of `fully_shard`."""
        is_first = torch.is_grad_enabled() and not self._has_checked
        with refusing_writes(self._root.model) if is_first else contextlib.nullcontext():
            outputs = self._root(method, *args, **kwargs)
        if not torch.is_grad_enabled():
            self._module.reshard()
        elif is_first:
            _check_outputs(outputs)
            self._has_checked = True
        return outputs

    def backward(self, loss: torch.Tensor) -> None:
        with self.attending():  # for blocks that are recomputed
            super().backward(loss)

    def average_gradients(self, parameters: list[nn.Parameter]) -> bool:
        return True  # each backward averages, even of an accumulated group

    def scale(self, parameters: list[nn.Parameter], factor: Any) -> None:
        if self._divided is None:
            super().scale(parameters, factor)
        else:
            self._divided.scale(_gradients(parameters), factor)

    def clip(self, parameters: list[nn.Parameter], limit: float, algorithm: str) -> None:
        if self._divided is None:
            super().clip(parameters, limit, algorithm)
        else:
            self._divided.clip(_gradients(parameters), limit, algorithm)

    def norm(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        if self._divided is None:
            return super().norm(tensors)
        return torch.tensor(self._divided.norm(tensors))

    def after_update(self) -> None:
        self._has_stepped = True

    def whole(self, make: Callable[[], Any]) -> Any:
        is_first = self._collectives.rank == 0
        with self._module.giving("whole on rank 0"):
            # Callbacks keep sharded tensors, too (averages of weights).
            return trees.map_leaves(partial(whole_on_host, wanted=is_first), make())

    def parts(self, make: Callable[[], Any]) -> Any:
        with self._module.giving("spread"):
            return make()

    def abandon(self) -> None:
        super().abandon()
        if self._collectives.rank == 0 and self._has_stepped:
            warn(
                "The training stopped while the net was sharded over the ranks. "
                + (
                    "Its weights and its optimizer are those from before fit."
                    if self._strategy.backup
                    else "Its weights are lost (backup=False)."
                )
                + " To continue the training exactly, write fit(…, resume_from=…) with a "
                "checkpoint."
            )


def _gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class RootRouter(StepRouter):
    """A router that never returns a view: a loss that works in place would drop its hooks."""

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
