"""The batch loops: training, evaluation, prediction. The same on every rank.

A batch without rows (`NoRows`) has its number among the batches, and no more: no step, no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fitkit import trees
from fitkit.callbacks import CallbackList
from fitkit.data.batches import NoRows
from fitkit.errors import ConfigurationError
from fitkit.training.host_copies import HostCopies
from fitkit.training.inferring import Inference
from fitkit.training.learning import Learning
from fitkit.training.log import LazyLogs
from fitkit.training.runs import Step
from fitkit.training.stage import Stage


def train_batches(
    batches: Iterator[Any],
    stage: Stage,
    step: Step,
    learn: Learning,
    callbacks: CallbackList,
    stops: Callable[[], bool] | None,
    note: Callable[[int], None],
    done: int = 0,
    group: int = 1,
) -> int:
    """Train on an epoch's batches.

    Args:
        stage: takes what hooks log.
        step: keeps the running values.
        learn: makes the updates.
        stops: whether some rank wants to stop; asked after each group. None where nobody can.
        note: takes the number of steps made, before anybody acts at a batch's end.
        done: how many of the epoch's steps were made before it was cut.
        group: batches between two calls of the batch hooks, counted from the epoch's begin: a
            training that was cut within a group goes on with its rest.

    Returns:
        How many batches of the epoch were read.

    Raises:
        ConfigurationError: no batch of the epoch had rows.
    """
    begin = callbacks.hooks("on_train_batch_begin")
    end = callbacks.hooks("on_train_batch_end")
    logbook = step.logbook
    results = logbook.results
    index = done - 1
    empty = 0
    waits = False  # the group's batches so far, for the hooks at its end
    for index, batch in enumerate(learn.watch(batches), done):
        if batch is NoRows:
            empty += 1
        else:
            if begin and not waits:
                stage.open(begin, index, {})
            learn(batch, index)
            if stage.waiting:
                stage.take_waiting()
            if index == done + empty:
                step.after_first()
            waits = True
        if end:
            note(index + 1)
        if not waits or (index + 1) % group:
            continue
        waits = False
        if end:
            logs = LazyLogs(results, logbook.loss.last)
            for hook in end:
                hook(index, logs)
        if stops is not None and stops():
            break
    if waits:
        logs = LazyLogs(results, logbook.loss.last)
        for hook in end:
            hook(index, logs)
    learn.finish()
    note(index + 1)
    if empty and empty == index + 1:
        raise ConfigurationError(f"x is empty: none of the epoch's {empty} batches has rows.")
    logbook.steps = index + 1 - done - empty
    return index + 1


def evaluate_batches(
    batches: Iterator[Any],
    stage: Stage,
    step: Step,
    callbacks: CallbackList,
    inference: Inference,
    group: int = 1,
) -> int:
    """Note losses and metrics of batches, without gradients.

    Args:
        stage: takes what hooks log.
        step: keeps the running values.
        inference: surrounds the steps, and says what makes them from the second on.
        group: batches between two calls of the batch hooks.

    Returns:
        How many were read.
    """
    begin = callbacks.hooks("on_test_batch_begin")
    end = callbacks.hooks("on_test_batch_end")
    results = step.logbook.results
    index = -1
    empty = 0
    waits = False
    with inference:
        advance: Callable[..., Any] = step
        for index, batch in enumerate(inference.batches(batches)):
            if batch is NoRows:
                empty += 1
            else:
                if begin and not waits:
                    stage.open(begin, index, {})
                advance(batch, index)
                if stage.waiting:
                    stage.take_waiting()
                if index == empty:
                    step.after_first()
                    advance = inference.settled(batch)
                waits = True
            if waits and (index + 1) % group == 0:
                waits = False
                if end:
                    logs = LazyLogs(results)
                    for hook in end:
                        hook(index, logs)
        if waits:
            logs = LazyLogs(results)
            for hook in end:
                hook(index, logs)
    step.logbook.steps = index + 1 - empty
    return index + 1


def predict_batches(
    batches: Iterator[Any],
    step: Callable[..., Any],
    callbacks: CallbackList,
    inference: Inference,
    group: int = 1,
) -> list[Any]:
    """The net's outputs for each batch, in order, on the CPU; `NoRows` for one without rows.

    Args:
        inference: surrounds the steps, and says what makes them from the second on.
        group: batches between two calls of the batch hooks, which get these batches' outputs.
    """
    begin = callbacks.hooks("on_predict_batch_begin")
    end = callbacks.hooks("on_predict_batch_end")
    copies = HostCopies()
    index = -1
    empty = 0
    waits = False

    def tell() -> None:
        logs = LazyLogs(partial(_outputs_of, copies, index - index % group, index + 1))
        for hook in end:
            hook(index, logs)

    with inference:
        advance = step
        for index, batch in enumerate(inference.batches(batches)):
            if batch is NoRows:
                empty += 1
                copies.add(batch)
            else:
                if not waits:
                    for hook in begin:
                        hook(index, {})
                copies.add(advance(batch, index))
                if index == empty:
                    advance = inference.settled(batch)
                waits = True
            if waits and (index + 1) % group == 0:
                waits = False
                if end:
                    tell()
        if end and waits:
            tell()
    copies.settle()
    return copies.outputs


def _outputs_of(copies: HostCopies, first: int, end: int) -> dict[str, Any]:
    """What a hook finds in its logs: some batches' outputs as one, or a list where they can't be.

    Asked for only where a hook looks, because they may be on their way still.
    """
    if len(copies.outputs) < end:
        copies.settle()
    outputs = [output for output in copies.outputs[first:end] if output is not NoRows]
    if len(outputs) == 1:
        return {"outputs": outputs[0]}
    try:
        return {"outputs": trees.concatenate(outputs)}
    except (RuntimeError, ValueError):
        return {"outputs": outputs}
