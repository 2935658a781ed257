"""The pass in which a step runs: what hooks and `self.log` know of the current batch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fitkit.data.batches import Batch
from fitkit.data.to_device import moved_by
from fitkit.distributed.collectives import Collectives
from fitkit.errors import ConfigurationError
from fitkit.module import LogOptions, Module
from fitkit.record import Context
from fitkit.samples import samples_in
from fitkit.scopes import Scope
from fitkit.training.first_batch import brought
from fitkit.training.log import Logbook
from fitkit.training.logged import Logged
from fitkit.training.step import CompiledStep, Outcome

Waiting = tuple[str, Any, LogOptions, int | None]
"""A value that was logged before a pass's first batch: its name, and how."""


ALONE = contextlib.nullcontext()
"""Stands for a lock where nothing takes turns."""


@dataclasses.dataclass
class StepContext:
    """What a pass is to the code inside it: to steps, hooks and `self.log`.

    A pass is an epoch's training, a validation, `evaluate` or `predict`. The context is made for
    it, and thrown away with it.

    Attributes:
        name: `"training"`, `"validation"`, `"test"` or `"predict"`.
        compiled: computes what hooks get by `super()`: the compiled loss, or in `predict` the net's
            outputs.
        record: the values of the pass.
        batch: the current batch, from its first hook on; None before a pass's first.
        is_part: whether it is only a part of an update's samples.
        is_silent: whether it is computed once more, and leaves no trace.
        in_step: whether a step of the model's own runs.
        inside: what `super().training_step(…)` found in it; None if it wasn't called.
        is_over: whether the hook at the end of the pass runs.
        waiting: the values that hooks logged before the first batch, with which they count.
        ending: the values logged by a hook that is called with the pass's values; otherwise None.
        replicas: a lock, by which replicas take turns.
        backward: computes a loss's gradients and averages them over the ranks; training only.
        transfer: the data's own way to move a batch; None leaves that to the model.
    """

    name: str
    compiled: CompiledStep
    record: Logbook
    batch: Batch | None = None
    transfer: Callable[[Any, torch.device], Any] | None = None
    backward: Callable[..., None] | None = None
    is_part: bool = False
    is_silent: bool = False
    in_step: bool = False
    inside: Outcome | None = None
    is_over: bool = False
    waiting: list[Waiting] = dataclasses.field(default_factory=list)
    ending: Logged | None = None
    replicas: AbstractContextManager[object] = ALONE

    @property
    def logged(self) -> Logged:
        """The values of `self.log`."""
        return self.record.logged

    def moved(self, own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
        """Return a batch moved by the data's own way, or else by a model's hook."""
        return moved_by(self.transfer or own, batch, device)

    def transferred(self, batch: Any) -> Any:
        """Return a batch moved to the device in fitkit's way."""
        return self.compiled.mover.transfer(batch, is_lent=False)

    def compiled_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the compiled loss of a batch that is on the device; compiled metrics count it."""
        counts = not self.is_silent and self.batch is not None and self.batch.samples > 0
        record = self.record if counts else None
        found = self._computed(model, batch, record)
        self.inside = found
        assert found.loss is not None
        return found.loss

    def _computed(self, model: Any, batch: Any, record: Logbook | None) -> Outcome:
        """Return the outcome of a batch inside a step of the model's own. Only the metrics record
        it.

        Args:
            model: the model, or one of its replicas.
            batch: a batch on the device.
            record: the pass's values; None if the batch doesn't count.
        """
        step = self.compiled
        x, y, weight = step.parts(batch)
        step.check_later(y, weight)
        # Replicas take turns at the first batch, whose checks build the metrics, and at their sums.
        with contextlib.nullcontext() if step.seen is not None else self.replicas:
            call = step.net.in_precision(model)
            found = step.compute(call, x, y, weight, is_part=self.is_part)
        if record is not None:
            with self.replicas, torch.no_grad():
                values = found.outputs, found.target, found.weight
                device = step.mover.transfer.device
                outputs, target, weight = brought(values, step.wrapped, device)
                shown = dataclasses.replace(found, outputs=outputs, target=target, weight=weight)
                step.measure(shown, samples_in(x, y), record)
        return found

    def compiled_outputs(self, model: Any, batch: Any) -> Any:
        """Return the net's outputs for a batch that is on the device."""
        net = self.compiled.net
        return net(self.compiled.parts(batch)[0], net.in_precision(model))

    def log_waiting(self) -> None:
        """Record what hooks logged before the first batch, now that its samples are known."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            self.log(*entry)

    def call_at_end(
        self,
        hooks: Iterable[Callable[..., Any]],
        values: dict[str, Any],
        ranks: Collectives,
        *arguments: Any,
    ) -> None:
        """Call hooks with a pass's values. What one logs is added to the values for the next.

        Args:
            hooks: the callbacks' hooks, in their order.
            values: the pass's values. They stay the same on all ranks.
            ranks: the ranks that call the hooks, too.
            *arguments: the hooks' own arguments.

        Ranks:
            Collective: one exchange per hook that `_may_log`.
        """
        for hook in hooks:
            with Scope() as scope:
                ending = self.ending = Logged(scope)
                try:
                    hook(*arguments)
                finally:
                    self.ending = None
                states, numbers = [ending.state()], [ranks.rank]
                if ranks.world_size > 1 and _may_log(hook):
                    states, numbers = ranks.gather(states[0]), list(range(ranks.world_size))
                if any(states):
                    values.update(ending.merge(states, [1] * len(states), numbers))

    def log(self, name: str, value: Any, options: LogOptions, samples: int | None) -> None:
        """Record a value that a hook logs, unless its batch doesn't count.

        Raises:
            ConfigurationError: called in `predict`, or `Logged.add` refuses the value.
        """
        if self.name == "predict":
            raise ConfigurationError(
                f"self.log({name!r}) was called in predict, which has no logs. Return the value "
                "from predict_step, or log it in test_step and call evaluate."
            )
        if self.ending is not None:
            self.ending.add(name, value, options, 1 if samples is None else samples)
            return
        if self.batch is None and not self.is_over:
            self.waiting.append((name, value, options, samples))
            return
        batch = 0 if self.batch is None else self.batch.samples
        if self.is_silent or (batch == 0 and not self.is_over):
            return
        if samples is None:
            # A value logged at the end of a pass stands for all samples of this rank.
            samples = max(self.record.seen, 1) if self.is_over else batch
        self.record.logged.add(name, value, options, samples, self.in_step)


class as_current(contextlib.AbstractContextManager[StepContext]):  # noqa: N801
    """Make a context the model's current one in this thread. Calls may nest."""

    __slots__ = ("_before", "_context", "_contexts")

    def __init__(self, model: Module, context: StepContext) -> None:
        self._contexts: dict[int, Context] = model._fitkit.contexts.by_thread
        self._context = context

    def __enter__(self) -> StepContext:
        thread = threading.get_ident()
        self._before = self._contexts.get(thread)
        self._contexts[thread] = self._context
        return self._context

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        if self._before is None:
            del self._contexts[thread]
        else:
            self._contexts[thread] = self._before


def _may_log(hook: Callable[..., Any]) -> bool:
    """Whether a hook may log: all but fitkit's own, unless these call a user's code."""
    is_ours = (getattr(hook, "__module__", None) or "").startswith("fitkit.")
    return not is_ours or getattr(getattr(hook, "__self__", None), "calls_users_code", False)
