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

Below them: how torch's own errors about shapes, number types and memory are known.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

import torch


class FitkitError(Exception):
    """Base of all errors that fitkit raises itself.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> try:
        ...     model.compile("adam", precision="8-true")
        ... except fitkit.FitkitError as error:
        ...     print(type(error).__name__)
        ConfigurationError
    """


class ConfigurationError(FitkitError, ValueError):
    """What was asked can't be done; raised by the call that has the mistake.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> try:
        ...     model.compile(devices=0)
        ... except fitkit.ConfigurationError as error:
        ...     print(error)
        devices=0 asks for no device...
    """


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument of a wrong type, or one that the call doesn't have."""


class CheckpointError(FitkitError, OSError, ValueError):
    """A file can't be read or written whole; nothing was changed.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> _ = open("broken.h5", "wb").write(b"no checkpoint")
        >>> try:
        ...     model.load("broken.h5")
        ... except fitkit.CheckpointError as error:
        ...     print("not loaded")
        not loaded
    """


class WorkerError(FitkitError, RuntimeError):
    """A rank failed.

    Attributes:
        rank: the global rank that failed first.
        remote_traceback: that rank's traceback, as text.

    Example:
        >>> import fitkit
        >>> def trained(model, x, y):
        ...     try:
        ...         return model.fit(x, y)
        ...     except fitkit.WorkerError as error:
        ...         print(f"rank {error.rank} failed:", error)
    """

    def __init__(self, message: str, rank: int = 0, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class OutOfMemoryError(FitkitError, torch.OutOfMemoryError):
    """Memory ran out; the message says what took it, and what needs less.

    Example:
        >>> import fitkit
        >>> def trained(model, x, y, batch_size=1024):
        ...     try:
        ...         return model.fit(x, y, batch_size=batch_size)
        ...     except fitkit.OutOfMemoryError:
        ...         return trained(model, x, y, batch_size // 2)
    """


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


_TORCH = str(Path(torch.__file__).parent)

SHAPE_ERRORS = re.compile(
    r"shapes cannot be multiplied|size mismatch|to have \d+ channels|Given groups=|"
    r"Expected .*\d+D|Given normalized_shape|must match the size of tensor|"
    r"is invalid for input of size|input\.size\(-1\) must be equal|"
    r"expected input's size|[Kk]ernel size can't be greater|"
    r"(running_mean|weight|running_var) should contain \d+ elements|"
    r"Calculated .* output size.* too small|must match except in dimension"
)
"""Of layers, and of arithmetic anywhere."""

DTYPE_ERRORS = re.compile(
    r"must have the same dtype|expected scalar type|Input type .* and (bias|weight) type|"
    r"not implemented for '|expected m1 and m2 to have the same dtype|"
    r"Expected tensor for argument .* to have one of the following scalar types|"
    r"Found dtype .* but expected"
)

PAIR_ERRORS = re.compile(
    r"[Tt]arget size|to match target batch_size|target tensor expected|spatial targets supported|"
    r"Dimension out of range|expanded size of the tensor|"
    r"arguments to matmul need|[Ee]xpected 1D tensors|inconsistent tensor size|"
    r"Expected floating point type for target|with a bool tensor is not supported|"
    r"can't be cast to the desired output type|expected target dtype|Integral inputs not supported|"
    r"could not infer output dtype|same number of dimensions|to be equal size|"
    r"number of (subscripts|dimensions)"
)
"""Of a prediction beside its target, in losses."""


MEMORY_ERRORS = re.compile(
    r"out of memory|MemoryError|(can't|cannot|unable to) allocate|alloc_failed", re.IGNORECASE
)
"""Of devices, libraries and the CPU's allocator."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch had no memory to give."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and MEMORY_ERRORS.search(str(error)) is not None


def raised_in_torch(error: BaseException) -> bool:
    """Whether it is a Python file of torch's that raised `error`."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code.co_filename.startswith(_TORCH)
