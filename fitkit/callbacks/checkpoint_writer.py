"""Writing checkpoints from callbacks, directly or in a thread, and finding intact ones."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fitkit.accelerators import has_streams
from fitkit.callbacks.base import from_all_ranks, from_rank_zero, run_of, several_ranks
from fitkit.checkpoint import (
    is_folder_name,
    open_checkpoint,
    remote,
    remove_abandoned,
    remove_checkpoint,
    save_checkpoint,
    save_weights,
)
from fitkit.checkpoint.formats import FolderInThreads, folder_format
from fitkit.checkpoint.remote import is_url
from fitkit.errors import CheckpointError, ConfigurationError, warn
from fitkit.fit_state import Run
from fitkit.module import Module

GRACE_S = 10.0
"""How long rank 0 waits for other ranks' parts when its own run has ended without them."""


def remove_unwanted(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint if it exists. Warns if that fails."""
    try:
        with contextlib.suppress(FileNotFoundError):
            remove_checkpoint(path)
    except OSError as error:
        reason = error.strerror or error
        warn(f"{os.fspath(path)} is no longer needed, but can't be deleted: {reason}.")


def newest_whole(paths: Iterable[str], refused: list[str] | None = None) -> str | None:
    """Return the first usable checkpoint of `paths`, with a warning for each damaged one; None if
    none.

    Args:
        paths: checkpoints, the newest first.
        refused: a list that gets the paths that can't be used.

    Raises:
        CheckpointError: there are checkpoints, and none can be used.
    """
    errors: list[CheckpointError] = []
    for path in paths:
        try:
            with open_checkpoint(path):
                pass
        except FileNotFoundError:  # another process deleted it
            continue
        except CheckpointError as error:
            errors.append(error)
            if refused is not None:
                refused.append(path)
            continue
        for problem in errors:
            warn(f"{problem} Training continues from {path}, which is older.")
        return path
    if len(errors) > 1:
        raise CheckpointError(f"None of {len(errors)} checkpoints can be used. {errors[0]}")
    if errors:
        raise errors[0]
    return None


class CheckpointWriter:
    """Writes a model's checkpoints: rank 0 writes files, all ranks write folders.

    A failure is raised on all ranks.

    Args:
        weights_only: whether the files hold the weights only.
        trainable_only: whether to leave out parameters that don't learn.
        asynchronous: whether a thread writes them, from copies in main memory. It writes one at a
            time, and the next save waits for it. Its error is raised at the next save or `finish`.
    """

    def __init__(
        self,
        *,
        weights_only: bool = False,
        trainable_only: bool = False,
        asynchronous: bool = False,
    ) -> None:
        self.weights_only = weights_only
        self.trainable_only = trainable_only
        self.asynchronous = asynchronous
        self._copies = StateCopies()
        self._thread: threading.Thread | None = None
        self._folder: FolderInThreads | None = None
        self._error: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Send other ranks the settings, without what is being written."""
        fresh = CheckpointWriter(
            weights_only=self.weights_only,
            trainable_only=self.trainable_only,
            asynchronous=self.asynchronous,
        )
        return vars(fresh)

    def check_place(self, model: Module, folder: str | os.PathLike[str]) -> None:
        """Find at fit's begin what would end it at its first save to a URL.

        Ranks:
            Collective.

        Raises:
            ConfigurationError, MissingPackageError, CheckpointError: it can't be written to.
        """
        if isinstance(folder, str) and is_url(folder):
            self._on_rank_zero(model, lambda: remote.urls.check_writable(folder))

    def save(self, model: Module, path: str, then: Callable[[], None] = lambda: None) -> None:
        """Write a file, and create its folder if needed.

        Args:
            then: called on rank 0 once the file is written.

        Ranks:
            Collective.

        Raises:
            CheckpointError: this file, or the one before (if asynchronous), can't be written.
        """
        self.finish(model)
        if is_folder_name(path):
            self._save_folder(model, path, then)
            return
        run = _running(model)
        collect: Any = run.weights if self.weights_only else run.contents
        contents = collect(trainable_only=self.trainable_only)
        if self.asynchronous:
            if model.is_global_zero:
                contents = self._copies.of(contents)
                self._begin(lambda: self._write(path, contents, then))
        else:
            self._on_rank_zero(model, lambda: self._write(path, contents, then))

    def _save_folder(self, model: Module, path: str, then: Callable[[], None]) -> None:
        """Let every rank write its part. Rank 0 does the rest."""
        strategy, run = model._fitkit.compilation.strategy, _running(model)
        state: dict[str, Any] | None = None
        if self.weights_only:
            weights = run.weights(spread=True, trainable_only=self.trainable_only)
        else:
            weights, state = run.contents(spread=True, trainable_only=self.trainable_only)
        self._on_rank_zero(model, lambda: _make_folder(path))
        if self.asynchronous:
            collectives, copied = strategy.collectives, self._copies.of
            folder = folder_format(path).begin(path, weights, state, collectives, copied)
            self._folder = folder
            self._begin(lambda: folder.write(then))
        else:
            folder_format(path).save(path, weights, state, strategy.collectives)
            self._on_rank_zero(model, then)

    def finish(self, model: Module) -> None:
        """Wait until everything is written.

        Ranks:
            Collective.

        Raises:
            CheckpointError: it couldn't be written.
        """
        if self.asynchronous:
            if self._folder is not None and several_ranks(model):
                self._meet(model, self._folder)
            self.wait()
            self._share(model)

    def _begin(self, work: Callable[[], None]) -> None:
        """Run the work in a thread."""
        self._thread = threading.Thread(
            target=self._attempt,
            args=(work,),
            name="fitkit-checkpoint",
            daemon=False,  # the interpreter waits for a file that is half written
        )
        self._thread.start()

    def _meet(self, model: Module, folder: FolderInThreads) -> None:
        """Wait for the parts of the other ranks. Rank 0's thread stops waiting for a failed one."""
        if not model.is_global_zero:
            self.wait()
        own = self._error
        errors = from_all_ranks(model, None if model.is_global_zero else own)
        first = next((error for error in errors if error is not None), None)
        if model.is_global_zero and first is not None:
            folder.stop()
            self.wait()
            self._error = own or first

    def wait(self) -> None:
        """Wait on this rank only. An error stays for the next save or `finish`."""
        thread, self._thread, self._folder = self._thread, None, None
        if thread is not None:
            thread.join()

    def give_up(self) -> None:
        """Wait on this rank after the run has failed. An error becomes a warning."""
        if self._thread is not None and self._folder is not None:
            self._thread.join(GRACE_S)  # other ranks may still be writing their parts
            self._folder.stop()
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            warn(f"The last checkpoint wasn't written: {error}")

    def _write(self, path: str, contents: Any, then: Callable[[], None]) -> None:
        _make_folder(path)
        if self.weights_only:
            save_weights(path, contents)
        else:
            save_checkpoint(path, *contents)
        then()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error

    def _on_rank_zero(self, model: Module, work: Callable[[], None]) -> None:
        """Work on rank 0, and raise its error on all ranks."""
        if model.is_global_zero:
            self._attempt(work)
        self._share(model)

    def _share(self, model: Module) -> None:
        """Raise rank 0's error on all ranks."""
        error, self._error = self._error, None
        if several_ranks(model):
            error = from_rank_zero(model, error)
        if error is not None:
            raise error


def _running(model: Module) -> Run:
    run = run_of(model)
    if run is None:
        raise ConfigurationError(
            "Callbacks save checkpoints only within fit. Use model.save elsewhere."
        )
    return run


def _make_folder(path: str) -> None:
    """Create the folder for a checkpoint, and remove what killed processes left in it."""
    if is_url(path):
        remote.urls.make_folder(remote.parent(path))
        return
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be written: the folder {folder} can't be made ({error.strerror}). "
            "Choose another."
        ) from error
    remove_abandoned(folder)


