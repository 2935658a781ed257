"""The checked arguments of `fit`, `evaluate` and `predict`, and the data that they describe."""

from __future__ import annotations

import copy
import dataclasses
import fractions
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Literal, TypeAlias, TypeVar

import torch
from torch.utils.data import DataLoader

from fitkit.arguments import (
    check_choice,
    check_count,
    check_number,
    chosen_verbose,
    describe,
    keep_checked,
    plain,
)
from fitkit.callbacks.batch_sizes import batch_sizes_among, value_in
from fitkit.callbacks.callback_list import CallbackList, Callbacks
from fitkit.callbacks.monitor import is_due
from fitkit.data.arrays import check_alike
from fitkit.data.batches import Source, check_readable
from fitkit.data.sources import (
    check_data_type,
    for_other_ranks,
    make_source,
    set_label,
    split_tail,
    validation_sets,
)
from fitkit.errors import ConfigurationError
from fitkit.guests import OpenedData
from fitkit.losses.class_weights import ClassWeights, class_weights_of
from fitkit.progress import Progress
from fitkit.typing import Arrays, BatchData, Data, Verbose

Arguments = TypeVar("Arguments")

Transferring: TypeAlias = Callable[[BatchData, torch.device], BatchData]
"""A function that moves a batch to a device."""

Parts: TypeAlias = tuple[object, object, object]
"""Data as `x`, `y` and `sample_weight`."""


