"""A training by DeepSpeed's engine: in place, and undone when it ends."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.distributed import world
from fitkit.distributed.engines.deepspeed_config import full_config
from fitkit.distributed.engines.deepspeed_package import count_anew, load_deepspeed, surroundings
from fitkit.distributed.engines.stand_ins import StandIns
from fitkit.distributed.engines.zero_optimizer import ZeroOptimizer
from fitkit.distributed.router import Door, StepRouter


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
