"""The door for extras, in this package and in others: all that they may use of the core.

A capability that a reader of the core needn't know imports from these pages, and from public
modules such as `fitkit.callbacks`. It may also use the modules that hold nothing of a training,
such as `fitkit.arguments`, `errors` and `trees`. The core never imports it: a registry or a public
module does, when somebody asks for its name. Each registry also knows the names that installed
packages add by entry points.

| you add | you subclass or write | it is found by | page |
|---|---|---|---|
| a callback, a logger | `Callback`, `fitkit.loggers.Logger` | `CALLBACKS` | `callbacks` |
| a strategy, a way to average gradients | `Strategy`, `Engine` | `STRATEGIES` | `strategies` |
| a precision | `Precision` | `PRECISIONS` | `precisions` |
| a loss | a function, or a `Definition` of its meaning | `LOSSES` | `losses` |
| a metric | a function, torchmetrics' class, a `Named` with a `Mean` | `METRICS` | `metrics` |
| an optimizer | torch's class, or a function | `OPTIMIZERS` | `optimizers` |
| a schedule | torch's class, or a function | `SCHEDULERS` | `optimizers` |
| a kind of network | `Guest` | `GUESTS` | `networks` |
| a kind of data | a function that returns `OpenedData` | `DATA` | `networks` |
| a kind of module with its own steps | `fitkit.Model` | `MODELS` | `networks` |
| a format of weight files | `WeightFormat` | `FORMATS` | `files` |
| a format of checkpoints that all ranks write | `FolderFormat` | `FOLDERS` | `checkpoints` |
| a kind of batch, such as a library's graphs | `BatchKind` | `KINDS` | `batches` |
| a change of whole training batches | `BatchTransform` | `compile(batch_transforms=…)` | `data` |
| another way to compute steps | `Updates`, `PassSteps` | `jit_compile` | `steps` |

`machines` has what a machine and its launcher are, `passes` what surrounds a verb's call. A name
may be imported from `fitkit.seams`, too, which finds its page: `from fitkit.seams import LOSSES`.
"""

import importlib
from typing import Any

PAGES = (
    "batches",
    "callbacks",
    "checkpoints",
    "data",
    "files",
    "launchers",
    "losses",
    "machines",
    "metrics",
    "networks",
    "optimizers",
    "passes",
    "precisions",
    "steps",
    "strategies",
)


def __getattr__(name: str) -> Any:
    """Find a name on its page."""
    for page in PAGES:
        module = importlib.import_module(f"{__name__}.{page}")
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"fitkit.seams has no {name!r}. Its pages are {', '.join(PAGES)}.")
