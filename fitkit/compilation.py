"""What `compile` was given, checked, and what it resolves to."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from typing import Literal, TypeVar

import torch

from fitkit import trees
from fitkit.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    describe,
    keep_checked,
    plain,
)
from fitkit.distributed.devices import older_spelling
from fitkit.distributed.precision import Precision
from fitkit.distributed.resolve import resolve_strategy
from fitkit.distributed.strategies import Strategy
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.guests import NO_GUEST, guest_of
from fitkit.held_modules import modules_in
from fitkit.losses import CompiledLoss
from fitkit.metrics import CompiledMetrics
from fitkit.metrics.torchmetrics_adapter import is_torchmetric
from fitkit.optimizers import OptimizerChoice, check_layer_decay, instances_in
from fitkit.schedulers import SchedulerChoice
from fitkit.trained import Trained, is_torchs_loss
from fitkit.typing import (
    UNSET,
    AcceleratorName,
    BatchTransformsArgument,
    CompilerOptions,
    DevicesArgument,
    LossArgument,
    LossWeights,
    MemoryFormat,
    MetricsArgument,
    Name,
    NamedPrecision,
    OptimizerArgument,
    SchedulerArgument,
    StrategyName,
    Unset,
)

MATMUL_PRECISIONS = (None, "highest", "high", "medium")


MEMORY_FORMATS: dict[MemoryFormat, torch.memory_format] = {"channels_last": torch.channels_last}
"""By the name that `compile` takes."""

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, eq=False)
class CompileArguments:
    """The arguments of `compile`, each with its type and its default.

    `gpus` isn't among them: it is another spelling of two of them. The default optimizer is the
    model's `configure_optimizers`, or Adam.

    Raises:
        ArgumentTypeError, ConfigurationError: from the constructor, for any argument.
    """

    optimizer: OptimizerArgument | None = None
    loss: LossArgument = None
    metrics: MetricsArgument = None
    learning_rate: float | None = None
    layer_decay: float | None = None
    loss_weights: LossWeights = None
    weighted_metrics: MetricsArgument = None
    target: str | list[str] | dict[str, str] | None = None
    lr_scheduler: SchedulerArgument = None
    devices: DevicesArgument = "auto"
    accelerator: AcceleratorName = "auto"
    strategy: StrategyName | Name | Strategy = "auto"
    num_nodes: int | Unset = UNSET
    precision: NamedPrecision | Precision = "32-true"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    scale_lr: Literal["linear", "sqrt"] | None = None
    warmup_epochs: float | None = None
    sync_batchnorm: bool = False
    replace_sampler: bool = True
    auto_select_gpus: bool = False
    log_gpu_memory: Literal["all", "min_max"] | None = None
    benchmark: bool | None = None
    deterministic: bool | Literal["warn"] | None = None
    jit_compile: bool | CompilerOptions = False
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    memory_format: MemoryFormat | None = None
    steps_per_execution: int = 1
    effective_batch_size: int | None = None
    batch_transforms: BatchTransformsArgument = None
    out_of_memory: Literal["raise", "split"] = "raise"

    def __post_init__(self) -> None:
        bounded = {"minimum": 0, "optional": True}
        keep_checked(self, check_number, "learning_rate", "warmup_epochs", **bounded)
        vars(self)["layer_decay"] = check_layer_decay(self.layer_decay)
        self._check_target()
        vars(self)["devices"] = trees.map_leaves(plain, self.devices)
        vars(self)["precision"] = plain(self.precision)
        if self.num_nodes is not UNSET:
            keep_checked(self, check_count, "num_nodes")
        keep_checked(self, check_count, "accumulate_grad_batches", "steps_per_execution")
        keep_checked(self, check_count, "effective_batch_size", optional=True)
        keep_checked(self, check_number, "gradient_clip_val", above=0, optional=True)
        keep_checked(self, check_choice, "gradient_clip_algorithm", choices=("norm", "value"))
        keep_checked(self, check_choice, "out_of_memory", choices=("raise", "split"))
        keep_checked(self, check_choice, "scale_lr", choices=(None, "linear", "sqrt"))
        keep_checked(self, check_flag, "sync_batchnorm", "replace_sampler", "auto_select_gpus")
        keep_checked(self, check_choice, "log_gpu_memory", choices=(None, "all", "min_max"))
        keep_checked(self, check_flag, "benchmark", optional=True)
        keep_checked(self, check_choice, "deterministic", choices=(None, True, False, "warn"))
        self._check_jit_compile()
        keep_checked(self, check_choice, "matmul_precision", choices=MATMUL_PRECISIONS)
        if self.memory_format is torch.channels_last:
            vars(self)["memory_format"] = "channels_last"
        keep_checked(self, check_choice, "memory_format", choices=(None, *MEMORY_FORMATS))
        self._check_batch_transforms()

    def _check_target(self) -> None:
        """Refuse what is neither None nor a name, a list or a dict of names."""
        if self.target is not None and not (
            (keys := list(trees.leaves(self.target)))
            and all(isinstance(key, str) and key for key in keys)
        ):
            raise ArgumentTypeError(
                f"target={describe(self.target)} must be the name of the entry of dict batches "
                "that holds the targets, or for several outputs a list of names or a dict "
                "{output: name}."
            )

    def _check_batch_transforms(self) -> None:
        """Refuse what is neither None nor callables."""
        given = self.batch_transforms
        if given is None or (
            isinstance(given, (list, tuple)) and all(callable(one) for one in given)
        ):
            return
        raise ArgumentTypeError(
            f"batch_transforms={describe(given)} must be a list of functions (x, y) -> (x, y) or "
            "x -> x on whole batches, such as [fitkit.transforms.MixUp(0.2)]."
        )

    def _check_jit_compile(self) -> None:
        """Refuse what is neither True, False, nor the keyword arguments of `torch.compile`."""
        flag = plain(self.jit_compile)
        if isinstance(flag, bool):
            vars(self)["jit_compile"] = flag
            return
        if not isinstance(self.jit_compile, dict):
            raise ArgumentTypeError(
                f"jit_compile={describe(self.jit_compile)} must be True, False or a dict of "
                "torch.compile's options, such as {'mode': 'max-autotune'}."
            )
        accepted = [key for key in inspect.signature(torch.compile).parameters if key != "model"]
        for key in self.jit_compile:
            if key not in accepted:
                raise ConfigurationError(
                    f"jit_compile has the unknown option {key!r}. torch.compile takes "
                    f"{', '.join(accepted)}."
                )

    def as_dict(self) -> dict[str, object]:
        """Return the arguments by name, for files and logs. What was left out is None."""
        return {name: None if value is UNSET else value for name, value in vars(self).items()}

    def chosen_optimizer(self) -> OptimizerChoice:
        """Return what `optimizer` and `learning_rate` mean together."""
        optimizer = "adam" if self.optimizer is None else self.optimizer
        if instances_in(optimizer):
            return OptimizerChoice(optimizer)
        return OptimizerChoice(optimizer, self.learning_rate, self.layer_decay)

    def chosen_strategy(self, devices: DevicesArgument | Unset = UNSET) -> Strategy:
        """Return what the arguments about hardware mean in this process.

        Args:
            devices: those that were chosen before; left out, they are chosen now.
        """
        return resolve_strategy(
            self._chosen_devices() if isinstance(devices, Unset) else devices,
            self.accelerator,
            self.strategy,
            self.precision,
            None if self.num_nodes is UNSET else self.num_nodes,
        )

    def _chosen_devices(self) -> DevicesArgument:
        """`devices`, or the free GPUs that `auto_select_gpus` chooses if it is a count."""
        devices = self.devices
        if not self.auto_select_gpus or isinstance(devices, (list, tuple)):
            return devices
        if isinstance(devices, str) and "," in devices:
            return devices
        try:
            count = -1 if devices == "auto" else int(devices)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            count = None
        if count is None or isinstance(devices, (bool, float)):
            raise ConfigurationError(
                f"auto_select_gpus=True needs a count of GPUs, but devices={describe(devices)}. "
                "Write for example devices=2, or devices=-1 for all that are free."
            )
        from fitkit.extras.free_devices import find_usable_cuda_devices

        return find_usable_cuda_devices(count)


def given_or(value: Value | Unset, before: Value) -> Value:
    """Return the value of an argument; the value before if the call left it out."""
    return before if value is UNSET else value


def is_given(*values: object) -> bool:
    """Whether a call has given any of these arguments."""
    return any(value is not UNSET for value in values)


def without_gpus(
    gpus: DevicesArgument | Unset | None,
    devices: DevicesArgument | Unset,
    accelerator: AcceleratorName | Unset,
) -> tuple[DevicesArgument | Unset, AcceleratorName | Unset]:
    """`gpus=…` as `devices` and `accelerator`.

    Raises:
        ConfigurationError: one of these was given, too.
    """
    if gpus is UNSET:
        return devices, accelerator
    for name, value in (("devices", devices), ("accelerator", accelerator)):
        if value is not UNSET:
            raise ConfigurationError(
                f"gpus={describe(gpus)} and {name}={describe(value)} were both given. gpus is the "
                "older spelling of accelerator='gpu', devices=…. Give only one of them."
            )
    words = older_spelling(trees.map_leaves(plain, gpus))
    return words["devices"], words["accelerator"]


@dataclasses.dataclass(frozen=True)
class Anew:
    """What a call of `compile` has given, even if it is the same as before.

    Attributes:
        optimizer, learning_rate: these arguments.
        scheduler: `lr_scheduler`.
        loss, metrics: these, or how they are weighted.
        hardware: an argument that requires a new strategy.
    """

    optimizer: bool
    learning_rate: bool
    scheduler: bool
    loss: bool
    metrics: bool
    hardware: bool


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One consistent configuration. `compile` makes a new one and never changes one.

    A plain record, not a module: a loss with state must not enter the model's `state_dict`.

    A copy (also one that was pickled) has no strategy before it first needs it. So each model has
    its own, in the process and on the machine where it is used.

    Attributes:
        given: the arguments, those included that earlier calls have given.
        optimizer, scheduler, loss, metrics: what they resolved to.
        free_gpus: of a copy on the same machine, those that `auto_select_gpus` chose for its
            original: within a run they aren't free any more, and each rank would choose others.
    """

    given: CompileArguments
    optimizer: OptimizerChoice
    scheduler: SchedulerChoice | None
    loss: CompiledLoss
    metrics: CompiledMetrics
    free_gpus: DevicesArgument | Unset = UNSET

    @functools.cached_property
    def strategy(self) -> Strategy:
        """The devices and how they train together, as the arguments about hardware say."""
        return self.given.chosen_strategy(self.free_gpus)

    def __getstate__(self) -> dict[str, object]:
        return {**self._state_here(), "free_gpus": UNSET}

    def _state_here(self) -> dict[str, object]:
        """Return what copies on this machine get."""
        state = {name: value for name, value in vars(self).items() if name != "strategy"}
        if self.given.auto_select_gpus and "strategy" in vars(self):
            state["free_gpus"] = [*self.strategy.device_ids]
        return state

    def __copy__(self) -> Compilation:
        made = object.__new__(type(self))
        vars(made).update(self._state_here())
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> Compilation:
        made = memo[id(self)] = copy.copy(self)
        # It only describes, and may hold what can't be copied.
        memo[id(self.given.strategy)] = self.given.strategy
        vars(made).update(copy.deepcopy(self._state_here(), memo))
        return made

    def _state_for_ranks(self, strategy: Strategy) -> dict[str, object]:
        """Give a call's ranks its strategy. Other models that come along resolve theirs."""
        return vars(self) if self.strategy is strategy else self._state_here()

    @classmethod
    def default(cls) -> Compilation:
        """Return the state before any call to `compile`."""
        given = CompileArguments()
        plain = cls(
            given, given.chosen_optimizer(), None, CompiledLoss(None), CompiledMetrics(None)
        )
        return plain.on(given.chosen_strategy())

    def on(self, strategy: Strategy) -> Compilation:
        """Return this configuration with another strategy than a copy would resolve."""
        made = copy.copy(self)
        vars(made)["strategy"] = strategy
        return made

    def updated(self, given: CompileArguments, anew: Anew, model: torch.nn.Module) -> Compilation:
        """Return this record with a call's arguments. What they leave unchanged stays the same
        object.

        Args:
            given: the arguments that hold from now on.
            anew: which of them the call has given.
            model: the model that they are for.

        Raises:
            ConfigurationError, ArgumentTypeError: an argument is invalid. Nothing changes.
        """
        _check_combinations(given, anew)
        meant = (guest_of(model) or NO_GUEST).meant
        made = Compilation(
            given,
            given.chosen_optimizer(),
            SchedulerChoice.read(given.lr_scheduler) if anew.scheduler else self.scheduler,
            CompiledLoss(meant("loss", given.loss), given.loss_weights) if anew.loss else self.loss,
            CompiledMetrics(
                meant("metrics", given.metrics), meant("weighted_metrics", given.weighted_metrics)
            )
            if anew.metrics
            else self.metrics,
        ).on(given.chosen_strategy() if anew.hardware else self.strategy)
        if given.out_of_memory == "split":
            _check_splitting(given, made.strategy)
        made.optimizer.check_parameters(made.trained(model).parameters())
        return made

    @property
    def names_optimizer(self) -> bool:
        """Whether `compile` was given an optimizer."""
        return self.given.optimizer is not None

    def trained(self, model: torch.nn.Module) -> Trained:
        """Return the model, and what trains with it."""
        losses, others = self._modules
        return Trained(model, losses, others)

    @functools.cached_property
    def _modules(self) -> tuple[dict[str, torch.nn.Module], dict[str, torch.nn.Module]]:
        """The modules of losses that may learn; those of metrics, and torch's own losses."""
        found = dict(modules_in(self.given.loss, "loss"))
        losses = {name: module for name, module in found.items() if not is_torchs_loss(module)}
        others = {name: module for name, module in found.items() if name not in losses}
        given = (self.given.metrics, self.given.weighted_metrics)
        for name, metric in modules_in(given, "metrics"):
            # Calls have their own copies of torchmetrics' objects.
            if not is_torchmetric(metric) and not is_torchmetric(metric, "MetricCollection"):
                others[name] = metric
        return losses, others


