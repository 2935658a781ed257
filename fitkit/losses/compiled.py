"""The loss of a whole net: those of its outputs, weighed and summed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fitkit.arguments import check_number, describe
from fitkit.errors import ConfigurationError
from fitkit.losses.class_weights import ClassWeights
from fitkit.losses.guards import check_learns
from fitkit.losses.looks import undone
from fitkit.losses.loss import Ask, Count, KnownLoss, Loss, resolve
from fitkit.losses.own import NetLoss
from fitkit.outputs import (
    SINGLE,
    LossHint,
    Outputs,
    by_output,
    class_axis_of,
    log_name,
    named_outputs,
    targets_by_output,
    weights_by_output,
)
from fitkit.trees import copied, leaves, leaves_with_paths

Losses = Loss | list[Any] | dict[Hashable, Any]
"""Losses, nested as the outputs are; None where an output isn't trained."""
Scales = float | list[Any] | dict[Hashable, Any]
ONE_OUTPUT = Outputs({SINGLE: None})


@dataclasses.dataclass
class _OutputLoss:
    """A loss of one output, or of a structure of outputs; `output` is None for all at once.

    `number` counts the losses of an output that has several, from 1. `factor` multiplies one that
    is a part of another loss. `classes` is the number of classes where the first batch's targets
    were class indices, and `dims` how many dimensions they had.
    """

    output: Hashable
    loss: Loss
    scale: float = 1.0
    number: int = 0
    factor: float = 1.0
    classes: int | None = None
    dims: int | None = None

    def checks(self, target: Any) -> bool:
        """Whether labels are of the first batch's kind: class indices may follow soft labels."""
        hint, shape = self.loss.hint, tuple(getattr(target, "shape", ()))
        if hint.task != "classes":
            return True
        if len(shape) != self.dims:
            return False
        return self.classes is not None or len(shape) < 2 or shape[hint.class_axis or -1] != 1

    def asking(self, ask: Ask | None) -> Loss:
        """Return the loss for one batch, whose inputs it may ask other nets about."""
        return self.loss if ask is None else self.loss.asking(ask, self.output)

    @property
    def name(self) -> str:
        log = log_name(str(self.output), "loss")
        return f"{log}#{self.number}" if self.number else log


@dataclasses.dataclass
class Term:
    """One output's loss in a batch: its name, its loss weight, its mean, and over what.

    The name is that of the output's log; several losses of one output have `#1`, `#2` after it.
    """

    name: str
    scale: float
    value: torch.Tensor
    count: Count


def total_of(terms: list[Term]) -> torch.Tensor:
    """Return the sum of several outputs' losses by their loss weights."""
    values = [t.value if t.scale == 1.0 else t.scale * t.value for t in terms]
    return functools.reduce(torch.add, values)


def of_outputs(losses: Mapping[str, Any]) -> dict[str, Any]:
    """Each output's loss, which is the sum of its losses; nothing where there is one output.

    Args:
        losses: by the names of their terms; None where a loss has no value.
    """
    found: dict[str, Any] = {}
    for name, value in losses.items():
        log = _log_of(name)
        one, other = found.get(log), value
        found[log] = other if one is None else one if other is None else one + other
    return found if len(found) > 1 else {}


def _log_of(name: str) -> str:
    # Names of logs end in "loss", those of one of several losses in a number.
    return name.rstrip("0123456789").removesuffix("#")


@dataclasses.dataclass
class _Plan:
    """Which loss meets which output, for the outputs that the net was seen to give."""

    outputs: Outputs
    parts: list[_OutputLoss]
    is_checked: bool = False

    @property
    def is_whole(self) -> bool:
        return self.parts[0].output is None

    @functools.cached_property
    def trained(self) -> list[Any]:
        """The outputs that have a loss."""
        return list(dict.fromkeys(part.output for part in self.parts))

    def pairs(self, predictions: dict[Any, Any], target: Any) -> list[tuple[_OutputLoss, Any, Any]]:
        """Each part with its prediction and its target."""
        targets = self.targets(target)
        return [(part, predictions[part.output], targets[part.output]) for part in self.parts]

    def targets(self, target: Any) -> dict[Any, Any]:
        """Return the target of each trained output; None for one that has none."""
        if self.is_whole:
            return {None: target}
        trained = self.trained
        given = targets_by_output(target, self.outputs, trained, trained)
        return {name: given.get(name) for name in trained}

    def weights(self, weight: Any) -> dict[Any, Any]:
        """Return the sample weights of each part; parts without any are left out."""
        if self.is_whole:
            return {None: weights_by_output(weight, ONE_OUTPUT, [SINGLE]).get(SINGLE)}
        return weights_by_output(weight, self.outputs, self.trained, self.trained)


