"""For formats of whole checkpoints: documents, numbered arrays, digests, and unfinished folders.

Example:
    >>> import os, tempfile
    >>> import torch
    >>> from fitkit.seams.checkpoints import Numbering, encode_state, read_container
    >>> from fitkit.seams.checkpoints import write_container
    >>> from fitkit.seams.files import decode_state
    >>> path, numbering = os.path.join(tempfile.mkdtemp(), "moments.h5"), Numbering()
    >>> state = encode_state({"step": 3, "moments": torch.ones(2)}, numbering)
    >>> digest = write_container(path, {"kind": "moments", "state": state}, numbering.arrays)
    >>> with read_container(path) as found:  # all of it is checked
    ...     decode_state(found.document["state"], found.read)
    {'step': 3, 'moments': tensor([1., 1.])}
"""

from fitkit.checkpoint.arrays import (
    Described,
    Numbering,
    describe_tensor,
    is_shape,
    read_description,
)
from fitkit.checkpoint.atomic import (
    flush_folder,
    is_still,
    refused_writes,
    remove_tree,
    unfinished_name,
)
from fitkit.checkpoint.codec import encode_state
from fitkit.checkpoint.container import Reader, read_container, write_container
from fitkit.checkpoint.disk import copy_file
from fitkit.checkpoint.formats import (
    FOLDERS,
    INDEX,
    FolderFormat,
    FolderInThreads,
    encode_extra,
    encode_weights,
    software,
)
from fitkit.checkpoint.safetensors_file import (
    SafeTensorsFile,
    has_dtype,
    open_tensors,
    write_tensors,
)
from fitkit.checkpoint.weights import collect_weights

__all__ = [
    "FOLDERS",
    "INDEX",
    "Described",
    "FolderFormat",
    "FolderInThreads",
    "Numbering",
    "Reader",
    "SafeTensorsFile",
    "collect_weights",
    "copy_file",
    "describe_tensor",
    "encode_extra",
    "encode_state",
    "encode_weights",
    "flush_folder",
    "has_dtype",
    "is_shape",
    "is_still",
    "open_tensors",
    "read_container",
    "read_description",
    "refused_writes",
    "remove_tree",
    "software",
    "unfinished_name",
    "write_container",
    "write_tensors",
]
