"""Data parallelism over processes: torch's DistributedDataParallel, one process per device."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fitkit import trees
from fitkit.accelerators import is_accelerator
from fitkit.arguments import check_choice, check_count, check_flag, check_number
from fitkit.errors import ConfigurationError
from fitkit.extras.launchers.group import enter, leave, place_among
from fitkit.extras.launchers.other_ranks import check_output, shows_all
from fitkit.extras.launchers.ranks import RankLauncher
from fitkit.seams.launchers import LAUNCHERS, InlineLauncher, Launcher, in_own_group
from fitkit.seams.strategies import (
    Assignment,
    Collectives,
    Solo,
    StepRouter,
    Strategy,
    World,
    WrappedModel,
)

UNUSED = re.compile(r"Expected to have finished reduction in the prior iteration")
UNUSED_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class DDP(Strategy):
    """Runs one process with a copy of the module per device, and averages the gradients.

    Args:
        process_group_backend: `"nccl"` or `"gloo"`. Default None: NCCL on CUDA, otherwise gloo.
        timeout: how long each exchange may wait, in seconds or as a `timedelta`. None for torch's
            default (30 minutes with gloo).
        find_unused_parameters: whether some steps may leave parameters unused. It costs a walk over
            the graph in each step.
        static_graph: promises that every step uses the same parameters in the same way.
        bucket_cap_mb: megabytes of gradients that are sent together. None for torch's 25.
        gradient_as_bucket_view: whether gradients are views of the buckets. This saves one copy of
            the gradients in memory.
        comm_hook: replaces the averaging (torch's `register_comm_hook`): a function, or
            `"fp16"`, `"bf16"` (half the traffic) or `"powersgd"` (low-rank, with error feedback).
        comm_hook_state: the hook's first argument. With `"powersgd"`, a dict of options of torch's
            `PowerSGDState`, like `{"matrix_approximation_rank": 2}`.
        output: `"all"` shows what the other ranks print, each line with its rank in front.
            `"rank_zero"` hides it. None (default) uses the environment variable
            `FITKIT_RANK_OUTPUT`, or `"rank_zero"`. It applies to processes that fitkit starts.
            Those of torchrun or SLURM print by themselves.

    Your own strategy may override `init_dist_connection` and `configure_ddp`.

    Reference: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training, 2020, arXiv:2006.15704.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", accelerator="cpu", devices=2,
        ...               strategy=fitkit.strategies.DDPStrategy())
    """

    name = "ddp"
    starts = "script"
    cuts_batches = True
    timeout: timedelta | None
    """The time limit for each exchange between ranks. None for torch's default."""

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: int | None = None,
        gradient_as_bucket_view: bool = False,
        comm_hook: Callable[..., Any] | str | None = None,
        comm_hook_state: object = None,
        *,
        output: str | None = None,
    ) -> None:
        super().__init__()
        process_group_backend = check_choice(
            "process_group_backend", process_group_backend, (None, "nccl", "gloo")
        )
        if not isinstance(timeout, timedelta):
            timeout = check_number("timeout", timeout, above=0, optional=True)
        find_unused_parameters = check_flag("find_unused_parameters", find_unused_parameters)
        static_graph = check_flag("static_graph", static_graph)
        gradient_as_bucket_view = check_flag("gradient_as_bucket_view", gradient_as_bucket_view)
        bucket_cap_mb = check_count("bucket_cap_mb", bucket_cap_mb, optional=True)
        if comm_hook is not None:
            from fitkit.extras.comm_hooks import check_hook

            check_hook(comm_hook, comm_hook_state)
        check_output(output)
        self.output = output
        self.process_group_backend = process_group_backend
        self.timeout = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        self.comm_hook = comm_hook
        self.comm_hook_state = comm_hook_state
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._wrapper: DDPWrapper | None = None  # of the current training
        self._sparse: list[torch.nn.Parameter] = []  # those with sparse gradients
        self._made_group = False

    def connect(self, assignment: Assignment) -> Strategy:
        super().connect(assignment)
        cluster = assignment.cluster
        ranks = 1 if self.replicates else len(self.devices)  # that the strategy starts itself
        # A model that a callback copies or compiles is used by all ranks of the running call.
        own = place_among(ranks) or World(0, ranks)
        self.world: World = own if cluster is None else World.of(cluster)
        self.reads_on_rank_zero: bool = False
        if self.world.size == 1:
            self.launcher: Launcher = InlineLauncher()
        elif cluster is not None and cluster.launcher != "fitkit":
            self.launcher = RankLauncher(self, cluster)
        else:
            starts = LAUNCHERS["script" if self.starts == "script" else "workers"]
            self.launcher = starts(self, self.world.size, shows_all(self.output))
            self.reads_on_rank_zero = self.launcher.sends_calls
        return self

    # ------------------------------------------------------------------ the ranks

    def join(self, store: Store | None = None) -> None:
        inside = in_own_group()
        try:
            self.collectives, self._made_group = self.init_dist_connection(store)
        except BaseException:
            if in_own_group() and not inside:  # an override failed after the group was made
                leave()
            raise

    def init_dist_connection(self, store: Store | None = None) -> tuple[Any, bool]:
        """Enter the process group. An override may create it differently and then call this.

        Args:
            store: the store by which the ranks meet. None for torch's `env://`.

        Returns:
            The collectives, and whether `leave` ends the group.
        """
        return enter(self.world, self.device, store, self.process_group_backend, self.timeout)

    def leave(self) -> None:
        self.finish()
        if self._made_group:
            leave()
        self._made_group = False
        self.collectives: Collectives = Solo()

    # ------------------------------------------------------------------ the module

    def place(self, module: torch.nn.Module, *, for_training: bool = False) -> None:
        if self.engine is not None:  # an evaluation during a training
            self.engine.average_ranks()
        super().place(module)
        self.collectives.broadcast_tensors([*module.parameters(), *module.buffers()])

    def wrap_for_training(
        self,
        module: torch.nn.Module,
        *,
        averages: bool = True,
        may_count: bool = False,
        compiles: bool = False,
        apart: bool = False,
    ) -> WrappedModel:
        if self.engine is not None and self.engine.replaces_ddp:
            return self.engine.wrap(module)
        if self._wrapper is not None and self._wrapper.wrapped.module is module:
            same: WrappedModel = self._wrapper.wrapped  # a callback of fit calls `train_on_batch`
            return same
        wrapped = self.wrap_for_evaluation(module)
        if self.collectives.world_size == 1:
            return wrapped
        self._sparse = self._sparse_weights(module)
        if not averages:
            return wrapped
        can_compile = compiles and wrapped.is_bare and not self.has_engine
        # An engine computes gradients in its own way, so a count isn't safe among them.
        carrier = self._new_carrier(module) if may_count and not self.has_engine else None
        is_torchs = type(self).configure_ddp is DDP.configure_ddp and self.comm_hook is None
        if self._sparse and is_torchs:
            # DDP can't exchange those that a rank's batch doesn't use.
            wrapped.count_parameter, wrapped.shared_buffers = carrier, list(module.buffers())
            return wrapped
        wrapper = DDPWrapper(wrapped, carrier, self.configure_ddp, type(self).__name__)
        if apart and not wrapper.averages_exactly:
            raise ConfigurationError(
                "out_of_memory='split' averages the gradients after a batch's last part, but this "
                f"{self.name} has its own way to average them: find_unused_parameters, "
                "static_graph, comm_hook or configure_ddp. Leave that or the option out.",
                code="FK068",
            )
        if apart or (can_compile and wrapper.is_replaceable):
            wrapper.drop()
            wrapped = self.wrap_for_evaluation(module)
            wrapped.count_parameter, wrapped.shared_buffers = carrier, list(module.buffers())
        else:
            self._wrapper = wrapper
        return wrapped

    def _sparse_weights(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the weights whose gradients are sparse, which only gloo sums.

        Raises:
            ConfigurationError: another backend would have to; with the layer's name.
        """
        found = []
        for name, layer in module.named_modules():
            if getattr(layer, "sparse", False) is not True:
                continue
            own = list(layer.parameters(recurse=False))
            sums = not is_accelerator(self.device) or self.process_group_backend == "gloo"
            if not sums and any(parameter.requires_grad for parameter in own):
                raise ConfigurationError(
                    f"The gradients of {name} are sparse, and {self.device.type} devices can't "
                    f"exchange those. Write sparse=False in {type(layer).__name__}."
                )
            found += own
        return found

    def mean_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        if not self._sparse:
            super().mean_gradients(parameters)
            return
        from fitkit.extras.sparse_gradients import mean_sparse_gradients

        sparse = {id(parameter) for parameter in self._sparse}
        super().mean_gradients([one for one in parameters if id(one) not in sparse])
        mean_sparse_gradients([one for one in parameters if id(one) in sparse])

    def _new_carrier(self, module: torch.nn.Module) -> torch.nn.Parameter | None:
        """Return an extra parameter for DDP to average. None if DDP wouldn't see that it is used,
        or wouldn't average it exactly.
        """
        options = self.options["find_unused_parameters"] or self.options["static_graph"]
        if options or self.comm_hook is not None:
            return None
        widest = max(
            (p.dtype.to_real() for p in module.parameters() if trees.is_inexact(p)),
            key=lambda dtype: dtype.itemsize,
            default=torch.float32,
        )
        dtype = widest if widest.itemsize > 4 else torch.float32  # counts are whole numbers
        return torch.nn.Parameter(torch.zeros((), dtype=dtype, device=self.device))

    def configure_ddp(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap the module in DDP. An override may pass other arguments.

        Args:
            module: a router whose `forward` leads to every step.
        """
        placed: dict[str, Any] = {}
        if self.device.index is not None:
            placed["device_ids"] = [self.device]
        options = {name: value for name, value in self.options.items() if value is not None}
        if any(hasattr(parameter, "__tensor_flatten__") for parameter in module.parameters()):
            # torch can't exchange quantized ones; `place` has done it.
            placed["init_sync"] = False
        wrapped = DistributedDataParallel(module, **placed, **options)
        if self.comm_hook is not None:
            from fitkit.extras.comm_hooks import resolve_hook

            wrapped.register_comm_hook(*resolve_hook(self.comm_hook, self.comm_hook_state))
        return wrapped

    def after_first_batch(self, module: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        if self.collectives.world_size > 1 and not (self.engine and self.engine.keeps_apart):
            from fitkit.extras.first_forward import share_first_state

            share_first_state(self.collectives, module, optimizers)

    def finish(self) -> None:
        super().finish()
        wrapper, self._wrapper, self._sparse = self._wrapper, None, []
        if wrapper is not None:
            wrapper.drop()


class DDPWrapper:
    """Calls a model through DistributedDataParallel, whose backward passes average gradients.

    Args:
        wrapped: the model. From now on its calls go through the wrapper.
        carrier: an extra parameter to average (`WrappedModel.count_parameter`), if the wrapper
            averages exactly; else None.
        configure: makes torch's wrapper (`DDP.configure_ddp`).
        kind: the strategy's class, for messages.
    """

    def __init__(
        self,
        wrapped: WrappedModel,
        carrier: torch.nn.Parameter | None,
        configure: Callable[[torch.nn.Module], torch.nn.Module],
        kind: str = "DDP",
    ) -> None:
        self._kind = kind.removesuffix("Strategy")
        self._configure = configure
        self._ddp: Any = configure(StepRouter(wrapped, carrier))
        if carrier is not None and not _averages_exactly(self._ddp):
            self.drop()
            self._ddp = configure(StepRouter(wrapped))
            carrier = None
        self.wrapped: Any = wrapped  # until it is dropped
        wrapped.wrapper, wrapped.count_parameter = self, carrier
        wrapped.accumulating, wrapped.rewrap = self.accumulating, self.rewrap

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._ddp(method, *args, **kwargs)
        except RuntimeError as error:
            if self.wrapped is None or not UNUSED.search(str(error)):
                raise
            raise ConfigurationError(
                "Parameters of the net took no part in the last step's loss"
                f"{_unused_names(self.wrapped.module, error)}. "
                "Freeze them (requires_grad = False), use them, or write "
                f"strategy={self._kind}Strategy(find_unused_parameters=True).",
                code="FK045",
            ) from error

    @property
    def averages_exactly(self) -> bool:
        """Whether an average over the ranks after the backward gives the same gradients."""
        return _averages_exactly(self._ddp)

    @property
    def is_replaceable(self) -> bool:
        """Whether a loop can average all gradients in one exchange instead, with the same result.

        DDP sends larger gradients in several, the first while others are computed.
        """
        if not (_averages_exactly(self._ddp) and self._ddp.broadcast_buffers):
            return False
        learning = [p for p in self.wrapped.module.parameters() if p.requires_grad]
        size: int = sum(p.numel() * p.element_size() for p in learning)
        return size <= int(self._ddp.bucket_bytes_cap)

    def accumulating(self) -> AbstractContextManager[Any]:
        """Surround calls whose gradients needn't be averaged yet."""
        no_sync = getattr(self._ddp, "no_sync", None)  # an override may have made another wrapper
        return contextlib.nullcontext() if no_sync is None else no_sync()

    def rewrap(self) -> None:
        """Wrap the model again, because DDP averages only what could learn when it was made.

        Ranks:
            Collective.
        """
        wrapped = self.wrapped
        self.drop()
        self._ddp = self._configure(StepRouter(wrapped, wrapped.count_parameter))
        self.wrapped = wrapped

    def drop(self) -> None:
        """Release the model and torch's wrapper."""
        self.wrapped = None
        ddp, self._ddp = self._ddp, None  # its hooks are removed from the parameters with it
        # Gloo closes its connections only when nothing holds the group. The other ranks see by
        # this that the rank has left, and an exception's frames may hold the wrapper for long.
        for name in ("reducer", "logger", "process_group"):
            vars(ddp).pop(name, None) if ddp is not None else None


class DDPSpawn(DDP):
    """`DDP` with worker processes. Your process is rank 0, and your model is trained in place.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", accelerator="cpu", devices=2,
        ...               strategy=fitkit.strategies.DDPSpawnStrategy())
    """

    name = "ddp_spawn"
    starts = "workers"


def _averages_exactly(wrapper: torch.nn.Module) -> bool:
    """Whether a wrapper, perhaps from an override, averages every gradient over all ranks exactly,
    and sees that an extra parameter is used."""
    return (
        type(wrapper) is DistributedDataParallel
        and isinstance(wrapper.module, StepRouter)
        and wrapper.process_group is dist.group.WORLD
        and wrapper.mixed_precision is None
        and not wrapper._comm_hooks
        and not wrapper.find_unused_parameters
        and not wrapper.static_graph
    )


def _unused_names(net: torch.nn.Module, error: RuntimeError) -> str:
    """Return the names of the unused parameters, which torch's message gives by index."""
    found = UNUSED_INDICES.search(str(error))
    learning = [name for name, p in net.named_parameters() if p.requires_grad]
    indices = [int(index) for index in found.group(1).split()] if found else []
    names = [learning[index] for index in indices if index < len(learning)]
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    return f": {shown}" if names else ""
