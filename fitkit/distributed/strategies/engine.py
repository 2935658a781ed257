"""Engine: computes a training's gradients and updates, for strategies that replace torch here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer

from fitkit.distributed.in_place import InPlace
from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.errors import ConfigurationError


def scale_gradients(parameters: list[nn.Parameter], factor: Any) -> None:
    """Multiply the gradients before an update.

    Args:
        factor: a number, or a tensor () on the device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_gradients(parameters: list[nn.Parameter], limit: float, algorithm: str) -> None:
    """Clip the gradients before an update.

    Args:
        limit: the limit of their norm or values.
        algorithm: `"norm"` (of all gradients together) or `"value"` (each entry).
    """
    try:
        if algorithm == "norm":
            clip_grad_norm_(parameters, limit)
        else:
            clip_grad_value_(parameters, limit)
    except NotImplementedError as error:
        raise _sparse_or(error) from error


def _sparse_or(error: NotImplementedError) -> Exception:
    """Return the error for sparse gradients; the given one where it is about something else."""
    if "Sparse" not in str(error):
        return error
    return ConfigurationError(
        "The gradients of a layer with sparse=True can't be clipped or measured: torch has no norm "
        "or limits of sparse tensors. Write sparse=False, or leave gradient_clip_val (NormMonitor) "
        "out."
    )


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the norm of several tensors together: (). Sharded tensors count as a whole.

    Ranks:
        Collective, if tensors are sharded.
    """
    try:
        total = get_total_norm([tensor.detach() for tensor in tensors])
    except NotImplementedError as error:
        raise _sparse_or(error) from error
    joined = getattr(total, "full_tensor", None)
    return total if joined is None else joined()


class Engine:
    """Computes the gradients and updates of one training. The base class does what torch does.

    A strategy returns an engine from `engine_for`, and has it as `engine` until the training ends.
    With several ranks, each method except `abandon` is called on all of them.

    Attributes:
        in_place: the module and the optimizers that are changed during the training.

    Example:
        >>> from fitkit.strategies import DDPSpawnStrategy, Engine
        >>> class Counting(Engine):
        ...     "Counts the updates."
        ...     updates = 0
        ...     def after_update(self):
        ...         self.updates += 1
        >>> class CountingStrategy(DDPSpawnStrategy):
        ...     "Trains with it; DDP still averages the gradients."
        ...     has_engine = True
        ...     def engine_for(self, module, optimizers):
        ...         return Counting()
    """

    in_place: tuple[InPlace, ...] = ()
    replaces_ddp = False
    """Whether training steps bypass DDP's wrapper and call what `wrap` returns."""
    evaluates_in_step = False
    """Whether evaluations do so, too, because a rank's forward waits for the other ranks."""

    keeps_apart = False
    """Whether the ranks' weights may differ between two updates."""
    may_leave_out = False
    """Whether all ranks may leave out an update together, as `SkipBadUpdates` does: the next one is
    then made as if nothing had been."""

    def wrap(self, module: nn.Module) -> WrappedModel:
        """Return what training steps call instead of DDP."""
        return WrappedModel(module)

    def rewrap(self) -> None:
        """Adapt to parameters that were frozen or unfrozen."""

    def accumulating(self) -> AbstractContextManager[Any]:
        """Surround batches whose gradients need no exchange yet."""
        return contextlib.nullcontext()

    def average_gradients(self, parameters: list[nn.Parameter]) -> bool:
        """Average gradients over the ranks, if no backward pass has averaged them.

        This is called with manual optimization, several optimizers and compiled steps. In other
        steps DDP averages them, or `backward` of an engine that replaces DDP.

        Returns:
            Whether they are averaged now. If not, the strategy does it.
        """
        return False

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss."""
        loss.backward()

    def scale(self, parameters: list[nn.Parameter], factor: Any) -> None:
        """Multiply gradients, as `scale_gradients` does."""
        scale_gradients(parameters, factor)

    def clip(self, parameters: list[nn.Parameter], limit: float, algorithm: str) -> None:
        """Clip gradients, as `clip_gradients` does."""
        clip_gradients(parameters, limit, algorithm)

    def norm(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the norm, as `norm_of` computes it. None if the engine doesn't expose the
        values.
        """
        return norm_of(tensors)

    def update(self, optimizer: Optimizer) -> None:
        """Make the optimizer's step."""
        optimizer.step()

    def after_update(self) -> None:
        """Act after an update of the weights."""

    def average_ranks(self) -> None:
        """Make equal what the ranks hold separately: at the ends of epochs, before evaluations and
        before saves."""

    def whole(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, with whole tensors on rank 0, which writes them."""
        return make()

    def parts(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make` for a folder to which every rank writes its part: sharded
        tensors stay sharded."""
        return make()

    def end(self, *, wanted: bool) -> None:
        """Restore the module and the optimizers to their ordinary form, with what they learned.

        Args:
            wanted: whether this rank needs what was learned.
        """
        while self.in_place:  # if one fails, `abandon` handles the rest
            self.in_place[-1].end(wanted=wanted)
            self.in_place = self.in_place[:-1]

    def abandon(self) -> None:
        """Release them after a failure, if other ranks may be gone."""
        while self.in_place:
            *rest, last = self.in_place
            self.in_place = tuple(rest)
            last.abandon()
