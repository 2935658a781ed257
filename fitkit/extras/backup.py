"""Backups of a training: after an interruption, the same command continues it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from fitkit.arguments import check_choice, check_count, check_flag
from fitkit.callbacks.base import (
    AnyRankFlag,
    Callback,
    Logs,
    WeakModel,
    batches_of_call,
    from_all_ranks,
    from_rank_zero,
    run_of,
    several_ranks,
)
from fitkit.callbacks.checkpoint_writer import CheckpointWriter, newest_whole, remove_unwanted
from fitkit.errors import ConfigurationError, Preempted, warn
from fitkit.extras.text_files import checked_place
from fitkit.printing import say
from fitkit.seams.files import remote, remove_abandoned

NAME = re.compile(r"backup-(\d{6,})\.(?:h5|dcp)")


class BackupAndRestore(Callback):
    """Saves the whole training regularly, so that the same command continues it when run again.

    Weights, optimizer, schedulers, data order and random numbers are as if the training had never
    stopped. One exception: within an epoch, `DataLoader` workers begin their random numbers again.
    After a kill, what came after the last backup is computed again. The backups are deleted when
    `fit` has ended. A backup takes precedence over the `resume_from=path` that its training
    started from.

    While `fit` runs in the main thread, it handles SIGTERM, and SIGUSR1 in a SLURM batch job. All
    ranks finish the current step, save, and exit with status 143 (or 138). After SIGUSR1,
    `scontrol requeue` puts the job back into the queue. Your own signal handler is called once the
    file is written. A signal during a validation takes effect after it.

    Args:
        backup_dir: a folder for this training only, or its URL (`s3://…`). It is created if
            needed. If you use several nodes, they must share it.
        save_freq: `"epoch"` (default: at the end of each), a number of batches, counted across
            epochs, or False to save only on a signal. A save waits as in `ModelCheckpoint`.
        double_checkpoint: Keras's spelling of `keep=2`. Default False.
        delete_checkpoint: whether to delete the backups when `fit` has ended. Default True.
        keep: how many backups to keep. If the newest is damaged, the one before it is used, with a
            warning. Default 1.
        catch_signals: whether to handle the signals above. Default True.
        asynchronous: whether a thread writes while training continues; see `ModelCheckpoint`.
            Default False.
        sharded: whether each backup is a folder to which every rank writes its part, instead of
            one file. This pays off with `FSDPStrategy`. Default False.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> backup = fitkit.callbacks.BackupAndRestore("backup")
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[backup])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid, or the ranks don't see the
            same backups.
        CheckpointError: a backup can't be written, or all existing ones are damaged.
    """

    restores = True
    stops_alike = True
    comes_last = True

    model: Any = WeakModel()  # the hooks that the constructor binds refer to this object

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        keep: int = 1,
        catch_signals: bool = True,
        asynchronous: bool = False,
        sharded: bool = False,
    ) -> None:
        self.backup_dir: Path | str = checked_place(backup_dir, "backup_dir")
        if isinstance(save_freq, str):
            save_freq = check_choice("save_freq", save_freq, ("epoch",))
        elif save_freq is not False:
            save_freq = check_count("save_freq", save_freq)
        double_checkpoint = check_flag("double_checkpoint", double_checkpoint)
        delete_checkpoint = check_flag("delete_checkpoint", delete_checkpoint)
        keep = check_count("keep", keep)
        catch_signals = check_flag("catch_signals", catch_signals)
        asynchronous = check_flag("asynchronous", asynchronous)
        sharded = check_flag("sharded", sharded)
        if sharded:
            remote.refuse_url(backup_dir, "a folder of shards", "Write sharded=False.")
        self._suffix = ".dcp" if sharded else ".h5"
        self.save_freq = save_freq
        self.keep: int = max(keep, 2) if double_checkpoint else keep
        self.delete_checkpoint = delete_checkpoint
        self.catch_signals = catch_signals
        self._writer = CheckpointWriter(asynchronous=asynchronous)
        self._flag_of_any = AnyRankFlag()
        self._signals = SignalNotes()
        self._damaged: list[str] = []
        self._since = 0
        self._due = self._ends = self._in_step = False
        if catch_signals or not isinstance(save_freq, str):
            # Only if needed: a batch hook costs a little.
            vars(self)["on_train_batch_begin"] = self._before_batch
            vars(self)["on_train_batch_end"] = self._after_batch

    # ------------------------------------------------------------------ moments

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._since, self._due, self._ends, self._in_step = 0, False, False, False
        self._flag_of_any.begin()
        self._check_alike()
        self._writer.check_place(self.model, self.backup_dir)
        if self.model.is_global_zero:
            remove_abandoned(self.backup_dir)
        self.add_cleanup(self._writer.give_up)
        if self.catch_signals:
            self.add_cleanup(self._signals.restore)
            self._signals.begin()

    def _check_alike(self) -> None:
        """Refuse to train if some ranks would continue and others start over.

        A rank that doesn't see the folder would train on other data than the rest.
        """
        if not several_ranks(self.model):
            return
        run = run_of(self.model)
        place = None if run is None else (run.progress.epoch, run.progress.steps)
        places = from_all_ranks(self.model, place)
        for rank, other in enumerate(places):
            if other != places[0]:
                raise ConfigurationError(
                    f"Rank {rank} doesn't find the same backup in {self.backup_dir} as rank 0. "
                    "backup_dir must be a folder that all nodes share."
                )

    def _before_batch(self, batch: int, logs: Logs | None = None) -> None:
        self._in_step = True

    def _after_batch(self, batch: int, logs: Logs) -> None:
        self._in_step = False
        if self.catch_signals:
            arrived = self._signals.arrived is not None
            self._ends = self._flag_of_any.after_step(self.model, arrived) or self._ends
        if self.save_freq is not False and not isinstance(self.save_freq, str):
            self._since += len(batches_of_call(self, batch))
            self._due = self._due or self._since >= self.save_freq
            self._since %= self.save_freq
        run = run_of(self.model)
        if (self._due or self._ends) and run is not None and run.is_between_updates:
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self._stops():
            # Not saved: a run that continues from the backup before decides it again.
            return
        if self._due or self._ends or self.save_freq == "epoch":
            self._save()

    def on_train_end(self, logs: Logs | None = None) -> None:
        stops = self._stops()
        if self._ends and stops:
            self._writer.finish(self.model)
            self._exit(f"left {self.backup_dir} as it was")
        if self._ends:
            self._save()
        self._writer.finish(self.model)
        self._signals.restore()  # at once: a signal that comes later isn't for this fit
        if self.model.is_global_zero:
            remove_abandoned(self.backup_dir)
            if self.delete_checkpoint:
                self._delete()

    def on_exception(self, error: BaseException) -> None:
        run = run_of(self.model)
        # The signal ended the DataLoader's workers before this process saw it.
        if self._signals.arrived is None or "DataLoader worker" not in str(error) or run is None:
            return
        self._writer.give_up()
        self._signals.restore(leaving=True)
        # With several ranks, no other rank may be left to save with: the last backup is used.
        whole = not several_ranks(self.model) and not self._in_step
        if whole and run.is_between_updates:
            self._ends = True
            self._save()
        raise Preempted(self._signals.arrived or 0)

    def _stops(self) -> bool:
        """Whether a callback ends the training. Also checks for signals."""
        own = self.model.stop_training, self._signals.arrived is not None
        everyones = from_all_ranks(self.model, own)
        self._ends = self._ends or any(arrived for _, arrived in everyones)
        return any(stops for stops, _ in everyones)

    # ------------------------------------------------------------------ saving

    def _save(self) -> None:
        """Write a backup. After a signal this is the last thing that the process does."""
        self._due = False
        self._writer.finish(self.model)  # a backup gets its number when it is written
        path = from_rank_zero(self.model, self._next_path())
        self._writer.save(self.model, path, self._prune)
        if self._ends:
            self._writer.finish(self.model)
            self._exit(f"saved {path}")

    def _exit(self, done: str) -> None:
        """Exit on all ranks in the way that the scheduler expects."""
        arrived = from_all_ranks(self.model, self._signals.arrived)
        number = next(each for each in arrived if each is not None)
        error = Preempted(number)
        self._signals.restore(leaving=True)
        if self.model.is_global_zero:
            said = f"fitkit: got signal {number}, {done}; exits with status {error.code}."
            say(said, stream="stderr")
            if number != 15:
                requeue()
        self._signals.pass_on()
        raise error

    def _existing(self) -> dict[int, str]:
        """Return the existing backups by number, the oldest first."""
        folder = os.fspath(self.backup_dir)
        if remote.is_url(folder):
            paths = remote.urls.files_in(folder)
        elif os.path.isdir(folder):
            paths = [os.path.join(folder, name) for name in os.listdir(folder)]
        else:
            return {}
        named = [(NAME.fullmatch(os.path.basename(path)), path) for path in paths]
        return dict(sorted((int(match[1]), path) for match, path in named if match))

    def _next_path(self) -> str:
        number = max(self._existing(), default=0) + 1
        return os.path.join(self.backup_dir, f"backup-{number:06d}{self._suffix}")

    def _prune(self) -> None:
        """Delete the backups that newer ones replace."""
        damaged, self._damaged = self._damaged, []
        whole = [path for path in self._existing().values() if path not in damaged]
        for path in [*damaged, *whole[: -self.keep]]:
            remove_unwanted(path)

    def _delete(self) -> None:
        for path in self._existing().values():
            remove_unwanted(path)
        if isinstance(self.backup_dir, str):
            remote.urls.remove_folder(self.backup_dir)
            return
        with contextlib.suppress(OSError):  # the folder holds other files
            self.backup_dir.rmdir()

    # ------------------------------------------------------------------ going on

    def last_path(self) -> str | None:
        """Return the newest intact backup; None if there is no backup.

        Raises:
            CheckpointError: there are backups, and all are damaged.
        """
        self._writer.wait()
        self._damaged = []
        return newest_whole(reversed(self._existing().values()), self._damaged)

    def state_dict(self) -> dict[str, Any]:
        return {"since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._since = int(state["since"])


CHILD_GRACE_S = 10
"""How long a forked child may continue after SIGTERM, in seconds."""


class SignalNotes:
    """Records SIGTERM, and SIGUSR1 in a SLURM batch job, until `restore`.

    Only the main thread can have signal handlers; in other threads nothing is recorded. An ignored
    signal stays ignored.

    Attributes:
        arrived: the first signal received; None before.
    """

    def __init__(self) -> None:
        self.arrived: int | None = None
        self._came: tuple[int, FrameType | None] | None = None
        self._previous: dict[int, Any] = {}  # the handlers that ours replace now
        self._handlers: dict[int, Any] = {}  # the handlers that are restored
        self._childrens: Any = None  # torch's handler for the end of child processes
        self._owner = 0

    def __getstate__(self) -> dict[str, Any]:
        """Send other ranks nothing: each has its own handlers."""
        return vars(SignalNotes())

    def begin(self) -> None:
        """Install the handlers."""
        self.restore()
        self.arrived, self._came = None, None
        self._owner = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in noted_signals():
            previous = signal.getsignal(number)
            # None: a handler that Python can't restore.
            if previous is not None and previous != signal.SIG_IGN:
                signal.signal(number, self._note)
                self._previous[number] = previous

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # This is a forked child. The current step may still need it, but nobody should wait
            # forever for a child that was told to end.
            if number == signal.SIGTERM:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(CHILD_GRACE_S)
            return
        if self.arrived is None:
            self.arrived, self._came = number, (number, frame)
            self._let_workers_go()

    def _let_workers_go(self) -> None:
        """Let the step finish although the signal also ended a DataLoader's workers.

        torch would raise in the middle of the step. The next batch of these workers fails anyway.
        """
        if hasattr(signal, "SIGCHLD") and callable(signal.getsignal(signal.SIGCHLD)):
            self._childrens = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def restore(self, *, leaving: bool = False) -> None:
        """Restore the earlier handlers.

        Args:
            leaving: whether the process ends now. torch's handler would then raise, because a
                DataLoader's workers ended before the process.
        """
        previous, self._previous = self._previous, {}
        if not previous or self._owner != os.getpid():
            return
        for number, handler in previous.items():
            if signal.getsignal(number) == self._note:  # otherwise another one was set since
                signal.signal(number, handler)
        self._handlers = previous
        if self._childrens is not None and not leaving:
            signal.signal(signal.SIGCHLD, self._childrens)
            self._childrens = None

    def pass_on(self) -> None:
        """Call the earlier handler, if it was a function. Call this after `restore`."""
        came, self._came = self._came, None
        if came is None:
            return
        handler = self._handlers.get(came[0])
        if callable(handler):
            handler(*came)


def noted_signals() -> list[int]:
    """Return the signals that mean that a job must end."""
    numbers = [signal.SIGTERM]
    if slurm_job() is not None and hasattr(signal, "SIGUSR1"):
        numbers.append(signal.SIGUSR1)
    return [int(number) for number in numbers]


def slurm_job() -> str | None:
    """Return the number of this SLURM batch job, as `scontrol` takes it; None outside a batch
    job.
    """
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    array, task = (os.environ.get(f"SLURM_ARRAY_{what}_ID") for what in ("JOB", "TASK"))
    if array and task:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID") or None


def requeue() -> None:
    """Put this SLURM job back into the queue with `scontrol`; warn if there is none."""
    job, program = slurm_job(), shutil.which("scontrol")
    if job is None or program is None:
        warn(
            "scontrol isn't installed here, so the job can't be requeued. Submit it again to "
            "continue."
        )
        return
    done = subprocess.run([program, "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        warn(f"scontrol requeue {job} failed ({done.stderr.strip()}). Submit it again to continue.")
