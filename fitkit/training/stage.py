"""What runs on a model right now: what its hooks and its `log` need to know."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fitkit.data.to_device import moved_by
from fitkit.errors import ConfigurationError
from fitkit.logging_options import LogOptions
from fitkit.module import Module
from fitkit.training.log import Logged

if TYPE_CHECKING:
    from fitkit.training.steps import CompiledStep, PredictStep


@dataclasses.dataclass
class Stage:
    """One pass over data: an epoch's training, a validation, `evaluate`, `predict`.

    Attributes:
        name: `"training"`, `"validation"`, `"test"` or `"predict"`.
        logged: what `self.log` was given.
        compiled: what `compile` described, for the hooks that call `super()`.
        transferred: brings a batch to the device as fitkit itself does.
        samples: of the current batch, on this rank.
        seen: samples of the pass so far, on this rank.
        is_over: whether the hook at the pass's end runs.
        is_filler: whether the current batch only fills a place and counts for nothing.
        is_opening: whether hooks run before a batch whose samples aren't known yet.
        waiting: what they have logged, until `take_waiting`.
        backward: computes a loss's gradients and averages them over the ranks; training only.
    """

    name: str
    logged: Logged = dataclasses.field(default_factory=Logged)
    compiled: CompiledStep | None = None
    predicting: PredictStep | None = None
    transferred: Callable[[Any], Any] = lambda batch: batch
    samples: int = 0
    seen: int = 0
    is_over: bool = False
    is_filler: bool = False
    is_opening: bool = False
    waiting: list[tuple[str, Any, LogOptions, int | None]] = dataclasses.field(default_factory=list)
    backward: Callable[..., None] | None = None

    @staticmethod
    def moved(own: Callable[..., Any], batch: Any, device: torch.device) -> Any:
        """A batch moved by a model's own hook."""
        return moved_by(own, batch, device)

    def compiled_loss(self, model: Any, batch: Any) -> torch.Tensor:
        """The compiled loss of a batch that is on the device; compiled metrics count it."""
        assert self.compiled is not None
        return self.compiled.inside(model, batch, counts=not self.is_filler)

    def compiled_outputs(self, model: Any, batch: Any) -> Any:
        """The net's outputs for a batch that is on the device."""
        assert self.predicting is not None
        return self.predicting.inside(model, batch)

    def open(self, hooks: Iterable[Callable[..., Any]], *arguments: Any) -> None:
        """Call hooks before a batch: what they log counts with that batch's samples."""
        self.is_opening = True
        for hook in hooks:
            hook(*arguments)
        self.is_opening = False

    def log(self, name: str, value: Any, options: LogOptions, samples: int | None) -> None:
        """Take a value that a hook logs, unless its batch counts for nothing.

        Raises:
            ConfigurationError: in `predict`; and what `Logged.add` refuses.
        """
        if self.name == "predict":
            raise ConfigurationError(
                f"self.log({name!r}) was called in predict, which has no logs. Return the value "
                "from predict_step, or log it in evaluate's test_step."
            )
        if self.is_opening:
            self.waiting.append((name, value, options, samples))
            return
        own_steps = self.samples or self.seen
        batch = self.samples if own_steps or self.compiled is None else self.compiled.samples
        if self.is_filler or (batch == 0 and not self.is_over):
            return
        if samples is None:
            # What is logged at a pass's end stands for all samples of this rank.
            samples = max(self.seen, 1) if self.is_over else batch
        self.logged.add(name, value, options, samples)

    def take_waiting(self) -> None:
        """Take what was logged before the current batch, now that its samples are known."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            self.log(*entry)


class Stages:
    """The stages that run on a model: one a thread. A copy of a model gets none of them.

    Attributes:
        by_thread: the stages, by their threads' numbers.
        placing: held while the model is brought to its device, which one thread does at a time.
    """

    def __init__(self) -> None:
        self.by_thread: dict[int, Stage] = {}
        self.placing = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Stages, ()

    @property
    def current(self) -> Stage | None:
        """This thread's stage; in a thread that only helps (a replica's, or autograd's) that of
        the thread that it helps, where one alone can be meant."""
        found = self.by_thread.get(threading.get_ident())
        if found is None and len(stages := list(self.by_thread.values())) == 1:
            return stages[0]
        return found


@contextlib.contextmanager
def running(model: Module, stage: Stage) -> Iterator[Stage]:
    """Make a stage the model's current one in this thread; calls of verbs may nest."""
    stages, thread = model._fitkit.stages.by_thread, threading.get_ident()
    before = stages.get(thread)
    stages[thread] = stage
    try:
        yield stage
    finally:
        if before is None:
            del stages[thread]
        else:
            stages[thread] = before