def parts_of_update(samples: int, ranks: int, size: int | None, *, is_fixed: bool) -> int:
    """How many batches of each rank make an update, by `effective_batch_size`.

    Args:
        samples: the samples of an update, on all ranks.
        ranks: the number of ranks that share the data.
        size: the most samples in a rank's batch. If the data make their own batches, exactly its
            samples, or None if they don't say.
        is_fixed: whether the data make their own batches.

    Raises:
        ConfigurationError: it can't be divided. The message names values that can.
    """
    given, among = f"effective_batch_size={samples}", f"{ranks} ranks" if ranks > 1 else "one rank"
    if size is None:
        raise ConfigurationError(
            f"{given} needs the number of samples in a batch, but x makes its own batches and has "
            "no batch_size. Give arrays, a Dataset or a DataLoader with a batch_size, or write "
            "accumulate_grad_batches=… instead."
        )
    step = ranks * size if is_fixed else ranks
    if samples % step:
        what = f"{among} with batches of {size}" if is_fixed else among
        below = samples // step * step
        nearest = f"{below} or {below + step}" if below else f"{step}"
        raise ConfigurationError(
            f"{given} can't be divided among {what}. Write {nearest}, or use another "
            f"number of devices{' or another batch_size in the loader' if is_fixed else ''}."
        )
    if is_fixed:
        return samples // step
    mine = samples // ranks
    # The fewest parts of equal size that aren't larger than a batch may be.
    parts = next(parts for parts in range(-(-mine // size), mine + 1) if mine % parts == 0)
    if 2 * (mine // parts) < min(size, mine):
        near = -(-mine // size) * size * ranks
        raise ConfigurationError(
            f"{given} gives each of {among} {mine} samples, which can't be divided into equal "
            f"batches of about batch_size={size} samples. The largest size that divides them is "
            f"{mine // parts}. Write effective_batch_size={near}, or another batch_size in fit."
        )
    return parts


@dataclasses.dataclass(frozen=True, eq=False)
class FitArguments:
    """One call of `fit`, with the method's own arguments.

    Attributes:
        callback_list, weights_by_class: what `callbacks` and `class_weight` stand for.
        source: the data to train on; see `prepared`.
        held_out: the data to validate on, by the sets' names. A single one has the empty name.
        accumulate: batches per update, if `effective_batch_size` says so.
        resumed: where a saved training stopped; None for a new one.
        transfer: moves a batch of these data to a device; None leaves that to the model.

    Raises:
        ArgumentTypeError, ConfigurationError: from the constructor, for any argument.
    """

    x: Data | None
    y: Arrays | None
    batch_size: int
    epochs: int
    verbose: Verbose
    callbacks: Callbacks
    validation_split: float
    validation_data: Data | None
    shuffle: bool | Literal["batch"]
    class_weight: Mapping[int, float] | None
    sample_weight: Arrays | None
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: float | Collection[int] | Mapping[str, int]
    callback_list: CallbackList = dataclasses.field(init=False)
    weights_by_class: ClassWeights | None = dataclasses.field(init=False)
    source: Source = dataclasses.field(init=False)
    held_out: dict[str, Source] = dataclasses.field(init=False, default_factory=dict)
    accumulate: int | None = dataclasses.field(init=False, default=None)
    resumed: Progress | None = dataclasses.field(init=False, default=None)
    transfer: Transferring | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        check_data_type(self.x)
        keep_checked(self, check_count, "batch_size", "epochs")
        keep_checked(self, check_count, "initial_epoch", minimum=0)
        optional = "steps_per_epoch", "validation_steps", "validation_batch_size"
        keep_checked(self, check_count, *optional, optional=True)
        keep_checked(self, check_number, "validation_split", minimum=0, below=1)
        vars(self)["verbose"] = plain(self.verbose)
        chosen_verbose(self.verbose)
        keep_checked(self, check_choice, "shuffle", choices=(True, False, "batch"))
        vars(self)["validation_freq"] = self._checked_validation_freq()
        weights = class_weights_of(self.class_weight)
        vars(self).update(callback_list=CallbackList(self.callbacks), weights_by_class=weights)

    def _checked_validation_freq(self) -> float | Collection[int] | Mapping[str, int]:
        frequency = plain(self.validation_freq)
        if isinstance(frequency, dict):
            if list(frequency) != ["batches"]:
                raise ConfigurationError(
                    f"validation_freq={describe(frequency)}: a dict says after how many batches, "
                    'like {"batches": 100}.'
                )
            return {"batches": check_count("validation_freq's batches", frequency["batches"])}
        if isinstance(frequency, numbers.Real) and not isinstance(frequency, numbers.Integral):
            if not 0 < float(frequency) <= 1:
                raise ConfigurationError(
                    f"validation_freq={describe(frequency)}: a fraction of the epoch is above 0 "
                    'and at most 1. Write an int for every so many epochs, {"batches": 100} for '
                    "every so many batches."
                )
            return float(frequency)
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
            return [int(epoch) for epoch in frequency]
        return check_count("validation_freq", frequency)

    @property
    def validates_within_epochs(self) -> bool:
        """Whether there are validations before the end of an epoch, too."""
        frequency = self.validation_freq
        return isinstance(frequency, dict) or (
            isinstance(frequency, numbers.Real) and float(frequency) < 1
        )

    def batches_between_validations(self, steps: int | None) -> fractions.Fraction:
        """How many batches, or parts of one, lie between two validations within an epoch.

        Args:
            steps: batches in the epoch; None if unknown.
        """
        frequency = self.validation_freq
        if isinstance(frequency, dict):
            return fractions.Fraction(frequency["batches"])
        assert isinstance(frequency, numbers.Real)
        assert steps is not None  # `prepared` has refused that
        # 0.2 is a fifth: as floats, 3 * 0.2 * 10 batches are a little more than 6.
        return fractions.Fraction(float(frequency)).limit_denominator(10**6) * steps

    def validates_after(self, epoch: int) -> bool:
        """Whether epoch `epoch` (from 0) ends with a validation."""
        return is_due(self.validation_freq, epoch)

    def reading(self, opened: OpenedData) -> FitArguments:
        """Return these arguments for what another library's object stands for."""
        held_out = self.validation_data
        return _with(
            self,
            x=opened.x,
            validation_data=opened.validation_data if held_out is None else held_out,
            callback_list=CallbackList([self.callback_list.callbacks, opened.callback]),
            transfer=opened.transfer,
        )

    def resumed_at(self, progress: Progress) -> FitArguments:
        """Return these arguments, to continue where a saved training stopped."""
        return _with(self, resumed=progress, initial_epoch=progress.epoch)

    def prepared(
        self, float_dtype: torch.dtype, ranks: int, effective_batch_size: int | None
    ) -> FitArguments:
        """Return these arguments with the training's and the validation's sources.

        Args:
            float_dtype: the dtype of the net's parameters.
            ranks: the number of ranks that will train.
            effective_batch_size: samples per update, by which a rank's batches are cut.

        Raises:
            ArgumentTypeError, ConfigurationError: the data can't be read, don't fit, or have fewer
                samples than there are ranks.
        """
        train: Parts = (self.x, self.y, self.sample_weight)
        validation: dict[str, Parts] = {}
        if self.validation_data is not None:
            validation = validation_sets(self.validation_data, self.x)
        elif self.validation_split:
            train, validation[""] = split_tail(*train, self.validation_split)
        batch_size, accumulate = self.batch_size, None
        size_by_epoch = self.batch_size_in(self.initial_epoch)
        if size_by_epoch is not None:
            self._check_batch_sizes(effective_batch_size)
            batch_size = size_by_epoch
        if effective_batch_size is not None:
            loader = train[0] if isinstance(train[0], DataLoader) else None
            size = batch_size if loader is None else loader.batch_size
            accumulate = parts_of_update(
                effective_batch_size, ranks, size, is_fixed=loader is not None
            )
            batch_size = effective_batch_size // ranks // accumulate
        source = make_source(
            *train, batch_size=batch_size, shuffle=self.shuffle, float_dtype=float_dtype
        )
        if effective_batch_size is not None and source.batch_size is None:  # an iterable of batches
            parts_of_update(effective_batch_size, ranks, None, is_fixed=True)
        check_readable(source, self.epochs - self.initial_epoch, self.steps_per_epoch)
        if size_by_epoch is not None:
            source.cut_into(size_by_epoch)  # refuses data that make their own batches
        if source.samples is not None and source.samples < ranks:
            raise ConfigurationError(
                f"x has {source.samples} samples, but there are {ranks} ranks: each needs at "
                "least one. Use fewer devices.",
                code="FK050",
            )
        held_out = {
            name: self._held_out(source, parts, float_dtype, set_label(name))
            for name, parts in validation.items()
        }
        for one in (source, *held_out.values()):
            one.transfer = self.transfer
        return _with(self, source=source, held_out=held_out, accumulate=accumulate)

    def batch_size_in(self, epoch: int) -> int | None:
        """Return the samples in an epoch's batches; None if no callback sets them by epoch."""
        sizes = batch_sizes_among(self.callback_list.callbacks)
        return (value_in(sizes, epoch, None) or self.batch_size) if sizes else None

    def _check_batch_sizes(self, effective_batch_size: int | None) -> None:
        """Refuse arguments by which an epoch's batches aren't one pass, or have a size already."""
        for name, given in (
            ("fit(steps_per_epoch=…)", self.steps_per_epoch),
            ("compile(effective_batch_size=…)", effective_batch_size),
        ):
            if given is not None:
                raise ConfigurationError(
                    f"A callback sets the batch size by epoch, which {name} doesn't allow: leave "
                    "it out. Each epoch is then a pass over the data, in batches of its size."
                )

    def _held_out(
        self, source: Source, validation: Parts, float_dtype: torch.dtype, name: str
    ) -> Source:
        """Return a source to validate on, which fits the one to train on."""
        held_out = make_source(
            *validation,
            batch_size=self.validation_batch_size or self.batch_size,
            float_dtype=float_dtype,
            name=name,
        )
        if self.validates_within_epochs:
            self._check_validates_within(source, held_out, name)
        check_readable(
            held_out,
            sum(self.validates_after(e) for e in range(self.initial_epoch, self.epochs)),
            self.validation_steps,
            name=name,
        )
        check_alike(source, held_out, name)
        return held_out

    def _check_validates_within(self, source: Source, held_out: Source, name: str) -> None:
        """Refuse data that can't be validated on several times per epoch, or at unknown batches."""
        given = f"validation_freq={describe(self.validation_freq)}"
        unknown = source.steps is None and self.steps_per_epoch is None
        if unknown and not isinstance(self.validation_freq, dict):
            raise ConfigurationError(
                f"{given} is a fraction of the epoch, but x has no known number of batches. Write "
                'validation_freq={"batches": 100}, or give steps_per_epoch=….'
            )
        if not held_out.repeatable and self.validation_steps is None:
            raise ConfigurationError(
                f"{given} validates several times, but {name} is an iterator, which can be read "
                "once. Give validation_steps=… to take that many batches each time, or "
                "data that can be read again (a list of batches, a DataLoader, a Dataset).",
                code="FK021",
            )

    def for_other_ranks(self) -> FitArguments:
        """Return these arguments for other processes: with sources in place of the user's data."""
        return _with(
            self,
            **dict.fromkeys(("x", "y", "sample_weight", "validation_data", "callbacks")),
            source=for_other_ranks(self.source),
            held_out={name: for_other_ranks(one) for name, one in self.held_out.items()},
        )


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluateArguments:
    """One call of `evaluate` or `predict`: a single pass over data.

    Attributes:
        callback_list: what `callbacks` stands for.
        source: the data; see `prepared`.
        transfer: as in `FitArguments`.
    """

    x: Data | None
    batch_size: int
    verbose: Verbose
    steps: int | None
    callbacks: Callbacks
    y: Arrays | None = None
    sample_weight: Arrays | None = None
    callback_list: CallbackList = dataclasses.field(init=False)
    source: Source = dataclasses.field(init=False)
    transfer: Transferring | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        check_data_type(self.x)
        keep_checked(self, check_count, "batch_size")
        keep_checked(self, check_count, "steps", optional=True)
        vars(self)["verbose"] = plain(self.verbose)
        chosen_verbose(self.verbose)
        vars(self)["callback_list"] = CallbackList(self.callbacks)

    def reading(self, opened: OpenedData) -> EvaluateArguments:
        """Return these arguments for what another library's object stands for."""
        callbacks = CallbackList([self.callback_list.callbacks, opened.callback])
        return _with(self, x=opened.x, callback_list=callbacks, transfer=opened.transfer)

    def prepared(
        self, float_dtype: torch.dtype, ranks: int, effective_batch_size: int | None
    ) -> EvaluateArguments:
        """Return these arguments with their source. Any number of samples is allowed."""
        source = make_source(
            self.x, self.y, self.sample_weight, batch_size=self.batch_size, float_dtype=float_dtype
        )
        source.transfer = self.transfer
        return _with(self, source=source)

    def for_other_ranks(self) -> EvaluateArguments:
        """Return these arguments for other processes."""
        return _with(
            self,
            **dict.fromkeys(("x", "y", "sample_weight", "callbacks")),
            source=for_other_ranks(self.source),
        )


def _with(arguments: Arguments, **values: object) -> Arguments:
    """Return a copy of a call's arguments with other values, which aren't checked again."""
    made = copy.copy(arguments)
    vars(made).update(values)
    return made
