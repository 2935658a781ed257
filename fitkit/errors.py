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

Many of them end with a code (`FK012`) and the command that prints its causes and what to do:
`python -m fitkit explain FK012`. `docs/troubleshooting.md` has the same texts; `error.code` has the
code alone.

Below them: how torch's own errors about shapes, number types and memory are known.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path

import torch

from fitkit.printing import where_possible

CODES = {
    "FK001": "the net can't take the batch's shape",
    "FK002": "the batch's number type",
    "FK003": "forward has other arguments than the batch",
    "FK004": "a batch that isn't (x, y) or (x, y, sample_weight)",
    "FK005": "arrays of different lengths",
    "FK006": "logits for a loss of probabilities",
    "FK007": "one-hot targets for a loss of class indices",
    "FK008": "class indices for a loss of one-hot targets",
    "FK009": "labels that the net has no class for",
    "FK010": "labels of a yes/no loss other than 0 and 1",
    "FK011": "prediction and target of different shapes",
    "FK012": "an index that an Embedding doesn't have",
    "FK013": "one column for a loss of classes",
    "FK014": "batch normalization of one sample",
    "FK015": "no loss",
    "FK016": "a loss or metric with the target first",
    "FK017": "something that is no data",
    "FK018": "a generator function that wasn't called",
    "FK019": "labels that are strings",
    "FK020": "a Hugging Face Dataset of Python lists",
    "FK021": "an iterator for several epochs",
    "FK022": "a loss that depends on no parameter that learns",
    "FK023": "all parameters frozen",
    "FK024": "an optimizer over another net",
    "FK025": "training_step without a loss",
    "FK026": "a method that looks like a hook",
    "FK027": "Adam's eps in float16",
    "FK028": "an unknown name",
    "FK029": "an unknown argument",
    "FK030": "a monitored value that isn't logged",
    "FK031": "a monitored value that can't come",
    "FK032": "a schedule without the training's length",
    "FK033": "a package that isn't installed",
    "FK034": "no such device visible",
    "FK035": "a device index that isn't there",
    "FK036": "device indices on a CPU",
    "FK037": "GPUs that others use",
    "FK038": "a precision that the device lacks",
    "FK039": "tensors on several devices in the net",
    "FK040": "memory ran out",
    "FK041": "a rank that the system ended",
    "FK042": "a rank that hangs",
    "FK043": "ranks that make different calls",
    "FK044": "ranks with different data",
    "FK045": "parameters without a gradient under DDP",
    "FK046": "an object that can't be sent to workers",
    "FK047": "several nodes without a launcher",
    "FK048": "other numbers of ranks started than asked for",
    "FK049": "a part of torchrun's variables",
    "FK050": "fewer samples than ranks",
    "FK051": "rank 0 out of reach",
    "FK052": "a damaged file",
    "FK053": "weights of another net",
    "FK054": "a file of weights where a checkpoint is needed",
    "FK055": "a file whose model had objects",
    "FK056": "a file of a model compiled otherwise",
    "FK057": "an object that no file can hold",
    "FK058": "a training cut within other data",
    "FK059": "no folder for a file",
    "FK060": "entries that disagree on a batch's samples",
    "FK061": "a loss that sums over a batch",
    "FK064": "forked processes that never begin",
    "FK065": "a teacher that can't teach",
    "FK068": "what can't be computed in parts",
    "FK069": "a batch that is computed in parts",
    "FK070": "a copy of a model that the ranks hold in parts",
    "FK071": "a callback in two running calls of fit",
    "FK072": "compiled code that gives other numbers",
    "FK073": "a failure of torch's compiler",
    "FK080": "Keras on another backend than torch",
    "FK081": "what a Keras network can't be trained with",
    "FK082": "an object of Keras without an equal one",
    "FK083": "what a LightningModule can't be trained with",
    "FK084": "what a LightningModule's trainer doesn't have",
    "FK090": "a data module of Lightning that a verb can't read",
    "FK091": "weights of a loss that don't fit its predictions",
    "FK092": "labels that are missing",
    "FK093": "a name of another library",
}
"""What each code stands for. A code is never used again for something else."""


CODED = re.compile(r"\((FK\d{3}): python -m fitkit explain \1\)")
"""A code at a message's end."""


def with_code(message: str, code: str) -> str:
    """Return a message that ends with its code, and with the command that explains it.

    Example:
        >>> from fitkit.errors import with_code
        >>> with_code("x is empty.", "FK005")
        'x is empty. (FK005: python -m fitkit explain FK005)'
    """
    assert code in CODES, code
    return f"{message} ({code}: python -m fitkit explain {code})"


class FitkitError(Exception):
    """Base of all errors that fitkit raises itself.

    Args:
        arguments: the message.
        code: one of `CODES`, which the message shows at its end. Default None: it has no code.

    Attributes:
        code: the code, or None.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> try:
        ...     model.compile("adam", precision="8-true")
        ... except fitkit.FitkitError as error:
        ...     print(type(error).__name__)
        ConfigurationError
    """

    def __init__(self, *arguments: object, code: str | None = None) -> None:
        if code is not None:
            arguments = (with_code(str(arguments[0]), code), *arguments[1:])
        super().__init__(*arguments)
        self.code = code

    def _render_traceback_(self) -> list[str]:
        """Return the traceback as IPython and Jupyter show it, which ask for this."""
        from fitkit.extras.notebook_tracebacks import rendered

        return rendered(self)


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
        code: that of the rank's error; None if it has none.
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
        found = CODED.search(message)
        self.code: str | None = None if found is None else found[1]
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


class Preempted(SystemExit):
    """A signal ended the training, after all of it was saved.

    Attributes:
        code: the exit status that a shell reports for this signal: 143 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class MissingPackageError(FitkitError, ImportError):
    """An optional package isn't installed; the message names the extra that brings it."""


def missing_package(package: str, extra: str, purpose: str) -> MissingPackageError:
    """Return the error for an optional package that isn't there, naming the extra to install."""
    return MissingPackageError(
        f"{purpose} needs the package {package!r}, which isn't installed. "
        f"Install it with: pip install 'torch-fitkit[{extra}]'",
        code="FK033",
    )


PACKAGE = str(Path(__file__).parent) + os.sep


def require(package: str, extra: str, purpose: str) -> None:
    """Make sure that an optional package is there, without importing it, which may take seconds.

    Raises:
        MissingPackageError: it isn't; see `missing_package`.
    """
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise missing_package(package, extra, purpose)


def warn(message: str, code: str | None = None) -> None:
    """Warn, naming the nearest line outside fitkit and torch that led here.

    Args:
        message: the warning.
        code: one of `CODES`, as of errors.
    """
    message = message if code is None else with_code(message, code)
    frame, level = sys._getframe(1), 2
    torch_package = str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (PACKAGE, torch_package)
    ):
        frame, level = frame.f_back, level + 1
    with where_possible():
        warnings.warn(message, UserWarning, stacklevel=level)


@functools.cache
def warn_once(message: str) -> None:
    """Warn, if this process hasn't said so yet."""
    warn(message)


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


def asked_by(error: BaseException) -> str:
    """Return the part of fitkit that called what raised `error`: `"losses"`, `"metrics"`,
    `"training"`.
    """
    found, frame = "", error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_globals.get("__name__", "")
        found = name if name.startswith("fitkit.") else found
        frame = frame.tb_next
    return found.split(".")[1] if found else ""
