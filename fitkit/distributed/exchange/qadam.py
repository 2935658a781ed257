"""Bagua's `qadam`: Adam whose momentum, after a warm-up, travels as bytes with error feedback."""

from __future__ import annotations

import functools

import torch
from torch.optim import Optimizer

from fitkit.distributed.costs import all_reduce
from fitkit.distributed.exchange.base import Exchange
from fitkit.distributed.exchange.byte_codec import wire_bytes
from fitkit.distributed.exchange.compressed_mean import (
    Feedback,
    compressed_mean,
    merge_feedback,
)
from fitkit.distributed.exchange.flat_tensors import FlatTensors
from fitkit.distributed.exchange.peers import Peers
from fitkit.distributed.exchange.qadam_optimizer import QAdamOptimizer
from fitkit.distributed.precision import Precision
from fitkit.errors import ConfigurationError

ERROR = "error"
"""The name under which the optimizer keeps what compression has taken from a momentum so far."""


class QAdam(Exchange):
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
        return all_reduce(wire_bytes(numbers), ranks)

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
            feedback.own.copy_(self._errors_of(number, parameters).read())
            known = self._feedback[number] = parameters, feedback
        flat.write(compressed_mean(vector, self._peers, known[1]))

    def settle(self) -> None:
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
        self._errors_of(number, parameters).write(feedback.own)

    def _errors_of(self, number: int, parameters: list[torch.nn.Parameter]) -> FlatTensors:
        """What the optimizer's state holds of errors, where checkpoints find it."""
        state = self._optimizers[number].state
        for parameter in parameters:
            if ERROR not in state[parameter]:
                state[parameter][ERROR] = torch.zeros_like(state[parameter]["exp_avg"])
        return FlatTensors(state[parameter][ERROR] for parameter in parameters)


def _are_same(some: list[torch.nn.Parameter], others: list[torch.nn.Parameter]) -> bool:
    return [id(parameter) for parameter in some] == [id(parameter) for parameter in others]
