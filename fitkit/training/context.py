"""StepContext: what hooks and `self.log` need to know about the batch that a pass computes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fitkit.data.to_device import moved_by
from fitkit.distributed.collectives import Collectives
from fitkit.errors import ConfigurationError
from fitkit.module import LogOptions, Module
from fitkit.training.log import Logged
from fitkit.training.step import CompiledStep, PredictStep


@dataclasses.dataclass
class StepContext:
    """One pass over data: an epoch's training, a validation, `evaluate`, `predict`.

    Attributes:
        name: `"training"`, `"validation"`, `"test"` or `"predict"`.
        logged: the values of `self.log`.
        compiled: computes the compiled loss, which hooks get by `super().training_step(…)`. None in
            `predict`.
        predicting: computes the net's outputs, which `predict_step` gets by `super()`. None except
            in `predict`.
        samples: the samples of the current batch, on this rank.
        seen: the samples of the pass so far, on this rank.
        is_over: whether the hook at the end of the pass runs.
        is_padding: whether the current batch is padding, which doesn't count.
        is_opening: whether hooks run before a batch whose samples aren't known yet.
        waiting: the values that they logged, until `take_waiting`.
        ending: the values logged by a hook that is called with the pass's values; otherwise None.
        backward: computes a loss's gradients and averages them over the ranks; training only.
    """

    name: str
    logged: Logged = dataclasses.field(default_factory=Logged)
    compiled: CompiledStep | None = None
    predicting: PredictStep | None = None
    samples: int = 0
    seen: int = 0
    is_over: bool = False
    is_padding: bool = False
    is_opening: bool = False
    waiting: list[tuple[str, Any, LogOptions, int | None]] = dataclasses.field(default_factory=list)
    ending: Logged | None = None
    backward: Callable[..., None] | None = None

    @staticmethod
    def moved(own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
        """A batch moved by a model's own hook."""
        return moved_by(own, batch, device)

    def transferred(self, batch: Any) -> Any:
        """A batch moved to the device in fitkit's way."""
        step = self.compiled or self.predicting
        assert step is not None
        return step.mover.transfer(batch)

    def compiled_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """The compiled loss of a batch that is on the device; compiled metrics count it."""
        assert self.compiled is not None
        return self.compiled.inside(model, batch, counts=not self.is_padding)

    def compiled_outputs(self, model: Any, batch: Any) -> Any:
        """The net's outputs for a batch that is on the device."""
        assert self.predicting is not None
        return self.predicting.inside(model, batch)

    def call_before_batch(self, hooks: Iterable[Callable[..., Any]], *arguments: Any) -> None:
        """Call hooks before a batch. What they log counts with that batch's samples."""
        self.is_opening = True
        for hook in hooks:
            hook(*arguments)
        self.is_opening = False

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
        if self.is_opening:
            self.waiting.append((name, value, options, samples))
            return
        own_steps = self.samples or self.seen
        batch = self.samples if own_steps or self.compiled is None else self.compiled.samples
        if self.is_padding or (batch == 0 and not self.is_over):
            return
        if samples is None:
            # A value logged at the end of a pass stands for all samples of this rank.
            samples = max(self.seen, 1) if self.is_over else batch
        self.logged.add(name, value, options, samples)

    def take_waiting(self) -> None:
        """Record what was logged before the current batch, now that its samples are known."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            self.log(*entry)


class StepContexts:
    """The contexts of the calls that run on a model, one per thread. A copy of a model has none.

    Attributes:
        by_thread: the contexts, by thread number.
        placing: a lock held while a thread moves the model to its device.
    """

    def __init__(self) -> None:
        self.by_thread: dict[int, StepContext] = {}
        self.placing: Any = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepContexts, ()

    @property
    def current(self) -> StepContext | None:
        """This thread's context. A helper thread (of a replica or autograd) gets the context of the
        thread that it helps, if only one is possible."""
        found = self.by_thread.get(threading.get_ident())
        if found is None and len(contexts := list(self.by_thread.values())) == 1:
            return contexts[0]
        return found


class running(contextlib.AbstractContextManager[StepContext]):  # noqa: N801
    """Make a context the model's current one in this thread. Calls may nest."""

    __slots__ = ("_before", "_context", "_contexts")

    def __init__(self, model: Module, context: StepContext) -> None:
        self._contexts: dict[int, StepContext] = model._fitkit.contexts.by_thread
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
