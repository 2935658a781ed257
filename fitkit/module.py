"""Module: what a model's own steps and callbacks override and call; `Model` adds the verbs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from fitkit import trees
from fitkit.arguments import check_choice, check_count, check_flag, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.foreign_names import instead
from fitkit.logging_options import (
    LogOptions,
    as_loggable,
    is_metric,
    joined_values,
    reduction_named,
)
from fitkit.losses import checked_count
from fitkit.optimizers import held_by


class Module(nn.Module):
    """The hooks that a subclass of `Model` may override, and the calls that it offers them.

    Everything below `Model` knows a model by this class. Whether a hook is overridden is found out
    once a call, so that a model without hooks of its own pays for none.

    Attributes:
        net: the network that was given, or None.
        history: the `History` of the last `fit`; None before.
        stop_training: set it in a callback to end `fit` after the current batch or epoch.
        stop_evaluating, stop_predicting: set it in a callback to end `evaluate` (or a validation)
            or `predict` after the current batch, on the rank that sets it.
        automatic_optimization: whether `fit` makes the updates (default); with False
            `training_step` makes them by `optimizers()` and `manual_backward`.
        current_epoch: the number of the epoch that runs or ran last, from 0.
    """

    _fitkit: Any
    net: Any
    history: Any
    stop_training: bool
    stop_evaluating: bool = False
    stop_predicting: bool = False
    automatic_optimization: bool = True
    current_epoch: int = 0

    def __getattr__(self, name: str) -> Any:
        """A parameter, buffer or module of that name.

        Raises:
            AttributeError: there is none; a peer's name is told what it is here.
        """
        # As torch does it, which by super() would cost each look at self.net another call.
        own = self.__dict__
        for place in ("_parameters", "_buffers", "_modules"):
            if place in own and name in own[place]:
                return own[place][name]
        sentence = instead("fitkit.Model", name)
        missing = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{missing}. {sentence}" if sentence else missing)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the net gives; a subclass may define its own."""
        net = self._modules.get("net")  # asking a module for an attribute costs microseconds
        net = self.net if net is None else net
        if net is None:
            raise ConfigurationError(
                f"{type(self).__name__} has neither a net nor a forward of its own. Write "
                "fitkit.Model(net), or define forward(self, x) in the subclass."
            )
        return net(*args, **kwargs)

    # ------------------------------------------------------------------ steps
    # Written as training_step(self, batch, batch_idx) in a subclass; here their arguments are left
    # open for type checkers' sake, because a subclass may take fewer or more.

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """One training batch: its loss.

        An override may call this one by `super()`: it gives the compiled loss and counts the
        compiled metrics.

        Args:
            *arguments: `batch`, as the data gave it, on the model's device, and `batch_idx`, its
                number in the epoch, from 0, which the hook may leave out. With several optimizers
                `optimizer_idx` gets the number of the one whose turn it is.

        Returns:
            The loss, a tensor with one number, the mean over the batch's samples; or a dict that
            has it as `"loss"`. With `automatic_optimization = False` anything. None leaves the
            batch out.
        """
        return self._compiled_loss(_batch_of(arguments, named))

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """One batch of `fit`'s validation data, in evaluation mode and without gradients.

        Returns:
            Anything; a loss (or a dict with `"loss"`) becomes the pass's `loss`, its mean over
            samples.
        """
        return self._compiled_loss(_batch_of(arguments, named))

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """One batch of `evaluate`, as `validation_step`, which stands in where it isn't there."""
        return self._compiled_loss(_batch_of(arguments, named))

    def predict_step(self, *arguments: Any, **named: Any) -> Any:
        """One batch of `predict`: its outputs."""
        return self._fitkit.contexts.current.compiled_outputs(self, _batch_of(arguments, named))

    # ------------------------------------------------------------------ after the replicas

    def _compiled_loss(self, batch: Any) -> Any:
        return self._fitkit.contexts.current.compiled_loss(self, batch)

    def training_step_end(self, outputs: Any) -> Any:
        """What the step returned, whole; the place for losses over all samples of a batch.

        Args:
            outputs: under `dp` and `ddp2` what the replicas returned, gathered: tensors joined
                along dimension 0, scalars as a vector with one entry a replica. Elsewhere what
                the step returned.

        Returns:
            As `training_step`. Without an override a gathered loss becomes its mean, weighted
            by the replicas' numbers of samples.
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
        """Called after an epoch's last training batch, before the validation.

        Args:
            outputs: what this rank's steps gave, without gradients; kept only where this hook is
                overridden. Empty on a rank that got no batch (an evaluation of few).
        """

    def validation_epoch_end(self, outputs: list[Any]) -> None:
        """As `training_epoch_end`, after a validation's last batch."""

    def test_epoch_end(self, outputs: list[Any]) -> None:
        """As `training_epoch_end`, after the last batch of `evaluate`."""

    # ------------------------------------------------------------------ optimizers and devices

    def configure_optimizers(self) -> Any:
        """The optimizers, where `compile` was given none.

        Returns:
            An optimizer; several in a list; `(optimizers, schedulers)`, two lists; a dict with
            `"optimizer"` and, if wanted, `"lr_scheduler"` (a scheduler, or a dict with
            `"scheduler"`, `"interval"`, `"frequency"`, `"monitor"`) and `"frequency"`; or a list
            of such dicts.
        """
        return None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, *loader: int) -> Any:
        """The batch on the device; an override does it for batches of one's own kind.

        Args:
            batch: as the data gave it.
            device: where to; under `dp` a replica's.
            *loader: 0, where the hook takes Lightning's `dataloader_idx`.
        """
        return self._fitkit.contexts.current.transferred(batch)

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
        """Add a value to the logs: to the history, to callbacks, to the progress bar.

        Args:
            name: the key in the logs. In a validation it gets `val_` in front, unless it begins
                with `val`.
            value: a number, a tensor with one number, or a torchmetrics object (which is
                computed over all ranks' samples at the epoch's end, then reset).
            prog_bar: whether the progress bar shows it. Default True.
            on_step: whether batches' logs have the latest value. Default: where `on_epoch=False`.
            on_epoch: whether the epoch's logs have all values of the epoch as one. Where neither
                is given, the epoch's, and the running value so far in batches' logs. Both True
                make two names, `<name>_step` and `<name>_epoch`.
            reduce_fx: how an epoch's values become one: `"mean"` (default), `"sum"`, `"min"`,
                `"max"`, or torch's function of that name. A mean is over samples.
            batch_size: by how many samples a mean weighs the value. Default: the batch's.
            sync_dist: makes the value of a step that of all ranks, at an exchange a step, and
                checks that all ranks log the same names. An epoch's value is always over all
                ranks. Default False.
            rank_zero_only: whether rank 0's value stands for all. Default False.
            logger, metric_attribute, add_dataloader_idx, enable_graph: accepted for the sake of
                Lightning's classes; without effect.

        Raises:
            ConfigurationError: outside of a run, or in `predict`; the name came with other
                arguments, or another torchmetrics object, before.
            ArgumentTypeError: no number.
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(f"self.log got the name {describe(name)}; it must be a string.")
        check_count("batch_size", batch_size, optional=True)
        reduction = reduce_fx if reduce_fx == "mean" else reduction_named(reduce_fx)
        options = _options(on_step, on_epoch, prog_bar, reduction, sync_dist, rank_zero_only)
        loggable = as_loggable(name, value)
        if not prog_bar:
            self._fitkit.hidden_names.add(name)
        notes = vars(self).get("_replica_notes")
        if notes is not None:
            notes.append((name, loggable, options, batch_size or vars(self)["_replica_samples"]))
            return
        if self._fitkit.contexts.current is None:
            raise ConfigurationError(
                f"self.log({name!r}) was called outside of a run, or when its last epoch was over. "
                "Call it in a step, its _epoch_end, or a callback's hook of epochs or batches."
            )
        self._fitkit.contexts.current.log(name, loggable, options, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """`log` each entry of a dict (or of a torchmetrics `MetricCollection`).

        Args:
            dictionary: names and values.
            **options: as in `log`.
        """
        if not hasattr(dictionary, "items"):
            raise ArgumentTypeError(
                f"self.log_dict got {describe(dictionary)}; it takes a dict of names and values."
            )
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def save_hyperparameters(self, *names: str, ignore: Any = (), logger: bool = True) -> None:
        """Keep the arguments of `__init__` as `self.hparams`, a dict whose entries are attributes.

        Args:
            *names: only these; none for all.
            ignore: a name or several that are left out.
            logger: accepted for the sake of Lightning's classes.
        """
        caller = inspect.currentframe()
        left_out = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        frame = None if caller is None else caller.f_back
        found = arguments_of(frame, self, names, left_out)
        self.hparams: Hyperparameters = Hyperparameters({**vars(self).get("hparams", {}), **found})

    def freeze(self) -> None:
        """Let no parameter learn, and go to evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Let all parameters learn, and go to training mode."""
        self.requires_grad_(True)
        self.train()

    @property
    def trainable(self) -> bool:
        """Whether any parameter learns; setting it freezes or frees all of them, as in Keras."""
        parameters = self.parameters()
        return any(parameter.requires_grad for parameter in parameters)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        check_flag("trainable", value)
        self.requires_grad_(value)

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on rank 0 alone."""
        if self._fitkit.compilation.strategy.world.rank == 0:
            print(*values, **options)

    # ------------------------------------------------------------------ ranks and replicas

    def all_gather(self, value: Any) -> Any:
        """Every rank's tensors, one below the other; for a loss over all ranks' samples, say.

        Args:
            value: a tensor, or a tuple, list or dict of them; numbers become tensors.

        Shapes: (N_r, ...) on each rank r, where the N_r may differ, gives (sum of N_r, ...) on
            all; a number gives (world size,).

        Returns:
            The same structure. Gradients flow through it to the rank that each row comes from.

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
        """Bring the batch to this replica's device in the model's own way, then call a step."""
        moved = self._fitkit.contexts.current.moved(
            self.transfer_batch_to_device, batch, self.device
        )
        return getattr(self, method)(moved, *arguments)

    def _begin_replica(self, device: torch.device, samples: int) -> None:
        """Make this copy of a model a replica, which keeps what it logs for `_end_replicas`."""
        vars(self).update(_replica_device=device, _replica_notes=[], _replica_samples=samples)

    def _end_replicas(self, replicas: list[Any]) -> None:
        """Log what the replicas of a batch have logged: each name once, for the whole batch."""
        notes: dict[str, list[Any]] = {}
        for replica in replicas:
            own = {id(module): path for path, module in replica.named_modules()}
            for name, value, options, samples in vars(replica)["_replica_notes"]:
                if is_metric(value) and id(value) in own:
                    value = self.get_submodule(own[id(value)])
                notes.setdefault(name, []).append((value, options, samples))
        for name, entries in notes.items():
            if self._fitkit.contexts.current is not None:
                options = entries[0][1]
                parts = [(value, count) for value, _, count in entries]
                value, samples = joined_values(parts, options.reduce_fx)
                self._fitkit.contexts.current.log(name, value, options, samples)

    # ------------------------------------------------------------------ optimizers

    @property
    def _updates_all(self) -> bool:
        """Whether each step leads to one update of all parameters, as wrappers like DDP's want it:
        no optimizers take turns, and the model makes no updates itself."""
        return self.automatic_optimization and not self._fitkit.fit_state.takes_turns

    @property
    def global_step(self) -> int:
        """How many updates were made so far, over all calls of `fit`."""
        return self._fitkit.fit_state.updates

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them where there are several; always torch's own."""
        found = self._fitkit.fit_state.optimizers_for(self)
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """The scheduler of `configure_optimizers`, the list of them, or None."""
        found = [plan.scheduler for plan in self._fitkit.fit_state.schedulers]
        return (found[0] if len(found) == 1 else found) if found else None

    def manual_backward(self, loss: torch.Tensor, *, count: Any = None, **options: Any) -> None:
        """Compute a loss's gradients, averaged over the ranks, in a step that makes its updates.

        Args:
            loss: a tensor with one number: the mean over this rank's samples.
            count: what the loss is the mean over where that isn't the samples: the number of
                labels that count, or their weights' sum. Ranks weigh by it. Default None.
            **options: of `Tensor.backward` (`retain_graph`, …).

        Raises:
            ConfigurationError: called elsewhere than in a `training_step` that makes its updates,
                or `count` isn't a number from 0.

        Ranks:
            Collective: every rank calls it equally often.
        """
        running = self._fitkit.contexts.current
        if self.automatic_optimization or getattr(running, "backward", None) is None:
            raise ConfigurationError(
                "manual_backward belongs into training_step, with automatic_optimization = False "
                "(set it in __init__)."
            )
        if count is not None:
            count = checked_count(count, "manual_backward was given count")
        self._fitkit.contexts.current.backward(loss, count, **options)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float,
        gradient_clip_algorithm: str = "norm",
    ) -> None:
        """Limit the gradients of an optimizer's parameters: their common norm, or each entry."""
        check_number("gradient_clip_val", gradient_clip_val, above=0)
        check_choice("gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value"))
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
    check_flag("rank_zero_only", rank_zero_only)
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


