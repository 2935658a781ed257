"""`jit_compile` in evaluation and prediction: compile the net and the loss of a pass's batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitkit import trees
from fitkit.errors import warn
from fitkit.extras.jit.graph_calls import Parts
from fitkit.extras.jit.net import JitNet, as_written
from fitkit.extras.jit.programs import (
    FEWEST_TOGETHER,
    Programs,
    copied,
    shapes_of,
)
from fitkit.extras.jit.proof import MisfitError
from fitkit.extras.jit.traced import TracedStep
from fitkit.extras.jit.tracing import UncompiledError
from fitkit.seams.data import Batch
from fitkit.seams.networks import Module
from fitkit.seams.steps import CompiledStep, Logbook, Outcome, Take

FEWEST_FUSED = 24
"""The fewest fusible operations for which a net is compiled with one batch a call.

If torch checks each call, that takes as long as some twenty such operations.
"""

FEWEST_OPERATIONS = 16
"""The fewest operations of any kind for which a net is compiled if torch needn't check each call.

Nets of 4, 7 and 10 linear layers (8, 14 and 20 operations) take 1.11, 0.96 and 0.89 of the time
when compiled.
"""

SMALL = 2**13
"""An operation counts once for every so many numbers that it computes, and at least once.

A CNN with four large operations (64 images of 3 x 32 x 32) takes 0.31 of the time when compiled.
"""

MOST_OPERATIONS = 256
"""The most operations that are compiled into one call of several batches.

