"""Checkpoints of the best, the last or all epochs, with numbers in their names."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import string
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import fitkit.checkpoint as files
from fitkit.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    describe,
    only_known_arguments,
)
from fitkit.callbacks.base import (
    AnyRankFlag,
    Callback,
    Logs,
    batches_of_call,
    from_rank_zero,
    print_on_rank_zero,
    run_of,
    several_ranks,
)
from fitkit.callbacks.checkpoint_writer import (
    CheckpointWriter,
    newest_whole,
    remove_unwanted,
)
from fitkit.callbacks.monitor import Monitor
from fitkit.checkpoint import is_there, remote
from fitkit.checkpoint.disk import written_at
from fitkit.checkpoint.formats import FOLDERS, FORMATS, SUFFIXES, is_folder_name, written_suffixes
from fitkit.errors import ArgumentTypeError, ConfigurationError, Preempted
from fitkit.registry import did_you_mean
from fitkit.typing import Mode

WHOLE = (*SUFFIXES, *FOLDERS)


class ModelCheckpoint(Callback):
    """Saves the model at the ends of epochs, or within them.

    If `fit` validates several times per epoch (`validation_freq=0.2`), a checkpoint that depends on
    a validation's value is saved after each validation. Its name can then use only the validation's
    values (`val_…`).

    A file is written completely or not at all. If batches are accumulated, a save within an epoch
    waits for the next update. Missing folders are created.

    Args:
        filepath: the file's name. Numbers in braces are filled in, as in
            `"{epoch:02d}-{val_loss:.2f}.h5"`: `epoch` (from 1), `step` (updates so far), `batch`
            (in the epoch, from 1), and the logs. A name that ends in `.dcp` makes a folder, to
            which every rank writes its part, for whole checkpoints and for weights.
        monitor: the log that decides which checkpoint is best. Default None: `"val_loss"`, if one
            is needed.
        verbose: 1 prints what is saved. Default 0.
        save_best_only: whether to save only if the value is better than all before. Default False.
        save_weights_only: whether files hold the weights only (`.h5`, `.safetensors`, `.pt`).
            Default False: everything that `fit(resume_from=…)` needs (`.h5`).
        trainable_only: whether to leave out parameters that don't learn: an adapter's files,
            without its base model. Training can resume from them on the same base. Default False.
        mode: `"min"`, `"max"` or `"auto"` (default), which infers it from the name.
        save_freq: `"epoch"` (default), or a number of batches, counted across epochs. With
            `steps_per_execution` a save waits for the end of its group of batches. The next one is
            counted from the exact multiple.
        initial_value_threshold: a value that the first best must beat. Default: none.
        save_top_k: how many of the best files to keep. Files of this callback that fall out of the
            ranking are deleted. 0 keeps none (with `save_last`), -1 all, ranked if `monitor` is
            given. Default None: all are kept. With a `monitor` and `dirpath` or `filename`, the
            default is 1, as in Lightning.
        save_last: whether `last.h5` (with `filepath`'s folder and suffix) always holds the newest
            checkpoint. Default False.
        dirpath, filename: Lightning's spelling of `filepath`: the folder (default: the working
            folder), and the name in it (default `"{epoch}-{step}"`). It is filled in like
            `filepath`, and gets `.h5` if it has no suffix. Values have no names in front, and
            epochs count from 1: `"{epoch}-{val_acc:.2f}"` gives `4-0.95.h5`, where Lightning writes
            `epoch=3-val_acc=0.95.ckpt`.
        every_n_epochs: save after every so many epochs. Default None: after each.
        every_n_train_steps: another spelling of `save_freq`: a number of batches.
        train_time_interval: save whenever this time has passed, in seconds or as a timedelta.
        save_on_exception: whether to write `exception.h5` in `filepath`'s folder if `fit` fails or
            is interrupted. A resumed training continues at the failed step, and doesn't draw that
            step's random numbers again. If one of several ranks has failed, the others can't save,
            and nothing is written. Default False.
        asynchronous: whether a thread writes while training continues, one file at a time. It
            costs a copy in main memory of all that the rank saves. An error is raised at the next
            save or at the end of `fit`. Default False.

    Attributes:
        best: the best value so far; infinite before the first. It stays from one fit to the next of
            the same model. Another model begins anew.
        best_model_path: the best file; None before the first, or if nothing is monitored.
        last_model_path: the newest file; None before the first.

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid. Also at the first save, if
            `filepath` has a name that the logs don't have.
        CheckpointError: a file can't be written. An existing file is untouched. At a URL, missing
            credentials are found when fit begins.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> model.compile("adam", "mse")
        >>> saves = fitkit.callbacks.ModelCheckpoint("{epoch:02d}.h5", "loss", save_top_k=1)
        >>> x, y = torch.ones(32, 2), torch.ones(32, 1)
        >>> history = model.fit(x, y, epochs=3, verbose=0, callbacks=saves)
        >>> model.load(saves.best_model_path)
    """

    stops_alike = True
    comes_last = True

    @only_known_arguments
    def __init__(
        self,
        filepath: str | os.PathLike[str] | None = None,
        monitor: str | None = None,
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Mode = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        save_top_k: int | None = None,
        save_last: bool = False,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: float | timedelta | None = None,
        save_on_exception: bool = False,
        asynchronous: bool = False,
        trainable_only: bool = False,
    ) -> None:
        verbose = check_choice("verbose", verbose, (0, 1, False, True))
        mode = check_choice("mode", mode, ("auto", "min", "max"))
        save_best_only = check_flag("save_best_only", save_best_only)
        save_weights_only = check_flag("save_weights_only", save_weights_only)
        save_last = check_flag("save_last", save_last)
        save_on_exception = check_flag("save_on_exception", save_on_exception)
        asynchronous = check_flag("asynchronous", asynchronous)
        trainable_only = check_flag("trainable_only", trainable_only)
        initial_value_threshold = check_number(
            "initial_value_threshold", initial_value_threshold, optional=True
        )
        save_top_k = check_count("save_top_k", save_top_k, minimum=-1, optional=True)
        says_it_lightnings_way = dirpath is not None or filename is not None
        if says_it_lightnings_way and monitor is not None and not save_best_only:
            save_top_k = 1 if save_top_k is None else save_top_k
        self._names = FileNames(
            _joined(filepath, dirpath, filename),
            written_suffixes() if save_weights_only else WHOLE,
            "weights" if save_weights_only else "whole checkpoints",
        )
        self._steps, self._interval_s = _frequency(
            save_freq, every_n_train_steps, train_time_interval
        )
        every_n_epochs = check_count("every_n_epochs", every_n_epochs, optional=True)
        if every_n_epochs is not None and self._within_epochs:
            raise ConfigurationError(
                "every_n_epochs saves at the end of an epoch, but another argument asks to save "
                "within epochs. Give one of them, or use two callbacks."
            )
        self.filepath: str = self._names.template
        self.monitor: str = "val_loss" if monitor is None else monitor
        self.every_n_epochs = every_n_epochs
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.save_on_exception = save_on_exception
        self._monitored: Monitor | None = None
        if save_best_only or (save_top_k and (save_top_k > 0 or monitor is not None)):
            self._monitored = Monitor(self.monitor, mode)
        self._check_names()
        if self._within_epochs or save_on_exception:
            # Only if needed: a batch hook costs a little.
            vars(self)["on_train_batch_end"] = self._after_batch
        self.trainable_only = trainable_only
        self._writer = CheckpointWriter(
            weights_only=save_weights_only, trainable_only=trainable_only, asynchronous=asynchronous
        )
        self._flag_of_any = AnyRankFlag()
        self._since = self._updates_before = 0
        self._due = False
        self._saved_at = time.monotonic()
        worst = self._monitored.worst if self._monitored is not None else float("inf")
        self._first_best = (
            worst if initial_value_threshold is None else float(initial_value_threshold)
        )
        self._forget()

    def _forget(self) -> None:
        """Forget the files: they belong to the model that was watched."""
        self._kept: list[tuple[float, str]] = []  # the best first
        self._removing: list[str] = []  # what the newest save replaces
        self.last_model_path: str | None = None
        self.best: float = self._first_best
        self.best_model_path: str | None = None

    def _check_names(self) -> None:
        if self.save_best_only and self.save_top_k is not None:
            raise ConfigurationError(
                "save_best_only keeps every file that was the best when it was saved. save_top_k=1 "
                "keeps only the best. Give one of them."
            )
        if self.save_top_k not in (None, 0, 1) and not self._names.fields:
            raise ConfigurationError(
                f"save_top_k={self.save_top_k} keeps several files, but "
                f"filepath={self.filepath!r} names one. Add a field such as {{epoch}} to it."
            )
        if (
            self.save_last
            and self._monitored is not None
            and not self._names.fields
            and Path(self._names.name({}, {})) == Path(self._last_name)
        ):
            raise ConfigurationError(
                f"filepath={self.filepath!r} is for the best checkpoint, but save_last=True "
                "writes the newest checkpoint there too. Choose another name, such as 'best.h5'."
            )

    @property
    def best_model_score(self) -> float | None:
        """The value of the best file; None before the first."""
        return None if self.best_model_path is None else self.best

    @property
    def best_k_models(self) -> dict[str, float]:
        """The values of the files that `save_top_k` keeps, by path, the best first."""
        return {path: value for value, path in self._kept}

    @property
    def kth_best_model_path(self) -> str | None:
        """The worst of the files that `save_top_k` keeps; None if there is none."""
        return self._kept[-1][1] if self._kept else None

    @property
    def _within_epochs(self) -> bool:
        return self._steps is not None or self._interval_s is not None

    # ------------------------------------------------------------------ moments

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._since, self._due = 0, False
        self._saved_at = time.monotonic()
        self._flag_of_any.begin()
        known = vars(self).get("_remembered")
        if from_rank_zero(self.model, known is None or known() is not self.model):
            self._forget()
        self._remembered = weakref.ref(self.model)
        self._updates_before = self.model.global_step
        self.add_cleanup(self._writer.give_up)
        self._remove_abandoned()
        self._writer.check_place(self.model, self._names.folder)
        if self._monitored is None:
            return
        if self._within_epochs and self.monitor.startswith("val_"):
            raise ConfigurationError(
                f"ModelCheckpoint saves within epochs and monitors {self.monitor!r}, which is "
                "known only at the end of an epoch. Write save_freq='epoch' or "
                f"monitor={self.monitor.removeprefix('val_')!r}."
            )
        self._monitored.begin(self)

    def _after_batch(self, batch: int, logs: Logs) -> None:
        if not self._within_epochs:
            return
        if self._is_due(batch):
            self._due = True
        run = run_of(self.model)
        if self._due and run is not None and run.is_between_updates:
            self._save(logs)

    def _is_due(self, batch: int) -> bool:
        """Whether to save at the end of this batch. The same on all ranks."""
        if self._steps is not None:
            self._since += len(batches_of_call(self, batch))
            is_due = self._since >= self._steps
            self._since %= self._steps
            return is_due
        assert self._interval_s is not None
        is_time = (
            self.model.is_global_zero and self._interval_s <= time.monotonic() - self._saved_at
        )
        return self._flag_of_any.after_step(self.model, is_time)

    def on_validation_within_epoch(self, batch: int, logs: dict[str, Any]) -> None:
        if (
            self._monitored is None
            or self._within_epochs
            or not self._saves_in(self.model.current_epoch)
        ):
            return
        if self._monitored.read_within(self, logs) is not None:
            self._save(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._within_epochs:
            wanted = self._due
        else:
            is_saved = self._monitored is not None and self._monitored.is_seen(self)
            wanted = self._saves_in(epoch) and not is_saved
        if wanted:
            self._save(logs)

    def _saves_in(self, epoch: int) -> bool:
        return (epoch + 1) % (self.every_n_epochs or 1) == 0

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._writer.finish(self.model)
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Remove unfinished files that killed processes left in this callback's folders."""
        if self.model.is_global_zero:
            for folder in {self._names.folder, *self._names.folders()}:
                files.remove_abandoned(folder)

    def on_exception(self, error: BaseException) -> None:
        run = run_of(self.model)
        if not self.save_on_exception or isinstance(error, Preempted) or run is None:
            return
        if several_ranks(self.model) or self.model.global_step == self._updates_before:
            return
        self._writer.give_up()
        path = self._names.beside("exception")
        self.last_model_path = path
        at_once = CheckpointWriter(
            weights_only=self.save_weights_only, trainable_only=self.trainable_only
        )
        at_once.save(self.model, path)
        print_on_rank_zero(self.model, f"fit ended with {type(error).__name__}; saved {path}.")

    # ------------------------------------------------------------------ saving

    def _save(self, logs: Mapping[str, Any]) -> None:
        """Save what is due now."""
        self._due, self._saved_at = False, time.monotonic()
        removed: list[str] = []
        wanted, value = self.save_top_k != 0, None
        if self._monitored is not None:
            # Within an epoch, reading logs waits for the device: do it only if needed.
            known = logs if isinstance(logs, dict) else dict(logs)
            value = self._monitored.read(self, known)
            # An epoch without the value is kept only if all are.
            wanted = value is not None or self.save_top_k == -1
        path = self._path(logs) if wanted else ""
        if value is not None:
            wanted = self._take(value, path, removed)
        last = self._last_name if self.save_last else None
        if not wanted and last is None:
            return
        # Before saving, because the file itself tells a resumed run about it.
        self.last_model_path = path if last is None else last
        first = path if wanted else self.last_model_path
        if last in (first, *removed):
            removed, last = [other for other in removed if other != last], None
        self._removing = removed
        monitored: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._monitored is not None:
            monitored = self._monitored.weights(self)
        with monitored:
            self._writer.save(self.model, first, lambda: _link_and_remove(first, last, removed))
        if self.verbose:
            print_on_rank_zero(self.model, f"Saved {first}.")

    def _path(self, logs: Mapping[str, Any]) -> str:
        """Return the name for this save, the same on all ranks."""
        numbers = {"epoch": self.model.current_epoch + 1, "step": self.model.global_step}
        run = run_of(self.model)
        if run is not None and "batch" in self._names.fields:
            numbers["batch"] = run.steps_done
        return from_rank_zero(self.model, self._names.name(numbers, logs))

    def _take(self, value: float, path: str, removed: list[str]) -> bool:
        """Whether to save the file for a value.

        Args:
            removed: a list that gets the files that are no longer wanted.
        """
        assert self._monitored is not None
        is_best = self._monitored.better(value, self.best)
        if self.save_top_k is None:
            wanted = is_best
        else:
            wanted = self._is_among_best(value, path, removed)
        if is_best and wanted:
            if self.verbose:
                print_on_rank_zero(
                    self.model, f"{self.monitor} improved from {self.best:g} to {value:g}."
                )
            self.best, self.best_model_path = value, path
        return wanted

    def _is_among_best(self, value: float, path: str, removed: list[str]) -> bool:
        assert self._monitored is not None and self.save_top_k
        sign = 1 if self._monitored.mode == "min" else -1

        def rank(pair: tuple[float, str]) -> tuple[bool, float]:
            return math.isnan(pair[0]), sign * pair[0]

        new = value, path
        if any(name == path and rank(new) >= rank((known, name)) for known, name in self._kept):
            return False  # a single name holds the best
        others = [(known, name) for known, name in self._kept if name != path]
        ranked = sorted([*others, new], key=rank)  # of equal values, the older one comes first
        most = len(ranked) if self.save_top_k == -1 else self.save_top_k
        if new not in ranked[:most]:
            return False
        removed += [name for _, name in ranked[most:]]
        self._kept = ranked[:most]
        return True

    # ------------------------------------------------------------------ going on

    @property
    def _last_name(self) -> str:
        return self._names.beside("last")

    def last_path(self) -> str | None:
        """Return the newest checkpoint of this callback, from this run or an earlier one; else
        None.

        A damaged file is skipped with a warning.

        Raises:
            ConfigurationError: its files hold weights only.
            CheckpointError: all of its files are damaged.
        """
        if self.save_weights_only:
            raise ConfigurationError(
                "resume_from='last' needs checkpoints with the training state, but this "
                "ModelCheckpoint has save_weights_only=True."
            )
        self._writer.wait()
        own = [self._last_name, self._names.beside("exception")]
        known = dict.fromkeys(filter(None, (self.last_model_path, *own, *self._names.found())))
        there = [path for path in known if files.is_there(path)]
        return newest_whole(sorted(there, key=lambda path: -(written_at(path) or 0)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_model_path": self.best_model_path,
            "kept": [[value, path] for value, path in self._kept],
            # If the process is killed before they are deleted, the resumed run deletes them.
            "removing": [[path, written_at(path)] for path in self._removing],
            "since": self._since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        This callback may delete the files that a checkpoint names. So it counts only those whose
        names `filepath` could have produced. It deletes files whose deletion was due, unless they
        were written again.
        """
        self.best = float(state["best"])
        best = state["best_model_path"]
        self.best_model_path = best if isinstance(best, str) else None
        self._kept = [
            (float(value), path) for value, path in state["kept"] if self._names.matches(path)
        ]
        self._since = int(state["since"])
        kept = [path for _, path in self._kept]
        leftover = [
            path
            for path, when in state.get("removing", [])
            if when is not None and path not in kept and self._names.matches(path)
            if written_at(path) == when
        ]
        if leftover and self.model.is_global_zero and all(map(files.is_there, kept)):
            for path in leftover:
                remove_unwanted(path)


def _joined(filepath: Any, dirpath: Any, filename: Any) -> Any:
    """Return the template given by `filepath`, or by `dirpath` and `filename`."""
    if dirpath is None and filename is None:
        if filepath is None:
            raise ConfigurationError(
                "ModelCheckpoint needs a name: filepath='{epoch:02d}.h5', or dirpath and filename."
            )
        return filepath
    if filepath is not None:
        raise ConfigurationError(
            "filepath gives both the folder and the name; dirpath and filename give one each. "
            "Use filepath, or the other two."
        )
    if dirpath is not None and not isinstance(dirpath, (str, os.PathLike)):
        raise ArgumentTypeError(f"dirpath={describe(dirpath)} must be a path.")
    if filename is not None and (not isinstance(filename, str) or not filename):
        raise ArgumentTypeError(f"filename={describe(filename)} must be a string.")
    name = filename or "{epoch}-{step}"
    if not name.lower().endswith(tuple(FORMATS)):  # a format may contain a dot, too
        name += ".h5"
    # Braces in a folder's name are not fields.
    folder = os.fspath(dirpath or "").replace("{", "{{").replace("}", "}}")
    return os.path.join(folder, name)


def _frequency(
    save_freq: Any, every_n_train_steps: Any, train_time_interval: Any
) -> tuple[int | None, float | None]:
    """After how many batches, or seconds, to save. Neither: after each epoch."""
    every_n_train_steps = check_count("every_n_train_steps", every_n_train_steps, optional=True)
    if isinstance(train_time_interval, timedelta):
        train_time_interval = train_time_interval.total_seconds()
    train_time_interval = check_number(
        "train_time_interval", train_time_interval, above=0, optional=True
    )
    steps = None
    if isinstance(save_freq, str):
        save_freq = check_choice("save_freq", save_freq, ("epoch",))
    else:
        if isinstance(save_freq, bool):
            raise ArgumentTypeError(
                f"save_freq={describe(save_freq)} must be 'epoch' or a number of batches."
            )
        save_freq = check_count("save_freq", save_freq)
        steps = int(save_freq)
    given = [value for value in (steps, every_n_train_steps, train_time_interval) if value]
    if len(given) > 1:
        raise ConfigurationError(
            "save_freq, every_n_train_steps and train_time_interval each say when to save. Give "
            "one of them, or use one callback for each."
        )
    return steps or every_n_train_steps, train_time_interval


def _link_and_remove(path: str, last: str | None, removed: list[str]) -> None:
    """Give a written file its second name, and delete the files that it replaces."""
    if last is not None:
        files.link_checkpoint(path, last)
    for other in removed:
        remove_unwanted(other)


_NUMBER = r" *(?:[-+]?\d[\d.,_]*(?:e[-+]?\d+)?%?|[-+]?inf%?|nan%?)"
"""The pattern of a field's text in a name, to find files again."""


class FileNames:
    """File names from a template like `"{epoch:02d}-{val_loss:.2f}.h5"`.

    Args:
        template: a path. Names in braces are replaced by the numbers of that name, in the given
            format. Double a brace to keep it.
        suffixes: the allowed suffixes.
        purpose: what the files hold, for messages.

    Attributes:
        fields: the names in braces.
        folder: the part of the folder that is the same for all files.

    Raises:
        ArgumentTypeError, ConfigurationError: not a path, a field without a name, or another
            suffix.
    """

    def __init__(
        self, template: str | os.PathLike[str], suffixes: tuple[str, ...], purpose: str
    ) -> None:
        if not isinstance(template, (str, os.PathLike)) or not os.fspath(template):
            raise ArgumentTypeError(f"filepath={describe(template)} must be a path.")
        remote.is_url(template)  # refuses a URL that went through pathlib
        self.template: str = str(os.fspath(template))
        self._parts = _parsed(self.template)
        self.fields: list[str] = [field for _, field, _ in self._parts if field is not None]
        self.suffix: str = os.path.splitext(self.template)[1]
        if self.suffix.lower() not in suffixes:
            raise ConfigurationError(
                f"filepath={self.template!r} can't be used: files with {purpose} end in "
                f"{' or '.join(suffixes)}."
            )
        self.folder: str = remote.parent(self._fixed()) or os.curdir
        if is_folder_name(self.template):
            remote.refuse_url(template, "a folder of shards", "Write a name that ends in .h5.")

    def _fixed(self) -> str:
        """Return the text before the first field. A doubled brace ends a piece, too, but isn't a
        field.
        """
        pieces = []
        for literal, field, _ in self._parts:
            pieces.append(literal)
            if field is not None:
                break
        return "".join(pieces)

    def beside(self, name: str) -> str:
        """Return the path of a file with another name, in the same folder and with the same
        suffix.
        """
        path = os.path.join(self.folder, name + self.suffix)
        return path if remote.is_url(path) else str(Path(path))

    def name(self, values: Mapping[str, Any], known: Mapping[str, Any]) -> str:
        """Return the name with an epoch's numbers.

        Args:
            values: the run's numbers: epoch, step.
            known: further numbers; read only if the template names them.

        Raises:
            ConfigurationError: a field has no value, or one of the wrong type.
        """
        text = []
        for literal, field, form in self._parts:
            text.append(literal)
            if field is None:
                continue
            if field in values:
                value = values[field]
            elif field in known:
                value = known[field]
            elif f"{field}_epoch" in known:  # as Monitor looks it up
                value = known[f"{field}_epoch"]
            else:
                raise self._unknown(field, [*values, *known])
            text.append(_formatted(field, value, form))
        return "".join(text)

    def _unknown(self, field: str, names: list[str]) -> ConfigurationError:
        return ConfigurationError(
            f"filepath={self.template!r} has the field {field!r}, but only these are known when "
            f"it is saved: {', '.join(names)}.{did_you_mean(field, names)}"
        )

    def matches(self, path: str) -> bool:
        """Whether the template could have produced a path."""
        pattern = "".join(
            re.escape(literal) + ("" if field is None else _NUMBER)
            for literal, field, _ in self._parts
        )
        return re.fullmatch(pattern, path) is not None

    def found(self) -> list[str]:
        """Return the existing files with such names."""
        if remote.is_url(self.template):
            depth = self.template.count("/") - self.folder.rstrip("/").count("/")
            return [p for p in remote.urls.files_in(self.folder, max(depth, 1)) if self.matches(p)]
        return [path for path in glob.glob(self._glob()) if self.matches(path) and is_there(path)]

    def folders(self) -> list[str]:
        """Return the existing folders for such files."""
        if remote.is_url(self.template):
            return []
        return glob.glob(os.path.dirname(self._glob()) or os.curdir)

    def _glob(self) -> str:
        return "".join(
            glob.escape(literal) + ("" if field is None else "*")
            for literal, field, _ in self._parts
        )


def _parsed(template: str) -> list[tuple[str, str | None, str]]:
    """Return the template's pieces: text, the field after it (None at the end), the field's
    format.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(f"filepath={template!r} can't be read: {error}.") from None
    for _, field, form, conversion in pieces:
        if field == "" or conversion or "{" in (form or ""):
            raise ConfigurationError(
                f"filepath={template!r} has braces without a name. Write names in them, like "
                "{epoch:02d} or {val_loss:.3f}."
            )
    return [(literal, field, form or "") for literal, field, form, _ in pieces]


def _formatted(field: str, value: Any, form: str) -> str:
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    try:
        return format(number, form)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"filepath has {{{field}:{form}}}, but {field} is {describe(number)}: {error}."
        ) from None
