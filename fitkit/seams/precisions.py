"""For precisions: the base classes, and layers that compute in another type.

Example:
    >>> import contextlib, torch, fitkit
    >>> from fitkit.seams.precisions import PRECISIONS, Precision
    >>> class Rounded(Precision):
    ...     "Gives whole numbers."
    ...     name = "rounded"
    ...     def autocast(self, device_type):
    ...         return contextlib.nullcontext()
    ...     def widen(self, tree):
    ...         return tree.round()
    >>> added = PRECISIONS.add("rounded", Rounded)
    >>> model = fitkit.Model(torch.nn.Identity())
    >>> model.compile(precision="rounded", accelerator="cpu", devices=1)
    >>> model.predict(torch.tensor([[1.3]]), verbose=0).item()
    1.0
"""

from fitkit.distributed.precision import PRECISIONS, MixedPrecision, Precision, plain_layers
from fitkit.distributed.precision.base import (
    FLOAT8,
    BFloat16Mixed,
    change_layer,
    changed_layers,
    check_pair,
    restore_dtypes,
    restore_layer,
)

__all__ = [
    "FLOAT8",
    "PRECISIONS",
    "BFloat16Mixed",
    "MixedPrecision",
    "Precision",
    "change_layer",
    "changed_layers",
    "check_pair",
    "plain_layers",
    "restore_dtypes",
    "restore_layer",
]
