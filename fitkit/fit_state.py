"""Optimizers and schedulers, kept from one fit to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fitkit.arguments import check_choice, check_count, check_flag, describe
from fitkit.compilation import Compilation
from fitkit.data.batches import Batch
from fitkit.distributed.in_place import as_parts
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn
from fitkit.modes import parameters_of
from fitkit.optimizer_copies import with_inner
from fitkit.optimizers import (
    OptimizerChoice,
    check_trainable,
    fuse,
    held_by,
    is_schedule_free,
    put_rates,
)
from fitkit.progress import Progress
from fitkit.schedulers import PlannedScheduler, check_step, check_watched, own_interval
from fitkit.scopes import Scope
from fitkit.trained import Trained
from fitkit.typing import PlainData, Values

if TYPE_CHECKING:
    from fitkit.extras.loss_scaling import Scaling

SHAPES = (
    "configure_optimizers returns an optimizer, a list of optimizers, two lists (optimizers, "
    "schedulers; one scheduler needs no list), a dict with 'optimizer' and 'lr_scheduler', or a "
    "list of such dicts"
)
SCHEDULER_KEYS = (
    "scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau",
    "opt_idx",
)  # fmt: skip
OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")


SCALINGS: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
"""How the rate grows with the number of ranks. None: not at all."""


OwnOptimizers = tuple[list[Optimizer], list[PlannedScheduler], list[int] | None]
"""What `configure_optimizers` makes: optimizers, schedulers, and `FitState.frequencies`."""


def read_optimizers(returned: object) -> OwnOptimizers:
    """Parse what `configure_optimizers` returned.

    Raises:
        ConfigurationError, ArgumentTypeError: it has none of the accepted shapes.
    """
    if returned is None:
        raise ConfigurationError(
            "configure_optimizers returned None, but fit needs an optimizer. Return one (is the "
            "`return` missing?), or delete the method and name an optimizer in compile. To run "
            f"the model without training it, call evaluate or predict. {SHAPES}."
        )
    if isinstance(returned, Optimizer):
        return [returned], [], None
    if isinstance(returned, Mapping):
        return _of_dicts([returned])
    if isinstance(returned, (list, tuple)) and returned:
        if all(isinstance(entry, Optimizer) for entry in returned):
            return list(returned), [], None
        if all(isinstance(entry, Mapping) for entry in returned):
            return _of_dicts(list(returned))
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            optimizers, schedulers = returned
            if not isinstance(schedulers, (list, tuple)):
                schedulers = [] if schedulers is None else [schedulers]
            return _of_two_lists(optimizers, schedulers)
    raise ArgumentTypeError(f"configure_optimizers returned {describe(returned)}. {SHAPES}.")


def _of_two_lists(optimizers: Sequence[object], schedulers: Sequence[object]) -> OwnOptimizers:
    checked = [_checked_optimizer(optimizer) for optimizer in optimizers]
    if not checked:
        raise ConfigurationError(f"configure_optimizers returned no optimizer. {SHAPES}.")
    return checked, [_planned(given, checked, None) for given in schedulers], None


def _of_dicts(dicts: list[Mapping[str, object]]) -> OwnOptimizers:
    optimizers, schedulers, frequencies = [], [], []
    for entry in dicts:
        given: PlainData = dict(entry)
        unknown = set(given) - set(OPTIMIZER_KEYS)
        if unknown or "optimizer" not in given:
            raise ConfigurationError(
                f"configure_optimizers returned a dict with the keys {list(given)}. It takes "
                f"'optimizer', and optionally {', '.join(map(repr, OPTIMIZER_KEYS[1:]))}."
            )
        optimizers.append(_checked_optimizer(given["optimizer"]))
        if given.get("lr_scheduler") is not None:
            schedulers.append(
                _planned(given["lr_scheduler"], optimizers[-1:], given.get("monitor"))
            )
        if given.get("frequency") is not None:
            frequencies.append(check_count("frequency", given["frequency"]))
    if frequencies and len(frequencies) != len(optimizers):
        raise ConfigurationError(
            "configure_optimizers gave some optimizers a 'frequency' and others none. Give one to "
            "each, or to none."
        )
    return optimizers, schedulers, frequencies or None


def _checked_optimizer(optimizer: object) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"configure_optimizers returned {describe(optimizer)} as an optimizer. {SHAPES}."
        )
    return optimizer


def _planned(given: object, optimizers: list[Optimizer], monitor: str | None) -> PlannedScheduler:
    options: PlainData = {"scheduler": given}
    if isinstance(given, Mapping):
        unknown = set(given) - set(SCHEDULER_KEYS)
        if unknown or "scheduler" not in given:
            raise ConfigurationError(
                f"configure_optimizers returned an lr_scheduler with the keys {list(given)}. It "
                f"takes {', '.join(map(repr, SCHEDULER_KEYS))}."
            )
        options = dict(given)
    scheduler = options["scheduler"]
    if not isinstance(scheduler, LRScheduler) and not (
        callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, (type, Optimizer))
    ):
        raise ArgumentTypeError(
            f"configure_optimizers returned {describe(scheduler)} as a scheduler. Return a "
            "torch.optim.lr_scheduler object over one of the optimizers."
        )
    check_step(scheduler)
    interval, frequency = options.get("interval"), options.get("frequency", 1)
    interval = own_interval(scheduler) if interval is None else interval
    interval = check_choice("interval", interval, ("epoch", "step"))
    frequency = check_count("frequency", frequency)
    check_flag("strict", options.get("strict", True))
    optimizer = getattr(scheduler, "optimizer", optimizers[0])
    if not any(optimizer is known for known in optimizers):
        raise ConfigurationError(
            "configure_optimizers returned a scheduler over an optimizer that it didn't return. "
            "Return both."
        )
    planned = PlannedScheduler(
        scheduler,
        interval,
        int(frequency),
        options.get("monitor") or monitor,
        optimizer,
        strict=options.get("strict", True),
        name=_checked_name(options.get("name")),
    )
    if not planned.keeps_state:
        warn(
            f"{type(scheduler).__name__} has no state_dict and load_state_dict, so checkpoints "
            "can't store its position. A resumed training starts it again. Add both methods."
        )
    if planned.watches:
        check_watched(interval, planned.monitor)
    return planned


def _checked_name(name: object) -> str | None:
    if name is None or (isinstance(name, str) and name):
        return name
    raise ArgumentTypeError(f"An lr_scheduler's name={describe(name)} must be a string.")


class Run(Protocol):
    """The running `fit`, as far as callbacks use it.

    Attributes:
        steps_done: the number of steps made in this epoch.
        is_between_updates: whether no batch waits for others to make an update with it. A save is
            complete only then.
        progress: where the training is on this rank: what a resumed one would begin with.
        batch: the batch of the last step on this rank, as the source gave it; None between epochs.
        seen_values: the values of the epoch's last validation, if callbacks have already seen
            them within the epoch (`on_validation_within_epoch`); else empty.
        validated_names: the names of the validations' values.
        callbacks: the user's callbacks.
        doubts: sentences about monitored values that can't come, said in one warning.
    """

    seen_values: Values
    validated_names: set[str]
    doubts: list[str]

    @property
    def steps_done(self) -> int: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def batch(self) -> Batch | None: ...

    @property
    def callbacks(self) -> Sequence[object]: ...

    @property
    def is_between_updates(self) -> bool: ...

    def follow_freezing(self) -> None:
        """Wrap the module again if a callback has frozen or unfrozen parameters. Collective."""

    def checkpoint_progress(self) -> Progress:
        """Return how far it is on all ranks, for a checkpoint. Collective."""

    def weights(self, *, spread: bool = False, trainable_only: bool = False) -> PlainData:
        """Collect the weights for a checkpoint, on all ranks. `spread`: each rank its part."""

    def as_validated(self) -> AbstractContextManager[object]:
        """Give the model the weights that its validations see, for a block. Collective."""

    def contents(
        self, *, spread: bool = False, trainable_only: bool = False
    ) -> tuple[PlainData, PlainData]:
        """Collect the weights and all else for a checkpoint, as `weights` does."""


class Guard(Protocol):
    """What a callback decides of batches and updates. All ranks decide alike."""

    def counts(self, optimizer: Optimizer, batch: Batch, outcome: object) -> bool:
        """Look at a batch's outcome; return whether the logs count it."""

    def admits(self, applier: object) -> bool:
        """Return whether an update is made from gradients that are complete."""


