"""The exceptions that fitkit raises.

Every message says what was given, why it can't be, and what to write instead.

```
FitkitError
├── ConfigurationError (ValueError)      what was asked can't be
│   └── ArgumentTypeError (TypeError)    a wrong type, an unknown argument
├── CheckpointError (OSError, ValueError) a file can't be read or written whole
├── WorkerError (RuntimeError)           a rank failed
├── OutOfMemoryError (torch's)           a device's or the host's memory ran out
└── MissingPackageError (ImportError)    an optional package isn't installed
```
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch


class FitkitError(Exception):
    """Base of all errors that fitkit raises itself."""


class ConfigurationError(FitkitError, ValueError):
    """What was asked can't be done; raised by the call that has the mistake."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument of a wrong type, or one that the call doesn't have."""


class CheckpointError(FitkitError, OSError, ValueError):
    """A file can't be read or written whole; nothing was changed."""


class WorkerError(FitkitError, RuntimeError):
    """A rank failed.

    Attributes:
        rank: the global rank that failed first.
        remote_traceback: that rank's traceback, as text.
    """

    def __init__(self, message: str, rank: int = 0, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class OutOfMemoryError(FitkitError, torch.OutOfMemoryError):
    """Memory ran out; the message says what took it, and what needs less."""


class MissingPackageError(FitkitError, ImportError):
    """An optional package isn't installed; the message names the extra that brings it."""


def missing_package(package: str, extra: str, purpose: str) -> MissingPackageError:
    """The error for an optional package that isn't there, naming the extra to install."""
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which isn't installed. "
        f"Install it with: pip install 'fitkit[{extra}]'"
    )


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
