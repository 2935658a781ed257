"""The checked arguments of the methods, and what `compile`'s arguments resolve to."""

from __future__ import annotations

import copy
import dataclasses
import fractions
import functools
import inspect
import numbers
from typing import Any

import torch
from torch.utils.data import DataLoader

from fitkit import trees
from fitkit.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    chosen_verbose,
    describe,
)
from fitkit.callbacks.callback_list import CallbackList
from fitkit.callbacks.monitor import is_due
from fitkit.data.arrays import check_alike
from fitkit.data.batches import Source, check_readable
from fitkit.data.sources import (
    check_data_type,
    for_other_ranks,
    make_source,
    split_tail,
    validation_parts,
)
from fitkit.distributed.devices import older_spelling
from fitkit.distributed.resolve import resolve_strategy
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.losses import CompiledLoss
from fitkit.losses.class_weights import ClassWeights
from fitkit.metrics import CompiledMetrics
from fitkit.modes import parameters_of
from fitkit.optimizers import OptimizerChoice, instances_in
from fitkit.schedulers import SchedulerChoice
from fitkit.training.resume import Progress
from fitkit.typing import UNSET

DEFAULTS: dict[str, Any] = {
    "optimizer": None,
    "loss": None,
    "metrics": None,
    "learning_rate": None,
    "loss_weights": None,
    "weighted_metrics": None,
    "target": None,
    "lr_scheduler": None,
    "devices": "auto",
    "accelerator": "auto",
    "strategy": "auto",
    "num_nodes": None,
    "precision": "32-true",
    "accumulate_grad_batches": 1,
    "effective_batch_size": None,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": "norm",
    "scale_lr": None,
    "warmup_epochs": None,
    "sync_batchnorm": False,
    "replace_sampler": True,
    "auto_select_gpus": False,
    "log_gpu_memory": None,
    "benchmark": None,
    "deterministic": None,
    "jit_compile": False,
    "matmul_precision": None,
    "memory_format": None,
    "steps_per_execution": 1,
}
"""The defaults of all arguments of `compile` except `gpus`, another spelling of two of them. The
default optimizer is the model's `configure_optimizers`, or Adam."""


HARDWARE = ("devices", "accelerator", "strategy", "precision", "num_nodes", "auto_select_gpus")
"""Arguments that require a new strategy."""


MATMUL_PRECISIONS = (None, "highest", "high", "medium")


