"""What a model's own steps may call: logging, gathering, optimizers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from fitkit import trees
from fitkit.arguments import check_choice, check_count, check_flag, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.logging_options import (
    LogOptions,
    as_loggable,
    is_metric,
    joined_values,
    reduction_named,
)
from fitkit.losses import checked_count
from fitkit.optimizers import held_by

if TYPE_CHECKING:
    from fitkit.training.compilation import Compilation
    from fitkit.training.optimizing import FitState


@dataclasses.dataclass
class Record:
    """What fitkit itself keeps on a model, under one name, so that all others are the user's.

    Attributes:
        compilation: what `compile` was given, and what it resolved to.
        fit_state: optimizers, schedulers and counters, over several calls of `fit`.
        stages: what runs on the model right now, in which thread.
        batch_size: of the last `fit`; None before.
        log_names: of the values that the last pass gave; None before.
    """

    compilation: Compilation
    fit_state: FitState
    stages: Any
    batch_size: int | None = None
    log_names: list[str] | None = None


class Services:
    """The calls that `Model` offers to its steps and to callbacks.

    Attributes:
        automatic_optimization: whether `fit` makes the updates (default); with False
            `training_step` makes them by `optimizers()` and `manual_backward`.
        current_epoch: the number of the epoch that runs or ran last, from 0.
    """

    _fitkit: Record
    automatic_optimization: bool = True
    current_epoch: int = 0

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
        notes = vars(self).get("_replica_notes")
        if notes is not None:
            notes.append((name, loggable, options, batch_size or vars(self)["_replica_samples"]))
            return
        if self._fitkit.stages.current is None:
            raise ConfigurationError(
                f"self.log({name!r}) was called outside of a run. Call it in a step, in its "
                "_epoch_end, or in a callback's batch hook; in on_epoch_end write logs[name] = …"
            )
        self._fitkit.stages.current.log(name, loggable, options, batch_size)

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
        self.hparams = Hyperparameters({**vars(self).get("hparams", {}), **found})

    def freeze(self) -> None:
        """Let no parameter learn, and go to evaluation mode."""
        self.requires_grad_(False)  # type: ignore[attr-defined]
        self.eval()  # type: ignore[attr-defined]

    def unfreeze(self) -> None:
        """Let all parameters learn, and go to training mode."""
        self.requires_grad_(True)  # type: ignore[attr-defined]
        self.train()  # type: ignore[attr-defined]

    @property
    def trainable(self) -> bool:
        """Whether any parameter learns; setting it freezes or frees all of them, as in Keras."""
        parameters = self.parameters()  # type: ignore[attr-defined]
        return any(parameter.requires_grad for parameter in parameters)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        check_flag("trainable", value)
        self.requires_grad_(value)  # type: ignore[attr-defined]

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
        moved = self._fitkit.stages.current.moved(self.transfer_batch_to_device, batch, self.device)  # type: ignore[attr-defined]
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
                    value = self.get_submodule(own[id(value)])  # type: ignore[attr-defined]
                notes.setdefault(name, []).append((value, options, samples))
        for name, entries in notes.items():
            if self._fitkit.stages.current is not None:
                options = entries[0][1]
                parts = [(value, count) for value, _, count in entries]
                value, samples = joined_values(parts, options.reduce_fx)
                self._fitkit.stages.current.log(name, value, options, samples)

    # ------------------------------------------------------------------ optimizers

    @property
    def global_step(self) -> int:
        """How many updates were made so far, over all calls of `fit`."""
        return self._fitkit.fit_state.updates

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them where there are several; always torch's own."""
        found = self._fitkit.fit_state.optimizers_for(self, self._fitkit.compilation)
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
        running = self._fitkit.stages.current
        if self.automatic_optimization or getattr(running, "backward", None) is None:
            raise ConfigurationError(
                "manual_backward belongs into training_step, with automatic_optimization = False "
                "(set it in __init__)."
            )
        if count is not None:
            count = checked_count(count, "manual_backward was given count")
        self._fitkit.stages.current.backward(loss, count, **options)

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
