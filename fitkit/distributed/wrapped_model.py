"""A model as steps call it: its methods by name, directly or through a wrapper such as DDP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


class WrappedModel:
    """Calls a module's methods by name.

    Args:
        module: whose methods are called.
        wrapper: what calls go through, called with a method's name and its arguments (a module
            such as DDP has a `StepRouter` inside); None for nothing.

    Attributes:
        module: as given; error messages describe it.
        accumulating: surrounds calls whose gradients the wrapper needn't exchange yet; None where
            it exchanges none.
        rewrap: renews the wrapper after parameters were frozen or freed, on all ranks; None where
            it needn't be.
        count_parameter: a parameter () whose gradient the wrapper averages over the ranks together
            with the module's, as it is and exactly: what counts on each rank travels as that. None
            where there is none.
        shared_buffers: the module's buffers, where nothing acts within a step: the loop averages
            gradients over the ranks itself, and brings these from rank 0 to all before an update's
            first forward. None where the wrapper does both, or nobody needs to.
    """

    accumulating: Callable[[], AbstractContextManager[Any]] | None = None
    rewrap: Callable[[], None] | None = None
    count_parameter: nn.Parameter | None = None
    shared_buffers: list[torch.Tensor] | None = None

    def __init__(self, module: nn.Module, wrapper: Callable[..., Any] | None = None) -> None:
        self.module = module
        self.wrapper = wrapper

    @property
    def is_bare(self) -> bool:
        """Whether nothing stands between a call and the module."""
        return self.wrapper is None

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the named method returns; `""` calls the module itself."""
        if self.wrapper is None:
            return self.call(method, *args, **kwargs)
        return self.wrapper(method, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As a call of the object itself, past its wrapper."""
        target = getattr(self.module, method) if method else self.module
        return target(*args, **kwargs)


def mean_by(values: torch.Tensor, weights: list[Any]) -> torch.Tensor:
    """Return the mean of a vector with one entry per replica, by what each entry is the mean over.

    An entry that is the mean over nothing counts for nothing, though it is NaN.
    """
    shares = torch.stack([torch.as_tensor(w, dtype=values.dtype) for w in weights])
    shares = shares.to(values.device)
    counted = torch.where(shares > 0, values, torch.zeros_like(values))
    return (counted * (shares / shares.sum().clamp_min(torch.finfo(values.dtype).tiny))).sum()


class ReplicatedModel(WrappedModel):
    """A model of which replicas compute parts of a batch each. Their outputs are gathered.

    Attributes:
        weights: the number of samples of each replica in the last call.
        weigh: gives what a replica's own loss is the mean over, from its outputs and its inputs;
            None where that is its samples.
    """

    weights: list[int]
    weigh: Callable[[Any, Any], float | torch.Tensor | None] | None = None

    @property
    def is_bare(self) -> bool:
        return False


class DividedModel(WrappedModel):
    """A model that each rank calls with its part of a batch's sequences, beside other ranks."""

    size: int
    """How many ranks share a sequence."""

    @abstractmethod
    def attending(self) -> AbstractContextManager[None]:
        """Let attention see all ranks' tokens: in forward, and where it is computed again."""

    @abstractmethod
    def divide(self, x: Any, y: Any = None, weight: Any = None) -> tuple[Any, Any, Any]:
        """Return this rank's part of a batch."""

    @abstractmethod
    def join(self, outputs: Any) -> Any:
        """Return the outputs for whole sequences, of all ranks' parts."""

    @abstractmethod
    def mean(self, loss: torch.Tensor, count: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss of whole sequences and its count, of those of this rank's part."""

    @abstractmethod
    def check(
        self, predict: Callable[[Callable[..., Any], Any], Any], x: Any, y: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """Refuse a net that gives something else for parts than for whole sequences.

        Args:
            predict: gives what a way into the net makes of inputs.
            x, y: a first batch, with whole sequences.

        Returns:
            The outputs and targets of its first tokens, whole; and this rank's part of both.
        """

    @abstractmethod
    def check_loss(self, whole: torch.Tensor, of_parts: torch.Tensor) -> None:
        """Refuse a loss that isn't a mean over tokens.

        Args:
            whole: of the outputs that `check` has given.
            of_parts: what `mean` makes of the loss of this rank's part.
        """


class StepRouter(nn.Module):
    """Stands between a wrapper (DDP, FSDP) and the model, and calls the method that is named.

    Wrappers arm the exchange of gradients in their own `forward`. A step that went past it
    would train each rank apart, silently.

    Args:
        wrapped: the model that the wrapper's calls lead to.
        carrier: a parameter more that the wrapper averages (`WrappedModel.count_parameter`).
    """

    def __init__(self, wrapped: WrappedModel, carrier: nn.Parameter | None = None) -> None:
        super().__init__()
        self.model: nn.Module = wrapped.module
        # After the model's, so that theirs keep their numbers; wrappers name parameters by these.
        self.carrier: nn.ParameterList = nn.ParameterList([] if carrier is None else [carrier])
        self._call = wrapped.call

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `model.<method>(*args, **kwargs)`; `""` calls the model itself."""
        return self._call(method, *args, **kwargs)
