"""Turn gradients into new weights: clipping, the optimizer's step, and what counts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from fitkit.distributed.strategies import Engine
from fitkit.module import Module
from fitkit.optimizers import held_by
from fitkit.training.second_order import explained_step

if TYPE_CHECKING:
    from fitkit.extras.loss_scaling import Scaling


@dataclasses.dataclass(eq=False)
class Applier:
    """Makes the updates of one optimizer, from gradients that are complete.

    Attributes:
        optimizer: makes the updates.
        engine: makes the optimizer's step, and clips.
        move_rates: moves the learning rates after each update; None if they stay.
    """

    checks_gradients: ClassVar[bool] = True
    """Whether a gradient that isn't finite is a fault."""

    model: dataclasses.InitVar[Module]
    optimizer: Optimizer
    engine: Engine
    move_rates: Callable[[], object] | None

    def __post_init__(self, model: Module) -> None:
        compilation = model._fitkit.compilation
        self._state = model._fitkit.fit_state
        self._has_own_engine = compilation.strategy.engine is not None
        self._clip_value = compilation.given.gradient_clip_val
        self._clip_algorithm = compilation.given.gradient_clip_algorithm
        # Last bits of a norm follow from the order of its sum. A loop of one's own goes over the
        # model's parameters, and Lightning over the groups of configure_optimizers.
        by_groups = model._configures_optimizers
        learning = [] if by_groups else compilation.trained(model).parameters()
        self._places = {id(parameter): place for place, parameter in enumerate(learning)}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that the optimizer changes now: gradients of others say nothing of an update."""
        held = held_by(self.optimizer)
        if len(self.optimizer.param_groups) == 1 or not self._places:
            return held
        return sorted(held, key=lambda one: self._places.get(id(one), len(self._places)))

    def __call__(self) -> None:
        """Clip the gradients, make the update, and count it, unless a callback leaves it out."""
        if (guard := self._state.guard) is not None and not guard.admits(self):
            return
        if self._clip_value is not None or self._state.grad_norms is not None:
            self.clip()
        try:
            self.engine.update(self.optimizer)
        except RuntimeError as error:
            if (explained := explained_step(error, self.optimizer)) is None:
                raise
            raise explained from error
        self.engine.after_update()
        self.count()

    def with_closure(self, closure: Callable[[], torch.Tensor]) -> None:
        """Make an update by an optimizer that computes gradients itself, any number of times."""
        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.engine.after_update()
        self.count()

    def count(self) -> None:
        """Count an update, and move the rates."""
        self._state.updates += 1
        if self.move_rates is not None:
            self.move_rates()

    def clip(self) -> None:
        """Clip the gradients; record their norm before that, if a callback asks for it."""
        norms, norm, parameters = self._state.grad_norms, None, self.parameters
        if norms is not None:
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = self.engine.norm(gradients)
            norms += [] if norm is None else [norm]
        if self._clip_value is None:
            return
        if norm is not None and not self._has_own_engine and self._clip_algorithm == "norm":
            # As clip_grad_norm_, without a second norm, which costs a twentieth of a small step.
            clip_grads_with_norm_(parameters, self._clip_value, norm)
        else:
            self.engine.clip(parameters, self._clip_value, self._clip_algorithm)


@dataclasses.dataclass(eq=False)
class ScaledApplier(Applier):
    """Makes updates from gradients of scaled losses, unless some of them aren't finite.

    Attributes:
        scaling: scales the losses.
    """

    checks_gradients: ClassVar[bool] = False  # scaled ones overflow on purpose

    scaling: Scaling

    def __call__(self) -> None:
        """Unscale and clip the gradients, make the update, and count it if it was made."""
        if (guard := self._state.guard) is not None and not guard.admits(self):
            return
        if self._clip_value is not None or self._state.grad_norms is not None:
            self.scaling.unscale(self.optimizer)
            self.clip()
        counts = self.scaling.step(self.optimizer)
        self.scaling.update()
        self.engine.after_update()  # even without one here: other ranks may have made one
        if counts:
            self.count()
