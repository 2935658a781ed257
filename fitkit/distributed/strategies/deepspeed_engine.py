"""A training by DeepSpeed's engine: in place, and undone when it ends."""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.distributed import world
from fitkit.distributed.spread.in_place import places_of, take_off_hooks
from fitkit.distributed.strategies.deepspeed_config import (
    count_anew,
    full_config,
    load_deepspeed,
    surroundings,
)
from fitkit.distributed.wrapped_model import Door, StepRouter
from fitkit.errors import ConfigurationError


class ZeroTraining:
    """Lets DeepSpeed train a module with a user's optimizer, until `end` or `abandon`.

    Args:
        module: the same numbers on all ranks.
        optimizer: over its parameters.
        config: the user's settings for DeepSpeed.
        stage: ZeRO's.
        rank: this one; rank 0 keeps what there was before, for a training that fails.
        device: this rank's.

    Attributes:
        door: the way into the module.
        has_stepped: whether an update was made.

    Ranks:
        Collective, and so is all but `abandon`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        config: dict[str, Any],
        stage: int,
        rank: int,
        device: torch.device,
    ) -> None:
        package = load_deepspeed(device)
        count_anew()
        self._stage = stage
        self._module = module
        self._is_first = rank == 0
        self._only_first = False
        self._engine: Any = None
        self._handles: list[Any] = []
        self._scale = 1.0
        self._limit = 0.0
        self.has_stepped = False
        held = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = sum(parameter.numel() for parameter in held)
        # Else those that compute are rounded or parts of those that learn.
        self._learns_what_computes = stage < 3 and held[0].dtype == torch.float32
        self._stand_ins = StandIns(module, "deepspeed")
        self._optimizer = ZeroOptimizer(optimizer, self._stand_ins.twins, keeps=self._is_first)
        self._surroundings = contextlib.ExitStack()
        self._surroundings.enter_context(surroundings(device))
        try:
            with world.counting_connections():
                self._engine, self._zero, _, _ = package.initialize(
                    model=StepRouter(module),
                    optimizer=self._optimizer.working,
                    config=full_config(config, stage, held[0].dtype, numbers),
                    dist_init_required=False,
                )
            self._optimizer.begin(self._zero, stage)
        except BaseException:
            self.abandon()
            raise
        self._stand_ins.let_go_of_numbers(keeps=self._is_first)
        self.door = EngineDoor(self._engine, module)
        self._translate_state_dicts()

    # ------------------------------------------------------------------ learning

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss, beside those of the same update so far."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def scale(self, factor: float) -> None:
        """Multiply the next update's gradients."""
        self._scale *= factor

    def clip(self, limit: float) -> None:
        """Limit the norm of the next update's gradients."""
        self._limit = limit

    def update(self) -> bool:
        """Make an update of the gradients so far.

        Returns:
            Whether they were finite. DeepSpeed leaves it out otherwise.
        """
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
        self.has_stepped = True
        return not zero.overflow

    def end(self, *, wanted: bool) -> None:
        """Make module and optimizer ordinary again.

        Args:
            wanted: whether this rank needs what was learned.
        """
        self._optimizer.end(wanted=wanted)
        numbers = {}
        for parameter, twin in self._stand_ins.twins.items():
            whole = self._whole(twin, copies=wanted)
            numbers[parameter] = whole if wanted else whole.new_empty(0)
        self._let_go()
        self._stand_ins.restore(numbers)

    def abandon(self) -> None:
        """Let go after a failure: rank 0 has weights and state from before."""
        self._let_go()
        self._optimizer.abandon()
        self._stand_ins.restore()

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        engine, self._engine, self._zero = self._engine, None, None
        if engine is not None:
            self.door = None  # type: ignore[assignment]
            with contextlib.suppress(Exception):
                engine.destroy()
            del engine
            gc.collect()  # The engine holds itself, and process groups.
        self._surroundings.close()

    # ------------------------------------------------------------------ whole tensors

    def for_file(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, with whole tensors on rank 0."""
        self._only_first = True
        try:
            return make()
        finally:
            self._only_first = False

    def _whole(self, twin: nn.Parameter, *, copies: bool) -> torch.Tensor:
        """A parameter's numbers; a copy where wanted, else nothing in particular."""
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
                    load = _GatheredLoad(self._gathered, part)
                    self._handles.append(part.register_load_state_dict_pre_hook(load.begin))
                    self._handles.append(part.register_load_state_dict_post_hook(load.end))
        self._handles.append(self._module.register_load_state_dict_post_hook(self._take))

    def _give(self, part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        wanted = self._is_first or not self._only_first
        for name, parameter in part._parameters.items():
            if prefix + name in state and parameter is not None:
                state[prefix + name] = self._whole(parameter, copies=wanted)

    def _take(self, module: nn.Module, problems: Any) -> None:
        """Let the updates go on from weights that were loaded."""
        self._zero.refresh_fp32_params()


class _GatheredLoad:
    """Whole parameters while one submodule takes its numbers from a state dict.

    Args:
        gathered: makes parameters whole.
        part: the submodule.
    """

    def __init__(self, gathered: Callable[..., Any], part: nn.Module) -> None:
        self._gathered = gathered
        self._part = part
        self._open = contextlib.ExitStack()

    def begin(self, *arguments: Any) -> None:
        own = [p for p in self._part._parameters.values() if p is not None]
        self._open.enter_context(self._gathered(own, changes=True))

    def end(self, *arguments: Any) -> None:
        self._open.close()


class EngineDoor(Door):
    """Enters a module through DeepSpeed's engine.

    Args:
        engine: around a `StepRouter`.
        module: what it leads to.
    """

    def __init__(self, engine: Any, module: nn.Module) -> None:
        super().__init__(module)
        self._engine = engine

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._engine(method, *args, **kwargs)


class StandIns:
    """Lets an engine have parameters of its own in a module, in place, until `restore`.

    Engines change a parameter's memory, class and attributes, and hang hooks on modules. Here
    they get others with the same numbers; afterwards the very same objects are back.

    Args:
        module: the same numbers on all ranks.
        engine: the package whose hooks are taken off again.

    Attributes:
        twins: the parameters that stand in, by the module's own.
    """

    def __init__(self, module: nn.Module, engine: str) -> None:
        self._engine = engine
        self._places = places_of(module)
        self._before = [
            (part, type(part), set(vars(part)), part._parameters) for part in module.modules()
        ]
        self.twins: dict[nn.Parameter, nn.Parameter] = {}
        self._shapes: dict[nn.Parameter, torch.Size] = {}
        self._devices: dict[nn.Parameter, torch.device] = {}
        for place in self._places:
            parameter = place.parameter
            if parameter not in self.twins:
                twin = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                self.twins[parameter] = twin
                self._shapes[parameter] = parameter.shape
                self._devices[parameter] = parameter.device
            place.put(self.twins[parameter])

    def let_go_of_numbers(self, *, keeps: bool) -> None:
        """Let the module's own parameters give up their memory, once the engine has its own.

        Args:
            keeps: whether this rank keeps the numbers in main memory, for a training that fails.
        """
        for parameter in self.twins:
            parameter.grad = None
            parameter.data = parameter.data.cpu() if keeps else parameter.data.new_empty(0)

    def restore(self, numbers: dict[nn.Parameter, torch.Tensor] | None = None) -> None:
        """Put the module's own parameters back.

        Args:
            numbers: what they shall have; None for those from before, NaN where nobody kept them.
        """
        for parameter, twin in self.twins.items():
            parameter.requires_grad_(twin.requires_grad)
            if numbers is not None:
                parameter.data = numbers[parameter]
            else:
                parameter.data = self._kept(parameter).to(self._devices[parameter])
        for part, kind, names, parameters in self._before:
            part.__class__ = kind
            take_off_hooks(part, self._engine)
            vars(part)["_parameters"] = parameters
            for name in [name for name in vars(part) if name not in names and _is_engines(name)]:
                del vars(part)[name]
        for place in self._places:
            place.put(place.parameter)
        self.twins = {}

    def _kept(self, parameter: nn.Parameter) -> torch.Tensor:
        shape = self._shapes[parameter]
        if parameter.shape == shape:
            return parameter.data
        return torch.full(shape, torch.nan, dtype=parameter.dtype)


def _is_engines(name: str) -> bool:
    """Whether an engine notes something on modules under that name."""
    known = ("_external_params", "_original_parameters", "all_parameters")
    backward = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")
    return name.startswith("ds_") or name in known + backward


class ZeroOptimizer:
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
        self.optimizer = optimizer
        self._ordinary = {twin: parameter for parameter, twin in twins.items()}
        self._before = dict(optimizer.state)
        self._replace(dict(twins))
        optimizer.state.clear()
        self._groups: list[dict[str, Any]] = []  # those in which something learns
        self.working = _copy_without_state(optimizer)
        for group in optimizer.param_groups:
            learning = [twin for twin in group["params"] if twin.requires_grad]
            if learning:
                self._groups.append(group)
                self.working.param_groups.append({**group, "params": learning})
        self._keeps = keeps
        self._zero: Any = None
        self._handles: list[Any] = []

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
            self._before = {}
        self._handles = [
            self.optimizer.register_state_dict_post_hook(self._give_whole),
            self.optimizer.register_load_state_dict_pre_hook(_refuse_load),
        ]

    def pass_on(self) -> None:
        """Give the copy the settings that schedulers and users have changed."""
        for group, own in zip(self._groups, self._zero.optimizer.param_groups, strict=True):
            own.update(_settings(group))

    def note_step(self) -> None:
        """Take over what the copy notes in its settings at a step."""
        for group, own in zip(self._groups, self._zero.optimizer.param_groups, strict=True):
            group.update(_settings(own))
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it

    def end(self, *, wanted: bool) -> None:
        """Make the optimizer ordinary again.

        Args:
            wanted: whether this rank needs the state; else it has none.

        Ranks:
            Collective.
        """
        state = self._gathered()
        self._release()
        self._replace(self._ordinary)
        if wanted:
            for twin, found in state.items():
                parameter = self._ordinary[twin]
                self.optimizer.state[parameter] = {
                    name: _like(value, parameter) for name, value in found.items()
                }

    def abandon(self) -> None:
        """Let go after a failure: the state is that from before, where this rank kept it."""
        self._release()
        self._replace(self._ordinary)
        self.optimizer.state.update(self._before)

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _replace(self, others: dict[Any, Any]) -> None:
        for group in self.optimizer.param_groups:
            # A training that fails while it ends has put some back already.
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]

    # ------------------------------------------------------------------ the state

    def _flat_parts(self) -> Iterator[tuple[torch.Tensor, list[nn.Parameter]]]:
        """This rank's flat parts, each with the parameters that it is of."""
        if self._stage == 3:
            return zip(self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups, strict=True)
        return zip(self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups, strict=True)

    def _spread(self, flat: torch.Tensor, learning: list[nn.Parameter]) -> None:
        """Make a flat part's state of its parameters' states."""
        states = {twin: self._before.get(self._ordinary[twin]) or {} for twin in learning}
        if not any(states.values()):
            return
        kind = type(self.optimizer).__name__
        made: dict[str, Any] = {}
        for twin, state in states.items():
            for name, value in state.items():
                if _is_spread(value):
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
                if _is_spread(value):
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
        own = flat.new_zeros(size)  # the last rank's part may reach beyond the parameter's end
        found = flat[rank * size : (rank + 1) * size]
        own[: len(found)] = found
        safe_set_local_optimizer_state(twin, own, name)

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
                    if _is_spread(value)
                    else _copied(value)
                    for name, value in held.items()
                }
        return {twin: state for twin, state in states.items() if state}

    def _link(self) -> None:
        """Let DeepSpeed find each parameter's part of the state; it looks but once by itself."""
        if self._stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _give_whole(self, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        held = [twin for group in optimizer.param_groups for twin in group["params"]]
        numbers = {twin: number for number, twin in enumerate(held)}
        state = {
            numbers[twin]: {
                name: _like(value, self._ordinary[twin]).cpu() if _is_spread(value) else value
                for name, value in found.items()
            }
            for twin, found in self._gathered().items()
        }
        return {**packed, "state": dict(sorted(state.items()))}


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


def _is_spread(value: Any) -> bool:
    """Whether a state has an entry for each of a parameter's."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A whole state as torch keeps it: in its parameter's dtype and shape."""
    if not _is_spread(value):
        return value
    return value.to(parameter.dtype)


def _shape(twin: Any) -> torch.Size:
    """The whole shape of a parameter that may be spread."""
    return torch.Size(getattr(twin, "ds_shape", twin.shape))
