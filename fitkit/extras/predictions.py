"""Where predictions go as they are computed: NumPy's files, a function, or a loop."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from fitkit import trees
from fitkit.accelerators import current_device
from fitkit.arguments import describe, dtype_name
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.streamed_predictions import Elsewhere
from fitkit.seams.files import check_folder_of, replacing
from fitkit.seams.passes import reading_on_ranks
from fitkit.seams.strategies import Strategy as AnyStrategy
from fitkit.typing import FilePath

SUFFIX = ".npy"
HELD_BYTES = 4 * 2**20
"""How much waits for a loop that is slower than the net, if a batch isn't larger."""


def receiver_for(out: Any, *, as_numpy: bool) -> OutputFiles | OutputFunction:
    """Return what `predict(out=…)` means.

    Raises:
        ArgumentTypeError, ConfigurationError: it can't be written to.
    """
    if isinstance(out, (str, os.PathLike)):
        return OutputFiles(out, as_numpy=as_numpy)
    if callable(out):
        return OutputFunction(out, as_numpy=as_numpy)
    raise ArgumentTypeError(
        f"out={describe(out)} must be the path of a {SUFFIX} file, or a function "
        "(outputs, indices) that gets each batch."
    )


class OutputFunction(Elsewhere):
    """Calls a function with the outputs of each batch, on rank 0.

    Args:
        function: called with the outputs, and the indices of their samples in the order of x.
        as_numpy: whether it gets NumPy arrays, or tensors.
    """

    def __init__(self, function: Callable[[Any, Any], object], *, as_numpy: bool) -> None:
        self._function = function
        self._as_numpy = as_numpy
        self._done = 0

    def take(self, batches: list[tuple[Any, int]]) -> None:
        """Call the function for each batch."""
        for outputs, samples in batches:
            first, self._done = self._done, self._done + samples
            given = trees.to_numpy(outputs) if self._as_numpy else outputs
            self._function(given, np.arange(first, self._done))

    def returned(self, result: Any) -> None:
        """Return what `predict` returns."""

    def for_other_ranks(self) -> Elsewhere:
        """Nothing: the function is called in this process."""
        return Elsewhere()


# ---------------------------------------------------------------------- files


class OutputFiles(Elsewhere):
    """Writes outputs to `.npy` files, which take their places when all is written.

    Args:
        path: of the file. Several outputs have their names before its suffix.
        as_numpy: what `predict` was given.

    Raises:
        ConfigurationError: no such file can be written.
    """

    def __init__(self, path: FilePath, *, as_numpy: bool) -> None:
        text = os.fspath(path)
        if "://" in text:
            raise ConfigurationError(
                f"out={text!r} is a URL, but the file is mapped into memory. Write to a local path."
            )
        if Path(text).suffix != SUFFIX:
            raise ConfigurationError(
                f"out={text!r} must end with {SUFFIX}, NumPy's format. For another one give out a "
                "function (outputs, indices), which gets each batch."
            )
        if not as_numpy:
            raise ConfigurationError(
                f"out={text!r} gives a NumPy array that is mapped into memory. Leave out "
                "as_numpy=False, or use torch.from_numpy on a copy."
            )
        self.path: Path = Path(text).absolute()
        self._arrays: dict[str, _GrowingArray] | None = None
        self._files = contextlib.ExitStack()

    def __enter__(self) -> None:
        check_folder_of(self.path, self.path)

    def take(self, batches: list[tuple[Any, int]]) -> None:
        """Add batches to the files."""
        found = [flat(outputs) for outputs, _ in batches]
        if self._arrays is None:
            self.result = list(found[0])
            self._arrays = {
                name: _GrowingArray(name, self._files.enter_context(replacing(path)))
                for name, path in files_of(self.path, self.result).items()
            }
        for leaves in found:
            if list(leaves) != self.result:
                raise ConfigurationError(
                    f"The batches have different outputs: {', '.join(self.result)} and then "
                    f"{', '.join(leaves)}. Give out a function (outputs, indices), which gets each."
                )
        for name, array in self._arrays.items():
            array.add([leaves[name] for leaves in found])

    def __exit__(self, *error: Any) -> None:
        """Put the files into their places; after an error, remove them."""
        with self._files:
            if error[1] is not None:
                raise error[1]
            for array in (self._arrays or {}).values():
                array.finish()

    def returned(self, result: list[str]) -> Any:
        """Return what `predict` returns: the arrays of these names.

        A rank on another machine, from which the files can't be seen, gets None.
        """
        paths = files_of(self.path, result)
        if not all(path.exists() for path in paths.values()):
            return None
        arrays = {name: _mapped(path) for name, path in paths.items()}
        return arrays.get("", arrays)

    def for_other_ranks(self) -> Elsewhere:
        """Nothing: rank 0 writes."""
        return Elsewhere()


