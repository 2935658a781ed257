"""A training among replicas that come and go: what one tells another that joins it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fitkit.callbacks import Callback
from fitkit.errors import ConfigurationError
from fitkit.training.progress import Progress, seed_of, set_seed_of
from fitkit.training.resuming import take_place
from fitkit.training.snapshot import checked_training, training_state
from fitkit.training.updates import Updater

if TYPE_CHECKING:
    from fitkit.training.fit_run import FitRun


class Joining(Callback):
    """Gives a training's whole state at an update, and takes another replica's over.

    Args:
        run: the training.
        updater: makes its updates.

    Raises:
        ConfigurationError: statistics of a batch over replicas, which can't wait for each other.
    """

    stops_alike = True

    def __init__(self, run: FitRun, updater: Updater) -> None:
        super().__init__()
        if run.compilation.sync_batchnorm:
            raise ConfigurationError(
                f"sync_batchnorm=True can't be kept under strategy={run.strategy.name!r}, whose "
                "replicas may leave amid a forward pass; running statistics are averaged in any "
                "case. Leave it out, or write strategy='ddp'."
            )
        self._run = run
        self._steps = 0  # of the epoch, with the one whose update is being made
        self.follow = updater.follow

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._steps = batch + 1

    def give(self, *, moved: bool) -> dict[str, Any]:
        """The state.

        Args:
            moved: whether to tell the place in the data, after the present update's batches.
        """
        run, model = self._run, self._run.model
        if moved:
            run.note(self._steps)
        return {
            "weights": model._weights_module().state_dict(),
            "training": training_state(model),
            "seed": seed_of(run.source),
            "progress": run.progress().as_dict() if moved else None,
            "place": self._place(),
        }

    def take(self, state: dict[str, Any], *, moves: bool) -> None:
        """Take over what another replica has given.

        Args:
            moves: whether to go on at its place in the data, too.

        Raises:
            ConfigurationError, CheckpointError: it trains something else, or elsewhere.
        """
        run, model = self._run, self._run.model
        if state["progress"] is None and state["place"] != self._place():
            raise ConfigurationError(
                f"Another replica begins at (epoch, step) {state['place']}, this one at "
                f"{self._place()}. Give all of them the same resume_from and initial_epoch."
            )
        model._weights_module().load_state_dict(state["weights"])
        checked_training(model, state["training"], "Another replica's training")()
        set_seed_of(run.source, state["seed"])
        if moves:
            progress = Progress.from_dict(state["progress"], "Another replica")
            # Its random numbers stay its own: two replicas shall not drop the same units.
            self._go_on(dataclasses.replace(progress, random=[None]))  # type: ignore[list-item]

    def _go_on(self, progress: Progress) -> None:
        """Go on at another's place."""
        run = self._run
        run.resumed = progress
        run.job.initial_epoch = progress.epoch
        take_place(run, progress)
        if run.warm_up is not None and progress.warm_up is not None:
            run.warm_up.go_on(progress.warm_up)

    def _place(self) -> list[int]:
        """Where this training begins, before its first update."""
        return [self._run.job.initial_epoch, self._run.steps_before]