class CompiledLoss:
    """What `compile` was given as loss: called with a batch, it gives the total and its parts.

    It remembers what its first batch looked like; `begin` gives one that remembers nothing.

    Attributes:
        class_weights: weights of labels, which multiply the sample weights; None for none.

    Args:
        loss: what `resolve` takes; lists and dicts of that, nested as the outputs are, with None
            for an output that isn't trained; or None: the loss that the net itself computes. A
            name or torch loss given once for several outputs holds for each, and the total is the
            sum. A function or module of one's own given once gets what the net returned.
            A list where the net has one tensor is several losses of it, which add up.
        loss_weights: what multiplies the loss, or lists and dicts of that by the same structure.

    Raises:
        ConfigurationError: whatever can be refused before data are seen.
    """

    def __init__(self, loss: Any, loss_weights: Any = None) -> None:
        self._losses = _resolved(loss)
        self._all: list[Loss] = [loss for loss in leaves(self._losses) if loss is not None]
        self._scales = _checked_scales(loss_weights, self._losses)
        self.class_weights: ClassWeights | None = None
        self._forget()

    def begin(self) -> CompiledLoss:
        """Return this loss for one call of a verb, so that calls can nest."""
        fresh = copy.copy(self)
        fresh._forget()
        return fresh

    def _forget(self) -> None:
        # A net may give other outputs in training than in evaluation, so there may be two plans.
        self._plans: dict[tuple[Hashable, ...], _Plan] = {}
        self._plan: _Plan | None = None  # the one last checked
        # The loss of a net with one output, where prediction and target need no unwrapping.
        self._only: Loss | None = None
        self._kinds: tuple[type, type] = (object, object)  # of its prediction and target
        self._needs_unwrapping = False

    @property
    def part_names(self) -> list[str]:
        """The keys of the parts: empty before `check`, and where one output has losses."""
        parts = [] if self._plan is None else self._plan.parts
        return list(of_outputs({part.name: 0.0 for part in parts}))

    @property
    def has_several(self) -> bool:
        """Whether there are several losses, of one output or of several; not before `check`."""
        return self._plan is not None and len(self._plan.parts) > 1

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

    def computed(
        self,
        prediction: Any,
        target: Any,
        weight: Any,
        *,
        counts: bool,
        is_part: bool = False,
        ask: Ask | None = None,
    ) -> tuple[torch.Tensor, Count, list[Term]]:
        """Return a batch's loss, what its mean was taken over, and its terms if there are several
        losses.

        Args:
            counts: whether to say what means were taken over; otherwise None, for the samples.
            is_part: whether the batch is a part of what an update sees.
            ask: calls other nets with the batch's inputs; None where no loss takes them.
        """
        only, (kind, kind_of_target) = self._only, self._kinds
        if type(prediction) is not kind or type(target) is not kind_of_target:
            only = None
        if only is not None and self.class_weights is None and self._plan is not None:
            if weight is None and counts:
                classes = self._plan.parts[0].classes
                return *only.counted(prediction, target, None, classes, is_part=is_part), []
            if weight is None:
                return only(prediction, target), None, []
            if isinstance(weight, torch.Tensor) and not counts:
                return only.weighted(prediction, target, weight), None, []
        terms = self._terms(prediction, target, weight, counts=counts, is_part=is_part, ask=ask)
        if len(terms) == 1:
            return total_of(terms), terms[0].count, []
        return total_of(terms), None, terms

    @property
    def may_be_nan(self) -> bool:
        """Whether some loss's mean over nothing has NaNs for gradients."""
        return any(loss.may_be_nan for loss in self._all)

    @property
    def own(self) -> NetLoss | None:
        """The loss that the net computes itself, where it does."""
        return self._losses if isinstance(self._losses, NetLoss) else None

    def counts(self, target: Any) -> list[Count]:
        """Return what each loss's mean is taken over, of a batch whose forward hasn't run."""
        assert self._plan is not None
        targets = self._plan.targets(target)
        return [
            part.loss.count(None, targets[part.output], part.classes) for part in self._plan.parts
        ]

    def terms(self, prediction: Any, target: Any, weight: Any, *, is_part: bool) -> list[Term]:
        """Return the several losses of a batch, each with what its mean was taken over."""
        return self._terms(prediction, target, weight, counts=True, is_part=is_part)

    def _terms(
        self,
        prediction: Any,
        target: Any,
        weight: Any,
        *,
        counts: bool,
        is_part: bool = False,
        ask: Ask | None = None,
    ) -> list[Term]:
        predictions = self._named(prediction)
        plan = self._same_plan(predictions)
        weights = plan.weights(weight)
        found = []
        for part, its_prediction, its_target in plan.pairs(predictions, target):
            its_weight, loss, count = weights.get(part.output), part.asking(ask), None
            if self.class_weights is not None:
                its_weight = self.class_weights(its_target, its_weight)
            if counts:
                value, count = loss.counted(
                    its_prediction, its_target, its_weight, part.classes, is_part=is_part
                )
            elif its_weight is None:
                value = loss(its_prediction, its_target)
            else:
                value = loss.weighted(its_prediction, its_target, its_weight)
            value = value if part.factor == 1.0 else part.factor * value
            found.append(Term(part.name, part.scale, value, count))
        return found

    def of_each(self, targets: list[Any]) -> Callable[[Any, Any], torch.Tensor] | None:
        """Return a function that gives each sample's loss (N,), whose mean over any samples is the
        loss.

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
    def takes_inputs(self) -> bool:
        """Whether some loss calls other nets with a batch's inputs."""
        return any(loss.takes_inputs for loss in self._all)

    @property
    def has_user_code(self) -> bool:
        """Whether code of the user's acts in some loss."""
        return any(loss.has_user_code for loss in self._all)

    def hint(self, output: Hashable, net: torch.nn.Module | None = None) -> LossHint:
        """Return what `output`'s loss says of its numbers; before `check` that of a net with one
        output.

        The hint is empty where there is no loss, or where it isn't known yet. Where it lacks the
        axis of classes, the last layer of a `net` with one output says it.
        """
        hint = self._hint(output)
        if net is None or output != SINGLE or hint.class_axis is not None:
            return hint
        return dataclasses.replace(hint, class_axis=class_axis_of(net))

    def _hint(self, output: Hashable) -> LossHint:
        if isinstance(self._losses, Loss):
            return self._losses.hint
        if self._plan is not None:
            losses = [part.loss for part in self._plan.parts if part.output == output]
        else:
            losses = self._all if output == SINGLE and len(self._losses) == 1 else []
        found = [loss.hint for loss in losses if loss.hint != LossHint()]
        return found[0] if found else LossHint()

    def check(self, prediction: Any, target: Any, ask: Ask | None = None) -> None:
        """Decide which loss meets which output, and refuse a first batch that can't be meant.

        Call it with the first batch of each kind of data (training, validation); it reads values
        back from the device.

        Args:
            prediction, target: of the batch.
            ask: calls other nets with its inputs; None where no loss takes them.

        Raises:
            ConfigurationError: outputs, losses and targets differ in structure, or a loss's own
                check failed.
        """
        predictions = self._named(prediction)
        plan = self._plan = self._plan_of(predictions)
        plan.is_checked = True
        needs_unwrapping = len(plan.parts) > 1 or plan.parts[0].scale != 1.0
        for part, its_prediction, its_target in plan.pairs(predictions, target):
            with _naming(part.output):
                part.asking(ask).check(its_prediction, its_target)
                part.classes = part.loss.count_classes(its_prediction, its_target)
                part.dims = getattr(its_target, "ndim", None)
            if its_prediction is not prediction or its_target is not target:
                needs_unwrapping = True
        # Once needed, always: training and validation data may differ in structure.
        self._needs_unwrapping = self._needs_unwrapping or needs_unwrapping
        self._only = None if self._needs_unwrapping else plan.parts[0].loss
        self._kinds = type(prediction), type(target)
        if self.class_weights is not None:
            self._begin_class_weights(self.class_weights, plan.pairs(predictions, target), ask)

    def tell_sums(self, prediction: Any, target: Any) -> None:
        """Warn of losses that sum over the samples, after the first batch's value."""
        predictions = self._named(prediction)
        for part, its_prediction, its_target in self._plan_of(predictions).pairs(
            predictions, target
        ):
            with _naming(part.output):
                part.loss.tell_sum(its_prediction, its_target)

    def _begin_class_weights(
        self,
        class_weights: ClassWeights,
        pairs: list[tuple[_OutputLoss, Any, Any]],
        ask: Ask | None,
    ) -> None:
        outputs = dict.fromkeys(part.output for part, _, _ in pairs)
        if len(outputs) > 1:
            raise ConfigurationError(
                f"class_weight needs a net with one trained output, but {list(outputs)} have "
                "losses. Give a dict of sample_weight by output."
            )
        for part, prediction, target in pairs:
            loss = part.asking(ask)
            with undone(loss):
                values = loss.per_sample(copied(prediction), target)
            class_weights.begin(part.loss.labels(prediction, target), target, values)

    def weigh(self, target: Any, weight: Any) -> Any:
        """Return the weights of a batch that was computed, for metrics: the classes' weights
        included.

        Raises:
            ConfigurationError: the batch's labels can't be read as the first batch's.
        """
        class_weights, plan = self.class_weights, self._plan
        if class_weights is None or plan is None:
            return weight
        (output,) = plan.trained
        its_target = plan.targets(target)[output]
        class_weights.note(its_target)
        weights = plan.weights(weight)
        weights[output] = class_weights(its_target, weights.get(output))
        return weights[output] if plan.is_whole or plan.outputs.names == [output] else weights

    def check_labels(self, target: Any) -> None:
        """Refuse what are no labels for the losses in `target`, perhaps a whole data set's.

        Does nothing before `check`, and for losses that take any number.

        Raises:
            ConfigurationError: with the range that the labels have and the one they should have.
        """
        plan = self._plan
        if plan is None or target is None:
            return
        if self._only is not None and isinstance(target, torch.Tensor):
            if plan.parts[0].checks(target):
                self._only.check_labels(target, plan.parts[0].classes)
            return
        labels = plan.targets(target)
        for part in plan.parts:
            if labels[part.output] is not None and part.checks(labels[part.output]):
                with _naming(part.output):
                    part.loss.check_labels(labels[part.output], part.classes)

    @property
    def checks_each(self) -> bool:
        """Whether `check_labels` must see each batch; not before `check`."""
        parts = [] if self._plan is None else self._plan.parts
        return any(part.loss.checks_each(part.classes) for part in parts)

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
        """Return the loss of a batch.

        Args:
            prediction: what the net gave.
            target: by the same structure, or what belongs to the single output.
            weight: sample weights (`formulas.weighted_mean`): one tensor for all outputs, or a
                list or dict.

        Returns:
            The total, to be differentiated; and each loss before its loss weight, detached, by its
            term's name. The latter is empty with one loss.
        """
        fits = (type(prediction), type(target)) == self._kinds
        if fits and self._only is not None and self.class_weights is None:
            if weight is None:
                return self._only(prediction, target), {}
            if isinstance(weight, torch.Tensor):
                return self._only.weighted(prediction, target, weight), {}
        terms = self._terms(prediction, target, weight, counts=False)
        parts = {term.name: term.value.detach() for term in terms} if len(terms) > 1 else {}
        return total_of(terms), parts

    def to(self, device: torch.device) -> None:
        """Move class weights and other buffers of the losses."""
        for loss in self._all:
            loss.to(device)

    def _named(self, prediction: Any) -> dict[Any, Any]:
        losses = self._losses
        if isinstance(losses, NetLoss):
            return {None: prediction}
        named = named_outputs(prediction)
        takes_whole = isinstance(losses, Loss) and losses.takes_whole
        if takes_whole and named.get(SINGLE, prediction) is not prediction:
            return {None: prediction}  # a function gets the net's object, and not the part of it
        return named

    def _plan_of(self, predictions: dict[Any, Any]) -> _Plan:
        names = tuple(predictions)
        if names not in self._plans:
            self._plans[names] = self._planned(Outputs(predictions))
        return self._plans[names]

    def _same_plan(self, predictions: dict[Any, Any]) -> _Plan:
        """Return the plan for a batch's outputs.

        Raises:
            ConfigurationError: others have a loss than in the first batch. Then sums over batches
                would be those of different things.
        """
        plan, first = self._plan_of(predictions), self._plan
        if first is None or plan.is_checked:
            return plan
        if set(plan.outputs.names) == set(first.outputs.names):  # a list of targets has one order
            return first
        if plan.trained == first.trained:
            return plan
        raise ConfigurationError(
            f"The net's outputs with a loss were {first.trained} in the first batch, and are "
            f"{plan.trained} in a later one. Return the same outputs for each batch, or write a "
            "training_step."
        )

    def _planned(self, outputs: Outputs) -> _Plan:
        losses, names = self._losses, outputs.names
        if isinstance(losses, Loss) and losses.takes_whole and names != [SINGLE]:
            return _Plan(outputs, [_OutputLoss(None, losses, self._whole_scale())])
        given = by_output(losses, outputs, "loss", spreads=True)
        scales = self._scales_for(outputs)
        parts: list[_OutputLoss] = []
        seen: dict[Any, Loss] = {}  # the function that gets an output with others around it
        for name, loss in given.items():
            if seen.get(name) is loss:
                continue
            if name in outputs.within:
                if not isinstance(loss, Loss) or not loss.takes_whole:
                    continue  # each of its outputs has its own
                seen.update(dict.fromkeys(outputs.below(name), loss))
            parts += _parts_of(name, loss, scales.get(name, 1.0))
        if not parts:
            raise ConfigurationError(f"None of the net's outputs {names} has a loss.")
        return _Plan(outputs, parts)

    def _whole_scale(self) -> float:
        if isinstance(self._scales, (list, dict)):
            raise ConfigurationError(
                f"loss_weights={self._scales} has an entry for each output, but one loss takes "
                "all outputs at once. Give a number."
            )
        return 1.0 if self._scales is None else self._scales

    def _scales_for(self, outputs: Outputs) -> dict[Any, Any]:
        names, scales = outputs.names, self._scales
        if scales is None:
            return {}
        if len(names) > 1 and not isinstance(scales, (list, dict)):
            raise ConfigurationError(
                f"loss_weights={scales} is one number, but the net has {len(names)} "
                f"outputs: {names}. Give a list in that order or a dict by name."
            )
        return by_output(scales, outputs, "loss_weights", spreads=True)


