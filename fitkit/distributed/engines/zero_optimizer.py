"""A user's optimizer while DeepSpeed makes its updates, by a copy over flat parts of parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError


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
