"""Batch normalisation over the batches of all ranks, on any device.

Torch's own `SyncBatchNorm` is another class, refuses CPU tensors and counts a batch that only
fills a rank's place. Here a module's batch normalisations keep their class, parameters and names;
they compute otherwise while a training runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fitkit.errors import ConfigurationError


class Synchronization:
    """What the synchronised layers of one training share.

    Attributes:
        group: the ranks; None for all.
        counts: whether this rank's batch counts in the statistics; False for one that only fills
            a place, in whose step this rank takes part all the same.
        normalise: gives a layer's output for its inputs, and moves its running statistics on.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, is_on: bool = True) -> None:
        self.counts: bool = True
        self.normalise: Callable[..., torch.Tensor] = self._normalise
        # It waits for other ranks, and so has no place in a compiled graph. Saying so loads torch's
        # whole compiler, which is there already where a net is compiled.
        if "torch._dynamo" in sys.modules:
            self.normalise = torch.compiler.disable(self._normalise)
        self.group: dist.ProcessGroup | None = group
        self._is_on = is_on

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a net, or a saved one, must not wait for ranks that know nothing of it.
        return (Synchronization, (None, False))

    def applies_to(self, layer: nn.Module) -> bool:
        """Whether a layer normalises over all ranks now: in training, until the end."""
        return self._is_on and layer.training

    def end(self) -> None:
        """Let all layers compute by themselves again."""
        self._is_on = False
        self.group = None

    def _normalise(self, layer: _BatchNorm, inputs: torch.Tensor) -> torch.Tensor:
        """Return what `normalise` says.

        Ranks:
            Collective.

        Shapes: (B, C, ...) → the same; B may differ from rank to rank, and be 0.
        """
        layer._check_input_dim(inputs)
        output, mean, variance, total = _Normalisation.apply(
            inputs, layer.weight, layer.bias, layer.eps, self.group, self.counts
        )
        if layer.track_running_stats:
            _track(layer, mean, variance * (total / (total - 1)))
        return output


@contextlib.contextmanager
def synchronized(
    module: nn.Module, group: dist.ProcessGroup | None = None
) -> Iterator[Synchronization]:
    """Let a module's batch normalisations see the batches of all ranks meanwhile.

    Layers in evaluation mode compute as ever. What torch's own `SyncBatchNorm` layers do on a GPU
    isn't touched.

    Args:
        module: the same on all ranks.
        group: the ranks; None for all.

    Raises:
        ConfigurationError: a layer that can't be synchronised.

    Reference: Zhang et al., Context Encoding for Semantic Segmentation, 2018, arXiv:1803.08904.
    """
    layers = [
        layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and _can_change(name or "the net", layer)
    ]
    synchronization = Synchronization(group)
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = _Forward(layer, synchronization)
    try:
        yield synchronization
    finally:
        synchronization.end()
        for layer, forward in zip(layers, before, strict=True):
            del vars(layer)["forward"]
            if forward is not None:
                vars(layer)["forward"] = forward


def _can_change(name: str, layer: _BatchNorm) -> bool:
    """Whether a layer computes as torch's plain ones do; False for one that synchronises itself.

    Raises:
        ConfigurationError: it computes otherwise, so that changing it would change the net.
    """
    kind = type(layer)
    if isinstance(layer, nn.SyncBatchNorm):
        if layer.weight is None or layer.weight.device.type != "cpu":
            return False
        raise ConfigurationError(
            f"{name} is a torch.nn.SyncBatchNorm, which refuses CPU tensors. Take a BatchNorm "
            "layer in its place: sync_batchnorm=True synchronises those on any device."
        )
    own = vars(layer).get("forward")  # ours on a copy that was made during a training
    if kind.forward is _BatchNorm.forward and (own is None or isinstance(own, _Forward)):
        return True
    raise ConfigurationError(
        f"sync_batchnorm=True can't synchronise {name}: {kind.__name__} has a forward of its own. "
        "Leave sync_batchnorm out, or put the layer together from torch's BatchNorm and another."
    )


class _Forward:
    """A layer's forward during a training; a method of the instance, found before the class's."""

    def __init__(self, layer: _BatchNorm, synchronization: Synchronization) -> None:
        self._layer = layer
        self._synchronization = synchronization

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        if not self._synchronization.applies_to(layer):
            return type(layer).forward(layer, input)
        return self._synchronization.normalise(layer, input)


