"""`train_on_batch`, `test_on_batch` and `predict_on_batch`: one batch, with steps that are kept."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fitkit import trees
from fitkit.batch_kinds import kind_of
from fitkit.data.arrays import (
    as_tensors,
    is_array,
    is_array_tree,
    is_sparse_matrix,
    made_dense,
    wide_dtype,
)
from fitkit.data.batches import Batch, check_weights
from fitkit.data.sources import array_batch, check_data_type
from fitkit.errors import warn
from fitkit.guests import guest_of
from fitkit.hooks import STEP_HOOKS, evaluation_stage
from fitkit.losses.class_weights import ClassWeights
from fitkit.modes import (
    has_plain_modes,
    in_use,
    kept_in_evaluation,
    modules_of,
    to_training,
)
from fitkit.module import Module
from fitkit.optimizers import members_of
from fitkit.outputs import EMPTY_MEAN
from fitkit.pickling import MadeAnew
from fitkit.samples import Reading, reading, samples_of
from fitkit.scopes import Scope
from fitkit.shortcuts import Shortcut
from fitkit.training.batch_changes import batch_transforms_of
from fitkit.training.evaluate import joined, on_host
from fitkit.training.log import Logbook, warn_of_empty
from fitkit.training.parts_of_batches import counter_of
from fitkit.training.step import CompiledStep
from fitkit.training.step_context import as_current
from fitkit.training.step_for import new_context, step_for
from fitkit.training.surroundings import (
    computing,
    evaluating,
    place,
    surroundings,
    unchanged_on_error,
)
from fitkit.training.update import backward_of, updates_for
from fitkit.training.with_gradients import first_step
from fitkit.typing import Tree

OF_ALL = ("transfer_batch_to_device", "forward")

CODE = {
    stage: (attrgetter(*names), names)
    for stage, names in (
        ("training", (*STEP_HOOKS["training"], *OF_ALL, "configure_optimizers")),
        ("test", (*STEP_HOOKS["test"], *STEP_HOOKS["validation"], *OF_ALL)),
        ("predict", (*STEP_HOOKS["predict"], *OF_ALL)),
    )
}
"""By stage, what reads a class's code for the hooks that decide how a step is built; and their
names."""

ROLE = attrgetter("requires_grad", "dtype", "device")
"""What a step depends on of a parameter."""

SHAPE = attrgetter("shape")

FLAGS = ("benchmark", "deterministic", "matmul_precision")
"""The arguments of `compile` by which `surroundings` sets a flag of torch."""

PLAIN = ("torch.nn.", "fitkit.")
"""The beginnings of the names of modules whose classes' code doesn't change."""

PLAIN_VALUES = (numbers.Number, str, bytes, type(None))
"""What no net computes with. Inputs of these alone are refused with what to write."""


@dataclasses.dataclass
class KeptStep:
    """Holds the step that a verb of single batches has built, with all that it needs.

    Attributes:
        stage: the stage's name.
        step: the stage's step.
        update: makes updates; None if the stage doesn't train.
        is_kept: whether the next call may use the step.
        layers: the modules in the model and its losses, but not the model.
        kinds: the classes of all modules.
        held: what decides how the step is built, as `_objects_of` returns it.
        roles: which parameters learn, with their dtypes and devices.
        fused: the tensors of optimizers' states that fused kernels read, and their shapes.
        batch_facts: which batches the step was built for, as `_batch_facts` returns it.
        may_count: whether the loss may be a mean over something other than samples.
    """

    stage: str
    step: Any
    update: Any = None
    is_kept: bool = False
    layers: list[nn.Module] = dataclasses.field(default_factory=list)
    kinds: list[type[nn.Module]] = dataclasses.field(default_factory=list)
    held: list[Any] = dataclasses.field(default_factory=list)
    parameters: list[nn.Parameter] = dataclasses.field(default_factory=list)
    roles: list[Any] = dataclasses.field(default_factory=list)
    fused: list[torch.Tensor] = dataclasses.field(default_factory=list)
    shapes: list[torch.Size] = dataclasses.field(default_factory=list)
    batch_facts: list[Any] = dataclasses.field(default_factory=list)
    may_count: bool = False

    def keep(self, model: Module, batch: tuple[Any, ...]) -> None:
        """Note what a step that has made its first batch was built for, if it can be kept."""
        step, losses = self.step, model._fitkit.compilation.trained(model).losses.values()
        if not _can_be_kept(model, self.stage, step):
            return
        self.is_kept = True
        _, *self.layers = everything = modules_of(model, *losses)
        self.parameters = [
            p for part in everything for p in part._parameters.values() if p is not None
        ]
        kinds = dict.fromkeys(map(type, everything))
        self.kinds = [kind for kind in kinds if not kind.__module__.startswith(PLAIN)]
        self.held = self._objects_of(model)
        self.roles = [*map(ROLE, self.parameters)]
        if self.update is not None:
            states = _fused_states(model)
            self.fused = [one for one in states if isinstance(one, torch.Tensor)]
            self.shapes = [*map(SHAPE, self.fused)]
        self.batch_facts = _batch_facts(batch)
        if step.loss is not None and not step.loss.has_several and not step.may_be_nan:
            # The mean over one batch is the same whatever it is taken over.
            self.may_count, step.may_count = step.may_count, False

    def holds(self, model: Module) -> bool:
        """Return whether nothing has changed that decides how the step is built."""
        objects = self._objects_of(model)
        return (
            len(objects) == len(self.held)
            and all(map(is_, objects, self.held))
            and self.roles == [*map(ROLE, self.parameters)]
            and self.shapes == [*map(SHAPE, self.fused)]
        )

    def _objects_of(self, model: Module) -> list[Any]:
        """Return the objects that decide how the step is built, or may act in it.

        True and False stand for whether there are hooks.
        """
        read, names = CODE[self.stage]
        objects: list[Any] = [
            model._fitkit.compilation,
            RemovableHandle.next_id,  # the number of hooks that were ever registered
            model.__dict__.keys().isdisjoint(names),
        ]
        for kind in self.kinds:
            objects += (kind.train, kind.eval)
        if not type(model).__module__.startswith(PLAIN):
            objects += read(type(model))
        for module in (model, *self.layers):
            own = module.__dict__
            if parts := own["_modules"]:
                objects += parts.values()
            if parts := own["_parameters"]:
                objects += parts.values()
            objects += (type(module), len(own))  # `forward` and `train` may have been set
        if self.update is not None:
            for listed in model._fitkit.fit_state.optimizers:
                for optimizer in members_of(listed):
                    objects += (optimizer, optimizer.state, optimizer.param_groups)
                    for group in optimizer.param_groups:
                        objects += group["params"]
                        objects.append(group.get("fused"))
            objects += _fused_states(model)
        return objects


class KeptSteps(MadeAnew):
    """Keeps a model's steps for single batches, by stage, from one call to the next.

    A step stays valid until something changes that its construction depends on. These are the
    arguments of `compile`, the net, its parameters, the optimizers, hooks, and the batches' dtypes,
    devices and shapes. Of the parameters, it depends on which ones learn, their dtypes and their
    devices. Modes are checked in each call. A step is rebuilt in each call if the model defines its
    own steps, with several ranks or replicas, and with an engine.

    Between calls a step doesn't refer to the model. Otherwise the model would stay in memory until
    the garbage collector runs. A copy of a model starts without steps. A call takes its step out,
    and gives it back if it succeeds. So calls in other threads, and nested calls, don't share it.
    """

    def __init__(self) -> None:
        self._by_stage: dict[str, KeptStep] = {}
        self.has_told = False  # that a loss isn't finite

    def drop(self) -> None:
        """Drop all steps, so that the next calls rebuild them."""
        self._by_stage.clear()

    def take(self, stage: str) -> KeptStep | None:
        """Return the stage's step, if there is one. It may no longer be valid."""
        return self._by_stage.pop(stage, None)

    def give(self, model: Module, batch: tuple[Any, ...], kept: KeptStep) -> None:
        """Keep a step whose call has succeeded, if a step of its type can be kept."""
        if not kept.is_kept:
            kept.keep(model, batch)
        if kept.is_kept:
            kept.step.net.lend(None)
            self._by_stage[kept.stage] = kept


