"""Bagua's `qadam`: Adam whose momentum, after a warm-up, travels as bytes with error feedback."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from fitkit.arguments import check_count, check_number
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.bagua.base import Algorithm, Peers, all_reduce_bytes
from fitkit.extras.bagua.compression import (
    Feedback,
    compressed_mean,
    merge_feedback,
    wire_bytes,
)
from fitkit.seams.precisions import Precision
from fitkit.tensors import FlatTensors

ERROR = "error"
"""The name under which the optimizer keeps what compression has taken from a momentum so far."""


class QAdam(Algorithm):
    """Gradients are averaged while `QAdamOptimizer` warms up, then the ranks' momentum is.

    What compression takes away is kept and added to the next momentum, on both legs of the
    exchange. All ranks hold the same weights. Clipping acts on each rank's own gradients after
    the warm-up.

    Reference: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed, 2021, arXiv:2102.02888; Gan et al., BAGUA, 2021, arXiv:2107.01499, from
    which the 8 bits are.
    """

    name = "qadam"

    _optimizers: tuple[QAdamOptimizer, ...] = ()
    _feedback: dict[int, tuple[list[torch.nn.Parameter], Feedback]]

    def sent(self, size: float, numbers: int, ranks: int) -> float:
        return all_reduce_bytes(wire_bytes(numbers), ranks)

    def check(self, size: int, precision: Precision, device: torch.device) -> None:
        if size > 1 and precision.scaler(device) is not None:
            raise ConfigurationError(
                "algorithm='qadam' can't be combined with a precision that scales the loss: a "
                "rank that leaves out a step would leave the others waiting for its momentum. "
                "Write precision='bf16-mixed' or '32-true'."
            )

    def check_optimizers(self, optimizers: list[Optimizer]) -> None:
        others = [type(o).__name__ for o in optimizers if not isinstance(o, QAdamOptimizer)]
        if others:
            raise ConfigurationError(
                f"algorithm='qadam' exchanges momentum, and {others[0]} isn't made for that. Write "
                "compile(optimizer='qadam'), or functools.partial(fitkit.optimizers."
                "QAdamOptimizer, lr=…, warmup_steps=…)."
            )

    def begin(
        self,
        peers: Peers,
        parameters: list[torch.nn.Parameter],
        optimizers: list[Optimizer],
        updates: int,
    ) -> None:
        super().begin(peers, parameters, optimizers, updates)
        self._optimizers = tuple(o for o in optimizers if isinstance(o, QAdamOptimizer))
        self._feedback = {}
        for number, optimizer in enumerate(self._optimizers):
            optimizer.average = functools.partial(self.average, number)

    @property
    def averages_gradients(self) -> bool:
        return any(optimizer.is_warming_up for optimizer in self._optimizers)

    def average(
        self, number: int, parameters: list[torch.nn.Parameter], steps: list[torch.Tensor]
    ) -> None:
        """Replace an optimizer's steps, before their rate, by their means over the ranks.

        Args:
            number: the optimizer's.
        """
        flat = FlatTensors(steps)
        vector = flat.read()
        known = self._feedback.get(number)
        if known is None or not _are_same(known[0], parameters):
            if known is not None:  # parameters were frozen or set free meanwhile
                self._keep(number)
            feedback = Feedback.none(vector, self._peers.size)
            feedback.local.copy_(self._errors_of(number, parameters).read())
            known = self._feedback[number] = parameters, feedback
        flat.write(compressed_mean(vector, self._peers, known[1]))

    def flush(self) -> None:
        for number in sorted(self._feedback):
            self._keep(number)

    def end(self) -> None:
        for optimizer in self._optimizers:
            optimizer.average = None
        self._optimizers, self._feedback = (), {}

    def _keep(self, number: int) -> None:
        """Bring all ranks' errors into the optimizer's state, the same on every rank."""
        parameters, feedback = self._feedback[number]
        merge_feedback(feedback, self._peers)
        self._errors_of(number, parameters).write(feedback.local)

    def _errors_of(self, number: int, parameters: list[torch.nn.Parameter]) -> FlatTensors:
        """Return what the optimizer's state holds of errors, where checkpoints find it."""
        state = self._optimizers[number].state
        for parameter in parameters:
            if ERROR not in state[parameter]:
                state[parameter][ERROR] = torch.zeros_like(state[parameter]["exp_avg"])
        return FlatTensors(state[parameter][ERROR] for parameter in parameters)


def _are_same(some: list[torch.nn.Parameter], others: list[torch.nn.Parameter]) -> bool:
    return [id(parameter) for parameter in some] == [id(parameter) for parameter in others]


class QAdamOptimizer(Optimizer):
    """Adam for `warmup_steps`. Then the variance is frozen, and momentum is sent as bytes.

    On several ranks it needs `strategy=BaguaStrategy(algorithm="qadam")`. This averages gradients
    during the warmup, and afterwards the ranks' momentum, with error feedback. On one device it is
    the same optimizer without an exchange.

    After the warmup, a parameter without a gradient counts as having a gradient of zero. Numbers
    whose gradient was zero throughout the warmup have no variance. They get the mean variance of
    their tensor (1 if it has none), because a division by nearly zero would throw them far. No
    number moves farther in a step than in Adam, lr (1 - beta1) / sqrt(1 - beta2). Otherwise a
    number whose gradients grow after the warmup could move farther. When sent as bytes, its range
    would leave no levels to the others.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        warmup_steps: the number of steps of full Adam, long enough for the variance to settle. The
            paper uses 15 to 25 % of the steps.
        betas: the decay of momentum and variance, each in [0, 1).
        eps: a number added to the root of the variance.
        weight_decay: the factor of the parameter that is added to its gradient.

    Reference: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed, 2021, arXiv:2102.02888; Gan et al., BAGUA, 2021, arXiv:2107.01499 (8 bits).

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile(fitkit.optimizers.QAdamOptimizer(model.parameters(), lr=1e-3), "mse")
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
        lr = check_number("lr", lr, minimum=0)
        warmup_steps = check_count("warmup_steps", warmup_steps)
        eps = check_number("eps", eps, minimum=0)
        weight_decay = check_number("weight_decay", weight_decay, minimum=0)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ArgumentTypeError(f"betas={betas!r} must be a pair, like (0.9, 0.999).")
        pair = tuple(check_number("betas", beta, minimum=0, below=1) for beta in betas)
        super().__init__(
            params,
            {
                "lr": lr,
                "warmup_steps": warmup_steps,
                "betas": pair,
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
            closure: computes the loss again and returns it; None if gradients exist.

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
        """Return the root of the variance, its start at zero put right."""
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
