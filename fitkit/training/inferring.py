"""Evaluation and prediction in torch's inference mode, where nobody can notice it.

Inference mode saves one or two microseconds an operation over `no_grad`. But what is made in it can
never take part in a backward pass, and nothing in it can be differentiated: a net's own code may
keep such tensors for later (positions, masks), or compute a derivative. So it is for nets that
consist of torch's own layers, evaluated by losses and metrics that fitkit knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from fitkit.arguments import is_torchs
from fitkit.callbacks import CallbackList, ProgressBar
from fitkit.data.arrays import ArraySource
from fitkit.data.batches import Source
from fitkit.hooks import overridden
from fitkit.module import Module
from fitkit.training.steps import CompiledStep, PredictStep


class Inference:
    """Surrounds a pass over data: no gradients, and inference mode where it is allowed.

    The first batch, which has everything checked, runs under `no_grad` alone.

    Args:
        step: makes the steps.
        allowed: whether they may run in inference mode; see `may_infer`.
        in_memory: whether batches are views or rows of tensors. Others are made outside of
            inference mode, since whoever makes them may keep them.
    """

    def __init__(self, step: Any, *, allowed: bool, in_memory: bool) -> None:
        self._step = step
        self._allowed = allowed
        self._in_memory = in_memory
        self._mode: torch.inference_mode | None = None
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Inference:
        self._no_grad.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()
        self._no_grad.__exit__(None, None, None)

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, made outside of inference mode where that could matter."""
        return batches if self._in_memory or not self._allowed else self._outside(batches)

    def _outside(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self._leave()

    def settled(self, first: Any) -> Callable[..., Any]:
        """What makes the steps from the second on.

        Args:
            first: the first batch, whose step is done.
        """
        step = self._step
        if not isinstance(step, (CompiledStep, PredictStep)):
            return step
        self._allowed = self._allowed and step.is_private
        if not self._in_memory:
            return self._inside if self._allowed else step
        if self._allowed:
            self._enter()
        return step.settled(first, alone=self._allowed)

    def _inside(self, batch: Any, index: int) -> Any:
        self._enter()
        return self._step(batch, index)

    def _enter(self) -> None:
        if self._mode is None:
            self._mode = torch.inference_mode()
            self._mode.__enter__()

    def _leave(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


def inference_for(
    model: Module, step: Any, callbacks: CallbackList, stage: str, source: Source
) -> Inference:
    """What surrounds a pass of `evaluate` (`stage` is `"test"`) or `predict`."""
    # Ranks in step may repeat a batch, marked as one that doesn't count.
    alike = not model._fitkit.compilation.strategy.evaluates_in_step
    return Inference(
        step,
        allowed=may_infer(model, step, callbacks, stage),
        in_memory=alike and isinstance(source.whole, ArraySource),
    )


def may_infer(model: Module, step: Any, callbacks: CallbackList, stage: str) -> bool:
    """Whether only torch's layers and fitkit's own code see what steps make.

    Not so with steps of the model's own, with callbacks that act at each batch, with hooks, and
    where something stands before the net (replicas, shards). A compiled net would be compiled a
    second time.
    """
    if not isinstance(step, (CompiledStep, PredictStep)) or not step.wrapped.is_bare:
        return False
    if not model._is_plain_wrapper or overridden(model, "transfer_batch_to_device"):
        return False
    hooks = (*callbacks.hooks(f"on_{stage}_batch_begin"), *callbacks.hooks(f"on_{stage}_batch_end"))
    if not all(type(getattr(hook, "__self__", None)) is ProgressBar for hook in hooks):
        return False
    layers = (module for module in model.modules() if module is not model)
    has_hooks = bool(model._forward_hooks or model._forward_pre_hooks or _has_any_global_hook())
    return not has_hooks and all(map(is_torchs, layers))
