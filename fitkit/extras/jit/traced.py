"""A batch's step as torch's compiler traces it.

The traced step records nothing. Its losses and metrics are recorded after the compiled call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fitkit import trees
from fitkit.accelerators import number_of
from fitkit.extras.jit.graph_calls import Parts
from fitkit.extras.jit.programs import copied
from fitkit.extras.jit.tracing import UncompiledError
from fitkit.samples import samples_in
from fitkit.seams.data import Batch
from fitkit.seams.losses import Term, checked_count
from fitkit.seams.networks import Module
from fitkit.seams.steps import (
    CompiledStep,
    Logbook,
    Outcome,
    OwnStep,
    is_plain_wrapper,
    loss_in,
    said_count,
)


class TracedStep:
    """The step that `compile` describes: the net's output, and the loss.

    Args:
        model: the model that has the net.
        step: computes the same without compiling.

    Attributes:
        may_join: whether the metrics may take several batches as one.
    """

    def __init__(self, model: Module, step: CompiledStep) -> None:
        self._model, self._is_plain_wrapper = model, is_plain_wrapper(model)
        self.device: str = model._fitkit.compilation.strategy.device.type
        self._step = step
        self._counts, self._keeps_prediction = step.may_count, step.meters is not None
        self.may_join: bool = False

    @property
    def net(self) -> Any:
        """What is called for a batch: the net alone, unless calling the model does more."""
        model = self._model
        hooks = model._forward_pre_hooks, model._forward_hooks
        is_hooked = any((*hooks, model._backward_pre_hooks, model._backward_hooks))
        return model.net if self._is_plain_wrapper and not is_hooked else model

    def moved(self, batch: Batch, index: int) -> Parts:
        """Move a batch's inputs, targets and weights to the device."""
        return self._step.moved_parts(batch)

    def leaves(self, batch: Any) -> bool:
        """Return whether `moved` only adds None to a pair of tensors, and to others like it."""
        step = self._step
        if type(batch) is not tuple or len(batch) != 2 or not step.wrapped.is_bare:
            return False
        return all(isinstance(part, torch.Tensor) for part in batch) and step.mover.leaves(batch)

    def as_written(self, batch: Parts, *, is_part: bool) -> Outcome:
        """Compute a batch's outcome without compiling; the first batch is checked."""
        return self._step.compute(self._step.net.in_precision(self.net), *batch, is_part=is_part)

    def entered(self, batch: Parts) -> tuple[Any, ...]:
        """Return the arguments of `predicted` and `computed` for a batch: the net's come first."""
        x, y, weight = batch
        if isinstance(x, torch.Tensor):
            return (x,), {}, y, weight
        return *self._step.net.arguments(x), y, weight

    def predicted(self, given: Any, named: Any) -> Any:
        """Compute the net's output; traced."""
        return self._step.net.in_precision(self.net)(*given, **named)

    def computed(
        self, given: Any, named: Any, y: Any, weight: Any, *, is_part: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Compute the loss, and the other values that `note` records; traced.

        Args:
            is_part: whether the batch is only a part of an update's samples.
        """
        assert self._step.loss is not None
        ask = self._step.asking(given, named)
        prediction = self.predicted(given, named)
        loss, count, terms = self._step.loss.computed(
            prediction, y, weight, counts=self._counts, is_part=is_part, ask=ask
        )
        kept = trees.map_leaves(_detached, prediction) if self._keeps_prediction else None
        parts = [(term.name, term.scale, term.value.detach(), term.count) for term in terms]
        return loss, (kept, count, parts)

    def outcome(self, loss: torch.Tensor, kept: Any, parts: Parts) -> Outcome:
        """Return the outcome of a batch, from what `computed` returned."""
        (prediction, count, terms), (_, y, weight) = kept, parts
        found = [Term(name, scale, value, number_of(c)) for name, scale, value, c in terms]
        return Outcome(loss, number_of(count), found, prediction, y, weight)

    def note(
        self, batch: Batch, record: Logbook, loss: torch.Tensor, kept: Any, parts: Parts
    ) -> Outcome:
        """Add a traced step's results to the pass's values, and return them."""
        if self.device != "cpu":  # a CUDA graph's next replay writes its results in the same place
            loss, kept = trees.map_leaves(copied, (loss, kept))
        outcome = self.outcome(loss, kept, parts)
        self._step.record(batch, outcome, record)
        return outcome

    def note_inside(self, record: Logbook, loss: torch.Tensor, kept: Any, parts: Parts) -> Outcome:
        """Add a traced `super().training_step`'s results to the metrics, but not its loss."""
        outcome, (x, y, _) = self.outcome(loss, kept, parts), parts
        with torch.no_grad():
            self._step.measure(outcome, samples_in(x, y), record)
        return outcome

    def running(self) -> AbstractContextManager[None]:
        """Surround a traced call."""
        return nullcontext()

    def look_at_metrics(self) -> None:
        """Decide whether the metrics may take several batches as one; call this once they exist."""
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
        prediction, count, terms = found[0][1]
        if not self.may_join or weight is not None or terms or count is not None:
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
        (prediction, count, terms), (_, y, weight) = kept, whole
        is_joined = self.may_join and weight is None and not terms and count is None
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

    def note_together(
        self, batches: Sequence[Batch], record: Logbook, found: Any, parts: Sequence[Parts]
    ) -> None:
        """Add several steps' results, from `joined`, to the pass's values."""
        if isinstance(found, list):
            for batch, (loss, kept), of_batch in zip(batches, found, parts, strict=True):
                self.note(batch, record, loss, kept, of_batch)
            return
        if self.device != "cpu":
            found = trees.map_leaves(copied, found)
        step, (losses, predictions, targets) = self._step, found
        record.samples = samples = batches[-1].samples
        record.loss.add_each(losses, samples)
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
        self._inside = TracedStep(model, step.compiled)
        self._parts = step.compiled.parts
        self._logged: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._last: torch.Tensor | None = None  # the last loss of super().training_step
        self._computed: list[tuple[torch.Tensor, Any, Parts]] = []  # and all that it gave
        # These replace the model's methods in a traced step.
        self._stand_ins: dict[str, Any] = {
            "log": self._take_log, "_compiled_loss": self._compiled_loss
        }  # fmt: skip

    def moved(self, batch: Batch, index: int) -> Parts:
        """Move a batch to the device, and return it with its number."""
        return self._step.mover(batch), None, index

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
        count = said_count(outputs)
        kept = trees.map_leaves(_detached, outputs) if step.keeps else None
        is_compiled_loss, self._last = loss is self._last, None  # its graph can't leave the trace
        return loss.reshape(()), (kept, count, is_compiled_loss)

    def _take_log(self, name: str, value: Any, *given: Any, **options: Any) -> None:
        self._logged.append((name, _detached(value), given, options))

    def _compiled_loss(self, batch: Any) -> torch.Tensor:
        parts = self._parts(batch)
        loss, kept = self._inside.computed(*self._inside.entered(parts))
        self._computed.append((_detached(loss), kept, parts))
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

    def note(
        self, batch: Batch, record: Logbook, loss: torch.Tensor, kept: Any, parts: Parts
    ) -> Outcome:
        """Add a traced step's results to the pass's values, and make its calls of `log`.

        Ranks:
            Collective, if the step logs values that the ranks exchange in each step.
        """
        step, (outputs, count, is_compiled_loss) = self._step, kept
        if self.device != "cpu":  # a CUDA graph's next replay writes its results in the same place
            loss, outputs = trees.map_leaves(copied, (loss, outputs))
        inside = [self._inside.note_inside(record, *computed) for computed in self._computed]
        outcome = Outcome(loss, outputs=outputs)
        if count is not None:
            outcome.count = checked_count(count, f"{step.method} returned 'count'")
        elif is_compiled_loss:
            outcome.count, outcome.terms = inside[-1].count, inside[-1].terms
        step.context.in_step = True
        for name, value, given, options in self._logged:
            self._model.log(name, copied(value), *given, **options)
        step.context.in_step = False
        step.record(batch, outcome, record)
        return outcome


NO_LOSS = "training_step doesn't return a loss with one number for every batch"


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
