"""Say in a line where a thread is: in an exchange, a callback's line, the loader, a backward.

`place` reads the frames of a stack and needs no ranks. `Standing` is a rank's answer to the others'
question where it is, and `lines` and `verdict` read the answers of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import linecache
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from fitkit.seams.machines import STACKS, Pulse, Stillness, pulses

FITKIT = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Folders of code that isn't the user's."""

IDLE = 0.05
"""A thread that uses less of a core than this waits."""
SHOWN = 8
"""Of more ranks than so many, those at one place share a line."""
WORKER_S = 1.0
"""How long a loader's worker may take to write down where it is."""

ROLES = {
    "fitkit.callbacks.base.Callback": "callback",
    "torch.utils.data.dataset.Dataset": "data set",
    "torch.utils.data.sampler.Sampler": "sampler",
}
"""What a user's object is, by the class that it inherits from."""


class Frame(NamedTuple):
    """A line of a stack.

    Attributes:
        file: the path.
        line: the number in it.
        function: its name.
        owner: the object whose method it is; None for a function.
    """

    file: str
    line: int
    function: str
    owner: Any = None


class Place(NamedTuple):
    """Where a thread is.

    Attributes:
        kind: `"exchange"`, `"backward"`, `"loader"`, `"compiler"`, `"reader"` (it waits for the
            user's loop over predictions), `"other"`, or `"unknown"`.
        text: what the thread does, and at which line.
        key: the lines that lead there, by which two ranks' places are compared.
    """

    kind: str
    text: str
    key: str = ""


# ---------------------------------------------------------------------- from frames to a place


def place(frames: Sequence[Frame]) -> Place:
    """Return where a stack is.

    Args:
        frames: the outermost first. What is outside of fitkit's first frame is left out.
    """
    is_own = [frame.file.startswith(FITKIT) for frame in frames]
    # Rank 0's call comes to the launcher through other functions than those of workers.
    launched = [
        at + 1
        for at, frame in enumerate(frames)
        if is_own[at] and frame.function == "_together" and at + 1 < len(frames)
    ]
    first = launched[0] if launched else is_own.index(True) if True in is_own else 0
    inside = frames[first:]
    if not inside:
        return Place("unknown", "its thread has ended")
    # Code that a compiler has written isn't the user's. What called the compiler is.
    inside = inside[: next((at + 1 for at, one in enumerate(inside) if _compiles(one)), None)]
    user = next((at for at in reversed(range(len(inside))) if _is_users(inside[at])), None)
    inner = inside if user is None else inside[user + 1 :]
    kind, what = _what(inner)
    shown = user
    if shown is None:
        own = [at for at, frame in enumerate(inside) if frame.file.startswith(FITKIT)]
        # An exchange is shown by who asks for it.
        apart = [at for at in own if not _is_exchange(inside[at])]
        shown = (apart or own or [len(inside) - 1])[-1]
    # Which line of fitkit asks the loader says nothing.
    is_known = user is None and kind == "loader"
    text = what if is_known else f"{what} in {_described(inside[shown])}"
    key = "|".join(f"{frame.file}:{frame.line}" for frame in inside[: shown + 1])
    return Place(kind, text, f"{key}|{what}")


def _what(inner: Sequence[Frame]) -> tuple[str, str]:
    """Return the kind of a place and what is done there, by the frames inside of the user's."""
    if inner and _compiles(inner[-1]):
        return "compiler", "compiles"
    for frame in inner:
        if frame.file.startswith(TORCH):
            file = frame.file[len(TORCH) :].replace(os.sep, "/")
            if file == "utils/data/dataloader.py" and frame.function in ("_try_get_data",):
                return "loader", "waits for a DataLoader worker"
    if inner and inner[-1].function == "_engine_run_backward":
        return "backward", "is in backward (computes, or exchanges gradients)"
    last = len(inner)
    while last and (_is_exchange(inner[last - 1]) or _is_waiting(inner[last - 1])):
        last -= 1
    exchange = [frame for frame in inner[last:] if _is_exchange(frame)]
    if exchange:
        of_torch = [f for f in exchange if f.file.startswith(TORCH) and f.function != "wrapper"]
        name = (of_torch or exchange)[0].function
        return "exchange", f"waits for the other ranks ({name})"
    if inner and _is_waiting(inner[-1]):
        in_reader = [f for f in inner if f.file == f"{FITKIT}extras{os.sep}predictions.py"]
        if in_reader:
            return "reader", "waits for the loop over predict_batches"
        return "other", f"waits ({inner[-1].function})"
    return "other", "is"


