"""`train_on_batch`, `test_on_batch` and `predict_on_batch`: one batch, with steps that are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.data.arrays import made_dense
from fitkit.data.class_weights import ClassWeights
from fitkit.data.sources import array_batch, check_data_type
from fitkit.hooks import evaluation_stage, has_own_steps, overridden
from fitkit.modes import has_plain_modes, kept_in_evaluation, modules_of, to_training
from fitkit.module import Module
from fitkit.optimizers import members_of
from fitkit.training.evaluate import joined, on_host
from fitkit.training.own_step import StepContext, predict_step_for, running, step_for
from fitkit.training.step import CompiledStep, PredictStep, forward_of
from fitkit.training.surroundings import evaluating, place, unchanged_on_error
from fitkit.training.update import updates_for


@dataclasses.dataclass
class KeptStep:
    """Holds the step that a verb of single batches has built, with all that it needs.

    Attributes:
        context: the stage's context.
        step: the stage's step.
        update: makes updates; None if the stage doesn't train.
        modules: the modules in the model and its losses.
        facts: what the step was built for, as `_facts` returns it.
        batch_facts: which batches the step was built for, as `_batch_facts` returns it.
        held: the objects whose ids are among the facts; no new object can then get such an id.
    """

    context: StepContext
    step: Any
    update: Any = None
    modules: list[nn.Module] = dataclasses.field(default_factory=list)
    facts: list[Any] = dataclasses.field(default_factory=list)
    batch_facts: list[Any] = dataclasses.field(default_factory=list)
    held: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.step, CompiledStep):
            self.step.logbook.meters.waits = False  # no later batch is measured with it


class KeptSteps:
    """Keeps a model's steps for single batches, by stage, from one call to the next.

    A step stays valid until something changes that its construction depends on. These are the
    arguments of `compile`, the net, its parameters, the optimizers, and the batches' dtypes and
    shapes. Of the parameters, it depends on which ones learn, their dtypes and their devices. Modes
    and hooks are checked in each call. A step is rebuilt in each call if the model defines its own
    steps, with several ranks or replicas, and with an engine.

    Between calls a step doesn't refer to the model. Otherwise the model would stay in memory until
    the garbage collector runs. A copy of a model starts without steps. A call takes its step out,
    and gives it back if it succeeds. So calls in other threads, and nested calls, don't share it.
    """

    def __init__(self) -> None:
        self._by_stage: dict[str, KeptStep] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptSteps, ()

    def drop(self) -> None:
        """Drop all steps, so that the next calls rebuild them."""
        self._by_stage.clear()

    def take(
        self, model: Module, stage: str, arrays: tuple[Any, ...]
    ) -> tuple[KeptStep | None, tuple[Any, ...]]:
        """Return the stage's step, or None if it is no longer valid, and the batch as tensors.

        Args:
            arrays: the batch's inputs, targets and weights, as the user gave them.
        """
        check_data_type(arrays[0])
        strategy = model._fitkit.compilation.strategy
        kept = self._by_stage.pop(stage, None)
        if kept is not None and kept.facts == _facts(model, stage, kept):
            batch = as_batch(arrays, kept.step.mover.transfer.float_dtype)
            if kept.batch_facts == _batch_facts(batch):
                wrapped = strategy.wrap_for_evaluation(model)
                kept.step.wrapped, kept.step.forward = wrapped, forward_of(wrapped)
                if stage != "predict":
                    kept.step.begin()
                return kept, batch
        return None, as_batch(arrays, strategy.precision.input_dtype(model))

    def give(self, model: Module, stage: str, batch: Any, kept: KeptStep) -> None:
        """Keep a step whose call has succeeded, if a step of its type can be kept."""
        if not kept.facts:
            if type(kept.step) not in (CompiledStep, PredictStep) or not kept.step.wrapped.is_bare:
                return
            kept.facts = _facts(model, stage, kept)
            kept.batch_facts = _batch_facts(batch)
        if kept.facts:
            kept.step.wrapped = kept.step.forward = None
            self._by_stage[stage] = kept


def as_batch(arrays: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Convert one batch's arrays to tensors."""
    batch: tuple[Any, ...] = array_batch(*arrays, float_dtype=dtype)
    return batch if type(batch[0]) is torch.Tensor else made_dense(batch)


