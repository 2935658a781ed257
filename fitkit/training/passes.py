"""One pass over batches: the only loop over them that there is.

`fit`'s epochs, its validations, `evaluate`, `predict` and streamed predictions make their passes
with it. A pass is made where it begins, and thrown away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fitkit.callbacks import CallbackList, ProgressBar
from fitkit.data.batches import Batch, NoRows, in_groups
from fitkit.training.log import LazyLogs
from fitkit.training.step_context import StepContext


@dataclasses.dataclass(frozen=True)
class Stage:
    """What kind of pass it is.

    Attributes:
        name: in the names of a model's own steps: `"validation"` of `validation_step`.
        hooks: in the names of callbacks' hooks: `"test"` of `on_test_batch_end`.
        stop: the model's attribute by which any code ends the pass.
    """

    name: str
    hooks: str
    stop: str


TRAINING = Stage("training", "train", "stop_training")
VALIDATION = Stage("validation", "test", "stop_evaluating")
TEST = Stage("test", "test", "stop_evaluating")
PREDICT = Stage("predict", "predict", "stop_predicting")


class Executor(Protocol):
    """Makes the steps of a pass: each at once, or several together, later. Made for the pass.

    Attributes:
        make: makes a batch's step now, or holds it.
    """

    @property
    def make(self) -> Callable[[Batch, int], object]: ...

    def skip(self) -> None:
        """Note a batch without rows, in the batches' order."""

    def flush(self) -> None:
        """Make the steps that are held. Other code runs next. A short group isn't completed."""

    def end(self) -> None:
        """Make all that is left: there are no more batches."""


class Pass:
    """A pass over batches. It can be asked how far it is at any time.

    Args:
        stage: the kind of pass.
        context: the pass, as hooks and `self.log` know it.
        callbacks: have the hooks at batches.
        execute: makes the steps.
        logs: returns what hooks get after a batch, by its number.
        group: the batches between two calls of the hooks.
        done: the batches of an interrupted pass that were done before.
        looks: whether code runs between groups that may look at the steps so far; by default,
            whether a callback does.

    Attributes:
        done: the batches so far, also those without rows.
        empty: the numbers of those that had no rows, in this process.
        context: as given.
    """

    def __init__(
        self,
        stage: Stage,
        context: StepContext,
        callbacks: CallbackList,
        execute: Executor,
        logs: Callable[[int], LazyLogs],
        *,
        group: int = 1,
        done: int = 0,
        looks: bool | None = None,
    ) -> None:
        self.context = context
        self.done: int = done
        self.empty: list[int] = []
        self._execute, self._logs, self._group = execute, logs, group
        self._begin = callbacks.hooks(f"on_{stage.hooks}_batch_begin")
        self._end = callbacks.hooks(f"on_{stage.hooks}_batch_end")
        self._looks = users_look(callbacks, stage) if looks is None else looks

    def run(self, batches: Iterator[Any], ends: Callable[[], bool]) -> None:
        """Make the steps of all batches, and call the hooks around them.

        Args:
            batches: this rank's.
            ends: says after each group of batches whether the pass ends there.
        """
        context, execute = self.context, self._execute
        record, make = context.record, execute.make
        begin, end, looks = self._begin, self._end, self._looks
        for group in in_groups(batches, self._group, first=self.done):
            has_rows = False
            for index, batch in group:
                if batch is NoRows:  # numbered, but without a step or hooks
                    self.empty.append(index)
                    execute.skip()
                else:
                    context.batch = batch
                    if context.waiting:
                        context.log_waiting()
                    if not has_rows:
                        for hook in begin:
                            hook(index, {})
                    make(batch, index)
                    record.steps += 1
                    has_rows = True
                self.done = index + 1
            if not has_rows:
                continue
            if looks:
                execute.flush()
            if end:
                logs = self._logs(index)
                for hook in end:
                    hook(index, logs)
            if ends():
                break
        execute.end()
        context.batch = None


def users_look(callbacks: CallbackList, stage: Stage) -> bool:
    """Return whether a callback other than the progress bar acts at batches of a pass."""
    names = (f"on_{stage.hooks}_batch_begin", f"on_{stage.hooks}_batch_end")
    hooks = [hook for name in names for hook in callbacks.hooks(name)]
    return any(type(getattr(hook, "__self__", None)) is not ProgressBar for hook in hooks)
