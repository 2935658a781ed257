"""What a fit reads: this rank's share of its data, cut into epochs, from where the training is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fitkit.data.batches import Source, Stream
from fitkit.data.draws import DataDraws, draws_of_fit
from fitkit.distributed.collectives import Collectives
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ConfigurationError, warn
from fitkit.module import Module
from fitkit.progress import Progress
from fitkit.pulse import heard
from fitkit.random_states import random_state, set_random_state
from fitkit.training.data_wait import DataWait
from fitkit.training.resume import check_data, facts_of
from fitkit.training.settings import FitArguments
from fitkit.training.surroundings import rank_source
from fitkit.typing import PlainData


class FitData:
    """The data of one call of `fit` on this rank.

    Args:
        model: the model to train.
        arguments: the arguments of `fit`.

    Attributes:
        source: this rank's share.
        stream: cuts it into epochs.
        place: where the training is. `Fit.progress` adds the steps of the pass that runs.
        draws: what the data draw with.
        wait: how long the first epoch waited for its batches.

    Ranks:
        Collective.
    """

    def __init__(self, model: Module, arguments: FitArguments) -> None:
        self._model, self._arguments = model, arguments
        strategy: Strategy = model._fitkit.compilation.strategy
        self._collectives: Collectives = strategy.collectives
        # A process that computes on several devices has a random state on each.
        self._devices: Sequence[torch.device] | None = (
            strategy.devices if strategy.replicas > 1 else None
        )
        shares, resumed = strategy.data_ranks.world_size, arguments.resumed
        self.draws: DataDraws = draws_of_fit(resumed, self._collectives)
        arguments.source.draws = self.draws
        for name, held_out in arguments.held_out.items():
            held_out.draws = self.draws.within("validation", name)
        steps = arguments.steps_per_epoch
        self.source: Source = rank_source(
            model, arguments.source, training=True, steps=None if steps is None else steps * shares
        )
        first = arguments.initial_epoch
        self.place: Progress = Progress(epoch=first, number=first, shares=shares)
        if resumed is not None:
            self.place = resumed.for_rank(self._collectives.rank, shares)
        self.draws.go_on(self.place)
        self.stream: Stream = Stream(self.source, self.place, steps)
        if resumed is not None:
            self._continue(resumed)
        self.wait: DataWait = DataWait(strategy.device, self.source)

    def _continue(self, resumed: Progress) -> None:
        """Continue in the data where a training was interrupted."""
        ranks = self._collectives.world_size
        if len(resumed.random) != ranks:
            warn(
                f"Training continues with {ranks} ranks instead of {len(resumed.random)}. Each "
                "remaining sample of the epoch is used once, but in other batches than before."
            )
        check_data(self.source, resumed)
        if resumed.seed is not None and hasattr(self.source.whole, "seed"):
            self.source.whole.seed = resumed.seed
        self.stream.take_loader_state(resumed.loader)

    @property
    def passes_are_epochs(self) -> bool:
        """Whether an epoch ends where a pass over the data does (without `steps_per_epoch`)."""
        return self._arguments.steps_per_epoch is None

    def cut_for(self, epoch: int) -> bool:
        """Cut the data into batches of the size that a callback gives an epoch.

        Returns:
            Whether the size has changed.

        Ranks:
            Collective.
        """
        size = self._arguments.batch_size_in(epoch)
        if size is None or size == self.source.batch_size:
            return False
        self._arguments.source.cut_into(size)
        self.source = rank_source(self._model, self._arguments.source, training=True)
        self.stream = Stream(self.source, self.place)
        return True

    def batches(self, epoch: int, done: int) -> Iterator[Any]:
        """Return an epoch's batches as they are read, but those that are done."""
        read = self.stream.epoch(done)
        if epoch == self._arguments.initial_epoch:
            read = self.wait.timed(read)
        return heard(read, "training", epoch, done)

    def ran_out(self, epoch: int, batches: int) -> bool:
        """Return whether an epoch got no batches; if it got too few, warn and end training.

        Raises:
            ConfigurationError: it was the first epoch.
        """
        model, asked = self._model, self._arguments.steps_per_epoch
        if batches >= (asked or 1) or (model.stop_training and batches > 0):
            return False
        if batches == 0 and epoch == self._arguments.initial_epoch:
            raise ConfigurationError("x is empty: it gave no batches.")
        wanted = f" of the {asked} that steps_per_epoch asks for" if asked else ""
        warn(f"x ended in epoch {epoch + 1} after {batches} batches{wanted}; training ends here.")
        model.stop_training = True
        return batches == 0

    # ------------------------------------------------------------------ what a checkpoint has

    def restore_random_state(self) -> None:
        """Restore this rank's random state of the checkpoint, once."""
        for state in self.place.random:
            set_random_state(state, self.stream.generators, self._devices)
        self.place.random = []

    def saved(self, *, ends_pass: bool) -> PlainData:
        """Return the entries of `Progress` that say how the data go on, for all ranks.

        Args:
            ends_pass: whether the next batch belongs to a new pass.

        Ranks:
            Collective.
        """
        drawn = random_state(self.stream.generators, self._devices)
        mine = (*self.place.began, drawn, self.draws.state())
        began, random, orders = zip(*self._collectives.gather(mine), strict=True)
        return {
            "began": [*began],
            "random": [*random],
            "orders": [*orders],
            "seed": getattr(self.source.whole, "seed", None),
            "loader": self.stream.loader_state(ends_pass=ends_pass),
            "data": facts_of(self.source),
        }
