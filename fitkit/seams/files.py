"""For files: formats of weights, whole writes, URLs, and states as plain data.

Example:
    >>> import contextlib, os, tempfile
    >>> import numpy as np
    >>> import torch, fitkit
    >>> from fitkit.seams.files import FORMATS, replacing
    >>> class Arrays:
    ...     "The tensors of a file that numpy has opened."
    ...     foreign, extra, versions = True, {}, {}
    ...     def __init__(self, arrays):
    ...         self.arrays = arrays
    ...     def describe(self):
    ...         return {n: (a.shape, torch.from_numpy(a).dtype) for n, a in self.arrays.items()}
    ...     def read(self, name):
    ...         return torch.from_numpy(self.arrays[name])
    ...     def read_into(self, name, tensor):
    ...         tensor.copy_(self.read(name))
    >>> class Archive:
    ...     "Weights in numpy's own format."
    ...     def write(self, path, weights):
    ...         with replacing(path) as file:
    ...             np.savez(file, **{n: part.numpy() for n, part in weights.tensors.items()})
    ...     @contextlib.contextmanager
    ...     def open(self, path):
    ...         with np.load(path, allow_pickle=False) as arrays:
    ...             yield Arrays(dict(arrays))
    >>> added = FORMATS.add(".archive", Archive())
    >>> model = fitkit.Model(torch.nn.Linear(2, 1))
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.archive")
    >>> model.save_weights(path)
    >>> twin = fitkit.Model(torch.nn.Linear(2, 1))
    >>> loaded = twin.load_weights(path)
    >>> torch.equal(twin.net.weight, model.net.weight)
    True
"""

from fitkit.checkpoint import remote, remove_abandoned
from fitkit.checkpoint.arrays import state_of, storable
from fitkit.checkpoint.atomic import HeldInterrupts, check_folder_of, replacing
from fitkit.checkpoint.checkpoint_file import checkpoint_in, open_stored, save_checkpoint
from fitkit.checkpoint.codec import check_plain, decode_state
from fitkit.checkpoint.container import refusals
from fitkit.checkpoint.formats import (
    FORMATS,
    SUFFIXES,
    InMemory,
    OpenWeights,
    StoredFile,
    WeightFormat,
    Weights,
    WeightSource,
    format_of,
    is_folder_name,
    open_weights,
    weights_in,
)
from fitkit.checkpoint.frozen import Frozen, noted
from fitkit.checkpoint.header import FORMAT_VERSION, damaged, open_file, unreadable
from fitkit.checkpoint.own_loading import Rehearsal
from fitkit.checkpoint.remote import is_url, parent, refuse_url
from fitkit.checkpoint.uncompiled import plain_name
from fitkit.checkpoint.weights import save_weights
from fitkit.scopes import Scope

__all__ = [
    "FORMATS",
    "FORMAT_VERSION",
    "SUFFIXES",
    "Frozen",
    "HeldInterrupts",
    "InMemory",
    "OpenWeights",
    "Rehearsal",
    "Scope",
    "StoredFile",
    "WeightFormat",
    "WeightSource",
    "Weights",
    "check_folder_of",
    "check_plain",
    "checkpoint_in",
    "damaged",
    "decode_state",
    "format_of",
    "is_folder_name",
    "is_url",
    "noted",
    "open_file",
    "open_stored",
    "open_weights",
    "parent",
    "plain_name",
    "refusals",
    "refuse_url",
    "remote",
    "remove_abandoned",
    "replacing",
    "save_checkpoint",
    "save_weights",
    "state_of",
    "storable",
    "unreadable",
    "weights_in",
]