def flat(outputs: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a net's outputs by name; a single one has the empty name.

    Raises:
        ConfigurationError: an output isn't a tensor.
    """
    if isinstance(outputs, torch.Tensor):
        return {name: outputs}
    if not trees.is_container(outputs):
        raise ConfigurationError(
            f"The output{f' {name!r}' if name else ''} is a {type(outputs).__name__}, which a "
            f"{SUFFIX} file can't hold. Give out a function (outputs, indices), which gets each "
            "batch."
        )
    keys: Any = getattr(outputs, "_fields", None)
    if isinstance(outputs, Mapping):
        keys = list(outputs)
    elif keys is None:
        keys = [place.lstrip(".") for place in trees.places(outputs)]
        if isinstance(outputs, (tuple, list)):
            keys = [f"output_{index}" for index in range(len(outputs))]
    found: dict[str, torch.Tensor] = {}
    for key, child in zip(keys, trees.children(outputs), strict=True):
        inner = flat(child, f"{name}/{key}" if name else str(key))
        if not found.keys().isdisjoint(inner):
            raise ConfigurationError(f"Two outputs have the name {next(iter(inner))!r}.")
        found.update(inner)
    return found


def files_of(path: Path, names: list[str]) -> dict[str, Path]:
    """Return the file of each output.

    Raises:
        ConfigurationError: an output's name can't be a part of a file's.
    """
    files = {
        name: path.with_name(f"{path.stem}.{name.replace('/', '.')}{SUFFIX}") if name else path
        for name in names
    }
    bad = [name for name, file in files.items() if file.parent != path.parent or "\0" in name]
    if bad or len(set(files.values())) < len(files):
        raise ConfigurationError(
            f"The outputs are called {', '.join(map(repr, names))}, of which no file names can be "
            "made. Give out a function (outputs, indices), which gets each batch."
        )
    return files


def _mapped(path: Path) -> Any:
    """Return the array in a file. The system can't map one without numbers."""
    is_empty = path.stat().st_size <= HEADER_BYTES
    return np.load(path, mmap_mode=None if is_empty else "r")


HEADER_BYTES = 256
"""A multiple of 64, with room for the shape of any array."""


class _GrowingArray:
    """An array in a file that grows by rows.

    Args:
        name: the output's, for messages.
        file: where it is written.
    """

    def __init__(self, name: str, file: BinaryIO) -> None:
        self._what = f"The output {name!r}" if name else "The output"
        self._file = file
        self._rows = 0
        self._kind: tuple[torch.dtype, tuple[int, ...]] | None = None
        self._dtype: Any = None
        file.write(bytes(HEADER_BYTES))

    def add(self, leaves: list[torch.Tensor]) -> None:
        """Write batches.

        Raises:
            ConfigurationError: their rows aren't like those before.
        """
        leaves = [leaf if leaf.ndim else leaf.reshape(1) for leaf in leaves]
        for leaf in leaves:
            kind = leaf.dtype, tuple(leaf.shape[1:])
            if self._kind is None:
                self._kind = kind
            elif kind != self._kind:
                told = [f"{dtype_name(d)} of shape {shape}" for d, shape in (self._kind, kind)]
                raise ConfigurationError(
                    f"{self._what} has rows of {told[0]}, then rows of {told[1]}, which one array "
                    "can't hold. Give out a function (outputs, indices), which gets each batch."
                )
        array = np.ascontiguousarray(trees.to_numpy(torch.cat(leaves)))
        self._dtype, self._rows = array.dtype, self._rows + len(array)
        if array.size:
            self._file.write(array.data)

    def finish(self) -> None:
        """Write the header, which says how many rows there are."""
        assert self._kind is not None
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._kind[1]),
        }
        begin = np.lib.format.magic(1, 0) + struct.pack("<H", HEADER_BYTES - 10)
        self._file.seek(0)
        self._file.write(begin + repr(described).ljust(HEADER_BYTES - 11).encode("latin1") + b"\n")


