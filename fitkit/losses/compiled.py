"""The loss of a whole net: one for each output, weighed and summed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from fitkit.arguments import check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.losses.guards import check_learns
from fitkit.losses.loss import Count, KnownLoss, Loss, resolve
from fitkit.losses.own import OwnLoss
from fitkit.outputs import (
    SINGLE,
    LossHint,
    by_output,
    log_name,
    named_outputs,
    targets_by_output,
    weights_by_output,
)
from fitkit.trees import leaves

Losses = Loss | list[Loss | None] | dict[Hashable, Loss | None]
Scales = float | list[float] | dict[Hashable, float]


@dataclasses.dataclass
class _OutputLoss:
    """One output's share of the loss; `output` is None where a loss takes all outputs at once.

    `classes` is the number of classes where the first batch's targets were class indices.
    """

    output: Hashable
    loss: Loss
    scale: float = 1.0
    classes: int | None = None

    @property
    def name(self) -> str:
        return log_name(str(self.output), "loss")


@dataclasses.dataclass
class Term:
    """One output's loss in a batch: its log's name, its loss weight, its mean, and over what."""

    name: str
    scale: float
    value: torch.Tensor
    count: Count


def total_of(terms: list[Term]) -> torch.Tensor:
    """The sum of several outputs' losses by their loss weights."""
    values = [t.value if t.scale == 1.0 else t.scale * t.value for t in terms]
    return functools.reduce(torch.add, values)


@dataclasses.dataclass
class _Plan:
    """Which loss meets which output, for the outputs that the net was seen to give."""

    outputs: list[Any]
    parts: list[_OutputLoss]

    @property
    def is_whole(self) -> bool:
        return self.parts[0].output is None

    @property
    def trained(self) -> list[Any]:
        """The outputs that have a loss."""
        return list(dict.fromkeys(part.output for part in self.parts))

    def pairs(self, prediction: Any, target: Any) -> list[tuple[_OutputLoss, Any, Any]]:
        """Each part with its prediction and its target."""
        if self.is_whole:
            return [(self.parts[0], prediction, target)]
        predictions: dict[Any, Any] = named_outputs(prediction)
        targets = self.targets(target)
        return [(part, predictions[part.output], targets[part.output]) for part in self.parts]

    def targets(self, target: Any) -> dict[Any, Any]:
        """The target of each trained output; None for one that has none."""
        if self.is_whole:
            return {None: target}
        given = targets_by_output(target, self.outputs, self.trained)
        return {name: given.get(name) for name in self.trained}

    def weights(self, weight: Any) -> dict[Any, Any]:
        """The sample weights of each part; parts without any are left out."""
        outputs = [None] if self.is_whole else self.outputs
        return weights_by_output(weight, outputs, self.trained)


