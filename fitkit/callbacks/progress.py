"""The progress of a run: a bar, or one line per epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fitkit.arguments import check_number, chosen_verbose
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.callback_list import CallbackList
from fitkit.callbacks.display import Display, Moment, display_for, shown_metrics
from fitkit.printing import is_lost, where_possible

if TYPE_CHECKING:
    from rich.console import Console


NEVER = float("inf")
QUIET_S = 1.0
"""How long evaluate and predict run before `verbose="auto"` shows a bar, in seconds."""

LARGEST_SHARE = 0.05
"""The share of the time that drawing may take, even on a slow terminal."""


class ProgressBar(Callback):
    """Shows the progress of `fit`, `evaluate` or `predict`. `fit` adds one by itself.

    Only rank 0 shows anything. Per batch it only reads the clock. Logs are read, and the device
    waited for, only when the bar is drawn.

    Args:
        verbose: 0 shows nothing. 1 shows a bar in a terminal or notebook; elsewhere one plain line
            per epoch, and one per minute within longer epochs. 2 prints one plain line per epoch.
            `"auto"` is 1, or 2 in continuous integration (`CI` is set), and shows evaluate and
            predict only after one second. The environment variable FITKIT_VERBOSE replaces
            `"auto"`. None uses the call's `verbose`.
        refresh_per_second: how often the bar is drawn at most.
        console: the rich console to write to. None writes to `sys.stdout`.
        clock: a function that returns seconds since any start.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.ProgressBar()
        ... ])
    """

    stops_alike = True
    _acts_alone = True

    def __init__(
        self,
        verbose: int | str | None = None,
        *,
        refresh_per_second: float = 10.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        refresh_per_second = check_number("refresh_per_second", refresh_per_second, above=0)
        if verbose is not None:
            chosen_verbose(verbose)
        self.verbose = verbose
        self._interval_s = 1 / refresh_per_second
        self._console = console
        self._clock = clock
        self._train_pace = Pace()
        self._test_pace = Pace()
        self._reset()

    def _reset(self) -> None:
        self._display: Display | None = None
        self._is_shown = False
        self._in_fit = False
        self._due_s = NEVER
        self._quiet_until_s = -NEVER
        self._title = self._phase = ""
        self._total: int | None = None
        self._trained = 0  # the training's batches, while a validation is shown
        self._metrics: list[tuple[str, str]] = []
        self._done = 0
        self._began_s = 0.0
        self._pace = self._train_pace
        # The number of batches in the first epoch, for data of unknown length.
        self._train_steps: int | None = None
        self._test_steps: dict[str, int | None] = {}  # by the name of the validation set

    def close(self) -> None:
        """Close the display. Further calls do nothing.

        The bar of an interrupted run stays, so that you see how far it came.
        """
        if self._is_shown:
            self._draw(self._clock(), None)
        self._close(erase=False)

    def _close(self, *, erase: bool) -> None:
        if self._display is not None:
            self._guarded(self._display.close, erase=erase)
        self._reset()

    # fit
    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._open()
        self._in_fit = True
        self._train_steps = self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        epochs = self.params.get("epochs") or epoch + 1
        self._metrics = []
        self._begin(
            f"Epoch {epoch + 1:>{len(str(epochs))}}/{epochs}", self._train_steps, self._train_pace
        )

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        # Like _advance, but without the call: this runs after every step.
        self._done = batch + 1
        if self._clock() >= self._due_s or self._pace.paused:
            self._advance(batch, logs)

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        self._phase, self._total, self._done = "", self._train_steps, batch + 1
        self._pace = self._train_pace
        self._pace.pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._train_steps is None:
            self._train_steps = self._trained if self._phase else self._done
        self._keep(self._shown(logs))

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._close(erase=True)

    # evaluate, and the validation in fit
    def on_test_begin(self, logs: Logs | None = None) -> None:
        if self._in_fit:
            if not self._phase:
                self._trained = self._done
            name = self._set_name
            total = self._test_steps.setdefault(name, self.params.get("validation_steps"))
            self._count(f"validating {name}".rstrip(), total, self._test_pace)
        else:
            self._open()
            self._begin("Evaluate", self.params.get("steps"), self._test_pace)

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        # In fit, the line keeps showing the training's values.
        self._advance(batch, None if self._in_fit else logs)

    def on_test_end(self, logs: Logs) -> None:
        if self._in_fit:
            if self._test_steps[self._set_name] is None:
                self._test_steps[self._set_name] = self._done
            return
        if self._clock() >= self._quiet_until_s:
            self._keep(self._shown(logs))
        self._close(erase=True)

    # predict
    def on_predict_begin(self, logs: Logs | None = None) -> None:
        self._open()
        self._begin("Predict", self.params.get("steps"), self._test_pace)

    def on_predict_batch_end(self, batch: int, logs: Logs) -> None:
        self._advance(batch, None)  # its logs are outputs

    def on_predict_end(self, logs: Logs | None = None) -> None:
        if self._quiet_until_s == -NEVER:  # otherwise nobody asked for it
            self._keep([])
        self._close(erase=True)

    # what they share
    def _open(self) -> None:
        """Find a display."""
        self.close()
        self.add_cleanup(self.close)  # an interrupted run must release the terminal, too
        given = self.params.get("verbose", "auto") if self.verbose is None else self.verbose
        verbose = chosen_verbose(given)
        if not self.model.is_global_zero:
            return
        self._train_pace, self._test_pace = Pace(), Pace()
        self._display = display_for(verbose, self._interval_s, self._console, self._clock)
        if self._display is None:
            return
        now = self._clock()
        self._due_s = now if self._display.shows_at_once else now + self._display.interval_s
        if verbose == "auto" and self.params.get("stage") != "fit":
            self._quiet_until_s = now + QUIET_S
            self._due_s = max(self._due_s, self._quiet_until_s)

    def _begin(self, title: str, total: int | None, pace: Pace) -> None:
        self._title, self._began_s = title, self._clock()
        self._count("", total, pace)

    def _count(self, phase: str, total: int | None, pace: Pace) -> None:
        """Begin to count batches."""
        self._phase, self._total, self._done, self._pace = phase, total, 0, pace
        pace.pause()
        now = self._clock()
        if now >= self._due_s:
            self._draw(now, None)

    def _advance(self, batch: int, logs: Logs | None) -> None:
        """Note that a batch is done. The first lines are all that runs between two drawings."""
        now = self._clock()
        self._done = batch + 1
        if now >= self._due_s:
            self._draw(now, logs)
        elif self._pace.paused:
            self._pace.update(self._done, now)

    def _draw(self, now: float, logs: Logs | None) -> None:
        display = self._display
        if display is None:
            return
        if logs is not None:
            self._metrics = self._shown(logs)
        if self._done:
            self._pace.update(self._done, now)
        total = self._total if self._total is None or self._done <= self._total else None
        steps_per_s = self._pace.steps_per_s
        samples = None  # the validation's batches may have another size
        if (batch_size := self.params.get("batch_size")) and not self._phase:
            samples = batch_size * self.model.world_size
        moment = Moment(
            self._title,
            self._done,
            total,
            self._phase,
            self._metrics,
            steps_per_s,
            steps_per_s * samples if steps_per_s and samples else None,
            now - self._began_s,
        )
        self._is_shown = True
        # Reading the logs may have waited for a device. That isn't a cost of drawing.
        began_s = self._clock()
        self._guarded(display.show, moment)
        if self._display is not None:
            ended_s = self._clock()
            spent_s = ended_s - began_s
            self._due_s = ended_s + max(display.interval_s, spent_s / LARGEST_SHARE)

    @property
    def _set_name(self) -> str:
        """The name of the running validation's set."""
        return str(self.params.get("validation_set", ""))

    def _shown(self, logs: Logs) -> list[tuple[str, str]]:
        """Return the values as text, without those that a step logs with `prog_bar=False`."""
        hidden, sets = self.model._fitkit.hidden_names, self.params.get("validation_sets", ())
        return shown_metrics((n, v) for n, v in logs.items() if not hidden & logged_as(n, sets))

    def _keep(self, metrics: list[tuple[str, str]]) -> None:
        if self._display is not None:
            self._is_shown = False
            elapsed_s = self._clock() - self._began_s
            self._guarded(self._display.keep, self._title, elapsed_s, metrics)

    def _guarded(self, act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Show something. If the terminal is gone, the display ends and training continues."""
        try:
            act(*args, **kwargs)
        except (OSError, ValueError) as error:
            if not is_lost(error):
                raise
            display, self._display = self._display, None
            self._is_shown = False
            self._due_s = NEVER
            if display is not None:
                with where_possible():
                    display.close(erase=True)


def logged_as(name: str, sets: Iterable[str] = ()) -> set[str]:
    """Return the names under which a step may have logged a value of the logs.

    Args:
        name: its name in the logs.
        sets: the names of the validation sets, if there are several.
    """
    plain = [name, name.removeprefix("val_")]
    for prefix in (f"val_{one}_" for one in sets):
        if name.startswith(prefix):
            own = name.removeprefix(prefix)
            plain += [own, f"val_{own}"]
    return {*plain, *(n.removesuffix(end) for n in plain for end in ("_step", "_epoch"))}


class Pace:
    """Steps per second, averaged over the last seconds. Pauses don't count.

    The step after a pause isn't measured, because it may include compiling and starting workers.

    Attributes:
        steps_per_s: the speed; None until known.
        paused: whether the next update only starts the measurement.
    """

    window_s: float = 3.0

    def __init__(self) -> None:
        self.steps_per_s: float | None = None
        self.paused: bool = True
        self._steps = 0
        self._since_s = 0.0
        self._measured_s = 0.0

    def pause(self) -> None:
        """Forget the time of the last step."""
        self.paused = True

    def update(self, steps: int, now_s: float) -> None:
        """Record that so many steps were done by that time."""
        passed_s, done = now_s - self._since_s, steps - self._steps
        if not self.paused and (passed_s <= 0 or done <= 0):
            return
        if not self.paused:
            self._measured_s += passed_s
            weight = min(1.0, passed_s / min(self._measured_s, self.window_s))
            before = self.steps_per_s or 0.0
            self.steps_per_s = before + weight * (done / passed_s - before)
        self.paused = False
        self._steps, self._since_s = steps, now_s


def with_built_in(callbacks: CallbackList, verbose: Any, *built_in: Callback) -> CallbackList:
    """Add fitkit's callbacks after the user's, so that they see what the user's add to the logs.

    Callbacks with `comes_last` follow: a callback that saves must see what all others have done.
    A backup comes at the very end, since a run resumes from it with the files that the others
    wrote.
    """

    def order(callback: Callback) -> tuple[bool, bool]:
        last = callback.comes_last
        return last, last and bool(getattr(callback, "restores", False))

    added: list[Callback] = list(built_in)
    if verbose != 0 and not any(isinstance(c, ProgressBar) for c in callbacks.callbacks):
        added.append(ProgressBar(verbose=verbose))
    together = [*callbacks.callbacks, *added]
    return CallbackList(sorted(together, key=order))
