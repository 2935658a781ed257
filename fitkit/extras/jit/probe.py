"""Whether this CPU runs torch's vector code, which torch asks in each process that compiles.

It starts two Python processes for that, one after the other: 1.2 CPU seconds, half of what a small
net's step takes if its code is there already. An answer "yes" is kept beside the library that torch
asks with.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch

ASKS = "_probe_load"
"""Torch's method that loads a library in another process, and says whether that works."""


@contextmanager
def remembered() -> Iterator[None]:
    """Ask only what hasn't been answered on this machine, for the length of a block."""
    try:
        from torch._inductor.cpu_vec_isa import VecISA

        ask = getattr(VecISA, ASKS)
    except (ImportError, AttributeError):  # of another torch, which asks as ever
        yield
        return

    def answer(self: Any, output_path: str) -> bool:
        mark = f"{output_path}.{_machine()}.loads"
        if os.path.exists(mark):
            return True
        loads: bool = ask(self, output_path)
        if loads and _machine():
            with suppress(OSError):
                open(mark, "xb").close()
        return loads

    with patch.object(VecISA, ASKS, answer):
        yield


@functools.cache
def _machine() -> str:
    """Return a name for what an answer depends on: CPU, Python and torch; "" if it isn't known."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            able = sorted({line for line in file if line.lower().startswith(("flags", "feature"))})
    except OSError:
        able = []
    if not able:
        return ""
    parts = platform.platform(), sys.version, torch.__version__, torch.__file__, *able
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
