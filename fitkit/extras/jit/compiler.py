"""`jit_compile`: what torch compiles of a model, in the place of what the core computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from fitkit.errors import warn
from fitkit.extras.jit.evaluation import JitPass
from fitkit.extras.jit.net import JitNet
from fitkit.extras.jit.programs import (
    Programs,
    UpdatePrograms,
    compiles_steps,
    traces_gradients,
)
from fitkit.extras.jit.update import JitUpdate
from fitkit.seams.networks import Module, has_own_steps, overridden
from fitkit.seams.optimizers import uses_closure
from fitkit.seams.steps import CompiledStep, Logbook, Outcome, Take, Update, Updates
from fitkit.typing import CompilerOptions


class TorchCompiler:
    """Compiles a model's updates, its passes and its net by `torch.compile`.

    A copy has the options, and compiles its own. If it is of the same net, it also knows whether
    that is given up.

    Args:
        options: True, or the keyword arguments of `torch.compile`.

    Raises:
        ConfigurationError: torch refuses them.

    Attributes:
        net: compiles how the net is called.
        of_updates, of_passes: what is compiled of updates, and of passes by their kind.
    """

    def __init__(self, options: bool | CompilerOptions) -> None:
        self._options = options
        self.net: JitNet = JitNet(options)

    @functools.cached_property
    def of_updates(self) -> UpdatePrograms:
        return UpdatePrograms(self._options)

    @functools.cached_property
    def of_passes(self) -> dict[str, Programs]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "net": self.net}

    def compile_net(self, model: Module) -> None:
        """Compile how the net is called, unless that is done, or was given up."""
        self.net.compile(model)

    def compiles_updates(self, model: Module) -> bool:
        """Return whether the model's options, hooks and optimizers allow compiled updates."""
        return self._allows_updates(model) and traces_gradients()

    def _allows_updates(self, model: Module) -> bool:
        compilation, state = model._fitkit.compilation, model._fitkit.fit_state
        strategy = compilation.strategy
        if not compiles_steps(self._options) or not model._updates_all:
            return False
        if self.net.given_up is not None:
            return False
        if strategy.precision.scaler(strategy.device) is not None:
            return False
        if compilation.given.sync_batchnorm and strategy.collectives.world_size > 1:
            return False
        moves_batches = overridden(model, "transfer_batch_to_device")
        if moves_batches and has_own_steps(model, "training"):
            return False
        return not any(map(uses_closure, state.optimizers))

    def updates(
        self, model: Module, eager: Updates, *, joins_steps: bool, is_announced: bool
    ) -> Updates:
        """Return what computes compiled updates in the eager ones' place, if that can be.

        Only a single optimizer's updates can be compiled. The step may be the one that `compile`
        describes, or the model's own `training_step`. On several ranks, the training loop must
        average the gradients.
        """
        strategy = model._fitkit.compilation.strategy
        if not isinstance(eager, Update) or strategy.engine is not None:
            return eager
        wrapped = eager.step.wrapped
        alone = strategy.collectives.world_size == 1 or wrapped.shared_buffers is not None
        if not alone or not wrapped.is_bare or not self._allows_updates(model):
            return eager
        if not traces_gradients():
            warn(
                f"jit_compile compiles the net alone: PyTorch {torch.__version__} can't compile "
                "gradients. PyTorch 2.13 compiles the whole step."
            )
            return eager
        kept = self.of_updates
        kept.steps.is_announced = kept.updates.is_announced = is_announced
        return JitUpdate(model, eager, kept, self.net, joins_steps=joins_steps)

    def pass_steps(
        self,
        model: Module,
        step: Callable[..., Outcome],
        take: Take,
        record: Logbook,
        scope: ExitStack,
        *,
        is_announced: bool,
    ) -> JitPass | None:
        """Return what computes a pass's batches by compiled functions.

        Returns None if the model has its own step, or moves batches itself. Returns None also if
        something wraps the net (replicas, shards).
        """
        strategy = model._fitkit.compilation.strategy
        if not compiles_steps(self._options) or self.net.given_up is not None:
            return None
        if type(step) is not CompiledStep or not step.wrapped.is_bare:
            return None
        if strategy.evaluates_in_step or not step.mover.is_ours:
            return None
        kind = "prediction" if step.loss is None else "evaluation"
        programs = self.of_passes.setdefault(kind, Programs(self._options, f"the {kind}"))
        programs.is_announced = is_announced
        return JitPass(model, step, take, record, scope, programs, self.net)
