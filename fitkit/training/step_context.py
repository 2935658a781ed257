"""The pass in which a step runs: what hooks and `self.log` know of the current batch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fitkit.data.batches import Batch
from fitkit.data.to_device import moved_by
from fitkit.distributed.collectives import Collectives
from fitkit.errors import ConfigurationError
from fitkit.module import LogOptions, Module
from fitkit.record import Context
from fitkit.training.log import Logged
from fitkit.training.step import CompiledStep, Outcome


@dataclasses.dataclass
class StepContext:
    """One pass over data: an epoch's training, a validation, `evaluate`, `predict`.

    Attributes:
        name: `"training"`, `"validation"`, `"test"` or `"predict"`.
        logged: the values of `self.log`.
        compiled: computes what hooks get by `super()`: the compiled loss, or in `predict` the net's
            outputs.
        batch: the current batch, from its first hook on; None before a pass's first.
        is_part: whether it is only a part of an update's samples.
        is_silent: whether it is computed once more, and leaves no trace.
        inside: what `super().training_step(…)` found in it; None if it wasn't called.
        seen: the samples of the pass so far, on this rank.
        is_over: whether the hook at the end of the pass runs.
        waiting: the values that hooks logged before the first batch, with which they count.
        ending: the values logged by a hook that is called with the pass's values; otherwise None.
        backward: computes a loss's gradients and averages them over the ranks; training only.
        transfer: the data's own way to move a batch; None leaves that to the model.
    """

    name: str
    logged: Logged
    compiled: CompiledStep
    batch: Batch | None = None
    is_part: bool = False
    is_silent: bool = False
    inside: Outcome | None = None
    seen: int = 0
    is_over: bool = False
    waiting: list[tuple[str, Any, LogOptions, int | None]] = dataclasses.field(default_factory=list)
    ending: Logged | None = None
    backward: Callable[..., None] | None = None
    transfer: Callable[[Any, torch.device], Any] | None = None

    def moved(self, own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
        """Return a batch moved by the data's own way, or else by a model's hook."""
        return moved_by(self.transfer or own, batch, device)

    def transferred(self, batch: Any) -> Any:
        """Return a batch moved to the device in fitkit's way."""
        return self.compiled.mover.transfer(batch, is_lent=False)

    def compiled_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the compiled loss of a batch that is on the device; compiled metrics count it."""
        counts = not self.is_silent and self.batch is not None and self.batch.samples > 0
        found = self.compiled.inside(model, batch, is_part=self.is_part, counts=counts)
        self.inside = found
        assert found.loss is not None
        return found.loss

    def compiled_outputs(self, model: Any, batch: Any) -> Any:
        """Return the net's outputs for a batch that is on the device."""
        return self.compiled.outputs_inside(model, batch)

    def begin(self) -> None:
        """Begin a new pass."""
        self.batch, self.seen = None, 0

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
            Collective: one exchange per hook that isn't fitkit's own, because its code may log.
        """
        for hook in hooks:
            self.ending = Logged()
            try:
                hook(*arguments)
            finally:
                ending, self.ending = self.ending, None
            states, numbers = [ending.state()], [ranks.rank]
            is_ours = (getattr(hook, "__module__", None) or "").startswith("fitkit.")
            if ranks.world_size > 1 and not is_ours:
                states, numbers = ranks.gather(states[0]), list(range(ranks.world_size))
            if any(states):
                values.update(ending.merge(states, [1] * len(states), numbers))
                ending.finish()

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
            samples = max(self.seen, 1) if self.is_over else batch
        self.logged.add(name, value, options, samples)


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
