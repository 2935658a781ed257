"""The optimizer of Bagua's `qadam`: Adam at first, then momentum over a variance that is frozen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.arguments import check_count, check_number
from fitkit.errors import ArgumentTypeError


class QAdamOptimizer(Optimizer):
    """Adam for `warmup_steps`; then the variance is frozen, and momentum travels as bytes.

    On several ranks it needs `strategy=BaguaStrategy(algorithm="qadam")`, which averages
    gradients during the warm-up, and the ranks' momentum afterwards, with error feedback. On one
    device it is the same optimizer without an exchange.

    After the warm-up a parameter without a gradient counts as having a gradient of zero. Numbers
    whose gradient was zero all through the warm-up have no variance; they get the mean variance
    of their tensor (1 where it has none), since a division by nearly zero would throw them far.
    And no number moves farther in a step than Adam lets it, lr (1 - beta1) / sqrt(1 - beta2):
    one whose gradients grow after its variance is frozen would, and its range on the wire would
    leave no levels to the others.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        warmup_steps: steps of full Adam; long enough for the variance to settle (the paper: 15
            to 25 % of the steps).
        betas: the decay of momentum and variance, each in [0, 1).
        eps: added to the root of the variance.
        weight_decay: added to the gradient, times the parameter.

    Reference: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed, 2021, arXiv:2102.02888; Gan et al., BAGUA, 2021, arXiv:2107.01499 (8 bits).
    """

    average: Callable[[list[torch.nn.Parameter], list[torch.Tensor]], None] | None = None
    """Replaces numbers of each parameter by their means over the ranks, while several train."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_number("lr", lr, minimum=0)
        check_count("warmup_steps", warmup_steps)
        check_number("eps", eps, minimum=0)
        check_number("weight_decay", weight_decay, minimum=0)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ArgumentTypeError(f"betas={betas!r} must be a pair, like (0.9, 0.999).")
        for beta in betas:
            check_number("betas", beta, minimum=0, below=1)
        super().__init__(
            params,
            {
                "lr": lr,
                "warmup_steps": warmup_steps,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "steps": 0,  # made so far
                "adam_steps": 0,  # of these, in which the variance learned
            },
        )

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step is one of full Adam."""
        return any(group["adam_steps"] < group["warmup_steps"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: computes the loss anew and gives it; None where gradients are there.

        Ranks:
            Collective after the warm-up, while `average` is set.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.is_warming_up:
            self._step_of_adam()
        else:
            self._step_of_momentum()
        for group in self.param_groups:
            group["steps"] += 1
        return loss

    def _step_of_adam(self) -> None:
        for group in self.param_groups:
            group["adam_steps"] += 1
            _, decay = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = self._add_to_momentum(parameter, group)
                variance = self.state[parameter]["exp_avg_sq"]
                variance.mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
                self._move(parameter, group)

    def _step_of_momentum(self) -> None:
        held = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        for parameter, group in held:
            comes_late = not self.state[parameter]
            self._add_to_momentum(parameter, group)
            if comes_late or group["steps"] == group["adam_steps"]:  # the warm-up has just ended
                _fill(self.state[parameter]["exp_avg_sq"])
            self._limit(parameter, group)
        if self.average is not None and held:
            self._average(held, self.average)
        for parameter, group in held:
            self._move(parameter, group)

    def _limit(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """Let no number's step be longer than Adam's longest."""
        keeps, decay = group["betas"]
        longest = self._root(parameter, group).mul_((1 - keeps) / math.sqrt(1 - decay))
        momentum = self.state[parameter]["exp_avg"]
        torch.clamp(momentum, -longest, longest, out=momentum)

    def _average(self, held: list[tuple[torch.nn.Parameter, dict[str, Any]]], average: Any) -> None:
        """Replace momenta by their means over the ranks.

        They travel divided by the root of the variance, which is frozen and the same everywhere:
        so rounding weighs the same in each number's step. Rounded as they are, those whose
        variance is small would be thrown far by errors that are small beside the others.
        """
        roots = [self._root(parameter, group) for parameter, group in held]
        momenta = [self.state[parameter]["exp_avg"] for parameter, _ in held]
        steps = [momentum / root for momentum, root in zip(momenta, roots, strict=True)]
        average([parameter for parameter, _ in held], steps)
        for momentum, step, root in zip(momenta, steps, roots, strict=True):
            torch.mul(step, root, out=momentum)

    def _add_to_momentum(
        self, parameter: torch.nn.Parameter, group: dict[str, Any]
    ) -> torch.Tensor:
        """Let the gradient into the momentum; the gradient."""
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        keeps = group["betas"][0]
        state["exp_avg"].mul_(keeps).add_(gradient, alpha=1 - keeps)
        return gradient

    def _root(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """The root of the variance, its start at zero put right."""
        share = math.sqrt(1 - group["betas"][1] ** group["adam_steps"])
        return self.state[parameter]["exp_avg_sq"].sqrt().div_(share).add_(group["eps"])

    def _move(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """Move a parameter along its momentum."""
        rate = group["lr"] / (1 - group["betas"][0] ** (group["steps"] + 1))
        momentum = self.state[parameter]["exp_avg"]
        parameter.addcdiv_(momentum, self._root(parameter, group), value=-rate)


def _fill(variance: torch.Tensor) -> None:
    """Give numbers without a variance the mean of the others in their tensor; 1 if there is none.

    The same on every rank, since all have the same variance.
    """
    empty = variance == 0
    there = (~empty).sum()
    mean = torch.where(there > 0, variance.sum() / there.clamp(min=1), torch.ones_like(there))
    variance.copy_(torch.where(empty, mean.to(variance.dtype), variance))