# ---------------------------------------------------------------------- loops


class Handover(Elsewhere):
    """Passes outputs from the thread that computes to the one that reads.

    The computing thread waits if much is held that hasn't been read.

    Args:
        on_every_rank: whether every rank of a script reads.
    """

    def __init__(self, *, on_every_rank: bool) -> None:
        self.on_every_rank = on_every_rank
        self.error: BaseException | None = None
        self._held: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._is_over = False
        self._changed = threading.Condition()

    def take(self, batches: list[tuple[Any, int]]) -> None:
        """Hold batches, once there is room for them."""
        size = sum(trees.tensor_bytes(outputs) for outputs, _ in batches)
        with self._changed:
            while self._held and self._bytes + size > HELD_BYTES and not self.has_left:
                self._changed.wait()
            self._held.append((batches, size))
            self._bytes += size
            self._changed.notify_all()

    def batches(self) -> Iterator[Any]:
        """Yield the batches, as they come."""
        while True:
            with self._changed:
                while not self._held and not self._is_over:
                    self._changed.wait()
                if not self._held:
                    return
                batches, size = self._held.popleft()
                self._bytes -= size
                self._changed.notify_all()
            batches.reverse()
            while batches:
                yield batches.pop()[0]

    def leave(self) -> None:
        """Say that the rest isn't wanted."""
        with self._changed:
            self.has_left = True
            self._held.clear()
            self._changed.notify_all()

    def compute(self, run: Callable[[Handover], object]) -> None:
        """Run the pass, in the thread that computes."""
        try:
            run(self)
        except BaseException as error:
            self.error = error
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def for_other_ranks(self) -> Elsewhere:
        """Nothing: the loop is in this process."""
        return Elsewhere()


def read_in_loop(
    run: Callable[[Handover], object], strategy: AnyStrategy, *, as_numpy: bool
) -> Iterator[Any]:
    """Yield the outputs of a pass, which another thread computes a few batches ahead.

    Args:
        run: makes the pass, with a receiver.
        strategy: of the model.
        as_numpy: whether to give NumPy arrays, or tensors.
    """
    alone = strategy.world.size == 1
    handover = Handover(on_every_rank=not alone and not strategy.reads_on_rank_zero)
    context, modes = contextvars.copy_context(), _modes_of_this_thread()

    def compute() -> None:
        with modes():
            context.run(handover.compute, run)

    thread = threading.Thread(target=compute, name="fitkit-predict", daemon=True)

    def end() -> None:
        handover.leave()
        thread.join()

    atexit.register(end)  # a loop that nobody has closed would meet an interpreter that ends
    try:
        with reading_on_ranks(strategy):
            thread.start()
            for outputs in handover.batches():
                yield trees.to_numpy(outputs) if as_numpy else outputs
            thread.join()
        if handover.error is not None:
            raise handover.error
        if handover.is_cut:
            raise ConfigurationError(
                "Another rank has left its loop over predict_batches before the end, which ends it "
                "on all ranks. Leave it after the same batch on each rank."
            )
    finally:
        if thread.ident is not None:
            end()
        atexit.unregister(end)
        handover.error = None  # it holds this frame


def _modes_of_this_thread() -> Callable[[], contextlib.ExitStack]:
    """Return what gives the caller's autocast and default device to another thread."""
    cache, default = torch.is_autocast_cache_enabled(), torch.get_default_device()
    entered = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in {"cpu", current_device().type}
        if torch.is_autocast_enabled(kind)
    ]

    def modes() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        if default.type != "cpu":
            stack.enter_context(default)
        for kind, dtype in entered:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))
        return stack

    return modes
