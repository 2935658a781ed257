"""What makes a training's gradients and updates where a strategy leaves them not to torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer

from fitkit.distributed.spread.in_place import InPlace
from fitkit.distributed.wrapped_model import WrappedModel


def scale_gradients(parameters: list[nn.Parameter], factor: Any) -> None:
    """Multiply the gradients of an update that is about to be made.

    Args:
        factor: a number, or a tensor () on the device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_gradients(parameters: list[nn.Parameter], limit: float, algorithm: str) -> None:
    """Limit the gradients of an update that is about to be made.

    Args:
        limit: of their norm or values.
        algorithm: `"norm"` (of all gradients together) or `"value"` (each entry).
    """
    if algorithm == "norm":
        clip_grad_norm_(parameters, limit)
    else:
        clip_grad_value_(parameters, limit)


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The norm of tensors together: (). Spread ones count as a whole.

    Ranks:
        Collective, where tensors are spread.
    """
    total = get_total_norm([tensor.detach() for tensor in tensors])
    joined = getattr(total, "full_tensor", None)
    return total if joined is None else joined()


class Engine:
    """Makes one training's gradients and updates; what is here is what torch does.

    A strategy returns one from `engine_for`, and has it as `engine` until the training ends. On
    several ranks each method is called on all of them, but for `abandon`.

    Attributes:
        in_place: the module and the optimizers that are in another form meanwhile.

    Example:
        >>> from fitkit.strategies import DDPSpawnStrategy, Engine
        >>> class Local(Engine):
        ...     "Each rank updates by its own gradients."
        >>> class LocalStrategy(DDPSpawnStrategy):
        ...     "Trains with it."
    """

    in_place: tuple[InPlace, ...] = ()
    replaces_ddp = False
    """Whether training steps go past DDP's wrapper: to what `wrap` gives."""
    evaluates_in_step = False
    """Whether evaluations go there too, where a rank's forward waits for the others'."""

    def wrap(self, module: nn.Module) -> WrappedModel:
        """What training steps call instead of DDP."""
        return WrappedModel(module)

    def rewrap(self) -> None:
        """Follow parameters that were frozen or freed."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Surrounds batches whose gradients need no exchange yet."""
        return contextlib.nullcontext()

    def average_gradients(self, parameters: list[nn.Parameter]) -> bool:
        """Average gradients over the ranks that no backward pass has averaged.

        Returns:
            Whether that is done; if not, the strategy does it.
        """
        return False

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss."""
        loss.backward()

    def scale(self, parameters: list[nn.Parameter], factor: Any) -> None:
        """As `scale_gradients`."""
        scale_gradients(parameters, factor)

    def clip(self, parameters: list[nn.Parameter], limit: float, algorithm: str) -> None:
        """As `clip_gradients`."""
        clip_gradients(parameters, limit, algorithm)

    def norm(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """As `norm_of`; None where the engine doesn't show the numbers."""
        return norm_of(tensors)

    def update(self, optimizer: Optimizer) -> None:
        """Make the optimizer's step."""
        optimizer.step()

    def after_update(self) -> None:
        """Act after an update of the weights."""

    def average_ranks(self) -> None:
        """Make equal again what the ranks hold apart: at epochs' ends, before evaluations and
        before saves."""

    def whole(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, with whole tensors on rank 0, which writes them to a file."""
        return make()

    def parts(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, for a folder to which every rank writes its part: spread tensors
        stay spread."""
        return make()

    def end(self, *, wanted: bool) -> None:
        """Give module and optimizers back as they were but for what they learned.

        Args:
            wanted: whether this rank needs what was learned.
        """
        while self.in_place:  # what fails leaves the rest to `abandon`
            self.in_place[-1].end(wanted=wanted)
            self.in_place = self.in_place[:-1]

    def abandon(self) -> None:
        """Let go of them after a failure, when other ranks may be gone."""
        while self.in_place:
            *rest, last = self.in_place
            self.in_place = tuple(rest)
            last.abandon()