@dataclasses.dataclass
class FitState:
    """The optimizers and schedulers, made when they are first needed after `compile`.

    Attributes:
        optimizers: one, several that step together, or those of `configure_optimizers`. Empty
            before they are needed.
        takes_turns: whether several have one loss each, in turn, by `configure_optimizers`.
        schedulers: those of `configure_optimizers`, or the compiled one. Empty if there are none,
            and before the first fit.
        frequencies: for how many batches in a row each optimizer is used. None uses all each time.
        updates: the number of updates so far. It is never reset.
        rate_factor: the factor by which the rates were scaled for the number of ranks.
        accumulate: batches whose gradients make one update, from the next group on.
        grad_norms: the gradient norm of each update before clipping, since a callback last took
            them. None if nobody asks.
        guard: a callback's, which says whether a batch counts in the logs, and before each update
            whether it is made (`counts`, `admits`). None if all are.
        frozen: the parameters that `toggle_optimizer` froze.
        scalings: the loss scalers of half precision, one per optimizer. Empty without scaling.
        stored_scalings: their states in a checkpoint.
        run: the running `fit`, or None.
        progress: where the last `fit`, or the loaded checkpoint, ended.
        stored_schedulers: a checkpoint's states for schedulers not made yet.
        stored_groups: the optimizers' settings in that checkpoint.
        has_training_weights: whether schedule-free optimizers hold the weights that they train at,
            instead of those for evaluation and saving.
        stored_weights: each optimizer's training weights in a checkpoint made within an epoch.
        unsaved: digests of the buffers that state dicts leave out, before the first training.
        stored_added: what a module's hooks have added to a loaded checkpoint, until a fit begins.
            None where the objects of the last fit have it.
        undo: undoes the load of the checkpoint that a fit resumes from, until the training goes on.
    """

    optimizers: list[Optimizer] = dataclasses.field(default_factory=list)
    takes_turns: bool = False
    schedulers: list[PlannedScheduler] = dataclasses.field(default_factory=list)
    frequencies: list[int] | None = None
    updates: int = 0
    rate_factor: float = 1.0
    accumulate: int = 1
    grad_norms: list[torch.Tensor] | None = None
    guard: Guard | None = None
    frozen: list[torch.nn.Parameter] = dataclasses.field(default_factory=list)
    scalings: list[Scaling] = dataclasses.field(default_factory=list)
    stored_scalings: list[PlainData] = dataclasses.field(default_factory=list)
    run: Run | None = None
    progress: Progress | None = None
    stored_schedulers: list[PlainData] = dataclasses.field(default_factory=list)
    stored_groups: list[PlainData] = dataclasses.field(default_factory=list)
    has_training_weights: bool = False
    stored_weights: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    unsaved: dict[str, str] | None = None
    stored_added: PlainData | None = None
    undo: Scope | None = None

    def __getstate__(self) -> PlainData:
        """Return the state of a copy: everything but the run. Its lists are its own."""
        lists = {name: list(value) for name, value in vars(self).items() if type(value) is list}
        return {**vars(self), **lists, **dict.fromkeys(("run", "grad_norms", "guard", "undo"))}

    def optimizers_for(
        self,
        model: torch.nn.Module,
        compilation: Compilation,
        configure: Callable[[], object] | None,
    ) -> list[Optimizer]:
        """Return the optimizers over the model's parameters.

        An optimizer made from a name is built again if parameters have been replaced. Otherwise it
        would keep training the old ones.

        Args:
            configure: the model's own `configure_optimizers`, if that makes them.

        Raises:
            ConfigurationError: it can't be made, nothing can learn, or an instance holds
                parameters that are no longer the model's.
        """
        choice = compilation.optimizer
        trained = compilation.trained(model)
        trainable = {id(parameter) for parameter in trained.parameters()}
        held = [parameter for optimizer in self.optimizers for parameter in held_by(optimizer)]
        if not all(id(parameter) in trainable for parameter in held):
            choice.check_parameters(trained.parameters())
            warn(
                "Parameters of the net were replaced after its optimizer was created. The "
                "optimizer is created again and loses its state."
            )
            self.drop_optimizers()
        if not self.optimizers:
            if configure is not None:
                self._configure(model, compilation, configure)
            else:
                self.optimizers = choice.build(trained.learning(), model)
                for optimizer in self.optimizers if choice.is_name else ():
                    fuse(optimizer, model)
            self.rate_factor = 1.0
            _warn_of_idle_loss(trained, self.optimizers)
        return self.optimizers

    def _configure(
        self, model: torch.nn.Module, compilation: Compilation, configure: Callable[[], object]
    ) -> None:
        """Use the result of the model's own `configure_optimizers`."""
        check_trainable(list(model.parameters()))
        given = compilation.given
        for name, value in (
            ("learning_rate", given.learning_rate),
            ("layer_decay", given.layer_decay),
            ("lr_scheduler", given.lr_scheduler),
        ):
            if value is not None:
                raise ConfigurationError(
                    f"compile was given {name}, but {type(model).__name__} makes its optimizers "
                    "in configure_optimizers. Set it there, or give compile the optimizer too."
                )
        optimizers, schedulers, frequencies = read_optimizers(configure())
        for optimizer in optimizers:
            OptimizerChoice(optimizer).check_parameters(compilation.trained(model).parameters())
        self.optimizers, self.schedulers, self.frequencies = optimizers, schedulers, frequencies
        self.takes_turns = len(optimizers) > 1

    @property
    def groups(self) -> list[PlainData]:
        """All optimizers' parameter groups, in their order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def freeze_others(self, optimizer: Optimizer) -> list[torch.nn.Parameter]:
        """Let only this optimizer's parameters need gradients. Returns those frozen by that."""
        needed = {id(parameter) for parameter in held_by(optimizer)}
        others = {id(p): p for other in self.optimizers for p in held_by(other)}
        frozen = [p for key, p in others.items() if key not in needed and p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        return frozen

    def scalings_for(self, strategy: Strategy, count: int) -> list[Scaling]:
        """Return the loss scalers, if the precision needs them. They are kept from fit to fit."""
        stored, self.stored_scalings = self.stored_scalings, []
        if strategy.precision.scaler(strategy.device) is None:
            self.scalings = []
            return []
        from fitkit.extras.loss_scaling import Scaling

        while len(self.scalings) < count:
            scaler = strategy.precision.scaler(strategy.device)
            assert scaler is not None
            self.scalings.append(Scaling(scaler))
        for scaling, state in zip(self.scalings, stored, strict=False):
            scaling.load_state_dict(state)
        return self.scalings

    @contextlib.contextmanager
    def counting_steps(self) -> Iterator[None]:
        """Count the updates that other code makes within the block."""

        def count(*arguments: object) -> None:
            self.updates += 1

        if self.scalings:
            from fitkit.extras.loss_scaling import scaled_steps

            with scaled_steps(self.scalings[0], self.optimizers, count):
                yield
            return
        handles = [optimizer.register_step_post_hook(count) for optimizer in self.optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def settings_restored(self) -> Iterator[None]:
        """Restore the groups' settings, such as the rates, at the end of a block."""
        before = self.settings()
        try:
            yield
        finally:
            for group, settings in zip(self.groups, before, strict=True):
                put_back(group, settings)

    def use_training_weights(self, weights: list[list[torch.Tensor]] | None = None) -> None:
        """Make schedule-free optimizers use the weights that they train at.

        Args:
            weights: these weights, to the bit: switching back and forth changes the last bits.
        """
        for optimizer in self.optimizers:
            if is_schedule_free(optimizer):
                optimizer.train()  # type: ignore[attr-defined]
                self.has_training_weights = True
        self.stored_weights = []
        if weights is None:
            return
        with torch.no_grad():
            for optimizer, stored in zip(self.optimizers, weights, strict=False):
                for parameter, weight in zip(held_by(optimizer), stored, strict=False):
                    parameter.copy_(as_parts(weight, parameter))

    def use_evaluation_weights(self) -> None:
        """Make schedule-free optimizers use the weights for evaluation and saving."""
        for optimizer in self.optimizers if self.has_training_weights else ():
            if is_schedule_free(optimizer):
                optimizer.eval()  # type: ignore[attr-defined]
        self.has_training_weights = False

    @contextlib.contextmanager
    def weights_restored(self) -> Iterator[None]:
        """Afterwards the weights are for training or for evaluation again, as they were before."""
        before = self.has_training_weights
        try:
            yield
        finally:
            if before != self.has_training_weights:
                self.use_training_weights() if before else self.use_evaluation_weights()

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[list[list[torch.Tensor]] | None]:
        """Use the evaluation weights within an epoch, then the training weights, to the bit.

        Yields:
            Each optimizer's training weights; None if the model has no others.
        """
        if not self.has_training_weights:
            yield None
            return
        weights = [
            [p.detach().clone() for p in held_by(optimizer)] if is_schedule_free(optimizer) else []
            for optimizer in self.optimizers
        ]
        self.use_evaluation_weights()
        try:
            yield weights
        finally:
            self.use_training_weights(weights)

    def scale_rates(self, scaling: str | None, ranks: int) -> float:
        """Multiply the rates for a number of ranks, once; another number later corrects it.

        Returns:
            The factor between the rates and those that the user set.
        """
        factor = 1.0 if scaling is None else SCALINGS[scaling](ranks)
        change = factor / self.rate_factor
        if change != 1.0:
            for group in self.groups:
                group["lr"] *= change
                for name in ("initial_lr", "max_lr", "min_lr"):
                    if name in group:
                        group[name] *= change
        self.rate_factor = factor
        return factor

    def set_rate(self, rate: float) -> None:
        """Change the rates and keep the optimizers' state. Schedulers start again from there."""
        self.rate_factor = 1.0
        put_rates(self.groups, rate)
        self.drop_schedulers()

    def drop_optimizers(self) -> None:
        """Let the optimizers be built again."""
        self.optimizers, self.schedulers, self.frequencies = [], [], None
        self.takes_turns = False
        self.stored_schedulers, self.stored_groups = [], []
        self.has_training_weights, self.stored_weights = False, []

    def drop_schedulers(self) -> None:
        """Let the next scheduler start from the current rates."""
        self.schedulers = []
        self.stored_schedulers, self.stored_groups = [], []
        for group, name in itertools.product(self.groups, ("initial_lr", "max_lr", "min_lr")):
            group.pop(name, None)

    def restorer(self) -> Callable[[], None]:
        """Return a function that undoes what changes from now on.

        That is all attributes, also the optimizers', and their states and groups, with their
        settings. Numbers in the states' tensors stay as they are then.
        """
        attributes, settings = dict(vars(self)), self.settings()
        groups = [
            {"params": group["params"], **its}
            for group, its in zip(self.groups, settings, strict=True)
        ]
        kept = [
            (optimizer, dict(vars(optimizer)), list(optimizer.param_groups))
            for optimizer in with_inner(self.optimizers)
        ]

        def restore() -> None:
            vars(self).update(attributes)
            for optimizer, held, entries in kept:
                vars(optimizer).clear()
                vars(optimizer).update(held)
                optimizer.param_groups[:] = entries  # a callback may have split some
            for group, before in zip(self.groups, groups, strict=True):
                for key in group.keys() - before.keys():
                    del group[key]
                put_back(group, before)

        return restore

    def settings(self) -> list[PlainData]:
        """Return the groups' settings. Rates in tensors change in place, so they are copied."""
        return [
            {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self.groups
        ]


def put_back(group: PlainData, settings: PlainData) -> None:
    """Restore the settings of an optimizer's group. A tensor stays the same object."""
    for name, value in settings.items():
        current = group.get(name)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                current.copy_(value)
        else:
            group[name] = value


def _warn_of_idle_loss(trained: Trained, optimizers: list[Optimizer]) -> None:
    """Warn once that a loss has parameters that no optimizer trains."""
    held = {id(parameter) for optimizer in optimizers for parameter in held_by(optimizer)}
    losses = parameters_of(*trained.losses.values())
    idle = [p for p in losses if p.requires_grad and id(p) not in held]
    if idle:
        warn(
            f"The loss has {len(idle)} parameters that no optimizer holds, so they don't learn. "
            "Give compile an optimizer over them and the net's, or make them part of the net."
        )
