"""The batch loops: training, evaluation, prediction. The same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fitkit import trees
from fitkit.callbacks import CallbackList
from fitkit.training.learning import Learning
from fitkit.training.logbook import LazyLogs
from fitkit.training.runs import Step


def train_batches(
    batches: Iterator[Any],
    step: Step,
    learn: Learning,
    callbacks: CallbackList,
    stops: Callable[[], bool] | None,
    note: Callable[[int], None],
    done: int = 0,
) -> int:
    """Train on an epoch's batches.

    Args:
        step: keeps the running values.
        learn: makes the updates.
        stops: whether some rank wants to stop; asked after each step. None where nobody can.
        note: takes the number of steps made, before anybody acts at a batch's end.
        done: how many of the epoch's steps were made before it was cut.

    Returns:
        How many steps the epoch has had.
    """
    begin = callbacks.hooks("on_train_batch_begin")
    end = callbacks.hooks("on_train_batch_end")
    results = step.logbook.results
    index = done - 1
    for index, batch in enumerate(batches, done):
        for hook in begin:
            hook(index, {})
        learn(batch, index)
        if index == done:
            step.after_first()
        if end:
            note(index + 1)
            logs = LazyLogs(results, step.logbook.loss.last)
            for hook in end:
                hook(index, logs)
        if stops is not None and stops():
            break
    learn.finish()
    note(index + 1)
    step.logbook.steps = index + 1 - done
    return index + 1


def evaluate_batches(batches: Iterator[Any], step: Step, callbacks: CallbackList) -> int:
    """Note losses and metrics of batches, without gradients.

    Returns:
        How many there were.
    """
    begin = callbacks.hooks("on_test_batch_begin")
    end = callbacks.hooks("on_test_batch_end")
    results = step.logbook.results
    index = -1
    with torch.no_grad():
        for index, batch in enumerate(batches):
            for hook in begin:
                hook(index, {})
            step(batch, index)
            if index == 0:
                step.after_first()
            if end:
                logs = LazyLogs(results)
                for hook in end:
                    hook(index, logs)
    step.logbook.steps = index + 1
    return index + 1


def predict_batches(
    batches: Iterator[Any], step: Callable[..., Any], callbacks: CallbackList
) -> list[Any]:
    """The net's outputs for each batch, in order, on the CPU."""
    begin = callbacks.hooks("on_predict_batch_begin")
    end = callbacks.hooks("on_predict_batch_end")
    outputs = []
    with torch.no_grad():
        for index, batch in enumerate(batches):
            for hook in begin:
                hook(index, {})
            output = on_host(step(batch, index))
            for hook in end:
                hook(index, {"outputs": output})
            outputs.append(output)
    return outputs


def on_host(output: Any) -> Any:
    """A net's output on the CPU; a dict (or Hugging Face's objects) without its Nones."""
    if isinstance(output, torch.Tensor):
        return output.cpu()
    if hasattr(output, "items"):
        return {key: on_host(value) for key, value in output.items() if value is not None}
    return trees.map_leaves(
        lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, output
    )
