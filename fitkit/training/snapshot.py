"""Saving all of a model's training to one file, and loading it."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Protocol, TypeVar

import torch
from torch.optim import Optimizer

import fitkit.checkpoint as files
from fitkit.arguments import describe, plain_settings
from fitkit.buffers import Place, restorer
from fitkit.callbacks import History
from fitkit.distributed.collectives import done_by_rank_zero
from fitkit.errors import ArgumentTypeError, CheckpointError, FitkitError, warn
from fitkit.fit_state import FitState
from fitkit.module import Module
from fitkit.optimizer_copies import with_inner
from fitkit.optimizers import OPTIMIZERS, class_of, held_by, instances_in, load_state, put_rate
from fitkit.progress import Progress
from fitkit.schedulers import PlannedScheduler
from fitkit.scopes import Scope, undone_on_error
from fitkit.training import unsaved
from fitkit.training.check_state import (
    check_progress,
    check_scheduler_state,
    check_training,
    differences,
    is_plain,
    plain_options,
    try_scheduler_state,
)
from fitkit.training.rates import restore_schedulers
from fitkit.trees import copied
from fitkit.typing import FilePath, PlainData

Found = TypeVar("Found")
Made = TypeVar("Made", bound=Module)

NAMED = (
    "optimizer", "loss", "metrics", "weighted_metrics", "target", "learning_rate", "layer_decay",
    "loss_weights", "lr_scheduler", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "precision", "scale_lr", "warmup_epochs", "effective_batch_size",
)  # fmt: skip
"""The arguments of `compile` that a file keeps, if they were given by name."""


def save(model: Module, path: FilePath) -> None:
    """Write weights, optimizers, schedulers and progress to one file, completely or not at all.

    Ranks:
        Collective within a run: all ranks call it, and rank 0 writes. For a folder, all write.
    """
    collectives = model._fitkit.compilation.strategy.collectives
    weights, state = contents(model, spread=files.is_folder_name(path))
    if files.is_folder_name(path):
        _write(model, path, weights, state)
        return
    # The others wait until the file is written, and share its failure.
    done_by_rank_zero(collectives, lambda: _write(model, path, weights, state))


def save_weights(model: Module, path: FilePath, *, trainable_only: bool = False) -> None:
    """Write the weights only, or only those that learn. Rank 0 writes.

    Ranks:
        Local within a run. Collective if a strategy has sharded the weights.
    """
    spread = files.is_folder_name(path)
    _write(model, path, weights_of(model, spread=spread, trainable_only=trainable_only), None)


def _write(model: Module, path: FilePath, weights: PlainData, state: PlainData | None) -> None:
    """Write a file, or a folder: within a run rank 0 writes the file, and all ranks the folder."""
    strategy, is_folder = model._fitkit.compilation.strategy, files.is_folder_name(path)
    if is_folder:
        save = files.folder_format(path).save
        write = functools.partial(save, path, weights, state, strategy.collectives)
    elif state is None:
        write = functools.partial(files.save_weights, path, weights)
    else:
        write = functools.partial(files.save_checkpoint, path, weights, state)
    if strategy.collectives.world_size == 1:
        strategy.launcher.on_rank_zero(os.fspath(path), write)
    elif is_folder or strategy.world.rank == 0:
        write()


def contents(
    model: Module, *, spread: bool = False, trainable_only: bool = False
) -> tuple[PlainData, PlainData]:
    """Return the content of a checkpoint now: weights, and everything else. The tensors are in use.

    Args:
        spread: whether sharded tensors stay sharded, for a folder. Otherwise rank 0 gets them
            whole.
        trainable_only: whether to leave out parameters that don't learn.

    Ranks:
        Collective within a run.
    """
    run = model._fitkit.fit_state.run
    collect = _collector(model, spread=spread)
    progress = model._fitkit.fit_state.progress if run is None else run.checkpoint_progress()
    state = {
        "compiled": named_arguments(model),
        "settings": plain_settings(model._fitkit.compilation.given.as_dict()),
        "progress": None if progress is None else progress.as_dict(),
    }
    with model._fitkit.fit_state.evaluated() as train_weights:
        make = _state_dict_of(model, trainable_only)
        weights, rest = collect(
            lambda: (make(), {**state, "training": training_state(model, train_weights)})
        )
        weights, added = model._saved(weights)
        found = weights, {**rest, "added": added} if added else rest
        # A schedule-free optimizer returns to its training weights.
        return found if train_weights is None else copied(found)


def weights_of(model: Module, *, spread: bool = False, trainable_only: bool = False) -> PlainData:
    """Return the evaluation weights. Arguments and ranks are as for `contents`."""
    collect = _collector(model, spread=spread)
    with model._fitkit.fit_state.evaluated() as train_weights:
        found = collect(_state_dict_of(model, trainable_only))
        # A schedule-free optimizer returns to its training weights.
        return found if train_weights is None else copied(found)


def _state_dict_of(model: Module, trainable_only: bool) -> Callable[[], PlainData]:
    """Return a function that returns the weights to save."""
    module, strategy = model._weights_module(), model._fitkit.compilation.strategy

    def whole() -> PlainData:
        with files.uncompiled(module) as plain:
            return plain.state_dict()

    if not trainable_only:
        return whole
    # While sharded, so that no rank ever holds all of a base that isn't saved.
    give = strategy.engine.parts if strategy.engine is not None else lambda make: make()
    wanted, found = strategy.world.rank == 0, give(whole)
    with files.uncompiled(module) as plain:
        learning = files.without_frozen(plain, found, wanted=wanted)
    return lambda: learning


class Collect(Protocol):
    """Collects tensors to save, while the engine holds them as they are wanted."""

    def __call__(self, make: Callable[[], Found], /) -> Found: ...


def _at_once(make: Callable[[], Found], /) -> Found:
    """Collect where no engine holds the tensors."""
    return make()


def _collector(model: Module, *, spread: bool) -> Collect:
    """Make the ranks equal, and return how to collect tensors to save.

    Args:
        spread: as for `contents`.

    Returns:
        A function that takes another one, such as `module.state_dict`, and calls it while the
        engine holds the weights whole (or in parts, with `spread`). It returns the result.

    Ranks:
        Collective within a run.
    """
    engine = model._fitkit.compilation.strategy.engine
    if engine is None:
        return _at_once
    engine.average_ranks()
    return engine.parts if spread else engine.whole


def training_state(
    model: Module, train_weights: list[list[torch.Tensor]] | None = None
) -> PlainData:
    """Optimizers, schedulers and counters, as plain data.

    Args:
        train_weights: each optimizer's training weights, if they aren't the model's, as
            `evaluated` yields them.
    """
    state = model._fitkit.fit_state
    names = _names_of(model)
    # Without a fit since a load, those of the file.
    weights = train_weights or state.stored_weights or [[] for _ in state.optimizers]
    return {
        "optimizers": [
            {
                "class": type(optimizer).__name__,
                "names": _names_in(optimizer, names),
                "options": plain_options(optimizer),
                "state": optimizer.state_dict(),
                "inner": [inner.state_dict() for inner in _inner(optimizer)],
                "weights": its_weights,
            }
            for optimizer, its_weights in zip(state.optimizers, weights, strict=True)
        ],
        "schedulers": [
            {
                "class": type(plan.scheduler).__name__,
                "state": plan.state(),
                "passed": plan.passed,
            }
            for plan in state.schedulers
        ]
        or state.stored_schedulers,
        "losses": _losses_of(model),
        "buffers": unsaved.changed(model),
        "optimizer_numbers": unsaved.changed_numbers(model),
        "scalings": state.stored_scalings or [scaling.state_dict() for scaling in state.scalings],
        "updates": state.updates,
        "rate_factor": state.rate_factor,
    }


def _losses_of(model: Module) -> list[dict[str, torch.Tensor]]:
    """Return the values of each loss that has some, by name. The tensors are in use."""
    saved = model._fitkit.compilation.trained(model).saved()
    return [
        {name: held for name, place in places.items() if (held := place.tensor) is not None}
        for places in saved
    ]


def _places_for(model: Module, losses: list[dict[str, torch.Tensor]]) -> list[dict[str, Place]]:
    """Return the places for stored losses. Files once had those that have parameters, alone."""
    saved = model._fitkit.compilation.trained(model).saved()
    if len(losses) != len(saved):
        parameter = torch.nn.Parameter
        return [p for p in saved if any(isinstance(one.tensor, parameter) for one in p.values())]
    return saved


def _check_losses(model: Module, training: PlainData, path: str) -> None:
    """Refuse values of other losses than the model's. Buffers may have grown, or be None yet."""
    stored = training.get("losses", [])
    places = _places_for(model, stored)
    fits = len(stored) == len(places) and all(map(_is_for, stored, places))
    if stored and not fits:
        then, now = (
            [{name: tuple(tensor.shape) for name, tensor in loss.items()} for loss in losses]
            for losses in (stored, _losses_of(model))
        )
        raise CheckpointError(
            f"{path} has losses with the values {then}, but the model is compiled with {now}. "
            "Compile it as it was, or use load_weights."
        )