COMPILER = {
    ("_dynamo/convert_frame.py", "_compile"),
    ("_inductor/compile_fx.py", "compile_fx"),
    ("_inductor/compile_fx.py", "compile_fx_inner"),
}
"""Functions in which torch's compiler works."""


def _compiles(frame: Frame) -> bool:
    file = frame.file.removeprefix(TORCH).replace(os.sep, "/")
    return frame.file.startswith(TORCH) and (file, frame.function) in COMPILER


WAITING = {
    "threading.py", "queue.py", "selectors.py", "subprocess.py", "socket.py", "ssl.py",
    "connection.py", "synchronize.py", "popen_fork.py", "_base.py", "base_events.py",
}  # fmt: skip
"""Files of Python's own library in which a thread waits."""


EXCHANGES = "extras/launchers/process_group.py"
"""The file of fitkit in which ranks exchange things."""


def _is_waiting(frame: Frame) -> bool:
    name = os.path.basename(frame.file)
    return name in WAITING and frame.file.startswith(LIBRARIES) and not _in_packages(frame.file)


def _is_exchange(frame: Frame) -> bool:
    if frame.file.startswith(TORCH):
        file = frame.file[len(TORCH) :].replace(os.sep, "/")
        if file.startswith("distributed/checkpoint/"):
            return False  # it writes and reads files; its exchanges are in distributed_c10d.py
        return file.startswith("distributed/") or file == "nn/parallel/distributed.py"
    if frame.file.startswith(FITKIT):
        return frame.file[len(FITKIT) :].replace(os.sep, "/") == EXCHANGES
    return False


def _in_packages(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def _is_users(frame: Frame) -> bool:
    if frame.file == "<string>" and frame.function.startswith(("_", "<")):
        return False  # methods that Python writes for data classes and named tuples
    known = (FITKIT, TORCH, *LIBRARIES, "<frozen", "<__array_function__")
    return not (frame.file.startswith(known) or _in_packages(frame.file))


def _described(frame: Frame) -> str:
    """Return a line for people: whose it is, where, and what stands there."""
    if frame.file.startswith(FITKIT):
        file = frame.file[len(FITKIT) :].replace(os.sep, "/")
        return f"fitkit {file}:{frame.line} {frame.function}"
    role, name = "", frame.function
    if frame.owner is not None:
        bases = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(frame.owner).__mro__]
        role = next((f"{ROLES[base]} " for base in bases if base in ROLES), "")
        name = f"{type(frame.owner).__name__}.{name}"
    source = linecache.getline(frame.file, frame.line).strip()
    return f"{role}{name}, {_short(frame.file)}:{frame.line}" + (f": {source}" if source else "")


def _short(file: str) -> str:
    """Return a path from the working directory on, or the file's name."""
    with contextlib.suppress(OSError, ValueError):
        found = os.path.relpath(file)
        if not found.startswith(os.pardir):
            return found
    return os.path.basename(file)


