"""Where the parts of a training step are, and how to time them while somebody wants that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fitkit.callbacks.part_clock import PartClock

if TYPE_CHECKING:
    from fitkit.training.fit_run import FitRun

DATA, DEVICE, FORWARD, BACKWARD = "data", "to device", "forward", "backward"
OPTIMIZER, METRICS, CALLBACKS = "optimizer", "metrics", "callbacks"
RANKS, VALIDATION = "ranks", "validation"
EXCHANGES = ("gather", "broadcast", "scatter", "sums", "broadcast_tensors", "mean_gradients")


class TimedParts:
    """Times a run's parts by a clock, from now until `undo`.

    The run's objects get attributes that cover their methods, so that a run which nobody watches
    pays nothing. Whatever a step does that isn't another part counts as its forward.

    Args:
        run: the `fit` that runs.
        clock: what counts.
    """

    def __init__(self, run: FitRun, clock: PartClock) -> None:
        self._clock = clock
        self._undo: list[Callable[[], Any]] = []
        self._cover_batches(run.stream, "epoch", DATA)
        self._cover(run, "learn", FORWARD)
        step: Any = run.step
        # On a GPU batches are brought there before the step has them.
        self._cover_batches(step.mover, "fed", DEVICE)
        # A compiled step has bound what moves its batches; steps of a model's own ask the mover.
        if hasattr(step, "_move"):
            self._cover(step, "_move", DEVICE)
        else:
            self._cover(step.mover, "transfer", DEVICE)
        meters = step.logbook.meters
        for name in ("update", "results", "state", "merge"):
            self._cover(meters, name, METRICS)
        self._cover(run.stage, "log", METRICS)
        for updater in updaters_of(run.learn):
            self._cover(updater, "backward", BACKWARD, then=OPTIMIZER)
        if run.stage.backward is not None:
            self._cover(run.stage, "backward", BACKWARD)
        for optimizer in run.optimizers:
            self._cover_optimizer(optimizer)
        for collectives in {id(c): c for c in (run.collectives, run.strategy.shares)}.values():
            if collectives.world_size > 1:
                for name in EXCHANGES:
                    self._cover(collectives, name, RANKS)

    def undo(self) -> None:
        """Leave the run's objects as they were."""
        while self._undo:
            self._undo.pop()()

    def _cover(self, owner: Any, name: str, part: str, then: str | None = None) -> None:
        own = vars(owner)
        had, before = name in own, getattr(owner, name)
        setattr(owner, name, Timed(before, self._clock.around(before, part, then)))
        self._undo.append(
            (lambda: setattr(owner, name, before)) if had else (lambda: delattr(owner, name))
        )

    def _cover_batches(self, owner: Any, name: str, part: str) -> None:
        """Cover a method that gives an iterator of batches."""
        make, clock = getattr(owner, name), self._clock

        def timed(*arguments: Any) -> Iterator[Any]:
            # Making the iterator may start workers, or draw an order.
            return clock.waiting(clock.around(make, part)(*arguments), part)

        setattr(owner, name, timed)
        self._undo.append(lambda: delattr(owner, name))

    def _cover_optimizer(self, optimizer: Any) -> None:
        clock = self._clock
        before = FORWARD

        def begin(*given: Any) -> None:
            nonlocal before
            before = clock.switch(OPTIMIZER)

        def end(*given: Any) -> None:
            # Clipping counts for the optimizer, from the backward pass on. After the update another
            # optimizer's forward may begin.
            clock.switch(FORWARD if before == OPTIMIZER else before)

        handles = [
            optimizer.register_step_pre_hook(begin),
            optimizer.register_step_post_hook(end),
        ]
        self._undo += [handle.remove for handle in handles]


class Timed:
    """An object that is called by way of a clock; all else is the object's own."""

    def __init__(self, covered: Any, call: Callable[..., Any]) -> None:
        vars(self).update(_covered=covered, _call=call)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._covered, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._covered, name, value)


def updaters_of(learn: Any) -> list[Any]:
    """What makes the updates: one an optimizer; none where a model makes them itself."""
    learners = getattr(learn, "_learners", [learn])
    return [learner._updater for learner in learners if hasattr(learner, "_updater")]