def _is_for(stored: dict[str, torch.Tensor], places: dict[str, Place]) -> bool:
    """Whether a loss can take stored values."""
    shapes = {
        name: (place.tensor.shape, place.tensor.is_complex())
        for name, place in places.items()
        if isinstance(place.tensor, torch.nn.Parameter)
    }
    return stored.keys() <= places.keys() and all(
        name in stored and (stored[name].shape, stored[name].is_complex()) == shape
        for name, shape in shapes.items()
    )


def _names_of(model: Module) -> dict[int, str]:
    """Return the parameters' names, by their identity."""
    return {id(p): files.plain_name(name) for name, p in model.named_parameters()}


def _names_in(optimizer: Optimizer, names: dict[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters; "" for one that isn't the model's."""
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def load(
    model: Module,
    path: FilePath,
    agree: Callable[[Progress | None], bool] = lambda progress: False,
) -> Scope:
    """Restore weights, optimizers and schedulers. Everything is checked before anything changes.

    Args:
        agree: a function called with the training's progress once all else is checked. It raises if
            the training can't continue there. It gets None if the training hadn't begun. It returns
            whether what comes after the load may fail.

    Returns:
        What undoes the load, of the weights only where `agree` asks for it.
    """
    state = model._fitkit.fit_state
    with files.open_checkpoint(path) as found, undone_on_error() as undo:
        undo.callback(state.restorer())
        name = os.fspath(path)
        training, stored = found.state.get("training"), found.state.get("progress")
        if not isinstance(training, dict) or not isinstance(stored, (dict, type(None))):
            raise CheckpointError(f"{name} has no training state. Use load_weights.")
        check_training(training, name)
        unsaved.check(training, name)
        progress = None if stored is None else Progress.from_dict(stored, name)
        if progress is not None:
            check_progress(progress, training, name)
        weights = files.fitting_weights(
            model._loaded(found.weights, lambda: found.state, undo),
            name,
            model._weights_module(),
            strict=model._loads_strictly,
            same_base=True,
        )
        model._weights_fit(weights, progress, undo)
        begun = None if progress is None else progress.warm_up
        targets = [] if begun is None else begun["targets"]
        restore = checked_training(model, training, name, targets)
        if agree(progress):
            undo.callback(weights.restorer())
            undo.callback(setattr, model, "history", model.history)
        told = differences(model, name, found.state.get("compiled"), training)
        unsaved.note(model)
        _assign(model, weights, restore, name, undo)
        unsaved.restore(model, training)
        model._fitkit.kept_steps.drop()
        if state.has_training_weights:  # loaded within an epoch
            state.use_training_weights()
        if told:
            warn(told)
        state.progress, state.stored_added = progress, copied(found.state.get("added") or {})
        if progress is not None:
            history = History()
            history.load_state_dict(progress.history)
            model.history = history
        return undo.pop_all()


def _assign(
    model: Module,
    weights: files.FittingWeights,
    restore: Callable[[], None],
    path: str,
    undo: Scope,
) -> None:
    """Give the model its weights and all else. The latter comes first, because it may not fit.

    Args:
        undo: gets what undoes it.

    Raises:
        CheckpointError: an optimizer or a scheduler doesn't take its state.
    """
    tensors_before = _dtypes_and_devices(model)
    for plan in model._fitkit.fit_state.schedulers:
        undo.callback(_put_back, plan, copy.deepcopy(plan.state()), plan.passed)
    trained = model._fitkit.compilation.trained(model)
    undo.callback(restorer(trained.places_beside().values()))
    try:
        restore()
        # The next run would do so too late: float32 can't hold the digits of float64.
        model._fitkit.compilation.strategy.precision.convert(model)
    except FitkitError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} has a state that an optimizer or a scheduler can't take "
            f"({type(error).__name__}: {error}). Nothing was loaded; use another file, or "
            "load_weights."
        ) from error
    weights.assign()
    if _dtypes_and_devices(model) != tensors_before:
        restore()  # optimizers keep their state in the dtype and on the device of parameters


def _put_back(plan: PlannedScheduler, its_state: PlainData, passed: int) -> None:
    """Give a scheduler back what it had."""
    if plan.keeps_state:
        plan.scheduler.load_state_dict(its_state)
    plan.passed = passed


def _dtypes_and_devices(model: Module) -> list[tuple[torch.dtype, torch.device]]:
    return [(parameter.dtype, parameter.device) for parameter in model.parameters()]


def checked_training(
    model: Module, training: PlainData, path: str, targets: Iterable[float] = ()
) -> Callable[[], None]:
    """Return a function that restores optimizers and schedulers, after a check that they fit.

    Args:
        targets: the groups' rates after the warm-up, if it isn't over. They get these.

    Raises:
        CheckpointError: other optimizers or schedulers than the model's.
    """
    state = model._fitkit.fit_state
    stored, losses = training.get("optimizers", []), training.get("losses", [])
    _check_losses(model, training, path)

    def restore_losses() -> None:
        for places, found in zip(_places_for(model, losses), losses, strict=False):
            for name, value in found.items():
                places[name].put(value)

    if not stored:

        def begin_anew() -> None:
            state.drop_optimizers()
            restore_losses()
            _restore_counters(state, training)

        return begin_anew
    optimizers = model._made_optimizers()
    classes = [type(optimizer).__name__ for optimizer in optimizers]
    wanted = [entry["class"] for entry in stored]
    if classes != wanted:
        raise CheckpointError(
            f"{path} was made with {', '.join(wanted)}, but the model is compiled with "
            f"{', '.join(classes)}. Compile it as it was, or use load_weights."
        )
    for optimizer, entry in zip(optimizers, stored, strict=True):
        files.check_optimizer_state(optimizer, entry["state"])
        for inner, its_state in zip(_inner(optimizer), entry.get("inner", []), strict=False):
            files.check_optimizer_state(inner, its_state)
        _check_order(model, optimizer, entry, path)
        _check_own_weights(optimizer, entry, path)
    _check_schedulers(model, training, path)

    def restore() -> None:
        for optimizer, entry in zip(optimizers, stored, strict=True):
            _load_whole(optimizer, entry)
        for group, target in zip(state.groups, targets, strict=False):
            put_rate(group, float(target))
        restore_losses()
        state.stored_schedulers = list(training.get("schedulers", []))
        state.stored_groups = state.settings()
        state.stored_weights = [entry.get("weights", []) for entry in stored]
        if any(plan.follows_fit for plan in state.schedulers):
            state.schedulers = []  # each fit makes them
        elif state.schedulers:
            restore_schedulers(state)
        _restore_counters(state, training)

    return restore


def _inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers inside one, such as Lookahead's, that have states of their own."""
    return [one for one in with_inner([optimizer])[1:] if one.state is not optimizer.state]


def _load_whole(optimizer: Optimizer, entry: PlainData) -> None:
    """Load an optimizer's state, and those of the ones inside; what they share stays shared."""
    shared = [
        (inner, name)
        for inner in with_inner([optimizer])[1:]
        for name in ("param_groups", "state")
        if getattr(inner, name) is getattr(optimizer, name)
    ]
    for inner, its_state in zip(_inner(optimizer), entry.get("inner", []), strict=False):
        load_state(inner, its_state)
    load_state(optimizer, entry["state"])
    for inner, name in shared:
        setattr(inner, name, getattr(optimizer, name))


def _restore_counters(state: FitState, training: PlainData) -> None:
    state.updates = int(training.get("updates", 0))
    state.rate_factor = float(training.get("rate_factor", 1.0))
    state.stored_scalings = list(training.get("scalings", []))


def _check_schedulers(model: Module, training: PlainData, path: str) -> None:
    """Refuse other schedulers than the file's, as far as they are known before they are made."""
    choice = model._fitkit.compilation.scheduler
    now = [type(plan.scheduler).__name__ for plan in model._fitkit.fit_state.schedulers]
    optimizers = model._fitkit.fit_state.optimizers
    among = [] if choice is None else choice.optimizers_among(optimizers)
    if not now and choice is not None:
        now = [choice.class_name or ""] * len(among)
    then = [str(entry.get("class")) for entry in training.get("schedulers", [])]
    if now and then and "" not in now and now != then:
        raise CheckpointError(
            f"{path} was made with the scheduler {', '.join(then)}, but the model is compiled with "
            f"{', '.join(now)}. Compile it as it was, or use load_weights."
        )
    entries = training.get("schedulers", [])
    schedulers = [plan.scheduler for plan in model._fitkit.fit_state.schedulers]
    stored_groups = [entry["state"]["param_groups"] for entry in training["optimizers"]]
    groups = [own for one, own in zip(optimizers, stored_groups, strict=True) if one in among]
    tried = [choice.trial(one, own) for one, own in zip(among, groups, strict=True) if choice]
    tried = [] if None in tried else tried
    for scheduler, entry in zip(tried or schedulers, entries, strict=False):
        check_scheduler_state(scheduler, entry["state"], path)
    for scheduler, entry in zip(tried, entries, strict=False):
        try_scheduler_state(scheduler, entry["state"], path)


def _check_order(model: Module, optimizer: Optimizer, entry: PlainData, path: str) -> None:
    """Refuse parameters that torch identifies by order only, if their order is another now."""
    now = _names_in(optimizer, _names_of(model))
    then = entry.get("names") or now
    if now != then and sorted(chain(*now)) == sorted(chain(*then)):
        raise CheckpointError(
            f"{path} has the optimizer's parameters in another order than the model, so their "
            "states would be mixed up. Register the layers in the same order as before."
        )


def _check_own_weights(optimizer: Optimizer, entry: PlainData, path: str) -> None:
    """Refuse training weights that don't fit the parameters."""
    shapes = [tuple(weight.shape) for weight in entry.get("weights", [])]
    if shapes and shapes != [tuple(parameter.shape) for parameter in held_by(optimizer)]:
        raise CheckpointError(
            f"{path} has weights of other shapes for {entry['class']} than the model. Build the "
            "same net as before, or use load_weights."
        )


def named_arguments(model: Module) -> PlainData:
    """`compile`'s arguments as plain data. Others become None and a note.

    Optimizer instances of classes with names are described by name, arguments and groups.
    """
    given, names = model._fitkit.compilation.given.as_dict(), _names_of(model)
    plain: PlainData = {"named": {}, "objects": []}
    for name in NAMED:
        value = given[name]
        if name == "optimizer" and value is None:
            continue  # compile was given none
        if is_plain(value):
            plain["named"][name] = value
        else:
            plain["objects"].append(name)
    instances = instances_in(given["optimizer"])
    kinds = [class_of(optimizer) for optimizer in instances]
    if instances and all(OPTIMIZERS.holds(kind.__name__, kind) for kind in kinds):
        described = [
            {
                "class": class_of(optimizer).__name__,
                "options": plain_options(optimizer),
                "groups": [
                    {"names": part, "options": _plain_part(group)}
                    for part, group in zip(
                        _names_in(optimizer, names), optimizer.param_groups, strict=True
                    )
                ],
            }
            for optimizer in instances
        ]
        plain["instance"] = described if len(described) > 1 else described[0]
    return plain


def _plain_part(group: PlainData) -> PlainData:
    """Return a group's settings that a file can hold."""
    return {name: value for name, value in group.items() if name != "params" and is_plain(value)}


def _made_again(instance: object, model: Module) -> Optimizer | None:
    """Return an optimizer that `named_arguments` described; None if its parts aren't the model's.

    Raises:
        Exception: of any kind, if the description isn't an optimizer's.
    """
    if not isinstance(instance, dict) or not is_plain(instance):
        return None
    parameters = {files.plain_name(name): p for name, p in model.named_parameters()}
    if not all(name in parameters for group in instance["groups"] for name in group["names"]):
        return None
    kind = OPTIMIZERS[instance["class"]]
    taken = inspect.signature(kind).parameters

    def settings(given: PlainData, names: Iterable[str]) -> PlainData:
        plain = {name: given[name] for name in names if name in given}
        return {n: tuple(v) if isinstance(v, list) else v for n, v in plain.items()}

    options = settings(instance["options"], taken)
    groups = [
        {
            **settings(group["options"], [*instance["options"], "name"]),
            "params": [parameters[name] for name in group["names"]],
        }
        for group in instance["groups"]
    ]
    return kind(groups, **options)


def restored_model(
    path: FilePath, net: torch.nn.Module, make: Callable[[torch.nn.Module], Made]
) -> Made:
    """Return a compiled model as a file describes it.

    Args:
        make: a function that returns a model for a net.

    Raises:
        ArgumentTypeError: `net` isn't a module.
        CheckpointError: the loss, the metrics or an optimizer of the user's own class were objects,
            which no file can hold.
    """
    if not isinstance(net, torch.nn.Module):
        raise ArgumentTypeError(
            f"net={describe(net)} must be the torch.nn.Module whose weights the file has. A file "
            "has no code, so build the same network as before, and write "
            f"fitkit.load_model({describe(path)}, net)."
        )
    with files.open_checkpoint(path) as found:
        compiled = found.state.get("compiled")
    model = make(net)
    named, others = _compiled(compiled)
    if named is None:
        raise CheckpointError(
            f"{os.fspath(path)} doesn't say how its model was compiled. Write model = "
            "fitkit.Model(net); model.compile(…) as it was; model.load(path)."
        )
    objects = [name for name in NAMED if name in others]
    if objects == ["optimizer"] and isinstance(compiled, dict) and "instance" in compiled:
        given = compiled["instance"]
        try:
            described = given if isinstance(given, list) else [given]
            optimizers = [_made_again(one, model) for one in described]
        except Exception as error:
            raise CheckpointError(
                f"{os.fspath(path)} describes an optimizer that can't be made: {error}"
            ) from error
        if optimizers and None not in optimizers:
            named = {**named, "optimizer": optimizers if len(optimizers) > 1 else optimizers[0]}
            objects = []
    if objects:
        raise CheckpointError(
            f"{os.fspath(path)} was saved by a model whose {', '.join(map(str, objects))} "
            "weren't given by name, and no file holds objects. Write model = fitkit.Model(net); "
            f"model.compile({', '.join(f'{name}=…' for name in objects)}); model.load(path).",
            code="FK055",
        )
    try:
        model.compile(**named)
    except FitkitError as error:
        raise CheckpointError(
            f"{os.fspath(path)} was compiled with {describe(named)}, which this version refuses: "
            f"{error}"
        ) from error
    load(model, path)
    return model


def _compiled(compiled: object) -> tuple[PlainData | None, list[object]]:
    """`compile`'s arguments in a file, and the names of those that were objects."""
    parts = compiled if isinstance(compiled, dict) else {}
    named, objects = parts.get("named"), parts.get("objects", [])
    if not isinstance(named, dict) or not isinstance(objects, list) or not is_plain(named):
        return None, []
    return {name: value for name, value in named.items() if name in NAMED}, objects