# ---------------------------------------------------------------------- where frames come from


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread; None for one that has ended.

    Python 3.11.0 to 3.11.5 and 3.12.0 hold a lock meanwhile for which a collection of garbage may
    wait (python/cpython#106883): here none begins.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


def frames_above(frame: FrameType | None) -> list[Frame]:
    """Return a running stack, the outermost line first."""
    found: list[Frame] = []
    while frame is not None:
        found.append(_as_frame(frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def frames_of_error(error: BaseException) -> list[Frame]:
    """Return the stack at which an error was raised, as far as it has come up."""
    found: list[Frame] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        found.append(_as_frame(trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _as_frame(frame: FrameType, line: int | None) -> Frame:
    code = frame.f_code
    found = Frame(code.co_filename, line or 0, code.co_name)
    # Before Python 3.13 a frame keeps the copies of its variables that are asked for. In fitkit's
    # own frames these would keep an error in a ring, with the data workers that its frames hold.
    is_asked = found.function == READS or _is_users(found)
    if is_asked and code.co_argcount and code.co_varnames[0] == "self":
        return found._replace(owner=frame.f_locals.get("self"))
    return found


# ---------------------------------------------------------------------- a loader's worker


READS = "_try_get_data"
"""The method of torch's iterator over a loader in which it waits for a worker."""


def _of_worker(frames: Sequence[Frame]) -> tuple[str, str]:
    """Return where the loader's worker is that a stack waits for, in words, and its stack."""
    for frame in frames:
        if frame.function == READS:
            with contextlib.suppress(Exception):
                iterator = frame.owner
                number = iterator._task_info[iterator._rcvd_idx][0]
                process = iterator._workers[number]
                name = f"DataLoader worker {number} (process {process.pid})"
                stack = worker_stack(process.pid)
                if not stack:
                    return f"waits for {name}, which doesn't say where it is", ""
                where = place(stack)
                text = f"waits for {name}, which {where.text}"
                return text, "".join(traceback.format_list([_summary(f) for f in stack]))
    return "", ""


def _summary(frame: Frame) -> traceback.FrameSummary:
    return traceback.FrameSummary(frame.file, frame.line, frame.function)


def worker_stack(process: int) -> list[Frame]:
    """Ask a loader's worker where it is; nothing where it can't say.

    Its handler writes without Python, so that it answers whatever it waits for.
    """
    memory = _memory_of(process)
    if memory is None:
        return []
    before = os.stat(memory).st_size
    os.kill(process, signal.SIGUSR1)
    until = time.monotonic() + WORKER_S
    text = ""
    while not text.endswith("\n") and time.monotonic() < until:
        time.sleep(0.02)
        with open(memory) as file:
            file.seek(before)
            text = file.read()
    main = text.rpartition("hread 0x")[2]  # the oldest thread comes last
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)
    return [Frame(file, int(line), function) for file, line, function in found[::-1]]


def _memory_of(process: int) -> str | None:
    """Return the path of the memory to which a worker writes its stack."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{name}"
            if os.readlink(path).startswith(f"/memfd:{STACKS}"):
                return path
    return None


# ---------------------------------------------------------------------- a rank's answer


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where a rank is, as it tells the others.

    Attributes:
        call: the verb, the epoch and the pass.
        batch: the number of the batch; None outside of a pass.
        still_s: for how many seconds it hasn't moved.
        share: how much of a core it has used meanwhile; None where unknown.
        kind, text, key: as those of `Place`.
        stack: its stack, and that of the loader's worker that it waits for.
    """

    call: str = ""
    batch: int | None = None
    still_s: float = 0.0
    share: float | None = None
    kind: str = "unknown"
    text: str = "is at a place that isn't known"
    key: str = ""
    stack: str = ""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, and computes nothing."""
        is_idle = self.share is not None and self.share < IDLE
        return is_idle and self.kind in ("exchange", "backward")

    def as_text(self) -> str:
        """Return it as it travels."""
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Standing:
        """Read what `as_text` returned."""
        return cls(*json.loads(text))

    def line(self) -> str:
        """Return it as a line, without the rank."""
        batch = "" if self.batch is None else f", batch {self.batch}"
        share = "" if self.share is None else f" ({self.share:.0%} of a core)"
        return f"{batch}: {self.text}{share}"


def standing(still: Stillness) -> Standing:
    """Return where the calls of a thread are."""
    frame = frame_of(still.thread)
    frames = frames_above(frame)
    stack = "".join(traceback.format_stack(frame)) if frame else ""
    where = place(frames)
    del frame
    if where.kind == "loader" and (found := _of_worker(frames)) and found[0]:
        where = where._replace(text=where.text.replace("waits for a DataLoader worker", found[0]))
        stack += f"The DataLoader worker is here:\n{found[1]}" if found[1] else ""
    return _standing(still, where, stack, is_reading=any(map(_reads, frames)))


def standing_at(error: BaseException, still: Stillness) -> Standing:
    """Return where the calls of a thread were when an error was raised."""
    where = place(frames_of_error(error))
    stack = "".join(traceback.format_exception(error))
    return Standing(still_s=still.look(), **where._asdict(), stack=stack)


def _reads(frame: Frame) -> bool:
    """Whether a line of fitkit's reads a batch."""
    folder, file = os.path.split(frame.file)
    return folder == f"{FITKIT}data" and file != "to_device.py"


def _standing(still: Stillness, where: Place, stack: str, *, is_reading: bool) -> Standing:
    call, batch = _call(pulses(still.thread))
    if batch is not None and not is_reading:
        batch = max(batch - 1, 0)  # the one that was taken last
    return Standing(call, batch, still.look(), still.share(), *where, stack)


def _call(calls: Sequence[Pulse]) -> tuple[str, int | None]:
    """Return the outermost call in words, and how many batches its pass has taken."""
    if not calls:
        return "", None
    first = calls[0]
    words = [first.verb]
    if first.epoch is not None:
        words.append(f"epoch {first.epoch + 1}")
    if first.stage and first.stage not in ("training", "test", "predict"):
        words.append(first.stage)
    return ", ".join(words), first.batches if first.stage else None


# ---------------------------------------------------------------------- all ranks' answers


def lines(found: Mapping[int, Standing | None]) -> str:
    """Return a line for each rank; ranks at one place share one if there are many.

    Args:
        found: the ranks' answers. None for a rank that didn't answer.
    """
    groups: dict[Any, list[int]] = {}
    for rank in sorted(found):
        one = found[rank]
        key = (one.batch, one.text) if one is not None and len(found) > SHOWN else rank
        groups.setdefault("silent" if one is None else key, []).append(rank)
    return "\n".join(f"  {_named(ranks)}{_line(found[ranks[0]])}" for ranks in groups.values())


def _line(one: Standing | None) -> str:
    if one is None:
        return ": doesn't answer (ended, stopped, or in code that keeps Python's lock)"
    return one.line()


def _named(ranks: Sequence[int]) -> str:
    """Return ranks as people write them.

    Example:
        >>> from fitkit.extras.whereabouts import _named
        >>> _named([3]), _named([0, 2, 3, 4])
        ('rank 3', 'ranks 0, 2-4')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(
        f"{low}-{high}" if high > low else f"{low}" for low, high in _runs(ranks)
    )


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    low = high = None
    for number in numbers:
        if high is not None and number == high + 1:
            high = number
            continue
        if low is not None and high is not None:
            yield low, high
        low = high = number
    if low is not None and high is not None:
        yield low, high


def report(found: Mapping[int, Standing | None], seconds: float) -> str:
    """Return what is printed of calls that don't move."""
    answers = [one for one in found.values() if one is not None]
    call = next((one.call for one in answers if one.call), "")
    head = f"fitkit: no batch for {seconds:.0f} s"
    if len(found) == 1:
        return f"{head} ({call}){answers[0].line()}"
    return f"{head}{f' ({call})' if call else ''}. Each rank's place:\n{lines(found)}"


def wait_for_each_other(found: Mapping[int, Standing | None]) -> bool:
    """Whether all ranks wait in exchanges, not all at one place: then none will go on."""
    answers = list(found.values())
    keys = {(one.call, one.batch, one.key) for one in answers if one is not None}
    return len(keys) > 1 and all(one is not None and one.waits for one in answers)


NONE_GOES_ON = "All ranks wait for each other, at different places: none will go on."
"""What follows if `wait_for_each_other`."""


def same_place(found: Iterable[Standing]) -> bool | None:
    """Whether ranks are at one place; None where that isn't known of each."""
    keys = {one.key for one in found}
    return None if "" in keys else len(keys) == 1
