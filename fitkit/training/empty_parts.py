"""Parts of an update in which nothing counts: their gradients are 0.

A mean over nothing is 0/0. No sum takes its value, but its backward runs: other ranks wait for it,
and hooks in its graph. Through 0/0 flow NaNs, which no factor makes 0. So hooks in the graph put 0
in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.parallel._functions import Broadcast
from torch.utils.hooks import RemovableHandle

from fitkit.training.weighing import Number

Gradients = tuple[torch.Tensor | None, ...]


@contextlib.contextmanager
def without_gradients_of_nothing(loss: torch.Tensor, count: Number) -> Iterator[None]:
    """Let a backward within the block find gradients of 0 where a loss is a mean over nothing.

    Args:
        loss: (), with its graph.
        count: what it is the mean over.
    """
    handles = stop_gradients_of_nothing(loss, count)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def stop_gradients_of_nothing(loss: torch.Tensor, count: Number) -> list[RemovableHandle]:
    """As `without_gradients_of_nothing`, for good.

    Returns:
        What undoes it.
    """
    counts = count > 0 if isinstance(count, torch.Tensor) else None
    if counts is None and count:
        return []

    def stopped(gradients: Gradients, *_: Any) -> Gradients:
        return tuple(None if one is None else _if(counts, one) for one in gradients)

    handles = []
    for node in _functions(loss, down_to_layers=counts is not None):
        handles += [node.register_prehook(stopped), node.register_hook(stopped)]
    return handles


def _if(counts: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient where something counts, and 0 elsewhere."""
    if counts is None:
        return torch.zeros_like(gradient)
    if gradient.is_sparse:  # of an embedding, which is given no NaN
        return gradient
    counts = counts.to(gradient.device)
    if gradient.is_nested:
        return gradient.masked_fill(~counts, 0.0)
    return torch.where(counts, gradient, 0.0)


def _functions(loss: torch.Tensor, *, down_to_layers: bool) -> list[Node]:
    """Return the functions in the graph of a loss.

    Args:
        down_to_layers: whether the first layers end the search, as they come from the loss. Those
            are the functions of parameters, and those of others' own, whose backward may act on
            parameters that aren't among their inputs (a checkpoint's). One that gives a number is
            a part of the loss, such as a learned factor. Each hook costs some 10 µs, and a mean
            over what counts in a batch stands after the layers.
    """
    found: list[Node] = []
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        inputs = [one for one, _ in node.next_functions if one is not None]
        functions = [one for one in inputs if not _holds_parameters(one)]
        is_layer = isinstance(node, BackwardCFunction) or len(functions) < len(inputs)
        if is_layer or not down_to_layers:
            found.append(node)
        if not (is_layer and down_to_layers) or _gives_a_number(node):
            new = [one for one in functions if one not in seen]
            waiting += new
            seen.update(new)
    return found


def _holds_parameters(node: Node) -> bool:
    """Whether a parameter comes from here: a leaf's place, or copies of leaves on other devices
    (`nn.parallel.replicate`), which replicas share.
    """
    return hasattr(node, "variable") or getattr(node, "_forward_cls", None) is Broadcast


def _gives_a_number(node: Node) -> bool:
    outputs = getattr(node, "_input_metadata", ())
    return all(not len(output.shape) for output in outputs)