MEMORY_FORMATS = {"channels_last": torch.channels_last}
"""By the name that `compile` takes."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One consistent configuration. `compile` makes a new one and never changes one.

    A plain record, not a module: a loss with state must not enter the model's `state_dict`.

    A copy (also one that was pickled) has no strategy before it first needs it. So each model has
    its own, in the process and on the machine where it is used.

    Attributes:
        given: every argument's value, defaults included.
        optimizer, scheduler, loss, metrics, strategy: what they resolved to.
    """

    given: dict[str, Any]
    optimizer: OptimizerChoice
    scheduler: SchedulerChoice | None
    loss: CompiledLoss
    metrics: CompiledMetrics
    strategy: Strategy

    def __getattr__(self, name: str) -> Any:
        """The argument of `compile` with that name."""
        given = self.__dict__.get("given", {})
        if name == "strategy" and given:
            strategy = vars(self)["strategy"] = _strategy_of(given)
            return strategy
        if name in given:
            return given[name]
        raise AttributeError(name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "strategy"}

    def __deepcopy__(self, memo: dict[int, Any]) -> Compilation:
        made = memo[id(self)] = copy.copy(self)
        # It only describes, and may hold what can't be copied.
        memo[id(self.given["strategy"])] = self.given["strategy"]
        vars(made).update(copy.deepcopy(self.__getstate__(), memo))
        return made

    def _state_for_ranks(self, strategy: Strategy) -> dict[str, Any]:
        """The ranks of a call get its strategy. Other models that come along resolve theirs."""
        return vars(self) if self.strategy is strategy else self.__getstate__()

    @classmethod
    def default(cls) -> Compilation:
        """The state before any call to `compile`."""
        return cls._resolve(dict(DEFAULTS), None, {})

    def updated(self, arguments: dict[str, Any], model: torch.nn.Module) -> Compilation:
        """This record with a call's arguments; those left out stay as they were.

        Args:
            arguments: the call's arguments, `UNSET` for what was left out.
            model: the model that they are for.

        Raises:
            ConfigurationError, ArgumentTypeError: an argument is invalid. Nothing changes.
        """
        given = {name: value for name, value in arguments.items() if value is not UNSET}
        _expand_gpus(given)
        _check_simple(given)
        _check_combinations({**self.given, **given}, given)
        compilation = self._resolve({**self.given, **given}, self, given)
        compilation.optimizer.check_parameters(compilation.trainable(model))
        return compilation

    @property
    def names_optimizer(self) -> bool:
        """Whether `compile` was given an optimizer."""
        return self.given["optimizer"] is not None

    def trainable(self, model: torch.nn.Module) -> list[torch.nn.Parameter]:
        """The parameters that may learn: the model's and the losses' own."""
        return parameters_of(model, *self.loss_modules)

    @functools.cached_property
    def loss_modules(self) -> list[torch.nn.Module]:
        """The losses that are the user's own modules."""
        found = [loss for loss in trees.leaves(self.given["loss"]) if _is_own_module(loss)]
        return list(dict.fromkeys(found))

    def loss_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of losses that are modules."""
        return [parameter for loss in self.loss_modules for parameter in loss.parameters()]

    @classmethod
    def _resolve(
        cls, values: dict[str, Any], before: Compilation | None, given: dict[str, Any]
    ) -> Compilation:
        """Resolve what has changed, and keep the other resolved objects."""

        def changed(*names: str) -> bool:
            return before is None or any(name in given for name in names)

        rate = values["learning_rate"]
        if instances_in(values["optimizer"]):
            rate = None
        return cls(
            given=values,
            optimizer=OptimizerChoice(
                "adam" if values["optimizer"] is None else values["optimizer"], rate
            ),
            scheduler=SchedulerChoice.read(values["lr_scheduler"])
            if before is None or changed("lr_scheduler")
            else before.scheduler,
            loss=CompiledLoss(values["loss"], values["loss_weights"])
            if before is None or changed("loss", "loss_weights")
            else before.loss,
            metrics=CompiledMetrics(values["metrics"], values["weighted_metrics"])
            if before is None or changed("metrics", "weighted_metrics")
            else before.metrics,
            strategy=_strategy_of(values)
            if before is None or changed(*HARDWARE)
            else before.strategy,
        )


def _strategy_of(given: dict[str, Any]) -> Strategy:
    """What the arguments about hardware mean in this process."""
    return resolve_strategy(
        _selected(given),
        given["accelerator"],
        given["strategy"],
        given["precision"],
        given["num_nodes"],
    )


def _selected(values: dict[str, Any]) -> Any:
    """`devices`, or the free GPUs that `auto_select_gpus` chooses if it is a count."""
    devices = values["devices"]
    if not values["auto_select_gpus"] or isinstance(devices, (list, tuple)):
        return devices
    if isinstance(devices, str) and "," in devices:
        return devices
    try:
        count = -1 if devices == "auto" else int(devices)
    except (TypeError, ValueError):
        count = None
    if count is None or isinstance(devices, (bool, float)):
        raise ConfigurationError(
            f"auto_select_gpus=True needs a count of GPUs, but devices={describe(devices)}. Write "
            "for example devices=2, or devices=-1 for all that are free."
        )
    from fitkit.extras.free_devices import find_usable_cuda_devices

    return find_usable_cuda_devices(count)


def _expand_gpus(given: dict[str, Any]) -> None:
    """`gpus=…` as `accelerator` and `devices`."""
    if "gpus" not in given:
        return
    gpus = given.pop("gpus")
    for name in ("devices", "accelerator"):
        if name in given:
            raise ConfigurationError(
                f"gpus={gpus!r} and {name}={given[name]!r} were both given. gpus is the older "
                "spelling of accelerator='gpu', devices=…. Give only one of them."
            )
    given.update(older_spelling(gpus))


def _check_simple(given: dict[str, Any]) -> None:
    """Check the arguments that can be checked one by one."""
    checks: dict[str, Any] = {
        "learning_rate": lambda name, value: check_number(name, value, minimum=0, optional=True),
        "accumulate_grad_batches": check_count,
        "effective_batch_size": lambda name, value: check_count(name, value, optional=True),
        "gradient_clip_val": lambda name, value: check_number(name, value, above=0, optional=True),
        "gradient_clip_algorithm": lambda name, value: check_choice(name, value, ("norm", "value")),
        "num_nodes": check_count,
        "target": _check_target,
        "scale_lr": lambda name, value: check_choice(name, value, (None, "linear", "sqrt")),
        "warmup_epochs": lambda name, value: check_number(name, value, minimum=0, optional=True),
        "benchmark": lambda name, value: check_flag(name, value, optional=True),
        "sync_batchnorm": check_flag,
        "replace_sampler": check_flag,
        "auto_select_gpus": check_flag,
        "deterministic": _check_deterministic,
        "log_gpu_memory": lambda name, value: check_choice(name, value, (None, "all", "min_max")),
        "jit_compile": _check_jit_compile,
        "matmul_precision": lambda name, value: check_choice(name, value, MATMUL_PRECISIONS),
        "memory_format": lambda name, value: check_choice(name, value, (None, *MEMORY_FORMATS)),
        "steps_per_execution": check_count,
    }
    for name, value in given.items():
        if name in checks:
            checks[name](name, value)


def _check_deterministic(name: str, value: Any) -> None:
    if value != "warn":
        check_flag(name, value, optional=True)


def _check_target(name: str, value: Any) -> None:
    """None, or a name, a list or a dict of names."""
    if value is not None and not (
        (keys := list(trees.leaves(value))) and all(isinstance(key, str) and key for key in keys)
    ):
        raise ArgumentTypeError(
            f"target={describe(value)} must be the name of the entry of dict batches that holds "
            "the targets, or for several outputs a list of names or a dict {output: name}."
        )


def _check_jit_compile(name: str, value: Any) -> None:
    """True, False, or the keyword arguments of `torch.compile`."""
    if not isinstance(value, dict):
        check_flag(name, value)
        return
    accepted = [key for key in inspect.signature(torch.compile).parameters if key != "model"]
    for key in value:
        if key not in accepted:
            raise ConfigurationError(
                f"jit_compile has the unknown option {key!r}. torch.compile takes "
                f"{', '.join(accepted)}."
            )


def _check_combinations(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse invalid combinations of the values that would hold after this call."""
    optimizer = values["optimizer"]
    if instances_in(optimizer) and given.get("learning_rate") is not None:
        raise ConfigurationError(
            f"learning_rate={given['learning_rate']} can't change an optimizer instance, which "
            "has its own rate. Set the rate where you create it (or in its param_groups), or give "
            "the optimizer's name or class."
        )
    if values["effective_batch_size"] is not None and values["accumulate_grad_batches"] != 1:
        raise ConfigurationError(
            f"effective_batch_size={values['effective_batch_size']} decides how many batches make "
            f"an update, and so does accumulate_grad_batches={values['accumulate_grad_batches']}. "
            "Leave one of them out (effective_batch_size=None, accumulate_grad_batches=1)."
        )
    scheduler = values["lr_scheduler"]
    if isinstance(scheduler, dict):
        scheduler = scheduler.get("scheduler")
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) and (
        all(scheduler.optimizer is not own for own in instances_in(optimizer))
    ):
        raise ConfigurationError(
            "The lr_scheduler instance belongs to another optimizer than this model's. Give "
            "compile both instances, or the scheduler's class."
        )
    if "optimizer" in given and (optimizer is None or isinstance(optimizer, bool)):
        raise ArgumentTypeError(f"optimizer={optimizer!r} must be a name, class or instance.")


