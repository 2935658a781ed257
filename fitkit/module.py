"""Module: the hooks and services of a model; `Model` adds `compile`, `fit` and the rest."""

from __future__ import annotations

import functools
import inspect
import io
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from fitkit import trees
from fitkit.accelerators import widest_dtype
from fitkit.arguments import check_choice, check_count, check_flag, check_number, describe
from fitkit.checkpoint.formats import OpenWeights
from fitkit.checkpoint.weights import FittingWeights
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.fit_state import Run
from fitkit.foreign_names import no_attribute
from fitkit.guests import Guest
from fitkit.hyperparameters import Hyperparameters, arguments_of
from fitkit.losses import checked_count
from fitkit.modes import modes_restored, set_mode
from fitkit.optimizers import held_by
from fitkit.printing import say
from fitkit.progress import Progress
from fitkit.record import LogOptions as LogOptions
from fitkit.record import Record
from fitkit.scopes import Scope
from fitkit.typing import PlainData

REDUCTIONS = ("mean", "sum", "min", "max")
"""How a name's values become one."""


def reduction_named(reduce_fx: Any) -> str:
    """One of `REDUCTIONS`, from its name or from torch's or Python's function of that name."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", None)
    if name in REDUCTIONS:
        return str(name)
    if name in ("amin", "amax"):
        return name[1:]
    raise ConfigurationError(
        f"reduce_fx={describe(reduce_fx)} must be one of {', '.join(REDUCTIONS)}."
    )


def merged(reduce_fx: str, states: list[tuple[float, float]]) -> float | None:
    """One value from several `Running.state`s; None where none has samples."""
    held = [(value, samples) for value, samples in states if samples]
    if not held:
        return None
    if reduce_fx == "mean":
        return sum(value for value, _ in held) / sum(samples for _, samples in held)
    values = [value for value, _ in held]
    return {"sum": sum(values), "min": min(values), "max": max(values)}[reduce_fx]


def as_loggable(name: str, value: Any) -> Any:
    """Return a value for `Logged.add`: a detached 0-d tensor, or a torchmetrics object as it is.

    Raises:
        ArgumentTypeError, ConfigurationError: no number, or several.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigurationError(
                f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}. Log one number: "
                "for example its .mean()."
            )
        return value.detach().reshape(())
    if is_metric(value):
        return value
    if isinstance(value, numbers.Real) or getattr(value, "shape", None) == ():
        return torch.tensor(float(value), dtype=torch.float64)
    hint = " Use self.log_dict for a dict." if trees.has_items(value) else ""
    raise ArgumentTypeError(
        f"self.log({name!r}) got {describe(value)}; it takes a number, a tensor with one number "
        f"or a torchmetrics.Metric.{hint}"
    )


def is_metric(value: Any) -> bool:
    """Whether a value is a torchmetrics object; asks without importing torchmetrics."""
    return isinstance(value, torch.nn.Module) and hasattr(value, "_reductions")


def joined_values(values: list[tuple[Any, int]], reduce_fx: str) -> tuple[Any, int]:
    """Return the values that replicas logged for their parts of a batch, as one for the batch.

    Args:
        values: of each replica, with its number of samples.
        reduce_fx: how the name's values become one.

    Returns:
        The value, and the samples of all.
    """
    samples = sum(count for _, count in values)
    if not isinstance(values[0][0], torch.Tensor):
        return values[0][0], samples
    device = values[0][0].device
    dtype = widest_dtype(device)
    stacked = torch.stack([value.to(device, dtype) for value, _ in values])
    if reduce_fx == "mean":
        counts = stacked.new_tensor([count for _, count in values])
        return stacked @ (counts / counts.sum()), samples
    return getattr(torch, {"min": "amin", "max": "amax"}.get(reduce_fx, "sum"))(stacked), samples