@torch.no_grad()
def _track(layer: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Move the running statistics towards a batch's: (C,) each, the variance unbiased."""
    momentum = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if momentum is None:  # a plain mean over all batches
            momentum = 1.0 / float(layer.num_batches_tracked)
    for running, value in ((layer.running_mean, mean), (layer.running_var, variance)):
        if running is not None:
            running.lerp_(value.to(running.dtype), momentum or 0.0)


class _Normalisation(torch.autograd.Function):
    """Normalises each channel by the mean and variance over all ranks that count.

    Means and sums of squares are merged in float64 rather than plain sums, which would lose the
    variance of numbers far from 0.

    Reference: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances, 1979.
    """

    @staticmethod
    def forward(
        context: Any,
        inputs: torch.Tensor,  # (B, C, ...)
        weight: torch.Tensor | None,  # (C,)
        bias: torch.Tensor | None,  # (C,)
        eps: float,
        group: dist.ProcessGroup | None,
        counts: bool,
    ) -> tuple[torch.Tensor, ...]:
        mean, variance, total = _merged(*_local_moments(inputs, counts), group)
        if total.device.type == "cpu" and total.item() < 2:
            raise ConfigurationError(
                "Batch normalisation in training needs more than 1 value per channel, but all "
                f"ranks together have {int(total.item())}. Use larger batches, or drop_last=True."
            )
        mean, variance = mean.to(_wide(inputs.dtype)), variance.to(_wide(inputs.dtype))
        context.save_for_backward(inputs, weight, mean, (variance + eps).rsqrt(), total)
        context.group, context.counts = group, counts
        context.mark_non_differentiable(mean, variance, total)
        weight = None if weight is None else weight.to(mean.dtype)
        bias = None if bias is None else bias.to(mean.dtype)
        output = F.batch_norm(inputs, mean, variance, weight, bias, eps=eps)
        return output, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Any) -> Any:
        inputs, weight, mean, scale, total = context.saved_tensors
        needs_inputs, needs_weight, needs_bias, *_ = context.needs_input_grad
        gradient = gradients[0].to(mean.dtype)  # (B, C, ...)
        others = [axis for axis in range(inputs.ndim) if axis != 1]
        along = (1, -1) + (1,) * (inputs.ndim - 2)
        centred = inputs.to(mean.dtype) - mean.view(along)
        of_bias = gradient.sum(others)  # (C,)
        of_scaled = (gradient * centred).sum(others)  # (C,)
        of_inputs = gradient
        if needs_inputs:
            slope = scale if weight is None else scale * weight.to(mean.dtype)
            sums = torch.cat([of_bias, of_scaled]).double()
            dist.all_reduce(sums, group=context.group)
            if context.counts:  # the statistics depend on these inputs too
                shift, tilt = (sums / total).to(mean.dtype).chunk(2)
                of_inputs = gradient - shift.view(along)
                of_inputs = of_inputs.addcmul_(centred, (tilt * scale**2).view(along), value=-1)
            of_inputs = of_inputs * slope.view(along)
        return (
            of_inputs.to(inputs.dtype) if needs_inputs else None,
            (of_scaled * scale).to(weight.dtype) if needs_weight else None,
            of_bias if needs_bias else None,
            *(None, None, None),
        )


def _local_moments(
    inputs: torch.Tensor, counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this rank's mean, sum of squares around it, and number of values per channel, in
    float64.

    Shapes: (B, C, ...) → (C,), (C,), (1,).
    """
    channels = inputs.shape[1]
    number = inputs.numel() // channels if counts else 0
    size = torch.full((1,), number, dtype=torch.float64, device=inputs.device)
    if number == 0:
        nothing = torch.zeros(channels, dtype=torch.float64, device=inputs.device)
        return nothing, nothing, size
    others = [axis for axis in range(inputs.ndim) if axis != 1]
    wide = inputs.to(_wide(inputs.dtype))
    # Several times as fast on a CPU as torch.var_mean over these axes, and as exact.
    mean = wide.mean(others, keepdim=True)
    centred = wide - mean
    rest = centred.mean(others).double()  # what rounding kept from the mean
    squares = centred.square_().sum(others).double() - size * rest.square()
    return mean.flatten().double() + rest, squares, size


def _merged(
    mean: torch.Tensor,
    squares: torch.Tensor,
    size: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean and (biased) variance over all ranks, and their number of values per channel.

    Ranks:
        Collective: one exchange.

    Shapes: (C,), (C,), (1,) → (C,), (C,), ().
    """
    packed = torch.cat([mean, squares, size])
    rows = packed.new_empty(dist.get_world_size(group), len(packed))
    dist.all_gather(list(rows), packed, group=group)
    means, all_squares, sizes = rows.split([len(mean), len(mean), 1], dim=1)  # (ranks, C or 1)
    total = sizes.sum()
    merged = (means * sizes).sum(0) / total
    around = all_squares + sizes * (means - merged).square()
    return merged, around.sum(0) / total, total


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of numbers of another."""
    return torch.float64 if dtype is torch.float64 else torch.float32
