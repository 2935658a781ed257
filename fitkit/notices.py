"""Warnings that point at the user's line."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

PACKAGE = str(Path(__file__).parent) + os.sep


def warn(message: str) -> None:
    """Warn, naming the nearest line outside fitkit and torch that led here."""
    frame, level = sys._getframe(1), 2
    torch_package = str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (PACKAGE, torch_package)
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
