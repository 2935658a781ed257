"""The model of a `LightningModule` as its services, hooks and trainer know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from fitkit.errors import ConfigurationError, with_code
from fitkit.extras.lightning_hooks import Hooks
from fitkit.model import Model
from fitkit.seams.callbacks import validation_name
from fitkit.seams.data import make_source
from fitkit.seams.networks import OpenedData

AT_STEPS = frozenset(
    {
        "training_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad",
        "optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward",
        "on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients",
        "optimizer_step",
    }
)  # fmt: skip
"""Hooks in which `log` means a step's value, unless its arguments say otherwise."""

AT_EPOCHS = frozenset(
    {
        "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start",
        "on_validation_epoch_start", "on_validation_epoch_end", "on_test_start",
        "on_test_epoch_start", "on_test_epoch_end",
    }
)  # fmt: skip
"""Hooks in which a value can't be a step's."""

OF_BATCHES = frozenset(
    {
        "validation_step", "on_validation_batch_start", "on_validation_batch_end", "test_step",
        "on_test_batch_start", "on_test_batch_end",
    }
)  # fmt: skip
"""Hooks in which a value is the epoch's, unless the arguments of `log` say otherwise."""


class ServedModel(Model):
    """A model whose module asks it for what its own library's Trainer would answer.

    Attributes:
        hooks: the module's hooks.
        call: what the verb was given.
        written: the names that the epoch's validations have logged.
        trainer: what the module sees as its trainer.
        hooked_updates: what the running `fit` trains by; None if nothing is around its updates.
        loader: the number of the validation set that is read; None if there is one.
        left_flags: the modes in which the module's own hooks have left it.
        evaluated: what the module's hooks have in evaluation mode at an epoch's begin.
        lent: what fitkit's callbacks have put into evaluation mode for the epoch.
        stops_early: whether a hook before the training has ended it.
        updates_before: within `optimizer_step`, the updates before it; else None.
        resumed: what the fit that begins resumes from, for the callbacks that the module brings.
        has_resumed: whether they have it in this process.
    """

    hooks: Hooks
    call: dict[str, Any]
    written: set[str]
    trainer: Any
    hooked_updates: Any
    loader: int | None
    updates_before: int | None = None
    resumed: dict[str, Any] | None = None
    has_resumed: bool = False
    left_flags: list[tuple[torch.nn.Module, bool]]
    evaluated: set[torch.nn.Module]
    lent: set[torch.nn.Module]
    stops_early: bool = False
    _run: Callable[[], Any]

    @property
    def run(self) -> Any:
        """The running `fit`; None without one."""
        return self._run()

    def opened_data(self, arguments: Any) -> OpenedData:
        """Return the loaders of the verb's data module, which is set up."""
        raise NotImplementedError

    @property
    def batches_of_epoch(self) -> int | None:
        """The training batches of an epoch on this rank; None if unknown."""
        if self.run is not None:
            steps: int | None = self.run.data.stream.steps
            return steps
        if (given := self.call.get("steps_per_epoch")) is not None:
            return int(given)
        x, data = self.call.get("x"), self.call.get("datamodule")
        if x is data and data is not None:  # asked before the loaders are made, as in setup
            x = data.train_dataloader()
        return self._batches_of(x)

    @property
    def batches_read(self) -> int | None:
        """The batches that `evaluate` or `predict` reads on this rank; None if unknown."""
        given, found = self.call.get("steps"), self._batches_of(self.call.get("x"))
        return found if given is None or (found is not None and found < given) else int(given)

    def _batches_of(self, x: Any) -> int | None:
        """Return how many batches of a verb's data are this rank's; None if unknown."""
        if x is None:
            return None
        source = make_source(
            x, self.call.get("y"), None, batch_size=self.call.get("batch_size", 32)
        )
        ranks = self._fitkit.compilation.strategy.data_rank_count
        if ranks == 1 or source.samples is None or source.batch_size is None:
            return source.steps
        return -(-source.samples // (ranks * source.batch_size))

    def on_exception(self, error: BaseException) -> None:
        """Tell the callbacks that the module brings of an error, once a verb."""
        if self.trainer.interrupted:
            return
        self.trainer.enter_interrupted()
        self.hooks.call_beside("on_exception", error)

    def validates_next(self, steps: int) -> bool:
        """Whether the running fit validates after this number of the epoch's batches."""
        run, updates = self.run, self.hooked_updates
        if not run.held_out or not updates.is_between_updates:
            return False
        if updates.is_last or self.stop_training:
            return bool(run.arguments.validates_after(self.current_epoch))
        validated = run.data.place.validated
        last = 0 if validated is None else validated["steps"]
        return bool(run.validations.plan.is_due(steps, last))

    @property
    def validation_sets(self) -> list[str]:
        """The names of the running fit's validation sets; a single one's is empty."""
        return list(getattr(self.run, "held_out", ()))

    @property
    def is_last_batch(self) -> bool:
        """Whether the training batch is its epoch's last."""
        return self.hooked_updates is not None and self.hooked_updates.is_last

    # ------------------------------------------------------------------ logs

    def log_of_module(
        self,
        name: str,
        value: Any,
        on_step: bool | None,
        on_epoch: bool | None,
        *,
        add_dataloader_idx: bool,
        **options: Any,
    ) -> None:
        """Log a value of the module's, with Lightning's defaults for the hook that runs.

        Raises:
            ConfigurationError: the hook has no logs.
        """
        hook = self.hooks.running
        if hook is not None and hook not in AT_STEPS | AT_EPOCHS | OF_BATCHES:
            raise refusal(
                f"self.log({name!r}) was called in {hook}, which has no logs. Call it in a step, "
                "or in a hook of an epoch's or a batch's begin or end."
            )
        if hook in AT_EPOCHS and on_step:
            raise refusal(
                f"self.log({name!r}, on_step=True) was called in {hook}, which isn't at a step. "
                "Leave out on_step."
            )
        is_step = hook in AT_STEPS
        on_step = is_step if on_step is None else on_step
        on_epoch = not is_step if on_epoch is None else on_epoch
        if not (on_step or on_epoch):
            raise refusal(
                f"self.log({name!r}, on_epoch=False) was called in {hook}, so the value is neither "
                "a step's nor the epoch's. Leave out on_epoch."
            )
        if hook != "training_step" or options["rank_zero_only"]:
            options["sync_dist"] = False  # an epoch's value is that of all ranks
        # torch traces a training step, but can't ask for its thread.
        context = None if hook == "training_step" else self._fitkit.contexts.current
        if getattr(context, "name", None) == "validation":
            if add_dataloader_idx and self.loader is not None and hook not in AT_EPOCHS:
                name = f"{name}/dataloader_idx_{self.loader}"
            self.written.add(name)
        self.log(name, value, on_step=on_step, on_epoch=on_epoch, **options)

    def as_written(self, logs: dict[str, Any]) -> None:
        """Give the values of validations the names that the module logged them by.

        A name that the training has logged, too, keeps its `val_`.
        """
        sets = self.validation_sets or [""]
        for name in sorted(self.written):
            for full in (name, f"{name}_step", f"{name}_epoch"):
                for one in sets:
                    theirs = validation_name(full, one)
                    if theirs != full and theirs in logs and full not in logs:
                        logs[full] = logs.pop(theirs)


class Unknown:
    """Base of the objects that answer an attribute that they don't have with a sentence."""

    KNOWN_AS = "trainer"
    INSTEAD: ClassVar[Mapping[str, str]] = {}
    """What to do in place of asking for a name."""
    OURS: ClassVar[frozenset[str]] = frozenset()
    """Names that are for fitkit alone."""
    SET_BY: ClassVar[str] = "Give it to compile or fit, or change the object that it returns."
    """What decides about the attributes that can't be set."""

    def __getattr__(self, name: str) -> Any:
        names = {*dir(type(self)), *vars(self)} - self.OURS
        known = ", ".join(sorted(n for n in names if n[0].islower()))
        advice = f"Instead, {self.INSTEAD[name]}. " if name in self.INSTEAD else ""
        message = (
            f"fitkit trains this module, and its {self.KNOWN_AS} has no {name!r}. {advice}It has "
            f"{known}."
        )
        raise AttributeError(message if name.startswith("_") else with_code(message, "FK084"))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse, with a sentence, to set what can only be read."""
        found = getattr(type(self), name, None)
        if isinstance(found, property) and found.fset is None:
            message = (
                f"fitkit trains this module, and its {self.KNOWN_AS}.{name} can't be set. "
                f"{self.SET_BY}"
            )
            raise AttributeError(with_code(message, "FK084"))
        super().__setattr__(name, value)


def refusal(message: str) -> ConfigurationError:
    """Return the error for what a LightningModule can't be trained with."""
    return ConfigurationError(message, code="FK083")
