"""A training by DeepSpeed: in place, and undone when it ends; and the package itself."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError, warn
from fitkit.extras.launchers.group import counting_connections
from fitkit.seams.strategies import (
    Engine,
    ModuleInPlace,
    OptimizerInPlace,
    StepRouter,
    WrappedModel,
    held_by,
)


def load_deepspeed(device: torch.device) -> Any:
    """Return the package, ready for a device.

    Raises:
        ConfigurationError: it was imported for another kind of device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    if chosen.split(":")[0] != device.type:
        raise ConfigurationError(
            f"deepspeed has chosen {chosen!r}, but this run is on {device.type}. Set the "
            f"environment variable DS_ACCELERATOR={device.type} before deepspeed is imported."
        )
    # Else it compiles a C++ operator when it first meets a process group on CPU; a start that is
    # ended meanwhile leaves a lock for which every later one waits.
    operators: dict[str, bool] = getattr(deepspeed.ops, "__compatible_ops__", {})
    operators["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def count_anew() -> None:
    """Let DeepSpeed number modules and parameters from 0.

    It compares the numbers over the ranks, and a rank that has been in more trainings than
    another (a worker that was started again) would be ahead.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    (counter,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counter[0] = 0


@contextlib.contextmanager
def process_state_kept(device: torch.device) -> Iterator[None]:
    """Set the variable by which DeepSpeed knows this rank's device, while it trains.

    Afterwards `torch.nn.functional.linear` is torch's again. DeepSpeed's third stage puts another
    in its place for good, whose gradients come in another order: ranks that differ in it would
    add up wrong ones in a later training by the second stage.
    """
    before, linear = os.environ.get("LOCAL_RANK"), functional.linear
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        functional.linear = linear
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


def forget_groups() -> None:
    """Let DeepSpeed forget the process groups that this process leaves; it would use them again."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups._release_process_group_references()


class ZeroTraining(Engine):
    """Lets DeepSpeed train a module with a user's optimizer.

    Args:
        module: the same numbers on all ranks.
        optimizer: over its parameters.
        config: gives DeepSpeed's settings for a dtype and a number of numbers.
        stage: ZeRO's.
        rank: this one; rank 0 keeps what there was before, for a training that fails.
        device: this rank's.

    Ranks:
        Collective, and so is all but `abandon`.
    """

    replaces_ddp = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        config: Callable[[torch.dtype, int], dict[str, Any]],
        stage: int,
        rank: int,
        device: torch.device,
    ) -> None:
        package = load_deepspeed(device)
        count_anew()
        # Below the third stage every rank has all parameters, and none need wait.
        self.evaluates_in_step: bool = stage == 3
        self._stage = stage
        self._module = module
        self._is_first = rank == 0
        self._only_first = False
        self._engine: Any = None
        self._handles: list[Any] = []
        self._scale = 1.0
        self._limit = 0.0
        self._has_stepped = self._has_warned = False
        held = held_by(optimizer)
        numbers = sum(parameter.numel() for parameter in held)
        # Else those that compute are rounded or parts of those that learn.
        self._learns_what_computes = stage < 3 and held[0].dtype == torch.float32
        self._stand_ins = StandIns(module)
        self._optimizer = ZeroOptimizer(optimizer, self._stand_ins.twins, keeps=self._is_first)
        self._process_state = contextlib.ExitStack()
        self._process_state.enter_context(process_state_kept(device))
        try:
            with counting_connections():
                self._engine, self._zero, _, _ = package.initialize(
                    model=StepRouter(WrappedModel(module)),
                    optimizer=self._optimizer.working,
                    config=config(held[0].dtype, numbers),
                    dist_init_required=False,
                )
            self._optimizer.begin(self._zero, stage)
        except BaseException:
            self.abandon()
            raise
        self._stand_ins.empty(keeps=self._is_first)
        self._translate_state_dicts()

    def wrap(self, module: nn.Module) -> WrappedModel:
        return WrappedModel(module, self._engine)

    def rewrap(self) -> None:
        raise ConfigurationError(
            "Parameters were frozen or freed in the middle of a training, which DeepSpeed "
            "can't follow. Do it before fit, or write strategy='ddp'."
        )

    def average_gradients(self, parameters: list[nn.Parameter]) -> bool:
        return True  # DeepSpeed averages at the latest when an update is made.

    # ------------------------------------------------------------------ learning

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, beside those of the same update so far."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def scale(self, parameters: list[nn.Parameter], factor: Any) -> None:
        self._scale *= factor

    def clip(self, parameters: list[nn.Parameter], limit: float, algorithm: str) -> None:
        if algorithm != "norm":
            raise ConfigurationError(
                f"gradient_clip_algorithm={algorithm!r} doesn't work with strategy='deepspeed', "
                "which limits the norm of all gradients. Write 'norm', or strategy='ddp_sharded'."
            )
        self._limit = limit

    def norm(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        return None  # DeepSpeed has them in buffers of its own.

    def update(self, optimizer: Optimizer) -> None:
        zero = self._zero
        self._optimizer.pass_on()
        if self._learns_what_computes:
            zero.refresh_fp32_params()  # whoever has changed parameters in place meant it
        zero.clip_grad = self._limit
        zero.loss_scaler.cur_scale = 1.0 / self._scale  # by which it divides at a step
        try:
            self._engine.step()
        finally:
            zero.loss_scaler.cur_scale = 1.0
            self._scale, self._limit = 1.0, 0.0
        self._optimizer.note_step()
        self._has_stepped = True
        if zero.overflow and not self._has_warned:
            self._has_warned = True
            warn("Gradients aren't finite: DeepSpeed leaves such updates out, the weights stay.")

    def end(self, *, wanted: bool) -> None:
        self._optimizer.end(wanted=wanted)
        numbers = {}
        for parameter, twin in self._stand_ins.twins.items():
            whole = self._whole(twin, copies=wanted)
            if wanted:
                numbers[parameter] = whole
        self._let_go()
        self._stand_ins.give_back(numbers)

    def abandon(self) -> None:
        self._let_go()
        self._optimizer.abandon()
        self._stand_ins.abandon()
        if self._is_first and self._has_stepped:
            warn(
                "The training stopped while the net was DeepSpeed's. The net's weights and "
                "optimizer are those from before fit. To continue from a checkpoint, write fit(…, "
                "resume_from=…)."
            )

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        engine, self._engine, self._zero = self._engine, None, None
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.destroy()
            del engine
            gc.collect()  # The engine holds itself, and process groups.
        self._process_state.close()

    # ------------------------------------------------------------------ whole tensors

    def whole(self, make: Callable[[], Any]) -> Any:
        self._only_first = True
        try:
            return make()
        finally:
            self._only_first = False

    def parts(self, make: Callable[[], Any]) -> Any:
        """Rank 0 writes all of it: DeepSpeed's flat parts are no parts of a tensor's rows."""
        return self.whole(make)

    def _whole(self, twin: nn.Parameter, *, copies: bool) -> torch.Tensor:
        """Return a parameter's numbers; a copy where wanted, else nothing in particular."""
        with self._gathered([twin]):
            return twin.data.clone() if copies else twin.data

    @contextlib.contextmanager
    def _gathered(self, twins: list[nn.Parameter], *, changes: bool = False) -> Iterator[None]:
        """Whole parameters meanwhile; rank 0's numbers are kept where they change."""
        if self._stage < 3:
            yield
            return
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with torch.no_grad(), GatheredParameters(twins, modifier_rank=0 if changes else None):
            yield

    def _translate_state_dicts(self) -> None:
        """Let the module's state dicts be whole, and let whole ones be loaded."""
        if self._stage == 3:
            for part in self._module.modules():
                if any(p is not None for p in part._parameters.values()):
                    self._handles.append(part.register_state_dict_post_hook(partial(self._give)))
                    self._gather_for_load(part)
        # A model's net may be given its weights by itself.
        for part in (self._module, *self._module.children()):
            self._handles.append(part.register_load_state_dict_post_hook(self._take))

    def _gather_for_load(self, part: nn.Module) -> None:
        """Make a submodule's parameters whole while they take numbers from a state dict."""
        gathered = contextlib.ExitStack()

        def begin(*arguments: Any) -> None:
            own = [p for p in part._parameters.values() if p is not None]
            gathered.enter_context(self._gathered(own, changes=True))

        def end(*arguments: Any) -> None:
            gathered.close()

        self._handles.append(part.register_load_state_dict_pre_hook(begin))
        self._handles.append(part.register_load_state_dict_post_hook(end))

    def _give(self, part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        wanted = self._is_first or not self._only_first
        for name, parameter in part._parameters.items():
            if prefix + name in state and parameter is not None:
                state[prefix + name] = self._whole(parameter, copies=wanted)

    def _take(self, module: nn.Module, problems: Any) -> None:
        """Let the updates continue from loaded weights."""
        self._zero.refresh_fp32_params()


class StandIns(ModuleInPlace):
    """Lets DeepSpeed have parameters of its own in a module: others with the same numbers.

    It changes a parameter's memory, class and attributes, and hangs hooks on modules.

    Args:
        module: the same numbers on all ranks.
    """

    hook_origins: tuple[str, ...] = ("deepspeed",)

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._devices = {parameter: parameter.device for parameter in module.parameters()}
        for part, name, parameter in self._places:
            if parameter not in self.twins:
                learns = parameter.requires_grad
                self.twins[parameter] = nn.Parameter(parameter.data, requires_grad=learns)
            setattr(part, name, self.twins[parameter])

    def empty(self, *, keeps: bool) -> None:
        """Let the module's own parameters give up their memory, once DeepSpeed has its own.

        Args:
            keeps: whether this rank keeps the numbers in main memory, for `abandon`.
        """
        for parameter in self.twins:
            self._empty(parameter, keeps=keeps)

    def abandon(self) -> None:
        twins = list(self.twins)
        super().abandon()
        for parameter in twins:
            parameter.data = parameter.data.to(self._devices[parameter])

    def _is_added(self, name: str) -> bool:
        known = ("_external_params", "_original_parameters", "all_parameters")
        backward = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")
        return name.startswith("ds_") or name in known + backward


class ZeroOptimizer(OptimizerInPlace):
    """Keeps a user's optimizer whole, from outside, while each rank has a part of its state.

    The object stays what it is: schedulers change its groups, and its `state_dict()` is
    collective and whole. DeepSpeed steps a copy, whose parameters are flat parts.

    Args:
        optimizer: over a module's ordinary parameters; its state is the same on all ranks.
        twins: those that stand in for them.
        keeps: whether this rank keeps the state from before, for a training that fails.

    Attributes:
        working: the copy, for DeepSpeed.
    """

    def __init__(
        self, optimizer: Optimizer, twins: dict[nn.Parameter, nn.Parameter], *, keeps: bool
    ) -> None:
        super().__init__(optimizer, twins)
        self._backup = dict(optimizer.state)
        self._replace(twins, {})
        self._groups: list[dict[str, Any]] = []  # those in which something learns
        self.working: Optimizer = _copy_without_state(optimizer)
        for group in optimizer.param_groups:
            learning = [twin for twin in group["params"] if twin.requires_grad]
            if learning:
                self._groups.append(group)
                self.working.param_groups.append({**group, "params": learning})
        self._keeps = keeps
        self._zero: Any = None

    def begin(self, zero: Any, stage: int) -> None:
        """Take DeepSpeed's optimizer, and give it the state that there is.

        Args:
            zero: what DeepSpeed has made of `working`.
            stage: ZeRO's.

        Raises:
            ConfigurationError: state that can't be spread.
        """
        self._zero = zero
        self._stage = stage
        for flat, learning in self._flat_parts():
            self._spread(flat, learning)
        if not self._keeps:
            self._backup = {}
        self._add_hooks(self.optimizer.register_load_state_dict_pre_hook(_refuse_load))

    def pass_on(self) -> None:
        """Give the copy the settings that schedulers and users have changed."""
        for group, own in zip(self._groups, self._zero.optimizer.param_groups, strict=True):
            own.update(_settings(group))

    def note_step(self) -> None:
        """Take over what the copy notes in its settings at a step."""
        for group, own in zip(self._groups, self._zero.optimizer.param_groups, strict=True):
            group.update(_settings(own))
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it

    def _whole_states(self, *, wanted: bool) -> dict[torch.Tensor, Any]:
        whole = self._gathered()
        if not wanted:
            return {}
        return {
            self._ordinary[twin]: {
                name: _like(value, self._ordinary[twin]) for name, value in found.items()
            }
            for twin, found in whole.items()
        }

    def _states_for_dict(self) -> dict[torch.Tensor, Any]:
        return {
            twin: {
                name: _like(value, self._ordinary[twin]).cpu() if _has_entries(value) else value
                for name, value in found.items()
            }
            for twin, found in self._gathered().items()
        }

    # ------------------------------------------------------------------ the state

    def _flat_parts(self) -> Iterator[tuple[torch.Tensor, list[nn.Parameter]]]:
        """Return this rank's flat parts, each with the parameters that it is of."""
        if self._stage == 3:
            return zip(self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups, strict=True)
        return zip(self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups, strict=True)

    def _spread(self, flat: torch.Tensor, learning: list[nn.Parameter]) -> None:
        """Make a flat part's state of its parameters' states."""
        states = {twin: self._backup.get(self._ordinary[twin]) or {} for twin in learning}
        if not any(states.values()):
            return
        kind = type(self.optimizer).__name__
        made: dict[str, Any] = {}
        for twin, state in states.items():
            for name, value in state.items():
                if _has_entries(value):
                    if value.shape != _shape(twin):
                        raise ConfigurationError(
                            f"{kind} keeps {name!r} of shape {tuple(value.shape)} for a parameter "
                            "of another shape, which DeepSpeed can't spread. Write strategy='ddp'."
                        )
                    made.setdefault(name, torch.zeros_like(flat, requires_grad=False))
                elif made.setdefault(name, _copied(value)) != value:
                    raise ConfigurationError(
                        f"{kind} has parameters with different {name!r} ({made[name]}, {value}); "
                        "DeepSpeed keeps one for all of a group. Write strategy='ddp'."
                    )
        self._zero.optimizer.state[flat] = made
        self._link()
        for twin, state in states.items():
            for name, value in state.items():
                if _has_entries(value):
                    self._put(twin, name, value)

    def _put(self, twin: nn.Parameter, name: str, value: torch.Tensor) -> None:
        """Let this rank's part have its numbers of a whole tensor."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        flat = value.detach().to(twin.device, torch.float32).flatten()
        if self._stage < 3:
            safe_set_full_optimizer_state(twin, flat, name)
            return
        size = twin.ds_tensor.numel()  # type: ignore[attr-defined]
        rank = self._zero._get_param_partition_rank(twin)
        local = flat.new_zeros(size)  # the last rank's part may reach beyond the parameter's end
        found = flat[rank * size : (rank + 1) * size]
        local[: len(found)] = found
        safe_set_local_optimizer_state(twin, local, name)

    def _gathered(self) -> dict[nn.Parameter, dict[str, Any]]:
        """All parameters' whole states.

        Ranks:
            Collective.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for flat, learning in self._flat_parts():
            held = self._zero.optimizer.state.get(flat) or {}
            for twin in learning:
                states[twin] = {
                    name: safe_get_full_optimizer_state(twin, name).clone()
                    if _has_entries(value)
                    else _copied(value)
                    for name, value in held.items()
                }
        return {twin: state for twin, state in states.items() if state}

    def _link(self) -> None:
        """Let DeepSpeed find each parameter's part of the state; it looks but once by itself."""
        if self._stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()


def _refuse_load(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    raise ConfigurationError(
        "The optimizer's state can't be loaded while DeepSpeed trains. Load it before fit, or "
        "write fit(…, resume_from=…)."
    )


def _copy_without_state(optimizer: Optimizer) -> Optimizer:
    """Another object with the same attributes, and neither groups nor state."""
    copy: Optimizer = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).pop("step", None)  # a scheduler's, which counts steps
    copy.param_groups = []
    copy.state = defaultdict(dict)
    return copy


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _has_entries(value: Any) -> bool:
    """Whether a state has an entry for each of a parameter's."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """Return a whole state as torch keeps it: in its parameter's dtype and shape."""
    if not _has_entries(value):
        return value
    return value.to(parameter.dtype)


def _shape(twin: Any) -> torch.Size:
    """Return the whole shape of a parameter that may be spread."""
    return torch.Size(getattr(twin, "ds_shape", twin.shape))