class Hyperparameters(dict[str, Any]):
    """A dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} among {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def arguments_of(
    frame: FrameType | None, model: Any, names: tuple[Any, ...], ignore: Iterable[str]
) -> Hyperparameters:
    """The arguments of the `__init__` that a frame runs.

    Args:
        frame: of the `__init__` that asks.
        model: the object that it makes.
        names: only these; none for all but `ignore`.

    Raises:
        ConfigurationError: the frame runs no `__init__` of the model, or lacks a name.
    """
    if (
        frame is None
        or frame.f_code.co_name != "__init__"
        or all(model is not value for value in frame.f_locals.values())
    ):
        raise ConfigurationError("save_hyperparameters() belongs into the model's __init__.")
    found = inspect.getargvalues(frame)
    values = {name: found.locals[name] for name in found.args[1:] if name in found.locals}
    if found.keywords:
        values.update(found.locals.get(found.keywords, {}))
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise ArgumentTypeError(
            f"save_hyperparameters got {describe(wrong[0])}; it takes names of arguments of "
            "__init__. Write self.save_hyperparameters() for all of them."
        )
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigurationError(
            f"save_hyperparameters got {missing}, but __init__ has {', '.join(values)}."
        )
    chosen = names or [name for name in values if name not in ignore and name != "__class__"]
    return Hyperparameters({name: values[name] for name in chosen})
