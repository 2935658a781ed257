"""What a verb was asked to do: its arguments, checked, as plain data."""

from __future__ import annotations

import copy
import dataclasses
import numbers
from typing import Any

import torch

from fitkit.arguments import (
    check_choice,
    check_count,
    check_number,
    describe,
)
from fitkit.callbacks.base import CallbackList
from fitkit.callbacks.display import chosen_verbose
from fitkit.data.arrays import check_alike
from fitkit.data.batches import Source
from fitkit.data.class_weights import ClassWeights
from fitkit.data.sources import (
    check_data_type,
    for_other_ranks,
    make_source,
    split_tail,
    validation_parts,
)
from fitkit.data.stream import check_readable
from fitkit.errors import ConfigurationError
from fitkit.training.progress import Progress


@dataclasses.dataclass
class FitJob:
    """One call of `fit`; the arguments are the verb's own.

    Raises:
        ArgumentTypeError, ConfigurationError: from the constructor, for any argument.
    """

    x: Any
    y: Any
    batch_size: int
    epochs: int
    verbose: int | str
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool | str
    class_weight: Any
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: Any

    def __post_init__(self) -> None:
        check_data_type(self.x)
        check_count("batch_size", self.batch_size)
        check_count("epochs", self.epochs)
        check_count("initial_epoch", self.initial_epoch, minimum=0)
        check_count("steps_per_epoch", self.steps_per_epoch, optional=True)
        check_count("validation_steps", self.validation_steps, optional=True)
        check_count("validation_batch_size", self.validation_batch_size, optional=True)
        check_number("validation_split", self.validation_split, minimum=0, below=1)
        chosen_verbose(self.verbose)
        check_choice("shuffle", self.shuffle, (True, False, "batch"))
        self._check_validation_freq()
        self.weights_by_class = (
            None if self.class_weight is None else ClassWeights(self.class_weight)
        )
        self.callback_list = CallbackList(self.callbacks)
        self.source: Source | None = None
        self.held_out: Source | None = None
        self.resumed: Progress | None = None

    def go_on_from(self, progress: Progress | None) -> None:
        """Begin where another fit was cut; None: at the beginning."""
        self.resumed = progress
        if progress is not None:
            self.initial_epoch = progress.epoch

    def _check_validation_freq(self) -> None:
        frequency = self.validation_freq
        if isinstance(frequency, (list, tuple, set)):
            if not all(
                isinstance(epoch, numbers.Integral)
                and not isinstance(epoch, bool)
                and int(epoch) >= 1
                for epoch in frequency
            ):
                raise ConfigurationError(
                    f"validation_freq={describe(frequency)}: a list holds epoch numbers from 1."
                )
        else:
            check_count("validation_freq", frequency)

    def validates_after(self, epoch: int) -> bool:
        """Whether epoch `epoch` (from 0) ends with a validation."""
        if isinstance(self.validation_freq, (list, tuple, set)):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % int(self.validation_freq) == 0

    def prepare(self, float_dtype: torch.dtype, ranks: int) -> None:
        """Make the training's and the validation's sources, before anything runs.

        Args:
            float_dtype: the dtype of the net's parameters.
            ranks: how many will train.

        Raises:
            ArgumentTypeError, ConfigurationError: data that can't be read, don't fit, or are
                fewer samples than ranks.
        """
        train, validation = (self.x, self.y, self.sample_weight), None
        if self.validation_data is not None:
            check_data_type(self.validation_data, "validation_data")
            validation = validation_parts(self.validation_data)
        elif self.validation_split:
            train, validation = split_tail(*train, self.validation_split)
        source = make_source(
            *train, batch_size=self.batch_size, shuffle=self.shuffle, float_dtype=float_dtype
        )
        check_readable(source, self.epochs - self.initial_epoch, self.steps_per_epoch)
        if source.samples is not None and source.samples < ranks:
            raise ConfigurationError(
                f"x has {source.samples} samples, but there are {ranks} ranks: each needs at "
                "least one. Use fewer devices."
            )
        self.source = source
        if validation is None:
            return
        self.held_out = make_source(
            *validation,
            batch_size=self.validation_batch_size or self.batch_size,
            float_dtype=float_dtype,
            name="validation_data",
        )
        check_readable(
            self.held_out,
            sum(self.validates_after(e) for e in range(self.initial_epoch, self.epochs)),
            self.validation_steps,
            name="validation_data",
        )
        check_alike(source, self.held_out)

    def for_other_ranks(self) -> FitJob:
        """The job as other processes get it: with sources in place of what the user passed."""
        job = copy.copy(self)
        job.x = job.y = job.sample_weight = job.validation_data = job.callbacks = None
        assert self.source is not None
        job.source = for_other_ranks(self.source)
        job.held_out = for_other_ranks(self.held_out)
        return job


@dataclasses.dataclass
class PassJob:
    """One call of `evaluate` or `predict`: a single pass over data."""

    x: Any
    y: Any
    batch_size: int
    verbose: int | str
    sample_weight: Any
    steps: int | None
    callbacks: Any

    def __post_init__(self) -> None:
        check_data_type(self.x)
        check_count("batch_size", self.batch_size)
        check_count("steps", self.steps, optional=True)
        chosen_verbose(self.verbose)
        self.callback_list = CallbackList(self.callbacks)
        self.source: Source | None = None

    def prepare(self, float_dtype: torch.dtype, ranks: int) -> None:
        """Make the source, before anything runs; as in `FitJob`, but for any number of samples."""
        self.source = make_source(
            self.x, self.y, self.sample_weight, batch_size=self.batch_size, float_dtype=float_dtype
        )

    def for_other_ranks(self) -> PassJob:
        """The job as other processes get it."""
        job = copy.copy(self)
        job.x = job.y = job.sample_weight = job.callbacks = None
        job.source = for_other_ranks(self.source)
        return job