class Module(nn.Module):
    """The hooks that a subclass of `Model` may override, and the methods that they may call.

    All modules below `model.py` know a model by this class. fitkit looks once per call whether a
    hook is overridden, so a model without hooks pays nothing for them.

    Attributes:
        net: the network that was given, or None.
        history: the `History` of the last `fit`; None before the first.
        stop_training: set it to True in a callback or a step to end `fit` after the current batch
            or epoch, on all ranks.
        stop_evaluating, stop_predicting: set it to True in a callback to end `evaluate` (or a
            validation) or `predict` after the current batch, on the rank that sets it.
        automatic_optimization: whether `fit` makes the updates (default). If False,
            `training_step` makes them with `optimizers()` and `manual_backward`.
        current_epoch: the number of the current or last epoch, from 0.
    """

    _fitkit: Record
    net: Any
    history: Any
    stop_training: bool
    stop_evaluating: bool = False
    stop_predicting: bool = False
    automatic_optimization: bool = True
    current_epoch: int = 0
    _counts_left_out: bool = False  # is a batch without a loss an update that changes nothing?
    # By what names its own code ends a training, and what else than its modules has such code.
    _stopped_by: frozenset[str] = frozenset({"stop_training"})
    _acting: Sequence[object] = ()

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module of that name.

        Raises:
            AttributeError: there is none. For a name from Keras or Lightning, the message says
                what to write instead.
        """
        # As torch does it. Calling super() would make each access to self.net slower.
        own = self.__dict__
        for place in ("_parameters", "_buffers", "_modules"):
            if place in own and name in own[place]:
                found = own[place][name]
                return found.given if name == "net" and isinstance(found, Guest) else found
        raise no_attribute(f"{type(self).__name__!r} object", "fitkit.Model", name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the net. A subclass may define its own."""
        net = self._modules.get("net")  # an attribute lookup on a module costs microseconds
        net = self.net if net is None else net
        if net is None:
            raise ConfigurationError(
                f"{type(self).__name__} has neither a net nor a forward method. Write "
                "fitkit.Model(net), or define forward(self, x) in the subclass."
            )
        return net(*args, **kwargs)

    def _weights_module(self) -> nn.Module:
        """Return the module whose names weight files use: the net, if the model only wraps it."""
        net = self._modules.get("net")
        if isinstance(net, nn.Module) and list(self._modules) == ["net"]:
            beside = [*self.parameters(recurse=False), *self.buffers(recurse=False)]
            if not beside:
                return net
        return self

    # ------------------------------------------------------------------ steps
    # Subclasses write training_step(self, batch, batch_idx). The arguments are left open here for
    # type checkers, because a subclass may take fewer or more.

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Compute the loss of one training batch.

        An override may call `super().training_step(…)`, which returns the compiled loss and
        updates the compiled metrics.

        Args:
            *arguments: `batch`, as the data gave it, on the model's device, and `batch_idx`, its
                number in the epoch, from 0. The hook may leave out `batch_idx`. With several
                optimizers, `optimizer_idx` is the number of the optimizer whose turn it is.

        Returns:
            The loss, a tensor with one number: the mean over the batch's samples. Or a dict with
            the loss as `"loss"`. With `automatic_optimization = False`, any value. None skips the
            batch.
        """
        return self._compiled_loss(_batch_of(arguments, named))

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """Process one batch of `fit`'s validation data, in evaluation mode without gradients.

        Returns:
            Any value. The mean of the losses over samples (or of the `"loss"` entries of dicts)
            becomes the validation's `loss`.
        """
        return self._compiled_loss(_batch_of(arguments, named))

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """Process one batch of `evaluate`. Without it, `evaluate` uses `validation_step`."""
        return self._compiled_loss(_batch_of(arguments, named))

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        """Compute the outputs for one batch of `predict`."""
        context = self._fitkit.contexts.current
        assert context is not None
        return context.compiled_outputs(self, _batch_of(arguments, named))

    # ------------------------------------------------------------------ after the replicas

    def _compiled_loss(self, batch: Any) -> Any:
        context = self._fitkit.contexts.current
        assert context is not None
        return context.compiled_loss(self, batch)

    def training_step_end(self, outputs: Any) -> Any:
        """Process what `training_step` returned, for the whole batch.

        Override it to compute a loss over all samples of a batch.

        Args:
            outputs: under `dp` and `ddp2`, the gathered outputs of the replicas: tensors are
                joined along dimension 0, scalars become a vector with one entry per replica. With
                other strategies, what the step returned.

        Returns:
            The same as `training_step`. Without an override, a gathered loss becomes its mean,
            weighted by the replicas' numbers of samples.
        """
        return outputs

    def validation_step_end(self, outputs: Any) -> Any:
        """As `training_step_end`, after `validation_step`."""
        return outputs

    def test_step_end(self, outputs: Any) -> Any:
        """As `training_step_end`, after `test_step`."""
        return outputs

    def predict_step_end(self, outputs: Any) -> Any:
        """As `training_step_end`, after `predict_step`."""
        return outputs

    # ------------------------------------------------------------------ at an epoch's end

    def training_epoch_end(self, outputs: list[Any]) -> None:
        """Act after the last training batch of an epoch, before the validation.

        Args:
            outputs: what the steps of this rank returned, without gradients. fitkit keeps them
                only if this hook is overridden. Empty on a rank that got no batch.
        """

    def validation_epoch_end(self, outputs: list[Any]) -> None:
        """As `training_epoch_end`, after a validation's last batch."""

    def test_epoch_end(self, outputs: list[Any]) -> None:
        """As `training_epoch_end`, after the last batch of `evaluate`."""

    # ------------------------------------------------------------------ optimizers and devices

    def configure_optimizers(self) -> Any:
        """Return the optimizers, if `compile` was given none.

        Returns:
            An optimizer, a list of optimizers, or `(optimizers, schedulers)`, a pair of lists. Or
            a dict with `"optimizer"` and, optionally, `"frequency"` and `"lr_scheduler"` (a
            scheduler, or a dict with `"scheduler"`, `"interval"`, `"frequency"`, `"monitor"`). Or a
            list of such dicts.
        """
        return None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, *loader: int) -> Any:
        """Move a batch to the device. Override it for your own batch types.

        Args:
            batch: the batch, as the data gave it.
            device: the target device; under `dp`, a replica's.
            *loader: 0, if the hook takes Lightning's `dataloader_idx`.
        """
        context = self._fitkit.contexts.current
        assert context is not None
        return context.transferred(batch)

    # ------------------------------------------------------------------ logging

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = True,
        logger: bool = True,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        sync_dist: bool = False,
        rank_zero_only: bool = False,
        metric_attribute: str | None = None,
        add_dataloader_idx: bool = True,
        enable_graph: bool = False,
    ) -> None:
        """Add a value to the logs: to the history, the callbacks and the progress bar.

        Args:
            name: the key in the logs. A validation puts `val_` in front, unless the name already
                begins with `val`.
            value: a number, a tensor with one number, or a torchmetrics object. The latter is
                computed over all ranks' samples at the end of the epoch, then reset.
            prog_bar: whether the progress bar shows the value. Default True.
            on_step: whether the logs of batches have the latest value. Default: only if
                `on_epoch=False`.
            on_epoch: whether the epoch's logs have all values of the epoch reduced to one. If you
                give neither, the epoch's logs have it, and batches' logs the running value so far.
                If both are True, you get two names, `<name>_step` and `<name>_epoch`.
            reduce_fx: how the values of an epoch become one: `"mean"` (default), `"sum"`, `"min"`,
                `"max"`, or torch's function of that name. A mean is over samples.
            batch_size: the number of samples that weighs the value in a mean. Default: the size of
                the batch.
            sync_dist: whether a step's value is reduced over all ranks. This costs one exchange
                per step, and checks that all ranks log the same names. An epoch's value always
                covers all ranks. Default False.
            rank_zero_only: whether to use rank 0's value for all ranks. Default False.
            logger, metric_attribute, add_dataloader_idx, enable_graph: accepted so that Lightning
                classes run. They have no effect.

        Raises:
            ConfigurationError: called outside of a run, or in `predict`. Or the name was logged
                before with other arguments or another torchmetrics object.
            ArgumentTypeError: the value isn't a number.
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(f"self.log got the name {describe(name)}; it must be a string.")
        batch_size = check_count("batch_size", batch_size, optional=True)
        reduction = reduce_fx if reduce_fx == "mean" else reduction_named(reduce_fx)
        options = _options(on_step, on_epoch, prog_bar, reduction, sync_dist, rank_zero_only)
        loggable = as_loggable(name, value)
        if not prog_bar:
            self._fitkit.hidden_names.add(name)
        notes = vars(self).get("_replica_notes")
        if notes is not None:
            notes.append((name, loggable, options, batch_size or vars(self)["_replica_samples"]))
            return
        context = self._fitkit.contexts.current
        if context is None:
            raise ConfigurationError(
                f"self.log({name!r}) was called outside of a run, or after its last epoch. "
                "Call it in a step, in its _epoch_end, or in an epoch or batch hook of a callback."
            )
        context.log(name, loggable, options, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log each entry of a dict (or of a torchmetrics `MetricCollection`) with `log`.

        Args:
            dictionary: names and values.
            **options: as in `log`.
        """
        if not trees.has_items(dictionary):
            raise ArgumentTypeError(
                f"self.log_dict got {describe(dictionary)}; it takes a dict of names and values."
            )
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def save_hyperparameters(self, *names: str, ignore: Any = (), logger: bool = True) -> None:
        """Keep the arguments of `__init__` in `self.hparams`, a dict with attribute access.

        Args:
            *names: the arguments to keep. Default: all.
            ignore: a name or several to leave out.
            logger: accepted so that Lightning classes run. It has no effect.
        """
        caller = inspect.currentframe()
        left_out = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        frame = None if caller is None else caller.f_back
        found = arguments_of(frame, self, names, left_out)
        self.hparams: Hyperparameters = Hyperparameters({**vars(self).get("hparams", {}), **found})

    def freeze(self) -> None:
        """Freeze all parameters, and switch to evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Let all parameters learn, and switch to training mode."""
        self.requires_grad_(True)
        self.train()

    @property
    def trainable(self) -> bool:
        """Whether any parameter learns. Setting it freezes or unfreezes all, as in Keras."""
        parameters = self.parameters()
        return any(parameter.requires_grad for parameter in parameters)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.requires_grad_(check_flag("trainable", value))

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only.

        If the standard output is closed, or can't have some characters, training goes on.
        """
        if self.is_global_zero and options.get("file") is not None:
            print(*values, **options)
        elif self.is_global_zero:
            line = io.StringIO()
            print(*values, **{**options, "file": line})
            say(line.getvalue(), end="")

    # ------------------------------------------------------------------ ranks and replicas

    @property
    def device(self) -> torch.device:
        """The device of this rank, or of this replica under `dp`."""
        replicas: torch.device | None = vars(self).get("_replica_device")
        return replicas or self._fitkit.compilation.strategy.device

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices in use, in rank order."""
        return list(self._fitkit.compilation.strategy.device_ids)

    @property
    def global_rank(self) -> int:
        """The rank of this process among all processes."""
        return self._fitkit.compilation.strategy.world.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process within its node."""
        return self._fitkit.compilation.strategy.world.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._fitkit.compilation.strategy.world.size

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
        return self.global_rank == 0

    def all_gather(self, value: Any) -> Any:
        """Gather the tensors of all ranks, for example for a loss over all ranks' samples.

        Args:
            value: a tensor, or a tuple, list or dict of tensors. Numbers become tensors.

        Shapes: (N_r, ...) on each rank r, where the N_r may differ, gives (sum of N_r, ...) on
            all ranks. A number gives (world size,).

        Returns:
            The same structure. Gradients flow back to the rank that each row comes from. Lightning
            stacks the ranks instead: `.unflatten(0, (model.world_size, -1))` does, where ranks have
            as many rows.

        Ranks:
            Collective: call it on every rank, in a forward or a callback.
        """
        strategy = self._fitkit.compilation.strategy

        def join(leaf: Any) -> Any:
            if isinstance(leaf, (int, float)):
                leaf = torch.tensor(leaf, device=strategy.device)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return strategy.collectives.join_rows(leaf if leaf.ndim else leaf.reshape(1))

        return trees.map_leaves(join, value)

    def _step_on_device(self, batch: Any, method: str, *arguments: Any) -> Any:
        """Move the batch to this replica's device with the model's own hook, then call a step."""
        context = self._fitkit.contexts.current
        assert context is not None
        moved = context.moved(self.transfer_batch_to_device, batch, self.device)
        return getattr(self, method)(moved, *arguments)

    def _begin_replica(self, device: torch.device, samples: int) -> None:
        """Turn this copy into a replica. It keeps what it logs for `_end_replicas`."""
        vars(self).update(_replica_device=device, _replica_notes=[], _replica_samples=samples)

    def _end_replicas(self, replicas: list[Any]) -> None:
        """Log what the replicas of a batch logged: each name once, for the whole batch."""
        notes: dict[str, list[Any]] = {}
        for replica in replicas:
            own = {id(module): path for path, module in replica.named_modules()}
            for name, value, options, samples in vars(replica)["_replica_notes"]:
                if is_metric(value) and id(value) in own:
                    value = self.get_submodule(own[id(value)])
                notes.setdefault(name, []).append((value, options, samples))
        for name, entries in notes.items():
            context = self._fitkit.contexts.current
            if context is not None:
                options = entries[0][1]
                parts = [(value, count) for value, _, count in entries]
                value, samples = joined_values(parts, options.reduce_fx)
                context.log(name, value, options, samples)

    # ------------------------------------------------------------------ optimizers

    @property
    def _updates_all(self) -> bool:
        """Whether each step makes one update of all parameters, as wrappers like DDP require:
        optimizers don't take turns, and the model doesn't make its own updates."""
        return self.automatic_optimization and not self._fitkit.fit_state.takes_turns

    @property
    def _configures_optimizers(self) -> bool:
        """Whether `configure_optimizers` makes the optimizers, because `compile` names none."""
        own = vars(self).get("configure_optimizers") or type(self).configure_optimizers
        is_own = own is not Module.configure_optimizers
        return is_own and not self._fitkit.compilation.names_optimizer

    def _fit_begins(self, run: Run) -> None:
        """Get ready for a `fit` on this rank: its data are known, its optimizers aren't made."""

    def _to_evaluation(self, modules: Collection[nn.Module] | None = None) -> None:
        """Go into evaluation mode for a pass; `modules` are all of the model, if they are known."""
        set_mode(self, training=False, modules=modules)

    def _around_validation(self) -> AbstractContextManager[None]:
        """Restore the training flags after a validation within `fit`."""
        return modes_restored(self)

    def _saved(self, weights: PlainData) -> tuple[PlainData, PlainData]:
        """Return the weights that a checkpoint gets, and what a module's own hooks add to it."""
        return weights, self._fitkit.fit_state.stored_added or {}

    def _loaded(
        self, weights: OpenWeights, beside: Callable[[], PlainData], undo: Scope
    ) -> OpenWeights:
        """Return a checkpoint's weights as they are loaded.

        Args:
            beside: returns all else in it.
            undo: gets what undoes the changes of a module's own hooks.
        """
        return weights

    def _weights_fit(self, weights: FittingWeights, progress: Progress | None, undo: Scope) -> None:
        """Give a checkpoint's state to what needs it before the optimizers are made.

        Args:
            weights: the file's, which fit.
            progress: the saved training's; None if it hadn't begun.
            undo: as for `_loaded`.
        """

    @property
    def _loads_strictly(self) -> bool:
        """Whether a name that only a checkpoint or only the module has is an error."""
        return True

    def _made_optimizers(self) -> list[Optimizer]:
        """Return the optimizers over the parameters. They are made when they are first needed."""
        configure = self.configure_optimizers if self._configures_optimizers else None
        return self._fitkit.fit_state.optimizers_for(self, self._fitkit.compilation, configure)

    @property
    def global_step(self) -> int:
        """The number of updates so far, over all calls of `fit`."""
        return self._fitkit.fit_state.updates

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of several. They are always torch's own objects."""
        found = self._made_optimizers()
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """Return the scheduler of `configure_optimizers`, the list of several, or None."""
        found = [plan.scheduler for plan in self._fitkit.fit_state.schedulers]
        return (found[0] if len(found) == 1 else found) if found else None

    def manual_backward(self, loss: torch.Tensor, *, count: Any = None, **options: Any) -> None:
        """Compute the gradients of a loss, averaged over the ranks, in a manual training step.

        Args:
            loss: a tensor with one number: the mean over this rank's samples.
            count: what the loss is a mean over, if not the samples: the number of labels that
                count, or the sum of their weights. Ranks are weighted by it, so give it on all of
                them, or on none. Default None: samples.
            **options: options of `Tensor.backward` (`retain_graph`, …).

        Raises:
            ConfigurationError: called outside of a `training_step` with
                `automatic_optimization = False`, or `count` is negative or not a number.

        Ranks:
            Collective: every rank must call it equally often.
        """
        running = self._fitkit.contexts.current
        backward = None if running is None else running.backward
        if self.automatic_optimization or backward is None:
            raise ConfigurationError(
                "manual_backward belongs into training_step, with automatic_optimization = False "
                "(set it in __init__)."
            )
        if count is not None:
            count = checked_count(count, "manual_backward was given count")
        backward(loss, count, **options)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float,
        gradient_clip_algorithm: str = "norm",
    ) -> None:
        """Clip the gradients of an optimizer's parameters: their total norm, or each entry."""
        gradient_clip_val = check_number("gradient_clip_val", gradient_clip_val, above=0)
        gradient_clip_algorithm = check_choice(
            "gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value")
        )
        for scaling in self._fitkit.fit_state.scalings[:1]:
            scaling.unscale(optimizer)
        clip = clip_grad_norm_ if gradient_clip_algorithm == "norm" else clip_grad_value_
        clip(held_by(optimizer), gradient_clip_val)

    def toggle_optimizer(self, optimizer: Optimizer, optimizer_idx: int | None = None) -> None:
        """Let only this optimizer's parameters need gradients, until `untoggle_optimizer`."""
        self.untoggle_optimizer(optimizer)
        self._fitkit.fit_state.frozen = self._fitkit.fit_state.freeze_others(optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer, optimizer_idx: int | None = None) -> None:
        """Let the parameters need gradients again that `toggle_optimizer` froze."""
        for parameter in self._fitkit.fit_state.frozen:
            parameter.requires_grad_(True)
        self._fitkit.fit_state.frozen = []


def _batch_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return arguments[0] if arguments else named["batch"]


@functools.lru_cache(maxsize=256)
def _options(
    on_step: bool | None,
    on_epoch: bool | None,
    prog_bar: bool,
    reduce_fx: str,
    sync_dist: bool,
    rank_zero_only: bool,
) -> LogOptions:
    for name, value in (("on_step", on_step), ("on_epoch", on_epoch)):
        check_flag(name, value, optional=True)
    for name, value in (("prog_bar", prog_bar), ("sync_dist", sync_dist)):
        check_flag(name, value)
    rank_zero_only = check_flag("rank_zero_only", rank_zero_only)
    if sync_dist and rank_zero_only:
        raise ConfigurationError(
            "sync_dist=True and rank_zero_only=True contradict each other: a value is that of all "
            "ranks or of rank 0."
        )
    if on_epoch is False:
        if on_step is False:
            raise ConfigurationError(
                "self.log(…, on_step=False, on_epoch=False) keeps the value nowhere. Leave out one "
                "of the two, or the call."
            )
        on_step = True
    by_epoch = on_epoch if on_epoch is not None else not on_step
    return LogOptions(bool(on_step), by_epoch, prog_bar, reduce_fx, sync_dist, rank_zero_only)
