"""`jit_compile`: a batch's forward, loss, gradients, clipping and update as one compiled function.

In eager PyTorch, hundreds of launches limit the speed of a small net's step. Torch's compiler can
join all of them: the net, the loss, `torch.autograd.grad` and torch's functional optimizers. A
part that it can't compile is left out, with one warning. At least the net is always compiled
(`net.py`).

`JitUpdate` stands in the eager `Update`'s place. What it can't compile, it leaves to that one.

If several batches or several ranks make an update, there are two functions. One computes a batch's
gradients, the other makes the update. Between them, the eager `Update` weights the gradients and
averages them over the ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fitkit import trees
from fitkit.errors import warn
from fitkit.extras.jit.graph_calls import Parts
from fitkit.extras.jit.loop import at, marked, stacked
from fitkit.extras.jit.net import JitNet, as_written
from fitkit.extras.jit.optimizer import JitOptimizer, Place
from fitkit.extras.jit.programs import UpdatePrograms, copied, most_steps, shapes_of
from fitkit.extras.jit.proof import MisfitError
from fitkit.extras.jit.shapes import Shapes
from fitkit.extras.jit.traced import TracedOwnStep, TracedStep
from fitkit.extras.jit.tracing import OTHERS_LEARN, UncompiledError
from fitkit.extras.launchers.process_group import pack_gradients, unpack_gradients
from fitkit.random_states import kept_random_numbers
from fitkit.seams.data import Batch
from fitkit.seams.networks import Module
from fitkit.seams.steps import Applier, CompiledStep, Logbook, Outcome, OwnStep, Update

MOST_BYTES = 2**26
"""How many bytes of batches a call of several steps copies to one place, at most."""


Waiting = tuple[Batch, int, Logbook, Parts]
"""A batch that waits for a call of several: as it came, its number, its pass's values, and its
parts on the device."""

COPIED = (torch.Tensor, np.ndarray, str, bytes, int, float, type(None))
"""What a batch that waits may hold: `copied` makes a copy, or nothing can change it."""


class JitApplier(Applier):
    """Makes updates by a compiled function; as written where that can't be.

    Args:
        eager: makes them as written.
        model: the model to train.
        optimizing: the compiled function.

    Attributes:
        is_compiled: whether the compiled function may be used.
    """

    def __init__(self, eager: Applier, model: Module, optimizing: JitOptimizer) -> None:
        super().__init__(model, eager.optimizer, eager.engine, eager.move_rates)
        self._optimizing = optimizing
        self.is_compiled: bool = False

    def __call__(self) -> None:
        """Clip the gradients, make the update, and count it."""
        if self.is_compiled and self._optimizing():
            self.count()
        else:
            super().__call__()


class JitUpdate:
    """Computes a batch's whole update by compiled functions, one for each shape of batches.

    `fit` is given it in the eager update's place. Only a single optimizer's updates are compiled.

    Batches of a rare shape are left to the eager update: an epoch's last one, of another length.

    A rank may compile its batches' gradients while another doesn't: the exchange is the same. The
    update must be compiled on all ranks or on none (`JitOptimizer`).

    Args:
        model: the model to train.
        eager: makes the updates without compiling.
        kept: what earlier calls of `fit` have compiled, so that nothing is compiled twice.
        net: what is given up if numbers differ.
        joins_steps: whether `steps_per_execution` may compute several steps in one call. Not if
            moving the rates reads a step's values.
    """

    def __init__(
        self,
        model: Module,
        eager: Update,
        kept: UpdatePrograms,
        net: JitNet,
        *,
        joins_steps: bool,
    ) -> None:
        step, parameters = eager.step, eager.parameters
        self._eager, self._kept, self._net = eager, kept, net
        self._optimizing = JitOptimizer(model, eager.optimizer, parameters, kept, net)
        self._apply = eager.apply = JitApplier(eager.apply, model, self._optimizing)
        compilation = model._fitkit.compilation
        self._model, self._step = model, step
        # A model's own step is traced as a whole, and calls the compiled one inside.
        compiled = step if isinstance(step, CompiledStep) else None
        self._compiled_loss = None if compiled is None else compiled.loss
        self._traced: TracedStep | TracedOwnStep
        if isinstance(step, OwnStep):
            self._traced = TracedOwnStep(model, step)
        else:
            self._traced = TracedStep(model, step)
        self._parameters = parameters
        # A model's own step may have effects, and a step on several ranks exchanges values. Then
        # the first batch can't run twice: its update isn't compiled, and `_look_back` inspects it.
        self._exchanges = compilation.strategy.collectives.world_size > 1
        self._looks_ahead = compiled is not None and not self._exchanges
        self._packs = False  # whether a batch's gradients are packed in one tensor
        self._may_learn: list[nn.Parameter] = []
        self._learns: list[bool] = []  # whether each of them has a gradient
        self._learning: list[nn.Parameter] = []  # those of them that have a gradient
        self._requires_grad: list[bool] = []
        self._is_known = False  # whether parameters are as they were when that was noted
        self._loss: torch.Tensor | None = None  # of the last batch of which there are gradients
        self._gradients: Sequence[torch.Tensor] = ()
        self._sizes = Shapes()
        self._may_wait = True  # False while batches that have waited come once more
        self._moves_rates = self._apply.move_rates is not None
        self._loops = self._kept.steps.may_loop(self._traced.device)
        self._most = most_steps(compilation.given.steps_per_execution, loops=self._loops)
        self._joins_steps = kept.may_join and joins_steps and self._most > 1
        self._joins_steps = self._joins_steps and compiled is not None
        self._keeps = compiled is not None and compiled.data.keeps_batches
        # Whether batches are pairs of tensors that need no move; None: to be asked again.
        self._leaves: bool | None = None
        self._may_repeat = False  # whether torch may skip its checks, see `Programs.run`
        self._waiting: list[Waiting] = []  # to be computed in one call
        self._shapes: Any = None  # of the waiting batches
        self._steps_a_call = self._most
        self._regroup()

    def _regroup(self) -> None:
        """Read how many batches make an update; if several do, the eager update makes it."""
        self._accumulate, self._is_part = self._eager.accumulate, self._eager.is_part
        self._apply.is_compiled = self._is_part
        self._check()
        self._updates = self._kept.update_stopped is None and not self._is_part
        self._batches = -1  # batches since one was inspected; -1 before that

    @property
    def is_between_updates(self) -> bool:
        """Whether no batch waits for the rest of its group."""
        return self._eager.is_between_updates

    def peekable(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return an epoch's batches, in an iterator that can look ahead if counts need that."""
        return self._eager.peekable(batches)

    def finish(self) -> None:
        """Make the update of a group that is shorter than others, at the epoch's end."""
        self._eager.finish()

    # ------------------------------------------------------------------ one batch

    def __call__(self, batch: Batch, index: int, record: Logbook) -> None:
        """Learn from a batch, or hold it until there are enough batches for one call."""
        eager = self._eager
        eager.begin()
        if eager.accumulate != self._accumulate:
            self._regroup()
        if self._kept.stopped is not None:
            eager(batch, index, record, begins=False)
        elif not self._learn_compiled(batch, index, record):
            # If the batch itself is wrong, the error is the same as without compiling.
            with as_written(self._model):
                outcome = eager(batch, index, record, begins=False)
            if self._kept.stopped is None and self._batches < 0:
                self._look_back(outcome)

    def _learn_compiled(self, batch: Batch, index: int, record: Logbook) -> bool:
        """Learn from a batch by compiled functions, or hold it.

        Returns:
            Whether that was done. If not, nothing has changed.
        """
        if batch.samples == 0:  # a placeholder batch must have no effect but its gradients
            return self._leave_to_eager()
        if self._leaves is None:
            self._leaves = self._keeps and self._traced.leaves(batch.data)
        is_there = self._leaves and not batch.is_lent
        parts = (*batch.data, None) if is_there else self._traced.moved(batch, index)
        shapes = shapes_of(parts)
        if self._may_wait and not self._sizes.earns(shapes) and not self._kept.steps.has(shapes):
            return self._leave_to_eager()
        others_wait = bool(self._waiting)
        if self._may_wait and self._may_hold(parts) and self._hold(batch, index, record, parts):
            return True
        if others_wait:  # they come first
            self._learn_each()
            self._learn_alone(batch, index, record)
            return True
        return self._kept.stopped is None and self._learn(batch, record, parts)

    def _leave_to_eager(self) -> bool:
        """Learn from the waiting batches, and return False: the eager update takes this one."""
        self.flush()
        self._eager.begin()  # what has waited may have left gradients
        return False

    def _learn(self, batch: Batch, record: Logbook, parts: Parts) -> bool:
        """Learn from one batch on the device; return whether that could be done."""
        traced = self._traced
        try:
            if self._batches < 0 or not self._follows():
                if not self._looks_ahead:
                    self._batches = -1
                    return False
                self._look(parts)
            try:
                found = self._run(batch.samples, parts)
            except UncompiledError as error:
                if not self._updates or isinstance(error, MisfitError):
                    raise
                self._updates = False  # perhaps only the optimizer's step can't be compiled
                found = self._run(batch.samples, parts)
                self._leave_optimizer_out(str(error))
        except UncompiledError as error:
            self._stop(error)
            return False
        loss, kept, gradients = found
        outcome = traced.note(batch, record, loss, kept, parts)
        if self._updates:
            self._apply.count()
            return True
        if traced.device != "cpu":  # a CUDA graph's next replay overwrites its results
            loss, gradients = trees.map_leaves(copied, (loss, gradients))
        if self._packs:
            *gradients, _ = unpack_gradients(gradients, self._learning)
        self._gradients = gradients
        outcome.loss = self._loss = loss.detach().requires_grad_()
        outcome.outputs = None
        eager = self._eager
        before, eager.backward = eager.backward, self._backward
        try:
            eager.learn_from(batch, outcome)
        finally:
            eager.backward = before
        return True

    def _stop(self, error: UncompiledError) -> None:
        """Use no compiled functions for batches from now on, and warn."""
        self._kept.stopped = str(error)
        if isinstance(error, MisfitError):
            if not self._exchanges:  # otherwise it must be alike on all ranks, and fits
                self._kept.update_stopped = self._kept.stopped
            self._net.give_up(self._model, error)
            return
        update = self._is_part and self._kept.update_stopped is None
        what = "the net and the update" if update else "the net alone"
        warn(f"jit_compile compiles {what}, not the whole step: {error}")

    # ------------------------------------------------------------------ several in one call

    def _may_hold(self, parts: Parts) -> bool:
        """Return whether batches may wait, from this one on."""
        if not self._joins_steps or not self._updates:
            return False
        if self._moves_rates:  # see first whether a schedule changes more than rates
            return self._batches > 1
        if self._batches < 0 and self._looks_ahead:
            try:
                self._look(parts)
            except UncompiledError as error:
                self._stop(error)
        return self._batches >= 0 and self._updates

    def _hold(self, batch: Batch, index: int, record: Logbook, parts: Parts) -> bool:
        """Hold a batch, and learn from the waiting batches once there are enough.

        The batch is copied if a generator may reuse its arrays for the next one.

        Returns:
            Whether the batch was taken.
        """
        if not self._may_join_batch(batch.samples, parts):
            return False
        if batch.is_lent:
            if not all(isinstance(leaf, COPIED) for leaf in trees.leaves(batch.data)):
                self._learn_each()
                return False
            batch = dataclasses.replace(batch, data=trees.map_leaves(copied, batch.data))
        self._waiting.append((batch, index, record, parts))
        if len(self._waiting) == self._steps_a_call:
            self._learn_together()
        return True

    def _may_join_batch(self, samples: int, parts: Parts) -> bool:
        """Return whether one call may compute a batch with others, and note its shapes."""
        shapes = (shapes_of(parts), samples)
        if shapes != self._shapes:
            self._learn_each()
            if any(type(leaf) not in (torch.Tensor, type(None)) for leaf in trees.leaves(parts)):
                return False
            self._shapes = shapes
            self._steps_a_call = self._most
            if self._loops:  # they are copied to one place
                bytes_each = max(trees.tensor_bytes(parts), 1)
                self._steps_a_call = min(self._most, max(2, MOST_BYTES // bytes_each))
        return True

    def _learn_together(self) -> None:
        """Learn from the waiting batches in as few calls as possible."""
        waiting, self._waiting = self._waiting, []
        while waiting:
            count = len(waiting)
            if self._loops and not self._kept.steps.is_steady(self._steps_a_call, self._shapes):
                count = 1
            self._learn_in_one_call(waiting[:count])
            waiting = waiting[count:]

    def _learn_in_one_call(self, waiting: list[Waiting]) -> None:
        """Learn from batches in one call; one by one if that can't be done."""
        batches, ready = [batch for batch, *_ in waiting], 0
        parts, samples = [parts for *_, parts in waiting], batches[0].samples
        while ready < len(batches) and self._joins_steps and self._follows(ready):
            self._apply.count()  # each step's rates are known before the call
            ready += 1
        if ready == len(batches):
            assert isinstance(self._traced, TracedStep)
            try:
                if self._loops:
                    found = self._traced.separated(*self._run_loop(parts), len(batches))
                else:
                    found = self._run(samples, *parts)
                self._traced.note_together(batches, waiting[0][2], found, parts)
                return
            except MisfitError as error:
                self._stop(error)
            except UncompiledError as error:
                if len(batches) == 1 or not self._loops:  # otherwise something has changed
                    self._join_no_more(error)
        # Schedules have moved on already. Each of these updates is counted when it is made.
        state, apply, groups = self._model._fitkit.fit_state, self._apply, self._optimizing.groups
        following = [float(group.given["lr"]) for group in groups]
        state.updates -= ready
        move_rates, apply.move_rates = apply.move_rates, None
        try:
            for number in range(ready):
                for group in groups:
                    group.give(group.last[number])
                self._learn_alone(*waiting[number][:3])
            for group, rate in zip(groups, following, strict=True):
                group.give(rate)
        finally:
            apply.move_rates = move_rates
        for batch, index, record, _ in waiting[ready:]:
            self._learn_alone(batch, index, record)

    def _join_no_more(self, error: UncompiledError) -> None:
        """Compute each step in a call of its own; `_run` warns once such a call was made."""
        self._kept.may_join = self._joins_steps = False
        self._kept.why_alone = str(error)

    def flush(self) -> None:
        """Learn from the waiting batches. Code of the user's may run after that."""
        self._learn_each()
        self._check()

    def _check(self) -> None:
        """Compare everything at the next batch, because other code may run now."""
        self._is_known = False
        self._kept.steps.check()
        self._optimizing.check()

    def _learn_each(self) -> None:
        if self._loops and self._joins_steps and self._updates:
            self._learn_together()
        waiting, self._waiting = self._waiting, []
        for batch, index, record, _ in waiting:
            self._learn_alone(batch, index, record)

    def _learn_alone(self, batch: Any, index: int, record: Logbook) -> None:
        """Learn from a batch as if there were no calls of several; the caller does nothing more."""
        before, self._may_wait = self._may_wait, False
        try:
            self(batch, index, record)
        finally:
            self._may_wait = before

    # ------------------------------------------------------------------ gradients and updates

    def _backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the last batch's loss, which may have been multiplied by a factor.

        Args:
            loss: the batch's loss, or its product with a factor.
        """
        assert self._loss is not None
        with torch.no_grad():
            gradients: Sequence[torch.Tensor] = self._gradients
            if loss is not self._loss:
                (factor,) = torch.autograd.grad(loss, self._loss)
                gradients = _weighted(gradients, factor)
            for parameter, gradient in zip(self._learning, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

    def _run(self, samples: int, *batches: Parts) -> Any:
        """Run the program for batches of these shapes; compile it if they are the first."""
        traced, batch = self._traced, batches[0]
        loops = self._loops and self._joins_steps and self._updates
        if loops and isinstance(traced, TracedStep) and self._may_join_batch(samples, batch):
            try:  # a loop of one step, so that only the loop is compiled
                losses, kept, _ = self._run_loop(batches)
                return *traced.result_at(0, losses, kept), None
            except MisfitError:
                raise
            except UncompiledError as error:
                self._join_no_more(error)
        with traced.running():
            found = self._kept.steps.run(
                self._whole if len(batches) == 1 else self._together,
                batches,
                shapes_of(batch),
                traced.device,
                entered=traced.entered,
                may_repeat=self._may_repeat and self._kept.update_stopped is None,
            )
        if self._kept.why_alone:
            warn(f"jit_compile computes each step in a call of its own: {self._kept.why_alone}")
            self._kept.why_alone = ""
        return found

    def _run_loop(self, batches: Sequence[Parts]) -> tuple[torch.Tensor, Any, Parts]:
        """Run the loop over the batches' steps.

        Returns:
            The losses, (most,), the other values that the steps record, and the batches, stacked.
        """
        traced, steps = self._traced, len(batches)
        whole = stacked([*batches, *[batches[0]] * (self._steps_a_call - steps)])
        (losses, kept), _ = self._kept.steps.run(
            self._at_place,
            [(*whole, torch.tensor(steps))],
            self._shapes,
            traced.device,
            entered=lambda batch: (traced.entered(batch[:3]), batch[3]),
            may_repeat=self._may_repeat,
            most=self._steps_a_call,
        )
        return losses, kept, whole

    # ------------------------------------------------------------------ traced functions

    def _at_place(self, given: Sequence[Any]) -> Any:
        """Compute one of several steps; traced.

        Args:
            given: the stacked batches, from `TracedStep.entered`, and the step's place ().

        Returns:
            The loss and the other values that the step records, as `marked` returns them.
        """
        [(entered, place)] = given
        return marked(self._whole([at(entered, place)], place)[:2], place)

    def _together(self, given: Sequence[Any]) -> Any:
        """Compute several steps from their batches; traced."""
        assert isinstance(self._traced, TracedStep)
        found = [self._whole([entered], place)[:2] for place, entered in enumerate(given)]
        return self._traced.joined(found, given)

    def _whole(self, given: Sequence[Any], place: Place = None) -> Any:
        """Compute the step from a batch; traced.

        Args:
            given: the batch, from `TracedStep.entered`.
            place: the step's index in a call of several.

        Returns:
            The loss, the other values that the step records, and the gradients. The gradients are
            None if the optimizer's step is included, and packed if the ranks exchange them.
        """
        with torch.enable_grad():
            loss, kept = self._traced.computed(*given[0], is_part=self._is_part)
            found = torch.autograd.grad(loss, self._may_learn, allow_unused=True)
            if [gradient is not None for gradient in found] != self._learns:
                raise UncompiledError(OTHERS_LEARN)
            gradients = [gradient for gradient in found if gradient is not None]
            if self._step.may_be_nan and not self._is_part:  # parts are weighed later
                gradients = _of_what_counts(gradients, kept[1])
        if self._packs:
            packed = pack_gradients(gradients, [True] * len(gradients))
            return loss.detach(), kept, packed
        if not self._updates:
            return loss.detach(), kept, gradients
        self._optimizing.trace(gradients, place)
        return loss.detach(), kept, None

    # ------------------------------------------------------------------ preparation

    def _follows(self, place: int = 0) -> bool:
        """Return whether the optimizer has the same tensors and settings as at the last batch."""
        optimizing = self._optimizing
        if place and not self._moves_rates:  # no code has run since the call's first step
            for group in optimizing.groups:
                group.put(group.last[0], place)
            return True
        if self._updates and not optimizing.has_same_state:
            return False
        if not self._is_known:
            requires = [parameter.requires_grad for parameter in self._parameters]
            if requires != self._requires_grad or _have_hooks(self._may_learn):
                return False
            self._is_known = True
        self._batches += 1
        if not self._updates or optimizing.follows(place):
            return True
        if self._batches == 1:
            self._leave_optimizer_out("its settings change from step to step")
        return False

    def _look_back(self, outcome: Outcome) -> None:
        """Inspect an update that ran without compiling, to prepare the compilation of the next.

        Args:
            outcome: of its last batch.
        """
        may_learn = [p for p in self._parameters if p.requires_grad]
        try:
            self._prepare(outcome, may_learn, [parameter.grad for parameter in may_learn])
        except UncompiledError as error:
            self._stop(error)

    def _look(self, parts: Parts) -> None:
        """Compute a first batch's gradients without compiling, then restore the model's state.

        This makes the first batch's checks, and finds which parameters have a gradient.

        Raises:
            UncompiledError: this step can't be compiled.
        """
        traced = self._traced
        assert isinstance(traced, TracedStep)
        may_learn = [p for p in self._parameters if p.requires_grad]
        _refuse_hooks(may_learn)
        put_back = _restorer(self._model._fitkit.compilation.trained(self._model).modules())
        with kept_random_numbers(), as_written(self._model):
            outcome = traced.as_written(trees.cloned(parts), is_part=self._is_part)
            assert outcome.loss is not None
            gradients = torch.autograd.grad(outcome.loss, may_learn, allow_unused=True)
        put_back()
        self._prepare(outcome, may_learn, gradients)

    def _prepare(
        self, outcome: Outcome, may_learn: list[nn.Parameter], gradients: Sequence[Any]
    ) -> None:
        """Note which parameters have a gradient, and collect the optimizer's tensors.

        Args:
            outcome: of a batch that was computed as written.
            may_learn: the parameters that require gradients.
            gradients: one for each of them; None where there is none.

        Raises:
            UncompiledError: these gradients can't be compiled.
        """
        self._kept.steps.check()
        _refuse_hooks(may_learn)
        if any(g is not None and g.layout is not torch.strided for g in gradients):
            raise UncompiledError("some gradients are sparse")
        own = self._compiled_loss.own if self._compiled_loss is not None else None
        if own is not None and not own.is_decided:
            raise UncompiledError("fitkit can't know what the net's own loss averages over")
        if self._is_part and outcome.counts_apart:
            raise UncompiledError("the losses of several outputs average over different counts")
        self._may_learn, self._learns = may_learn, [g is not None for g in gradients]
        self._learning = list(itertools.compress(may_learn, self._learns))
        self._requires_grad = [p.requires_grad for p in self._parameters]
        one_dtype = len({parameter.dtype for parameter in may_learn}) == 1
        self._packs = self._exchanges and one_dtype and all(self._learns)
        if self._optimizing.is_asked_for_norms:
            self._updates = False
        if self._updates:
            try:
                for parameter, gradient in zip(may_learn, gradients, strict=True):
                    parameter.grad = gradient  # the optimizer ignores parameters without one
                self._optimizing.collect()
            except UncompiledError as error:
                self._leave_optimizer_out(str(error))
            finally:
                for parameter in may_learn:
                    parameter.grad = None
        if isinstance(self._traced, TracedStep):
            self._traced.look_at_metrics()
            self._may_repeat = self._keeps and self._traced.may_join
        self._batches = 0
        self._leaves = None  # a first step shows whether the net changes its inputs

    def _leave_optimizer_out(self, why: str) -> None:
        """Compile the step without the optimizer's part from now on, and warn."""
        self._updates = False
        self._kept.steps.clear()
        self._optimizing.stop(why)


def _weighted(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor]:
    """Multiply gradients by a factor (). A factor of 0 gives 0, even for gradients that are NaN.

    The gradients of a mean over nothing are NaN.
    """
    if not factor.is_cpu:
        return [torch.where(factor != 0, gradient * factor, 0.0) for gradient in gradients]
    number = factor.item()
    if number == 0.0:
        return [torch.zeros_like(gradient) for gradient in gradients]
    return list(torch._foreach_mul(list(gradients), number))


def _of_what_counts(gradients: list[torch.Tensor], count: Any) -> list[torch.Tensor]:
    """Return gradients; 0 if they are those of a mean over nothing, which are NaN."""
    if isinstance(count, torch.Tensor):
        return [torch.where(count.detach() > 0, gradient, 0.0) for gradient in gradients]
    return gradients if count is None or count else list(map(torch.zeros_like, gradients))


def _refuse_hooks(may_learn: list[nn.Parameter]) -> None:
    if _have_hooks(may_learn):
        raise UncompiledError("a parameter has hooks on its gradient")


def _have_hooks(may_learn: list[nn.Parameter]) -> bool:
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in may_learn)


def _restorer(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Note what a forward may change in modules; return a function that puts it back.

    That is their attributes, the contents of lists, dicts and sets among these, and the numbers of
    all tensors there: buffers, and parameters, which a momentum encoder changes in place.
    """
    attributes = [(module, dict(vars(module))) for module in modules]
    contents: list[tuple[Any, Any]] = []
    numbers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _, held in attributes:
        for value in held.values():
            if type(value) in (list, dict, set):
                contents.append((value, value.copy()))
            if isinstance(value, (torch.Tensor, list, dict)):
                numbers += [
                    (leaf, leaf.detach().clone())
                    for leaf in trees.leaves(value)
                    if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
                ]

    @torch.no_grad()
    def put_back() -> None:
        for module, held in attributes:
            vars(module).clear()
            vars(module).update(held)
        for value, before in contents:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        for tensor, before in numbers:  # a version tells nothing of running statistics
            tensor.copy_(before)

    return put_back
