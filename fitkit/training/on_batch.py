"""`train_on_batch`, `test_on_batch`, `predict_on_batch`: one batch, by steps that are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fitkit import trees
from fitkit.data.class_weights import ClassWeights
from fitkit.hooks import evaluation_stage, has_own_steps, overridden
from fitkit.modes import kept_in_evaluation, parameters_of, to_training
from fitkit.module import Module
from fitkit.optimizers import members_of
from fitkit.training.evaluate import joined, on_host
from fitkit.training.own_step import StepContext, predict_step_for, running, step_for
from fitkit.training.step import CompiledStep, PredictStep, forward_of
from fitkit.training.surroundings import evaluating, place, unchanged_on_error
from fitkit.training.update import updates_for


@dataclasses.dataclass
class KeptStep:
    """What a verb of single batches has built.

    Attributes:
        context, step: of the stage.
        update: makes updates; None where nothing learns.
        facts: what it was built for, as `_facts` gives it.
        held: what the facts name by their ids, so that no other object can get one of these.
    """

    context: StepContext
    step: Any
    update: Any
    facts: list[Any]
    held: list[Any]


class KeptSteps:
    """A model's steps for single batches, by stage, from one call to the next.

    A step is kept as long as all stays that its construction looked at: what `compile` was given,
    the net and its parameters (which learn, their dtypes and devices), the optimizers, and the
    batches' dtypes and shapes. Modes and hooks are looked at in each call. Steps of the model's
    own, several ranks or replicas and engines are built anew each time.

    Between two calls a step doesn't refer to the model, which would wait for the garbage collector
    otherwise. A copy of a model gets none. A call takes its step out, so that calls in other
    threads, or within it, don't share one; and gives it back if it succeeds.
    """

    def __init__(self) -> None:
        self._by_stage: dict[str, KeptStep] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptSteps, ()

    def drop(self) -> None:
        """Let all steps be built anew."""
        self._by_stage.clear()

    def take(self, model: Module, stage: str, batch: Any) -> KeptStep | None:
        """The stage's step, where it is still right; None where it has to be built."""
        kept = self._by_stage.pop(stage, None)
        if kept is None or kept.facts != _facts(model, stage, batch)[0]:
            return None
        wrapped = model._fitkit.compilation.strategy.wrap_for_evaluation(model)
        kept.step.wrapped, kept.step.forward = wrapped, forward_of(wrapped)
        if stage != "predict":
            kept.step.begin()
        return kept

    def give(self, model: Module, stage: str, batch: Any, kept: KeptStep) -> None:
        """Keep a step whose call has succeeded, where its kind can be kept."""
        if type(kept.step) not in (CompiledStep, PredictStep) or not kept.step.wrapped.is_bare:
            return
        if not kept.facts:
            kept.facts, kept.held = _facts(model, stage, batch)
        if kept.facts:
            kept.step.wrapped = kept.step.forward = None
            self._by_stage[stage] = kept


def _facts(model: Module, stage: str, batch: Any) -> tuple[list[Any], list[Any]]:
    """What decides how a step is built, comparable at once, and the objects it names by id.

    Nothing where a step can't be kept.
    """
    compilation, state = model._fitkit.compilation, model._fitkit.fit_state
    strategy, net = compilation.strategy, model.net
    if (
        strategy.world.size > 1
        or strategy.replicas > 1
        or strategy.has_engine
        or compilation.memory_format is not None
        or (stage == "training" and state.scalings)
        or compilation.loss.own is not None
        or has_own_steps(model, stage)
        or overridden(model, "transfer_batch_to_device")
    ):
        return [], []
    held = [compilation, net]
    facts = [id(compilation), type(model), id(net), type(net), "forward" in vars(model)]
    for parameter in parameters_of(model, *compilation.loss_modules):
        held.append(parameter)
        facts += (id(parameter), parameter.requires_grad, parameter.dtype, parameter.device)
    if stage == "training":
        for optimizer in (one for listed in state.optimizers for one in members_of(listed)):
            held += (optimizer, optimizer.state, optimizer.param_groups)
            facts += (id(optimizer), id(optimizer.state), id(optimizer.param_groups))
            for group in optimizer.param_groups:
                facts.append(len(group["params"]))
                for parameter in group["params"] if group.get("fused") else ():
                    # Kernels of one pass read these as the parameter's, which a new step checks.
                    for value in (optimizer.state.get(parameter) or {}).values():
                        held.append(value)
                        facts += (id(value), getattr(value, "shape", None))
    for number, part in enumerate(batch):
        plain = isinstance(part, torch.Tensor)
        for path, leaf in [("", part)] if plain else trees.leaves_with_paths(part):
            facts.append(path)
            if isinstance(leaf, torch.Tensor):  # inputs may be of any length, as texts are
                facts += (leaf.dtype, leaf.shape[1:] if number else leaf.ndim)
    return facts, held


def _values_of(step: Any) -> dict[str, Any]:
    """The values of the one batch that a step has computed."""
    step.undo_writes()
    if step.logbook.meters:
        step.logbook.meters.flush()  # no more come
    values: dict[str, Any] = step.logbook.results()
    return values


def fit_batch(
    model: Module, batch: Any, class_weights: ClassWeights | None = None
) -> dict[str, Any]:
    """One update on one batch, here: its loss and metrics before it."""
    state, steps = model._fitkit.fit_state, model._fitkit.kept_steps
    kept = None if class_weights is not None else steps.take(model, "training", batch)
    with unchanged_on_error(model, is_ready=kept is not None):
        if kept is None:
            model._fitkit.compilation.strategy.place(model)
            state.optimizers_for(model)  # how many there are decides on the step
        to_training(model, kept_in_evaluation(model._weights_module()))
        if kept is None:
            context, step = step_for(model, "training", class_weights=class_weights)
            kept = KeptStep(context, step, None, [], [])
        context, step = kept.context, kept.step
        with running(model, context), state.training():
            try:
                if kept.update is None:
                    # One batch is not worth what the first one costs where steps are compiled.
                    kept.update = updates_for(model, context, step, accumulate=1, compiles=False)
                state.accumulate = 1
                kept.update(batch, 0)
                values = _values_of(step)
            finally:
                step.logbook.logged.finish()
    model._fitkit.log_names = list(values)
    if class_weights is None:
        steps.give(model, "training", batch, kept)
    return values


def evaluate_batch(model: Module, batch: Any) -> dict[str, Any]:
    """One batch's loss and metrics, here."""
    steps, stage = model._fitkit.kept_steps, evaluation_stage(model) or "test"
    kept = steps.take(model, stage, batch)
    if kept is None:
        place(model)
        kept = KeptStep(*step_for(model, stage), None, [], [])
    step = kept.step
    with evaluating(model, kept.context), torch.no_grad():
        try:
            step(batch, 0)
            values = _values_of(step)
        finally:
            step.logbook.logged.finish()
    steps.give(model, stage, batch, kept)
    return values


def predict_batch(model: Module, batch: Any) -> Any:
    """The net's outputs for one batch, on the CPU."""
    steps = model._fitkit.kept_steps
    kept = steps.take(model, "predict", batch)
    if kept is None:
        place(model)
        kept = KeptStep(*predict_step_for(model), None, [], [])
    with evaluating(model, kept.context), torch.no_grad():
        outputs = joined([on_host(kept.step(batch, 0))])
    steps.give(model, "predict", batch, kept)
    return outputs