def _parts_of(output: Hashable, losses: Any, scales: Any) -> list[_OutputLoss]:
    """Return the losses of one output with their loss weights."""
    if not losses:
        return []
    one = losses if isinstance(losses, list) else [losses]
    if not all(isinstance(loss, Loss) for loss in one):
        at = f" at {output!r}" if output else ""
        raise ConfigurationError(
            f"loss{at} has {len(losses)} entries, but the net has one output there. Give one loss, "
            "or a list of several, which add up."
        )
    if isinstance(scales, float):
        scales = [scales] * len(one)
    if not isinstance(scales, list) or len(scales) != len(one):
        raise ConfigurationError(
            f"loss_weights has {describe(scales)} for the output {output!r}. Give a number, or one "
            f"for each of its losses ({len(one)})."
        )
    summands = [
        (part, scale, factor)
        for loss, scale in zip(one, scales, strict=True)
        for part, factor in loss.parts
    ]
    first = 1 if len(summands) > 1 else 0
    return [
        _OutputLoss(output, part, scale, number, factor)
        for number, (part, scale, factor) in enumerate(summands, first)
    ]


def _resolved(loss: Any) -> Losses:
    if loss is None:
        return NetLoss()
    if not isinstance(loss, (list, tuple, Mapping)):
        return resolve(loss)
    entries: Losses = _plain(loss, lambda one: None if one is None else resolve(one))
    if not any(leaves(entries)):
        raise ConfigurationError(
            f"loss={describe(loss)} trains no output: at least one needs a loss. "
            "loss=None alone stands for the net's own loss."
        )
    return entries


