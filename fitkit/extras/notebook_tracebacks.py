"""Tracebacks of fitkit's errors in IPython and Jupyter: the user's frames, and one line for ours.

IPython asks an exception that has `_render_traceback_` for its text, so nothing is installed, and
no other error is shown in another way.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from fitkit.errors import PACKAGE

TORCH = str(Path(torch.__file__).parent) + os.sep
PYTHON = str(Path(sysconfig.get_path("stdlib"))) + os.sep
INSTALLED = ("site-packages", "dist-packages")


def rendered(error: BaseException) -> list[str]:
    """Return an error's traceback as IPython shows it, without the frames of fitkit.

    With `FITKIT_TRACEBACK=full` in the environment it has all frames.
    """
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if shell is None:  # another program that asks as IPython does
        return traceback.format_exception(error)
    if os.environ.get("FITKIT_TRACEBACK") == "full":
        return _structured(shell, error, error.__traceback__)
    kept = _without_own(error.__traceback__)
    hidden = _length(error.__traceback__) - _length(kept)
    with _causes_shortened(error):
        lines = _structured(shell, error, kept)
    if hidden:
        lines.insert(-1, f"(frames of fitkit, hidden: {hidden}; FITKIT_TRACEBACK=full shows all)")
    return lines


def _structured(shell: Any, error: BaseException, frames: TracebackType | None) -> list[str]:
    found: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, frames)
    return found


@contextlib.contextmanager
def _causes_shortened(error: BaseException) -> Iterator[None]:
    """Hide frames of what led to an error, too, and all of a cause without frames of the user's.

    The message of an error has what its cause says.
    """
    changed: list[tuple[BaseException, TracebackType | None]] = []
    cut: tuple[BaseException, BaseException | None, bool] | None = None
    last, cause = error, _shown_cause(error)
    while cause is not None and cause not in [one for one, _ in changed]:
        kept = _without_own(cause.__traceback__)
        if kept is None:
            cut = (last, last.__cause__, last.__suppress_context__)
            last.__cause__ = None
            last.__suppress_context__ = True
            break
        changed.append((cause, cause.__traceback__))
        cause.__traceback__ = kept
        last, cause = cause, _shown_cause(cause)
    try:
        yield
    finally:
        for one, frames in changed:
            one.__traceback__ = frames
        if cut is not None:
            cut[0].__cause__ = cut[1]
            cut[0].__suppress_context__ = cut[2]


def _shown_cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None:
        return error.__cause__
    return None if error.__suppress_context__ else error.__context__


def _without_own(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without fitkit's frames, and without torch's and Python's below them."""
    kept: list[TracebackType] = []
    is_below = False
    while frames is not None:
        is_own = frames.tb_frame.f_code.co_filename.startswith(PACKAGE)
        is_below = is_below or is_own
        if not is_own and not (is_below and _is_librarys(frames.tb_frame)):
            kept.append(frames)
        frames = frames.tb_next
    found: TracebackType | None = None
    for one in reversed(kept):
        found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found


def _is_librarys(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith((TORCH, "<frozen")):
        return True
    return file.startswith(PYTHON) and not any(name in file for name in INSTALLED)


def _length(frames: TracebackType | None) -> int:
    return sum(1 for _ in traceback.walk_tb(frames))