class StateCopies:
    """Copies of tensors in main memory, in buffers that the next copies use again."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}

    def of(self, value: Any) -> Any:
        """Copy nested dicts, lists and tuples. The copy before must no longer be in use.

        Tensors that share memory share it in the copy, too.
        """
        used: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        made: dict[int, torch.UntypedStorage] = {}

        def copied_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            if storage.data_ptr() not in made:
                kind = (storage.nbytes(), has_streams(storage.device))
                waiting = self._free.get(kind)
                host = waiting.pop() if waiting else _host_memory(*kind)
                host.copy_(storage)
                used.setdefault(kind, []).append(host)
                made[storage.data_ptr()] = host
            return made[storage.data_ptr()]

        def copied(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                if item.layout != torch.strided or not item.numel() or item.is_quantized:
                    return item.detach().to("cpu", copy=True)
                host = torch.empty(0, dtype=item.dtype)
                return host.set_(
                    copied_storage(item.detach().untyped_storage()),
                    item.storage_offset(), item.shape, item.stride(),
                )  # fmt: skip
            if isinstance(item, dict):
                twin = copy.copy(item)  # a state dict has attributes, too
                twin.update((key, copied(entry)) for key, entry in item.items())
                return twin
            if type(item) in (list, tuple):
                return type(item)(copied(entry) for entry in item)
            return copy.deepcopy(item)

        try:
            return copied(value)
        finally:
            self._free = used


def _host_memory(size_bytes: int, for_cuda: bool) -> torch.UntypedStorage:
    """Return new memory, pinned if it is filled from a GPU."""
    made = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=for_cuda)
    return made.untyped_storage()
