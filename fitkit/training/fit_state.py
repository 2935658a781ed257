"""The optimizer and the scheduler of a model, kept from one fit to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError
from fitkit.notices import warn
from fitkit.optimizers import check_trainable
from fitkit.training.compilation import Compilation


@dataclasses.dataclass
class FitState:
    """The optimizer and scheduler: made when it is first needed after `compile` named it.

    Attributes:
        optimizer: None before it was needed.
        scheduler: None where there is none, or before the first fit.
        updates: how many updates were made so far; never starts anew.
        rate_factor: by how much the rates were scaled for the number of ranks.
    """

    optimizer: Optimizer | None = None
    scheduler: Any = None
    updates: int = 0
    rate_factor: float = 1.0

    def optimizer_for(self, model: torch.nn.Module, compilation: Compilation) -> Optimizer:
        """The optimizer over the model's parameters.

        One that was made from a name is made anew where parameters have been replaced since;
        it would go on training the old ones.

        Raises:
            ConfigurationError: it can't be made, nothing can learn, or an instance holds
                parameters that are no longer the model's.
        """
        choice = compilation.optimizer
        parameters = list(model.parameters())
        own = {id(parameter) for parameter in compilation.trainable(model)}
        if self.optimizer is not None and not all(id(p) in own for p in held_by(self.optimizer)):
            if choice.is_instance:
                choice.check_parameters(compilation.trainable(model))
            warn(
                "Parameters of the net were replaced since its optimizer was made; the optimizer "
                "is made anew, without its state."
            )
            self.optimizer = self.scheduler = None
        if self.optimizer is None:
            self.optimizer = choice.build(parameters)
            self.rate_factor = 1.0
            _warn_of_idle_loss(compilation, self.optimizer)
        return self.optimizer

    def check(self, model: torch.nn.Module, compilation: Compilation) -> None:
        """Refuse to train where nothing can learn.

        Raises:
            ConfigurationError: no parameters, all frozen, or shapes that aren't known yet.
        """
        check_trainable(compilation.trainable(model))

    def scheduler_for(
        self,
        model: torch.nn.Module,
        compilation: Compilation,
        *,
        epochs: int,
        initial_epoch: int,
        steps: int | None,
    ) -> Any:
        """The scheduler of a fit.

        One by name whose length `fit` gives (`"cosine"`) is made anew for each fit and moved on
        to `initial_epoch`; any other is made once and goes on.

        Args:
            epochs: the final epoch's number.
            initial_epoch: the first epoch's number.
            steps: updates in an epoch; None where unknown.
        """
        choice = compilation.scheduler
        if choice is None:
            return None
        optimizer = self.optimizer_for(model, compilation)
        if self.scheduler is not None and not choice.follows_fit:
            return self.scheduler
        if self.scheduler is not None:
            for group in optimizer.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])
        self.scheduler = choice.build(optimizer, epochs, None if steps is None else epochs * steps)
        if choice.follows_fit and initial_epoch:
            done = initial_epoch if choice.interval == "epoch" else initial_epoch * (steps or 0)
            # torch warns where a scheduler moves before its optimizer has.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            for _ in range(done):
                self.scheduler.step()
        return self.scheduler

    def set_rate(self, rate: float) -> None:
        """Change the rate and keep the optimizer's state; a scheduler begins anew from there."""
        self.scheduler = None
        self.rate_factor = 1.0
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
                group.pop("initial_lr", None)

    def drop_scheduler(self) -> None:
        """Let the next scheduler begin from the rates that there are now."""
        self.scheduler = None
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group.pop("initial_lr", None)

    def snapshot(self) -> tuple[Any, ...]:
        """What `restore` needs: the objects, and the groups' settings."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return self.optimizer, self.scheduler, self.rate_factor, settings

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Put the objects and the groups' settings back."""
        self.optimizer, self.scheduler, self.rate_factor, settings = snapshot
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        for group, before in zip(groups, settings, strict=True):
            for key in set(group) - set(before) - {"params"}:
                del group[key]
            group.update(before)


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters that an optimizer holds."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _warn_of_idle_loss(compilation: Compilation, optimizer: Optimizer) -> None:
    """Say once that a loss has parameters which nobody trains."""
    held = {id(parameter) for parameter in held_by(optimizer)}
    idle = [p for p in compilation.loss_parameters() if p.requires_grad and id(p) not in held]
    if idle:
        warn(
            f"The loss has {len(idle)} parameters of its own that no optimizer holds, so they "
            "don't learn. Give compile an optimizer over both, or make them part of the net."
        )


def check_monitor(monitor: str | None, logs: dict[str, Any]) -> None:
    """Refuse a monitored name that the logs don't have.

    Raises:
        ConfigurationError: with the names that they have.
    """
    if monitor is not None and monitor not in logs:
        raise ConfigurationError(
            f"lr_scheduler monitors {monitor!r}, but the logs have {', '.join(logs)}."
        )