STEPS_KEPT = Shortcut("the step of single batches kept from call to call")


def _can_be_kept(model: Module, stage: str, step: Any) -> bool:
    """Return whether a step can serve several calls."""
    compilation, state = model._fitkit.compilation, model._fitkit.fit_state
    strategy = compilation.strategy
    return (
        isinstance(step, CompiledStep)
        and step.wrapped.is_bare
        and step.mover.is_ours
        and strategy.world.size == 1
        and strategy.replicas == 1
        and not strategy.has_engine
        and compilation.given.memory_format is None
        and not (stage == "training" and compilation.given.batch_transforms)
        and compilation.loss.own is None
        and not (stage == "training" and state.scalings)
        and STEPS_KEPT.is_on
    )


def _fused_states(model: Module) -> list[Any]:
    """Return the values in the states of optimizers with fused kernels.

    These kernels assume the parameters' shapes. A new step checks that.
    """
    found: list[Any] = []
    for listed in model._fitkit.fit_state.optimizers:
        for optimizer in members_of(listed):
            for group in optimizer.param_groups:
                if group.get("fused"):
                    for state in optimizer.state.values():
                        found += state.values()
                    break
    return found


def as_batch(arrays: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Convert one batch's arrays to tensors. Other inputs stay, as in the batches of a loader."""
    check_data_type(arrays[0])
    if _is_as_loaded(arrays[0], arrays[1]):
        return _loaded_batch(arrays, dtype)
    batch: tuple[Any, ...] = array_batch(*arrays, float_dtype=dtype)
    return batch if type(batch[0]) is torch.Tensor else made_dense(batch)


def _is_as_loaded(x: Tree, y: Any) -> bool:
    """Whether inputs aren't arrays of rows, but what a loader's batches may have.

    Such are lists with one entry per sample, packed sequences, objects of a library, and texts
    beside tensors.
    """
    if is_array(x) or is_sparse_matrix(x):
        return False
    if kind_of(x) is not None:
        return True
    found = list(trees.leaves(x))
    if all(isinstance(leaf, PLAIN_VALUES) for leaf in found):
        return False
    if not all(map(is_array, found)):
        return True
    if not isinstance(x, (list, tuple)) or (kind := reading(x)) is Reading.PARTS:
        return False
    # Of dicts with equally many rows, the targets say whether each is a sample.
    is_one_each = is_array(y) and len(x) == len(y) != found[0].shape[0]
    return kind is Reading.SAMPLES or is_one_each


def _loaded_batch(arrays: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return a batch of inputs that stay as they are."""
    x, y, sample_weight = arrays
    wide = wide_dtype(dtype)
    parts = [x]
    if y is not None:
        is_arrays = is_array_tree(y, gaps=True)
        parts.append(as_tensors(y, "y", wide, target=True) if is_arrays else y)
    if sample_weight is not None:
        parts.append(as_tensors(sample_weight, "sample_weight", wide))
        check_weights(parts[-1], "sample_weight")
    return tuple(parts)


def _batch_facts(batch: tuple[Any, ...]) -> list[Any]:
    """Return the dtypes, devices and shapes of a batch, which decide how a step is built."""
    facts: list[Any] = []
    for number, part in enumerate(batch):
        plain = isinstance(part, torch.Tensor)
        for path, leaf in [("", part)] if plain else trees.leaves_with_paths(part):
            facts.append(path)
            if isinstance(leaf, torch.Tensor):  # inputs, such as texts, may vary in length
                facts += (leaf.dtype, leaf.device, leaf.shape[1:] if number else leaf.ndim)
    return facts


def _ready(
    model: Module, verb: str, kept: KeptStep | None, arrays: tuple[Any, ...]
) -> tuple[KeptStep | None, tuple[Any, ...]]:
    """Return a kept step with its model, or None if it is no longer valid; and the batch's tensors.

    Args:
        verb: the verb of which this is a batch.
        arrays: the batch's inputs, targets and weights, as the user gave them.
    """
    if kept is None or not kept.holds(model):
        if (guest := guest_of(model)) is not None:
            guest.check(model, verb)
            guest.prepare(lambda: arrays[0])
        dtype = model._fitkit.compilation.strategy.precision.input_dtype(model)
        return None, as_batch(arrays, dtype)
    step = kept.step
    batch = as_batch(arrays, step.mover.transfer.float_dtype)
    if kept.batch_facts != _batch_facts(batch):
        return None, batch
    step.net.lend(model)
    return kept, batch


def _counted(data: tuple[Any, ...], samples_of: Callable[[Any], int]) -> Batch:
    samples = samples_of(data)
    return Batch(data, samples, samples)


def _counted_by_all(model: Module, data: tuple[Any, ...]) -> Batch:
    """Return a batch of an update, in which all ranks take part if `fit` runs on several."""
    batch, ranks = _counted(data, counter_of(model)), model._fitkit.compilation.strategy.data_ranks
    if ranks.world_size == 1:
        return batch
    return dataclasses.replace(batch, total=int(ranks.sums([float(batch.samples)])[0]))


def _values_of(kept: KeptStep, steps: KeptSteps, record: Logbook, batch: Batch) -> dict[str, Any]:
    """Return the values of the one batch that a step has computed."""
    step = kept.step
    values: dict[str, Any] = record.results()
    loss = values.get("loss")
    if loss != loss and kept.may_count and not any(step.counts_of(batch)):  # NaN, of no labels
        loss = values["loss"] = EMPTY_MEAN
    if EMPTY_MEAN in values.values():
        warn_of_empty(values, "In this batch")
    if loss is not None and loss is not EMPTY_MEAN and not math.isfinite(loss):
        _tell_lost(loss, steps, batch)
    return values


def _tell_lost(loss: float, steps: KeptSteps, batch: Batch) -> None:
    """Warn, once for a model, that a batch's loss isn't finite, and where its data aren't."""
    if steps.has_told:
        return
    steps.has_told = True
    from fitkit.extras.bad_numbers import first_bad

    where = first_bad(batch.data)
    advice = "All numbers of the batch are finite" if where is None else f"In the batch, {where}"
    warn(f"In this batch loss is {loss}. {advice}. This is said once.")


def fit_batch(
    model: Module, arrays: tuple[Any, ...], class_weights: ClassWeights | None = None
) -> dict[str, Any]:
    """Make one update on one batch in this process; return the loss and metrics before it."""
    state, steps = model._fitkit.fit_state, model._fitkit.kept_steps
    assert type(steps) is KeptSteps
    kept = steps.take("training") if class_weights is None else None
    losses = model._fitkit.compilation.trained(model).losses.values()
    with in_use(model, "train_on_batch", alone=True), surroundings(model, "train_on_batch"):
        kept, batch = _ready(model, "fit", kept, arrays)
        modules = None if kept is None else modules_of(model, *losses)
        with unchanged_on_error(model, modules):
            if kept is None:
                place(model)
                model._made_optimizers()  # their number decides which step is built
            trains = modules is not None and all(module.training for module in modules)
            if modules is None or not (trains and has_plain_modes(modules)):
                to_training(model, kept_in_evaluation(model._weights_module()))
            if kept is None:
                kept = KeptStep(
                    "training", step_for(model, "training", class_weights=class_weights)
                )
            step = kept.step
            if kept.update is None:
                # Compiled updates cost more than they save on one batch.
                kept.update = updates_for(model, step, accumulate=1)
            with Scope() as scope, state.weights_restored():
                context = new_context(model, "training", step, scope, backward_of(kept.update))
                with as_current(model, context):
                    state.use_training_weights()
                    state.accumulate = 1
                    counted = _counted_by_all(model, batch)
                    if (transforms := batch_transforms_of(model, step)) is not None:
                        counted = transforms(counted)
                    context.batch = counted
                    kept.update(counted, 0, context.record)
                    values = _values_of(kept, steps, context.record, counted)
    model._fitkit.log_names = list(values)
    if class_weights is None:
        steps.give(model, batch, kept)
    return values


def evaluate_batch(model: Module, arrays: tuple[Any, ...]) -> dict[str, Any]:
    """Compute one batch's loss and metrics in this process."""
    steps, stage = model._fitkit.kept_steps, evaluation_stage(model) or "test"
    assert type(steps) is KeptSteps
    with computing(model, "test_on_batch") as modules, surroundings(model, "test_on_batch"):
        kept, batch = _ready(model, "evaluate", steps.take("test"), arrays)
        if kept is None:
            place(model)
            kept = KeptStep("test", step_for(model, stage))
        step = kept.step
        with Scope() as scope:
            context = new_context(model, stage, step, scope)
            with evaluating(model, context, modules), torch.no_grad():
                counted = context.batch = _counted(batch, counter_of(model))
                step.record(counted, first_step(model, step, counted), context.record)
                values = _values_of(kept, steps, context.record, counted)
    steps.give(model, batch, kept)
    return values


def predict_batch(model: Module, x: Tree) -> Any:
    """Compute the net's outputs for one batch; return them as NumPy arrays."""
    steps, arrays = model._fitkit.kept_steps, (x, None, None)
    assert type(steps) is KeptSteps
    with computing(model, "predict_on_batch") as modules, surroundings(model, "predict_on_batch"):
        kept, batch = _ready(model, "predict", steps.take("predict"), arrays)
        if kept is None:
            place(model)
            kept = KeptStep("predict", step_for(model, "predict"))
        context = new_context(model, "predict", kept.step, Scope())  # nothing is logged or measured
        with evaluating(model, context, modules), torch.no_grad():
            counted = context.batch = _counted(batch, samples_of)
            outcome = first_step(model, kept.step, counted)
            outputs = trees.to_numpy(joined([on_host(outcome.outputs)]))
    steps.give(model, batch, kept)
    return outputs