def _facts(model: Module, stage: str, kept: KeptStep) -> list[Any]:
    """Return all that decides how a step is built; an empty list if the step can't be kept.

    Args:
        kept: receives the objects whose ids are among the facts, if it holds none yet.
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
        return []
    _, *modules = everything = modules_of(model, *compilation.loss_modules)
    parameters = [p for part in everything for p in part._parameters.values() if p is not None]
    held: list[Any] = [compilation, *modules, *parameters]
    facts: list[Any] = [type(model), type(net), "forward" in vars(model)]
    facts += [(p.requires_grad, p.dtype, p.device) for p in parameters]
    if stage == "training":
        for optimizer in (one for listed in state.optimizers for one in members_of(listed)):
            held += (optimizer, optimizer.state, optimizer.param_groups)
            for group in optimizer.param_groups:
                facts.append(len(group["params"]))
                if group.get("fused"):
                    # Fused kernels assume the parameter's shape here. A new step checks that.
                    for state_of_one in map(optimizer.state.get, group["params"]):
                        values = list((state_of_one or {}).values())
                        held += values
                        facts += [getattr(value, "shape", None) for value in values]
    facts.append([*map(id, held)])
    if not kept.held:
        kept.held, kept.modules = held, modules
    return facts


def _batch_facts(batch: tuple[Any, ...]) -> list[Any]:
    """Return the dtypes and shapes of a batch, which decide how a step is built."""
    facts: list[Any] = []
    for number, part in enumerate(batch):
        plain = isinstance(part, torch.Tensor)
        for path, leaf in [("", part)] if plain else trees.leaves_with_paths(part):
            facts.append(path)
            if isinstance(leaf, torch.Tensor):  # inputs, such as texts, may vary in length
                facts += (leaf.dtype, leaf.shape[1:] if number else leaf.ndim)
    return facts


def _values_of(step: Any) -> dict[str, Any]:
    """Return the values of the one batch that a step has computed."""
    step.undo_writes()
    if step.logbook.meters:
        step.logbook.meters.flush()  # no more batches come
    values: dict[str, Any] = step.logbook.results()
    return values


def fit_batch(
    model: Module, arrays: tuple[Any, ...], class_weights: ClassWeights | None = None
) -> dict[str, Any]:
    """Make one update on one batch in this process; return the loss and metrics before it."""
    state, steps = model._fitkit.fit_state, model._fitkit.kept_steps
    kept, batch = steps.take(model, "training", arrays)
    if class_weights is not None:
        kept = None
    modules = None if kept is None else [model, *kept.modules]
    with unchanged_on_error(model, modules):
        if kept is None:
            model._fitkit.compilation.strategy.place(model)
            state.optimizers_for(model)  # their number decides which step is built
        trains = modules is not None and all(module.training for module in modules)
        if modules is None or not (trains and has_plain_modes(modules)):
            to_training(model, kept_in_evaluation(model._weights_module()))
        if kept is None:
            kept = KeptStep(*step_for(model, "training", class_weights=class_weights))
        context, step = kept.context, kept.step
        with running(model, context), state.training():
            try:
                if kept.update is None:
                    # Compiling a step costs more than it saves on one batch.
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


def evaluate_batch(model: Module, arrays: tuple[Any, ...]) -> dict[str, Any]:
    """Compute one batch's loss and metrics in this process."""
    steps, stage = model._fitkit.kept_steps, evaluation_stage(model) or "test"
    kept, batch = steps.take(model, stage, arrays)
    if kept is None:
        place(model)
        kept = KeptStep(*step_for(model, stage))
    step = kept.step
    with evaluating(model, kept.context), torch.no_grad():
        try:
            step(batch, 0)
            values = _values_of(step)
        finally:
            step.logbook.logged.finish()
    steps.give(model, stage, batch, kept)
    return values


def predict_batch(model: Module, x: Any) -> Any:
    """Compute the net's outputs for one batch; return them on the CPU."""
    steps = model._fitkit.kept_steps
    kept, batch = steps.take(model, "predict", (x, None, None))
    if kept is None:
        place(model)
        kept = KeptStep(*predict_step_for(model))
    with evaluating(model, kept.context), torch.no_grad():
        outputs = joined([on_host(kept.step(batch, 0))])
    steps.give(model, "predict", batch, kept)
    return outputs
