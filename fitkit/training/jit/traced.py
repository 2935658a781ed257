"""A batch's step as torch's compiler traces it.

The traced step records nothing. Its losses and metrics are recorded after the compiled call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fitkit import trees
from fitkit.data.batches import Batch
from fitkit.distributed.strategies import Strategy
from fitkit.losses import Term
from fitkit.losses.compiled import total_of
from fitkit.module import Module
from fitkit.samples import samples_in
from fitkit.training.jit.graph_calls import Parts
from fitkit.training.jit.programs import copied
from fitkit.training.jit.tracing import UncompiledError
from fitkit.training.own_step import OwnStep, loss_in
from fitkit.training.step import CompiledStep, PredictStep, is_plain_wrapper, number_of


class TracedStep:
    """The step that `compile` describes: the net's output, and the loss.

    Args:
        model: the model that has the net.
        step: computes the same without compiling.

    Attributes:
        may_join: whether the metrics may take several batches as one.
    """

    def __init__(self, model: Module, step: CompiledStep | PredictStep) -> None:
        strategy: Strategy = model._fitkit.compilation.strategy
        self._model, self._is_plain_wrapper = model, is_plain_wrapper(model)
        self.device: str = strategy.device.type
        self._step, self._caller = step, step.caller
        self._precision, self._is_plain = strategy.precision, strategy.precision.is_plain
        if isinstance(step, CompiledStep):
            self._loss, self._counts = step.loss, step.may_count
            self._keeps_prediction = step.meters is not None
            self.may_join: bool = False

    @property
    def net(self) -> Any:
        """What is called for a batch: the net alone, unless calling the model does more."""
        model = self._model
        hooks = model._forward_pre_hooks, model._forward_hooks
        is_hooked = any((*hooks, model._backward_pre_hooks, model._backward_hooks))
        return model.net if self._is_plain_wrapper and not is_hooked else model

    def moved(self, batch: Any, index: int) -> Parts:
        """Move a batch's inputs, targets and weights to the device."""
        return self._step.moved_parts(batch)

    def leaves(self, batch: Any) -> bool:
        """Return whether `moved` only adds None to a pair of tensors, and to others like it."""
        step = self._step
        if type(batch) is not tuple or len(batch) != 2 or not step.wrapped.is_bare:
            return False
        return all(isinstance(part, torch.Tensor) for part in batch) and step.mover.leaves(batch)

    def as_written(self, batch: Parts) -> torch.Tensor:
        """Compute a batch's loss without compiling; the first batch is checked."""
        assert isinstance(self._step, CompiledStep)
        loss: torch.Tensor = self._step.compute(self.net, *batch)[1]
        return loss

    def entered(self, batch: Parts) -> tuple[Any, ...]:
        """Return the arguments of `predicted` and `computed` for a batch: the net's come first."""
        x, y, weight = batch
        if isinstance(x, torch.Tensor):
            return (x,), {}, y, weight
        return *self._caller.arguments(x), y, weight

    def predicted(self, given: Any, named: Any) -> Any:
        """Compute the net's output; traced."""
        if self._is_plain:
            return self.net(*given, **named)
        with self._precision.autocast(self.device):
            prediction = self.net(*given, **named)
        return self._precision.widen(prediction)

    def computed(
        self, given: Any, named: Any, y: Any, weight: Any, *, is_part: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Compute the loss, and the other values that `note` records; traced.

        Args:
            is_part: whether the batch is only a part of an update's samples.
        """
        prediction = self.predicted(given, named)
        loss, parts, counted = self._losses(prediction, y, weight, is_part)
        kept = trees.map_leaves(_detached, prediction) if self._keeps_prediction else None
        return loss, (kept, parts, counted)

    def _losses(self, prediction: Any, y: Any, weight: Any, is_part: bool) -> Any:
        if not self._counts:
            return *self._loss(prediction, y, weight), None
        if not self._loss.part_names:
            loss, count = self._loss.counted(prediction, y, weight, is_part=is_part)
            return loss, {}, count
        terms = self._loss.terms(prediction, y, weight, is_part=is_part)
        found = [(term.name, term.scale, term.value.detach(), term.count) for term in terms]
        if all(term.count is None for term in terms):
            return total_of(terms), {name: value for name, _, value, _ in found}, None
        return total_of(terms), {}, found

    def note(self, batch: Batch, loss: torch.Tensor, kept: Any, parts: Parts) -> None:
        """Add a traced step's results to the pass's values."""
        if self.device != "cpu":  # a CUDA graph's next replay writes its results in the same place
            loss, kept = trees.map_leaves(copied, (loss, kept))
        prediction, by_output, counted = kept
        _, y, weight = parts
        self._step_counted(counted).note(batch, prediction, loss, by_output, y, weight)

    def note_inside(self, kept: Any, batch: Parts) -> None:
        """Add a traced `super().training_step`'s results to the metrics, but not its loss.

        Args:
            kept: the second value that `computed` returned.
        """
        (prediction, parts, counted), (x, y, weight) = kept, batch
        step = self._step_counted(counted)
        with torch.no_grad():
            if parts:
                step.logbook.add_parts(parts, samples_in(x, y))
            weight = step.loss.weigh(y, weight)
            if step.meters is not None:
                step.meters.update(prediction, y, weight)

    def _step_counted(self, counted: Any) -> CompiledStep:
        """Return the step, with `count` or `terms` set to what the last loss is the mean over."""
        step = self._step
        assert isinstance(step, CompiledStep)
        step.count = step.terms = None
        if isinstance(counted, list):
            step.terms = [Term(name, s, value, number_of(c)) for name, s, value, c in counted]
        elif counted is not None:
            step.count = number_of(counted)
        return step

    def running(self) -> AbstractContextManager[None]:
        """Surround a traced call."""
        return nullcontext()

    def look_at_metrics(self) -> None:
        """Decide whether the metrics may take several batches as one; call this once they exist."""
        assert isinstance(self._step, CompiledStep)
        meters = self._step.meters
        self.may_join = meters is None or not meters.has_user_code

    def joined(self, found: Sequence[tuple[torch.Tensor, Any]], entered: Sequence[Any]) -> Any:
        """Join several steps' results, if their losses and metrics can be recorded as one; traced.

        Args:
            found: each step's results, from `computed`.
            entered: the steps' batches, from `entered`.

        Returns:
            The losses (k,), and the outputs and targets as one batch for the metrics. `found`
            itself where the results can't be joined.
        """
        _, _, y, weight = entered[0]
        prediction, parts, counted = found[0][1]
        if not self.may_join or weight is not None or parts or counted is not None:
            return found
        losses = torch.stack([loss for loss, _ in found])
        if prediction is None:
            return losses, None, None
        if not isinstance(prediction, torch.Tensor) or not isinstance(y, torch.Tensor):
            return found
        predictions = torch.cat([kept[0] for _, kept in found])
        return losses, predictions, torch.cat([batch[2] for batch in entered])

    def separated(self, losses: torch.Tensor, kept: Any, whole: Parts, steps: int) -> Any:
        """Return several steps' results as `joined` does.

        Args:
            losses: (most,); those of the steps come first.
            kept: the steps' second values from `computed`, stacked: (most, ...).
            whole: the steps' batches, stacked.
            steps: how many there are.
        """
        (prediction, parts, counted), (_, y, weight) = kept, whole
        is_joined = self.may_join and weight is None and not parts and counted is None
        if is_joined and prediction is None:
            return losses[:steps], None, None
        both = prediction, y
        if is_joined and all(isinstance(one, torch.Tensor) and one.ndim > 1 for one in both):
            return losses[:steps], *(one[:steps].flatten(0, 1) for one in both)
        return [self.result_at(place, losses, kept) for place in range(steps)]

    def result_at(self, place: int, losses: torch.Tensor, kept: Any) -> tuple[torch.Tensor, Any]:
        """Return one of several steps' results, as `computed` does."""

        def at(leaf: Any) -> Any:
            return leaf[place] if isinstance(leaf, torch.Tensor) else leaf

        return losses[place], trees.map_leaves(at, kept)

    def note_together(self, batches: Sequence[Batch], found: Any, parts: Sequence[Parts]) -> None:
        """Add several steps' results, from `joined`, to the pass's values."""
        if isinstance(found, list):
            for batch, (loss, kept), of_batch in zip(batches, found, parts, strict=True):
                self.note(batch, loss, kept, of_batch)
            return
        if self.device != "cpu":
            found = trees.map_leaves(copied, found)
        step, (losses, predictions, targets) = self._step_counted(None), found
        step.samples, step.total = batches[-1].samples, batches[-1].total
        step.logbook.loss.add_each(losses, step.samples)
        if step.meters is not None:
            step.meters.update(predictions, targets)


class TracedOwnStep:
    """A model's own `training_step`.

    Its calls of `self.log` run after the compiled call. So do the updates of metrics by
    `super().training_step`.

    Args:
        model: the model that has the step.
        step: computes the same without compiling.
    """

    def __init__(self, model: Module, step: OwnStep) -> None:
        self.device: str = model._fitkit.compilation.strategy.device.type
        self._model, self._step = model, step
        assert step.context.compiled is not None
        self._inside = TracedStep(model, step.context.compiled)
        self._parts = step.context.compiled.parts
        self._logged: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._last: torch.Tensor | None = None  # the last loss of super().training_step
        self._computed: list[tuple[Any, Parts]] = []  # the results of super().training_step
        # These replace the model's methods in a traced step.
        self._stand_ins: dict[str, Any] = {
            "log": self._take_log, "_compiled_loss": self._compiled_loss
        }  # fmt: skip

    def moved(self, batch: Any, index: int) -> Parts:
        """Move a batch to the device, and return it with its number."""
        return self._step.mover.transfer(batch), None, index

    def leaves(self, batch: Any) -> bool:
        """Return False: `moved` adds the batch's number."""
        return False

    def entered(self, batch: Parts) -> tuple[Any, ...]:
        """Return the arguments of `computed` for a batch."""
        whole, _, index = batch
        return whole, self._step.arguments(index)

    def computed(
        self, batch: Any, arguments: list[int], *, is_part: bool
    ) -> tuple[torch.Tensor, Any]:
        """Compute the loss, and the other values that `note` records; traced."""
        step = self._step
        self._logged, self._computed, self._last = [], [], None
        with step.autocast():
            outputs = step.ended(step.enter(batch, *arguments))
        loss = loss_in(outputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UncompiledError(NO_LOSS)
        count = outputs.get("count") if isinstance(outputs, Mapping) else None
        kept = trees.map_leaves(_detached, outputs) if step.keeps else None
        is_compiled_loss, self._last = loss is self._last, None  # its graph can't leave the trace
        return loss.reshape(()), (kept, count, is_compiled_loss)

    def _take_log(self, name: str, value: Any, *given: Any, **options: Any) -> None:
        self._logged.append((name, _detached(value), given, options))

    def _compiled_loss(self, batch: Any) -> torch.Tensor:
        parts = self._parts(batch)
        loss, kept = self._inside.computed(*self._inside.entered(parts))
        self._computed.append((kept, parts))
        self._last = loss
        return loss

    def running(self) -> AbstractContextManager[None]:
        """Surround a traced call."""
        return self._logs_kept()

    @contextmanager
    def _logs_kept(self) -> Iterator[None]:
        own = vars(self._model)
        before = {name: own[name] for name in self._stand_ins if name in own}
        own.update(self._stand_ins)
        try:
            yield
        finally:
            for name in self._stand_ins:
                del own[name]
            own.update(before)

    def note(self, batch: Batch, loss: torch.Tensor, kept: Any, parts: Parts) -> None:
        """Add a traced step's results to the pass's values, and make its calls of `log`.

        Ranks:
            Collective, if the step logs values that the ranks exchange in each step.
        """
        step, (outputs, count, is_compiled_loss) = self._step, kept
        if self.device != "cpu":  # a CUDA graph's next replay writes its results in the same place
            loss, outputs = trees.map_leaves(copied, (loss, outputs))
        for computed, of_batch in self._computed:
            self._inside.note_inside(computed, of_batch)
        step.take(batch, count, is_compiled_loss=is_compiled_loss)
        for name, value, given, options in self._logged:
            self._model.log(name, copied(value), *given, **options)
        step.note(loss, outputs)
        step.context.logged.exchange(step.ranks)


NO_LOSS = "training_step doesn't return a loss with one number for every batch"


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