def parts_of_update(samples: int, ranks: int, size: int | None, *, is_fixed: bool) -> int:
    """How many batches of each rank make an update, by `effective_batch_size`.

    Args:
        samples: the samples of an update, on all ranks.
        ranks: the number of ranks that share the data.
        size: the most samples in a rank's batch. If the data make their own batches, exactly its
            samples, or None if they don't say.
        is_fixed: whether the data make their own batches.

    Raises:
        ConfigurationError: it can't be divided. The message names values that can.
    """
    given, among = f"effective_batch_size={samples}", f"{ranks} ranks" if ranks > 1 else "one rank"
    if size is None:
        raise ConfigurationError(
            f"{given} needs the number of samples in a batch, but x makes its own batches and has "
            "no batch_size. Give arrays, a Dataset or a DataLoader with a batch_size, or write "
            "accumulate_grad_batches=… instead."
        )
    step = ranks * size if is_fixed else ranks
    if samples % step:
        what = f"{among} with batches of {size}" if is_fixed else among
        below = samples // step * step
        nearest = f"{below} or {below + step}" if below else f"{step}"
        raise ConfigurationError(
            f"{given} can't be divided among {what}. Write {nearest}, or use another "
            f"number of devices{' or another batch_size in the loader' if is_fixed else ''}."
        )
    if is_fixed:
        return samples // step
    mine = samples // ranks
    # The fewest parts of equal size that aren't larger than a batch may be.
    parts = next(parts for parts in range(-(-mine // size), mine + 1) if mine % parts == 0)
    if 2 * (mine // parts) < min(size, mine):
        near = -(-mine // size) * size * ranks
        raise ConfigurationError(
            f"{given} gives each of {among} {mine} samples, which can't be divided into equal "
            f"batches of about batch_size={size} samples. The largest size that divides them is "
            f"{mine // parts}. Write effective_batch_size={near}, or another batch_size in fit."
        )
    return parts


def _is_own_module(loss: Any) -> bool:
    """Whether a loss is a module that may have parameters and a mode. torch's have neither."""
    return isinstance(loss, torch.nn.Module) and not type(loss).__module__.startswith("torch.nn.")


@dataclasses.dataclass
class FitArguments:
    """One call of `fit`, with the method's own arguments.

    Raises:
        ArgumentTypeError, ConfigurationError: from the constructor, for any argument.
    """

    x: Any
    y: Any
    batch_size: int
    epochs: int
    verbose: int | str
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool | str
    class_weight: Any
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: Any

    def __post_init__(self) -> None:
        check_data_type(self.x)
        check_count("batch_size", self.batch_size)
        check_count("epochs", self.epochs)
        check_count("initial_epoch", self.initial_epoch, minimum=0)
        check_count("steps_per_epoch", self.steps_per_epoch, optional=True)
        check_count("validation_steps", self.validation_steps, optional=True)
        check_count("validation_batch_size", self.validation_batch_size, optional=True)
        check_number("validation_split", self.validation_split, minimum=0, below=1)
        chosen_verbose(self.verbose)
        check_choice("shuffle", self.shuffle, (True, False, "batch"))
        self._check_validation_freq()
        self.weights_by_class: ClassWeights | None = (
            None if self.class_weight is None else ClassWeights(self.class_weight)
        )
        self.callback_list: CallbackList = CallbackList(self.callbacks)
        self.source: Any = None  # a Source, once it is prepared
        self.held_out: Source | None = None
        self.resumed: Progress | None = None
        self.accumulate: int | None = None  # batches per update, if the effective size says so

    def _check_validation_freq(self) -> None:
        frequency = self.validation_freq
        if isinstance(frequency, dict):
            if list(frequency) != ["batches"]:
                raise ConfigurationError(
                    f"validation_freq={describe(frequency)}: a dict says after how many batches, "
                    'like {"batches": 100}.'
                )
            check_count("validation_freq's batches", frequency["batches"])
        elif isinstance(frequency, numbers.Real) and not isinstance(frequency, numbers.Integral):
            if not 0 < float(frequency) <= 1:
                raise ConfigurationError(
                    f"validation_freq={describe(frequency)}: a fraction of the epoch is above 0 "
                    'and at most 1. Write an int for every so many epochs, {"batches": 100} for '
                    "every so many batches."
                )
        elif isinstance(frequency, (list, tuple, set)):
            if not all(
                isinstance(epoch, numbers.Integral)
                and not isinstance(epoch, bool)
                and int(epoch) >= 1
                for epoch in frequency
            ):
                raise ConfigurationError(
                    f"validation_freq={describe(frequency)}: a list holds epoch numbers from 1."
                )
        else:
            check_count("validation_freq", frequency)

    @property
    def validates_within_epochs(self) -> bool:
        """Whether there are validations before the end of an epoch, too."""
        return isinstance(self.validation_freq, dict) or (
            not isinstance(self.validation_freq, (list, tuple, set)) and self.validation_freq < 1
        )

    def batches_between_validations(self, steps: int | None) -> fractions.Fraction | None:
        """How many batches, or parts of one, lie between two validations of an epoch.

        Args:
            steps: batches in the epoch; None if unknown.

        Returns:
            The number; None if only the ends of epochs validate.
        """
        if not self.validates_within_epochs:
            return None
        if isinstance(self.validation_freq, dict):
            return fractions.Fraction(self.validation_freq["batches"])
        assert steps is not None  # `prepare` has refused that
        # 0.2 is a fifth: as floats, 3 * 0.2 * 10 batches are a little more than 6.
        return fractions.Fraction(float(self.validation_freq)).limit_denominator(10**6) * steps

    def validates_after(self, epoch: int) -> bool:
        """Whether epoch `epoch` (from 0) ends with a validation."""
        return is_due(self.validation_freq, epoch)

    def prepare(
        self, float_dtype: torch.dtype, ranks: int, effective_batch_size: int | None = None
    ) -> None:
        """Make the training's and the validation's sources, before anything runs.

        Args:
            float_dtype: the dtype of the net's parameters.
            ranks: the number of ranks that will train.
            effective_batch_size: samples per update, by which a rank's batches are cut.

        Raises:
            ArgumentTypeError, ConfigurationError: the data can't be read, don't fit, or have fewer
                samples than there are ranks.
        """
        train, validation = (self.x, self.y, self.sample_weight), None
        if self.validation_data is not None:
            check_data_type(self.validation_data, "validation_data")
            validation = validation_parts(self.validation_data)
        elif self.validation_split:
            train, validation = split_tail(*train, self.validation_split)
        batch_size = self.batch_size
        if effective_batch_size is not None:
            is_loader = isinstance(train[0], DataLoader)
            size = train[0].batch_size if is_loader else batch_size
            self.accumulate = parts_of_update(effective_batch_size, ranks, size, is_fixed=is_loader)
            batch_size = effective_batch_size // ranks // self.accumulate
        source = make_source(
            *train, batch_size=batch_size, shuffle=self.shuffle, float_dtype=float_dtype
        )
        if effective_batch_size is not None and source.batch_size is None:  # an iterable of batches
            parts_of_update(effective_batch_size, ranks, None, is_fixed=True)
        check_readable(source, self.epochs - self.initial_epoch, self.steps_per_epoch)
        if source.samples is not None and source.samples < ranks:
            raise ConfigurationError(
                f"x has {source.samples} samples, but there are {ranks} ranks: each needs at "
                "least one. Use fewer devices.",
                code="FK050",
            )
        self.source = source
        if validation is None:
            return
        self.held_out = make_source(
            *validation,
            batch_size=self.validation_batch_size or self.batch_size,
            float_dtype=float_dtype,
            name="validation_data",
        )
        if self.validates_within_epochs:
            self._check_validates_within(source, self.held_out)
        check_readable(
            self.held_out,
            sum(self.validates_after(e) for e in range(self.initial_epoch, self.epochs)),
            self.validation_steps,
            name="validation_data",
        )
        check_alike(source, self.held_out)

    def _check_validates_within(self, source: Source, held_out: Source) -> None:
        """Refuse data that can't be validated on several times per epoch, or at unknown batches."""
        given = f"validation_freq={describe(self.validation_freq)}"
        unknown = source.steps is None and self.steps_per_epoch is None
        if unknown and not isinstance(self.validation_freq, dict):
            raise ConfigurationError(
                f"{given} is a fraction of the epoch, but x has no known number of batches. Write "
                'validation_freq={"batches": 100}, or give steps_per_epoch=….'
            )
        if not held_out.repeatable and self.validation_steps is None:
            raise ConfigurationError(
                f"{given} validates several times, but validation_data is an iterator, which can "
                "be read once. Give validation_steps=… to take that many batches each time, or "
                "data that can be read again (a list of batches, a DataLoader, a Dataset).",
                code="FK021",
            )

    def for_other_ranks(self) -> FitArguments:
        """These arguments for other processes: with sources in place of the user's data."""
        arguments = copy.copy(self)
        for name in ("x", "y", "sample_weight", "validation_data", "callbacks"):
            setattr(arguments, name, None)
        arguments.source = for_other_ranks(self.source)
        arguments.held_out = for_other_ranks(self.held_out)
        return arguments


@dataclasses.dataclass
class EvaluateArguments:
    """One call of `evaluate` or `predict`: a single pass over data."""

    x: Any
    batch_size: int
    verbose: int | str
    steps: int | None
    callbacks: Any
    y: Any = None
    sample_weight: Any = None

    def __post_init__(self) -> None:
        check_data_type(self.x)
        check_count("batch_size", self.batch_size)
        check_count("steps", self.steps, optional=True)
        chosen_verbose(self.verbose)
        self.callback_list: CallbackList = CallbackList(self.callbacks)
        self.source: Any = None  # a Source, once it is prepared

    def prepare(
        self, float_dtype: torch.dtype, ranks: int, effective_batch_size: int | None = None
    ) -> None:
        """Make the source, before anything runs. Any number of samples is allowed."""
        self.source = make_source(
            self.x, self.y, self.sample_weight, batch_size=self.batch_size, float_dtype=float_dtype
        )

    def for_other_ranks(self) -> EvaluateArguments:
        """These arguments for other processes."""
        arguments = copy.copy(self)
        arguments.x = arguments.y = arguments.sample_weight = arguments.callbacks = None
        arguments.source = for_other_ranks(self.source)
        return arguments