This bounds the compilation's time (a net 32-64-10 with 16 batches: some 10 s).
"""

MOST_TOGETHER = 16
"""The most batches in one call; with so many, the call itself adds a twentieth to their time."""


class JitPass:
    """Computes a pass's batches by compiled functions, from the second batch on.

    Batches with the first one's shapes are compiled. Each call computes one of them, or several if
    `steps_per_execution` allows that. Batches too few for a call of several run without compiling,
    and so does a last batch of another length: to compile them would take longer. If there are
    more batches of other lengths, they share one program for any length. A net of few operations
    isn't compiled for calls of one batch.

    Args:
        model: the model to evaluate.
        step: computes a batch without compiling.
        take: receives the batches with their outcomes, in their order.
        record: the pass's values.
        scope: the pass's, in which the net may be run as written.
        programs: those of earlier passes of this kind, so that nothing is compiled twice.
        net: what is given up if numbers differ.
    """

    def __init__(
        self,
        model: Module,
        step: CompiledStep,
        take: Take,
        record: Logbook,
        scope: contextlib.ExitStack,
        programs: Programs,
        net: JitNet,
    ) -> None:
        self._model, self._step, self._traced = model, step, TracedStep(model, step)
        self._take, self._record = take, record
        self._plain: Callable[..., Outcome] = step
        self._predicts = step.loss is None
        self._programs, self._net = programs, net
        self._scope = scope
        self._most = model._fitkit.compilation.given.steps_per_execution
        self._together = 1
        self._function: Callable[..., Any] = self._computed
        self._joins = self._leaves = False
        self._may_repeat = False  # whether torch may skip its checks, see `Programs.run`
        self._shapes: Any = None
        self._others = 0
        self._held: list[Batch] = []
        self._parts: list[Parts] = []
        self.stopped: bool = False

    def first(self, batch: Batch, index: int) -> Outcome:
        """Make the first step without compiling; it checks everything."""
        step, net, seen = self._step, self._step.net, _Operations()
        forward = net.forward

        def counted(*given: Any, **named: Any) -> Any:
            with seen:
                return forward(*given, **named)

        with as_written(self._model):
            if self._programs.operations is not None:
                return step(batch, index)
            net.forward = counted
            try:
                found = step(batch, index)
            finally:
                net.forward = forward
        self._programs.operations = seen.count, seen.fused
        return found

    def after_first(
        self,
        first: Batch,
        plain: Callable[[Batch, int], Outcome],
        *,
        keeps: bool,
        users_look: bool,
    ) -> Callable[[Batch, int], Outcome | None]:
        """Return the function that makes the steps from the second on.

        Args:
            first: the first batch.
            plain: makes them without compiling.
            keeps: whether the batches' memory stays unchanged until the pass ends.
            users_look: whether other code runs between batches.
        """
        step, self._plain = self._step, plain
        if not step.wrapped.is_bare or not self._gains(keeps and not users_look):
            self._scope.enter_context(as_written(self._model))
            return plain
        self._programs.check()
        if self._predicts:
            self._function = self._predicted
        else:
            meters = step.meters
            if meters is not None and meters.only is not None and meters.only.joins_losses:
                self._joins = True
            self._function = self._measured if self._joins else self._computed
        # If the first batch is a pair of tensors that needs no move, then all others are too.
        self._leaves = keeps and self._traced.leaves(first.data)
        self._shapes = shapes_of(self._parts_of(first))
        return self

    def _gains(self, may_repeat: bool) -> bool:
        """Return whether to compile the batches from the second on.

        Args:
            may_repeat: whether batches are rows of arrays, and no other code runs between them.
        """
        self._may_repeat = may_repeat
        if not self._predicts:
            self._traced.look_at_metrics()
            self._may_repeat = may_repeat and self._traced.may_join
        operations, fused = self._programs.operations or (1, 0)
        most = min(self._most, MOST_TOGETHER, MOST_OPERATIONS // max(operations, 1))
        if self._most >= FEWEST_TOGETHER and most > 1:
            self._together = 1 << (most.bit_length() - 1)
            return True
        self._together = 1
        return fused >= FEWEST_FUSED or (self._may_repeat and operations >= FEWEST_OPERATIONS)

    def __call__(self, batch: Batch, index: int = 0) -> Outcome | None:
        """Compute a batch, or hold it until there are enough batches for one call.

        Returns:
            Its outcome; None if it was taken already, or comes later.
        """
        if self.stopped:
            return self._plain(batch, index)
        parts = self._parts_of(batch)
        if shapes_of(parts) != self._shapes:
            self.flush()
            self._others += 1
            if self._others == 1:
                self._run_plainly(batch)
            else:
                self._run([batch], [parts], None)
            return None
        if self._together > 1 and batch.is_lent:  # a generator may reuse its arrays
            batch = dataclasses.replace(batch, data=parts)
        self._held.append(batch)
        self._parts.append(parts)
        if len(self._held) == self._together:
            held, ready, self._held, self._parts = self._held, self._parts, [], []
            self._run(held, ready, self._shapes)
        return None

    def _parts_of(self, batch: Batch) -> Parts:
        """Return a batch's inputs, targets and weights, on the device, in memory of their own."""
        if self._leaves and not batch.is_lent:
            return *batch.data, None
        return self._step.moved_parts(batch)

    def flush(self) -> None:
        """Compute the waiting batches. Code of the user's may run after that."""
        self._programs.check()
        held, self._held, self._parts = self._held, [], []
        for batch in held:
            self._run_plainly(batch)

    def _run(self, held: list[Batch], batches: list[Parts], shapes: Any) -> None:
        """Compute some batches in one call.

        Args:
            held: the batches as they were passed in.
            batches: their inputs, targets and weights, on the device.
        """
        traced, step = self._traced, self._step
        try:
            found = self._programs.run(
                self._function,
                batches,
                shapes,
                traced.device,
                entered=traced.entered,
                may_repeat=self._may_repeat,
            )
        except UncompiledError as error:
            for batch in held:
                self._run_plainly(batch)  # raises the error if the batch itself is wrong
            self.stopped = True
            if isinstance(error, MisfitError):
                self._net.give_up(self._model, error)
                return
            warn(f"jit_compile compiles the net alone in {self._programs.what}: {error}")
            return
        if self._predicts:
            found = found if traced.device == "cpu" else trees.map_leaves(copied, found)
            for batch, outputs in zip(held, found, strict=True):
                self._take(batch, Outcome(None, outputs=outputs))
        elif self._joins:
            assert step.meters is not None
            for prediction, target in found:
                step.meters.update(prediction, target)
        else:
            traced.note_together(held, self._record, found, batches)

    def _run_plainly(self, batch: Batch) -> None:
        with contextlib.nullcontext() if self.stopped else as_written(self._model):
            self._take(batch, self._plain(batch, 0))

    def _predicted(self, entered: Any) -> Any:
        """Compute the batches' outputs; traced."""
        return [self._traced.predicted(given, named) for given, named, _, _ in entered]

    def _measured(self, entered: Any) -> Any:
        """Compute the batches' outputs and targets, joined as one batch where possible; traced."""
        predictions, targets = self._predicted(entered), [batch[2] for batch in entered]
        if len(entered) > 1 and self._traced.may_join:
            return [(torch.cat(predictions), torch.cat(targets))]
        return list(zip(predictions, targets, strict=True))

    def _computed(self, entered: Any) -> Any:
        """Compute the batches' losses, and the other values that are recorded; traced."""
        found = [self._traced.computed(*batch) for batch in entered]
        return self._traced.joined(found, entered) if len(found) > 1 else found


class _Operations(TorchDispatchMode):
    """Counts torch's operations within a `with` block, and how many its compiler can fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.fused = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        found = function(*args, **(kwargs or {}))
        if torch.Tag.pointwise in function.tags or "norm" in function.__name__:
            outputs = found[0] if isinstance(found, (tuple, list)) else found
            self.fused += max(1, outputs.numel() // SMALL)
        return found