def _checked_scales(scales: Any, losses: Losses) -> Scales | None:
    if scales is None:
        return None
    for path, value in leaves_with_paths(scales):
        check_number(f"loss_weights{path}", value)
    plain: Scales = _plain(scales, float)
    if isinstance(losses, Loss) or not isinstance(plain, (list, dict)):
        return plain
    if any(isinstance(entry, (list, dict)) for given in (losses, plain) for entry in _of(given)):
        return plain  # what fits shows with the first batch's outputs
    if isinstance(plain, dict):
        unknown = [key for key in plain if isinstance(losses, dict) and key not in losses]
        if unknown:
            raise ConfigurationError(
                f"loss_weights names {unknown}, but loss has entries for {list(losses)}."
            )
    elif len(plain) != len(losses):
        raise ConfigurationError(
            f"loss_weights has {len(plain)} entries, but loss has {len(losses)}."
        )
    return plain


def _of(given: list[Any] | dict[Hashable, Any]) -> Iterable[Any]:
    return given.values() if isinstance(given, dict) else given


def _plain(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a tree of dicts and lists, whatever it was made of, with its leaves converted."""
    if isinstance(tree, Mapping):
        return {key: _plain(value, convert) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_plain(value, convert) for value in tree]
    return convert(tree)


@contextlib.contextmanager
def _naming(output: Hashable) -> Iterator[None]:
    """Say in errors which of several outputs they are about."""
    try:
        yield
    except ConfigurationError as error:
        if output is None or output == SINGLE:
            raise
        raise type(error)(f"Output {output!r}: {error}") from None