class CompiledLoss:
    """What `compile` was given as loss: called with a batch, it gives the total and its parts.

    It remembers what its first batch looked like; `begin` gives one that remembers nothing.

    Args:
        loss: what `resolve` takes; a list or dict of that, one an output, with None for an output
            that isn't trained; or None: the loss that the net itself computes. A name or torch loss
            given once holds for every output, and the total is the sum. A function or module of
            one's own given once for several outputs gets all of them.
        loss_weights: what multiplies the loss, or a list or dict of that, one an output.

    Raises:
        ConfigurationError: whatever can be refused before data are seen.
    """

    def __init__(self, loss: Any, loss_weights: Any = None) -> None:
        self._losses = _resolved(loss)
        self._all: list[Loss] = [loss for loss in leaves(self._losses) if loss is not None]
        self._scales = _checked_scales(loss_weights, self._losses)
        self._forget()

    def begin(self) -> CompiledLoss:
        """This loss for one call of a verb, so that calls can nest."""
        fresh = copy.copy(self)
        fresh._forget()
        return fresh

    def _forget(self) -> None:
        # A net may give other outputs in training than in evaluation, so there may be two plans.
        self._plans: dict[tuple[Hashable, ...], _Plan] = {}
        self._plan: _Plan | None = None  # the one last checked
        # The loss of a net with one output, where prediction and target need no unwrapping.
        self._only: Loss | None = None
        self._needs_unwrapping = False

    @property
    def part_names(self) -> list[str]:
        """The keys of the parts: empty before `check`, and where there is one loss."""
        if self._plan is None or len(self._plan.parts) < 2:
            return []
        return [part.name for part in self._plan.parts]

    @property
    def trained(self) -> list[Any]:
        """The outputs that have a loss; none before `check`, and where a loss takes all at once."""
        return [] if self._plan is None or self._plan.is_whole else self._plan.trained

    def may_count(self, targets: list[Any] | None) -> bool:
        """Whether some loss may be a mean over something else than samples.

        Args:
            targets: all that there will be; None where that isn't known.
        """
        known = None if targets is None else list(leaves(targets))
        return any(loss.may_count(known) for loss in self._all)

    def counted(
        self, prediction: Any, target: Any, weight: Any, *, is_part: bool
    ) -> tuple[torch.Tensor, Count]:
        """The loss of a net with one loss, and what its mean was taken over: None for samples."""
        if self._only is not None and self._plan is not None and weight is None:
            classes = self._plan.parts[0].classes
            return self._only.counted(prediction, target, None, classes, is_part=is_part)
        (term,) = self.terms(prediction, target, weight, is_part=is_part)
        return total_of([term]), term.count

    @property
    def own(self) -> OwnLoss | None:
        """The loss that the net computes itself, where it does."""
        return self._losses if isinstance(self._losses, OwnLoss) else None

    def counts(self, target: Any) -> list[Count]:
        """What each output's mean is taken over, of a batch whose forward hasn't run."""
        assert self._plan is not None
        targets = self._plan.targets(target)
        return [
            part.loss.count(None, targets[part.output], part.classes) for part in self._plan.parts
        ]

    def terms(self, prediction: Any, target: Any, weight: Any, *, is_part: bool) -> list[Term]:
        """The losses of a batch's several outputs, each with what its mean was taken over."""
        return self._terms(prediction, target, weight, counts=True, is_part=is_part)

    def _terms(
        self, prediction: Any, target: Any, weight: Any, *, counts: bool, is_part: bool = False
    ) -> list[Term]:
        plan = self._plan_of(prediction)
        weights = plan.weights(weight)
        found = []
        for part, its_prediction, its_target in plan.pairs(prediction, target):
            its_weight, loss, count = weights.get(part.output), part.loss, None
            if counts:
                value, count = loss.counted(
                    its_prediction, its_target, its_weight, part.classes, is_part=is_part
                )
            elif its_weight is None:
                value = loss(its_prediction, its_target)
            else:
                value = loss.weighted(its_prediction, its_target, its_weight)
            found.append(Term(part.name, part.scale, value, count))
        return found

    @property
    def direct(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """The loss of a net with one output, for a tensor and its target; None before `check`, and
        where a batch must be taken apart for it."""
        return None if self._only is None else self._only.__call__

    def of_each(self, targets: list[Any]) -> Callable[[Any, Any], torch.Tensor] | None:
        """A function that gives each sample's loss (N,), whose mean over any samples is the loss.

        Args:
            targets: all that there will be, as far as they are known.

        Returns:
            None before `check`, and where the loss isn't, or may not be, such a mean.
        """
        only = self._only
        if not isinstance(only, KnownLoss) or not targets:
            return None
        tensors = all(isinstance(target, torch.Tensor) for target in targets)
        return only.of_each if tensors and all(map(only.joins, targets)) else None

    @property
    def has_user_code(self) -> bool:
        """Whether code of the user's acts in some loss."""
        return any(loss.has_user_code for loss in self._all)

    def hint(self, output: Hashable) -> LossHint:
        """What `output`'s loss says of its numbers; before `check` that of a net with one output.

        The hint is empty where there is no loss, or where it isn't known yet.
        """
        if isinstance(self._losses, Loss):
            return self._losses.hint
        if self._plan is not None:
            losses = [part.loss for part in self._plan.parts if part.output == output]
        else:
            losses = self._all if output == SINGLE and len(self._losses) == 1 else []
        return losses[0].hint if losses else LossHint()

    def check(self, prediction: Any, target: Any) -> None:
        """Decide which loss meets which output, and refuse a first batch that can't be meant.

        Call it with the first batch of each kind of data (training, validation); it reads values
        back from the device.

        Raises:
            ConfigurationError: outputs, losses and targets differ in structure, or a loss's own
                check failed.
        """
        plan = self._plan = self._plan_of(prediction)
        needs_unwrapping = len(plan.parts) > 1 or plan.parts[0].scale != 1.0
        for part, its_prediction, its_target in plan.pairs(prediction, target):
            with _naming(part.output):
                part.loss.check(its_prediction, its_target)
                part.classes = part.loss.count_classes(its_prediction, its_target)
            if its_prediction is not prediction or its_target is not target:
                needs_unwrapping = True
        # Once needed, always: training and validation data may differ in structure.
        self._needs_unwrapping = self._needs_unwrapping or needs_unwrapping
        self._only = None if self._needs_unwrapping else plan.parts[0].loss

    def check_labels(self, target: Any) -> None:
        """Refuse what are no labels for the losses in `target`, perhaps a whole data set's.

        Does nothing before `check`, and for losses that take any number.

        Raises:
            ConfigurationError: with the range that the labels have and the one they should have.
        """
        plan = self._plan
        if plan is None or target is None:
            return
        labels = plan.targets(target)
        for part in plan.parts:
            if labels[part.output] is not None:
                with _naming(part.output):
                    part.loss.check_labels(labels[part.output], part.classes)

    def check_learns(self, loss: torch.Tensor) -> None:
        """Refuse a training's first `loss` where no parameter's gradient can come from it.

        Does nothing where gradients are off.

        Raises:
            ConfigurationError: with what may have cut the gradient off.
        """
        label = self._losses.label if isinstance(self._losses, Loss) else "The loss"
        check_learns(label, loss)

    def __call__(
        self, prediction: Any, target: Any, weight: Any = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a batch.

        Args:
            prediction: what the net gave.
            target: by the same structure, or what belongs to the single output.
            weight: sample weights (`formulas.weighted_mean`): one tensor for all outputs, or a
                list or dict.

        Returns:
            The total, to be differentiated; and each output's loss before its loss weight,
            detached, under the key that logs give it. The latter is empty with one loss.
        """
        if self._only is not None:
            if weight is None:
                return self._only(prediction, target), {}
            if isinstance(weight, torch.Tensor):
                return self._only.weighted(prediction, target, weight), {}
        terms = self._terms(prediction, target, weight, counts=False)
        parts = {term.name: term.value.detach() for term in terms} if len(terms) > 1 else {}
        return total_of(terms), parts

    def to(self, device: torch.device | str) -> None:
        """Move class weights and other buffers of the losses."""
        for loss in self._all:
            loss.to(device)

    def _plan_of(self, prediction: Any) -> _Plan:
        reads_itself = isinstance(self._losses, OwnLoss)
        outputs: tuple[Hashable, ...] = () if reads_itself else tuple(named_outputs(prediction))
        if outputs not in self._plans:
            self._plans[outputs] = self._planned(list(outputs))
        return self._plans[outputs]

    def _planned(self, outputs: list[Any]) -> _Plan:
        losses = self._losses
        if isinstance(losses, OwnLoss):
            return _Plan(outputs, [_OutputLoss(None, losses, self._whole_scale())])
        if isinstance(losses, Loss):
            if losses.takes_whole and len(outputs) > 1:
                return _Plan(outputs, [_OutputLoss(None, losses, self._whole_scale())])
            by_name: dict[Any, Any] = dict.fromkeys(outputs, losses)
        else:
            by_name = _structured(losses, outputs, "loss")
        scales = self._scales_for(outputs)
        parts = [
            _OutputLoss(name, loss, scales.get(name, 1.0))
            for name, loss in by_name.items()
            if loss is not None
        ]
        if not parts:
            raise ConfigurationError(f"None of the net's outputs {outputs} has a loss.")
        return _Plan(outputs, parts)

    def _whole_scale(self) -> float:
        if isinstance(self._scales, (list, dict)):
            raise ConfigurationError(
                f"loss_weights={self._scales} has an entry for each output, but one loss takes "
                "all outputs at once. Give a number."
            )
        return 1.0 if self._scales is None else self._scales

    def _scales_for(self, outputs: list[Any]) -> dict[Any, float]:
        if self._scales is None:
            return {}
        if not isinstance(self._scales, (list, dict)):
            if len(outputs) > 1:
                raise ConfigurationError(
                    f"loss_weights={self._scales} is one number, but the net has {len(outputs)} "
                    f"outputs: {outputs}. Give a list in that order or a dict by name."
                )
            return {outputs[0]: self._scales}
        return _structured(self._scales, outputs, "loss_weights")


def _resolved(loss: Any) -> Losses:
    if loss is None:
        return OwnLoss()
    if isinstance(loss, Mapping):
        entries: Losses = {key: _entry(value) for key, value in loss.items()}
    elif isinstance(loss, (list, tuple)):
        entries = [_entry(value) for value in loss]
    else:
        return resolve(loss)
    if not any(leaves(entries)):
        raise ConfigurationError(
            f"loss={describe(loss)} trains no output: at least one needs a loss. "
            "loss=None alone stands for the net's own loss."
        )
    return entries


def _entry(loss: Any) -> Loss | None:
    if isinstance(loss, (list, tuple, Mapping)):
        raise ArgumentTypeError(
            f"loss has the entry {describe(loss)}, but each output has one loss. Add losses up in "
            "a callable (prediction, target)."
        )
    return None if loss is None else resolve(loss)


def _checked_scales(scales: Any, losses: Losses) -> Scales | None:
    if scales is None:
        return None
    if not isinstance(scales, (list, tuple, Mapping)):
        check_number("loss_weights", scales)
        return float(scales)
    by_key = dict(scales if isinstance(scales, Mapping) else enumerate(scales))
    for key, value in by_key.items():
        check_number(f"loss_weights[{key!r}]", value)
    if isinstance(scales, Mapping):
        unknown = [key for key in scales if isinstance(losses, dict) and key not in losses]
        if unknown:
            raise ConfigurationError(
                f"loss_weights names {unknown}, but loss has entries for {list(losses)}."  # type: ignore[arg-type]
            )
        return {key: float(value) for key, value in by_key.items()}
    if isinstance(losses, (list, dict)) and len(losses) != len(scales):
        raise ConfigurationError(
            f"loss_weights has {len(scales)} entries, but loss has {len(losses)}."
        )
    return [float(value) for value in scales]


def _structured(value: Any, outputs: list[Any], what: str) -> dict[Any, Any]:
    """A list or dict by output names, also for a net with one output."""
    if len(outputs) == 1 and len(value) != 1:
        raise ConfigurationError(
            f"{what} has {len(value)} entries, but the net has one output. Give one."
        )
    return by_output(value, outputs, what)


@contextlib.contextmanager
def _naming(output: Hashable) -> Iterator[None]:
    """Say in errors which of several outputs they are about."""
    try:
        yield
    except ConfigurationError as error:
        if output is None or output == SINGLE:
            raise
        raise type(error)(f"Output {output!r}: {error}") from None