def _check_combinations(given: CompileArguments, anew: Anew) -> None:
    """Refuse invalid combinations of the values that would hold after this call."""
    optimizer, scheduler = given.optimizer, given.lr_scheduler
    if instances_in(optimizer) and anew.learning_rate and given.learning_rate is not None:
        raise ConfigurationError(
            f"learning_rate={given.learning_rate} can't change an optimizer instance, which "
            "has its own rate. Set the rate where you create it (or in its param_groups), or give "
            "the optimizer's name or class."
        )
    if instances_in(optimizer) and given.layer_decay is not None:
        raise ConfigurationError(
            f"layer_decay={given.layer_decay} can't change an optimizer instance, which has its "
            "own groups. Give the optimizer's name or class, or make the groups by "
            "fitkit.optimizers.parameter_groups(net, learning_rate=…, layer_decay=…)."
        )
    if given.effective_batch_size is not None and given.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"effective_batch_size={given.effective_batch_size} decides how many batches make "
            f"an update, and so does accumulate_grad_batches={given.accumulate_grad_batches}. "
            "Leave one of them out (effective_batch_size=None, accumulate_grad_batches=1)."
        )
    if given.warmup_epochs is not None and isinstance(scheduler, dict) and "warmup" in scheduler:
        raise ConfigurationError(
            f"warmup_epochs={given.warmup_epochs} and lr_scheduler's warmup="
            f"{describe(scheduler['warmup'])} were both given. Leave one of them out."
        )
    chosen: object = scheduler.get("scheduler") if isinstance(scheduler, dict) else scheduler
    if isinstance(chosen, torch.optim.lr_scheduler.LRScheduler) and (
        all(chosen.optimizer is not own for own in instances_in(optimizer))
    ):
        raise ConfigurationError(
            "The lr_scheduler instance belongs to another optimizer than this model's. Give "
            "compile both instances, or the scheduler's class."
        )
    if anew.optimizer and (optimizer is None or isinstance(optimizer, bool)):
        raise ArgumentTypeError(f"optimizer={optimizer!r} must be a name, class or instance.")


def _check_splitting(given: CompileArguments, strategy: Strategy) -> None:
    """Refuse to compute batches in parts where ranks or devices compute each of them together."""
    if not strategy.cuts_batches or strategy.has_engine or strategy.replicates:
        raise ConfigurationError(
            "out_of_memory='split' computes a batch in parts on each rank by itself, but under "
            f"strategy={strategy.name!r} the ranks or devices exchange something within a batch. "
            "Use one device, strategy='ddp' or 'ddp_spawn', or leave the option out.",
            code="FK068",
        )
    if given.sync_batchnorm:
        raise ConfigurationError(
            "out_of_memory='split' and sync_batchnorm=True can't be combined: ranks that compute "
            "their batches in unequal numbers of parts would wait for each other. Leave one of "
            "them out.",
            code="FK068",
        )
