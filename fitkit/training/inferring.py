"""Evaluation and prediction in torch's inference mode, where nobody can notice it.

Inference mode saves one or two microseconds an operation over `no_grad`, but what is made in it can
never take part in a backward pass, and no gradient can be computed in it. So it is used for what
provably stays within a batch's step; everything else runs under `no_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fitkit import trees
from fitkit.callbacks import CallbackList, ProgressBar
from fitkit.data.arrays import ArraySource
from fitkit.data.sharding import Share, whole_of
from fitkit.data.sources import Source
from fitkit.distributed.strategies import Door
from fitkit.hooks import overridden
from fitkit.training.steps import CompiledStep, PredictStep

if TYPE_CHECKING:
    from fitkit.model import Model


class Inference:
    """Surrounds a pass over data: no gradients, and inference mode where it is allowed.

    The first batch runs under `no_grad`, and so does each of other shapes: what the net keeps then
    (positions, masks, lazily made layers) stays ordinary.

    Args:
        net: what computes.
        step: makes the steps.
        allowed: whether they may run in inference mode at all; see `may_infer`.
        in_memory: whether batches are views or rows of tensors. Others are made outside of
            inference mode, since whoever makes them may keep them.
    """

    def __init__(self, net: nn.Module, step: Any, allowed: bool, in_memory: bool) -> None:
        self._net = net
        self._step = step
        self._allowed = allowed
        self._in_memory = in_memory
        self._usual: Any = None
        self._mode: torch.inference_mode | None = None
        self._was_used = False
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Inference:
        self._no_grad.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()
        self._no_grad.__exit__(None, None, None)
        if self._was_used:
            make_ordinary(self._net)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, made outside of inference mode where that could matter."""
        return batches if self._in_memory or not self._allowed else self._outside(batches)

    def _outside(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self._leave()

    def first(self, batch: Any, index: int) -> Any:
        """Make the first batch's step, and see what it needs."""
        step = self._step
        if not self._allowed:
            return step(batch, index)
        self._usual, forward = shapes_of(batch), step.forward
        grad_modes = _GradModes()
        step.forward = grad_modes.around(forward)
        result = step(batch, index)
        step.forward = forward
        self._allowed = step.is_private and not grad_modes.on
        return result

    def settled(self, first: Any) -> Callable[..., Any]:
        """What makes the steps from the second on.

        Args:
            first: the first batch.
        """
        step = self._step
        if not isinstance(step, (CompiledStep, PredictStep)):
            return step
        if not self._allowed:
            return step.settled(first, step) if self._in_memory else step
        if not self._in_memory:
            return self._chosen
        self._enter()
        return step.settled(first, self._chosen)

    def _chosen(self, batch: Any, index: int) -> Any:
        """A batch's step, in the mode that its shapes allow."""
        if shapes_of(batch) == self._usual:
            self._enter()
        else:
            self._leave()
        return self._step(batch, index)

    def _enter(self) -> None:
        if self._mode is None:
            self._mode = torch.inference_mode()
            self._mode.__enter__()
            self._was_used = True

    def _leave(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


class _GradModes(TorchFunctionMode):
    """Notices that somebody switches gradients on, as nets do that give a derivative.

    Attributes:
        on: whether somebody has.
    """

    on = False

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function that notices what `forward` does."""

        def noticed(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return noticed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch._C._set_grad_enabled and args and args[0]:
            self.on = True
        return func(*args, **(kwargs or {}))


def inference_for(
    model: Model, step: Any, callbacks: CallbackList, stage: str, source: Source
) -> Inference:
    """What surrounds a pass of `evaluate` (`stage` is `"test"`) or `predict`."""
    # Ranks in step may repeat a batch, marked as one that doesn't count.
    alike = not model.compilation.strategy.evaluates_in_step
    in_memory = alike and isinstance(whole_of(source), ArraySource)
    return Inference(model, step, may_infer(model, step, callbacks, stage), in_memory)


def may_infer(model: Model, step: Any, callbacks: CallbackList, stage: str) -> bool:
    """Whether only fitkit's own code and the net's forward see what steps make.

    Not so with steps of the model's own, with callbacks that act at each batch, with hooks in the
    net, where something stands before it (replicas, shards), and where it is compiled: that would
    be compiled a second time.
    """
    if not isinstance(step, (CompiledStep, PredictStep)) or type(step.door) is not Door:
        return False
    if overridden(model, "transfer_batch_to_device"):
        return False
    hooks = (*callbacks.hooks(f"on_{stage}_batch_begin"), *callbacks.hooks(f"on_{stage}_batch_end"))
    if not all(type(getattr(hook, "__self__", None)) is ProgressBar for hook in hooks):
        return False
    return not any(map(_is_watched_or_compiled, model.modules()))


def _is_watched_or_compiled(module: nn.Module) -> bool:
    forward = getattr(type(module), "forward", None)
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
        or hasattr(module, "_orig_mod")  # what torch.compile returns
    )


def shapes_of(batch: Any) -> Any:
    """The shapes of a batch's inputs: those of its targets follow from them."""
    if type(batch) is Share:
        batch = batch.batch
    if type(batch) is tuple and isinstance(batch[0], torch.Tensor):
        return batch[0].shape
    return [getattr(leaf, "shape", None) for leaf in trees.leaves(batch)]


def make_ordinary(net: nn.Module) -> None:
    """Replace tensors of inference mode that modules have kept, by copies that can be trained with.

    Looked at are a module's attributes and buffers, and what containers among them hold.
    """
    for module in net.modules():
        _make_entries_ordinary(vars(module))


def _make_entries_ordinary(entries: dict[str, Any]) -> None:
    for name, value in entries.items():
        if isinstance(value, torch.Tensor):
            if value.is_inference():
                entries[name] = value.clone()
        elif name == "_buffers":
            _make_entries_ordinary(value)
        elif isinstance(value, (dict, list, tuple)) and name not in _NO_TENSORS:
            kept = [leaf for leaf in trees.leaves(value) if isinstance(leaf, torch.Tensor)]
            if any(tensor.is_inference() for tensor in kept):
                entries[name] = trees.map_leaves(_ordinary, value)


def _ordinary(leaf: Any) -> Any:
    is_ours = isinstance(leaf, torch.Tensor) and leaf.is_inference()
    return leaf.clone() if is_ours else leaf


_NO_TENSORS = frozenset(vars(nn.Module()))
"""What every module has: its parameters, its parts, its hooks."""
