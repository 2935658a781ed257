"""The batch loops: training, evaluation, prediction. The same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fitkit import trees
from fitkit.callbacks import CallbackList
from fitkit.training.logbook import LazyLogs
from fitkit.training.steps import CompiledStep, PredictStep
from fitkit.training.updates import Updater


def train_batches(
    batches: Iterator[Any],
    step: CompiledStep,
    updater: Updater,
    callbacks: CallbackList,
    stops: Callable[[], bool] | None,
) -> int:
    """Train on an epoch's batches.

    Args:
        stops: whether some rank wants to stop; asked after each step. None where nobody can.

    Returns:
        How many steps there were.
    """
    begin = callbacks.hooks("on_train_batch_begin")
    end = callbacks.hooks("on_train_batch_end")
    clear, update = updater.clear, updater.step
    results = step.logbook.results
    index = -1
    for index, batch in enumerate(batches):
        for hook in begin:
            hook(index, {})
        clear()
        if updater.accumulates:
            with updater.around_step():
                loss = step(batch)
                update(loss, step.samples, step.total)
        else:
            loss = step(batch)
            if updater.takes_closure:
                updater.step_with_closure(loss, partial(step.again, batch))
            else:
                update(loss, step.samples, step.total)
        if index == 0:
            step.transfer.put_back()
        if end:
            logs = LazyLogs(results)
            for hook in end:
                hook(index, logs)
        if stops is not None and stops():
            break
    updater.finish()
    return index + 1


def evaluate_batches(batches: Iterator[Any], step: CompiledStep, callbacks: CallbackList) -> int:
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
            step(batch)
            if index == 0:
                step.transfer.put_back()
            if end:
                logs = LazyLogs(results)
                for hook in end:
                    hook(index, logs)
    return index + 1


def predict_batches(
    batches: Iterator[Any], step: PredictStep, callbacks: CallbackList
) -> list[Any]:
    """The net's outputs for each batch, in order, on the CPU."""
    begin = callbacks.hooks("on_predict_batch_begin")
    end = callbacks.hooks("on_predict_batch_end")
    outputs = []
    with torch.no_grad():
        for index, batch in enumerate(batches):
            for hook in begin:
                hook(index, {})
            output = on_host(step(batch))
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
