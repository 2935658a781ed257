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
    LARGEST_RANK,
    Described,
    Numbering,
    StoredArrays,
    describe_tensor,
    is_shape,
    read_description,
    write_array,
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
    decode_extra,
    encode_extra,
    encode_weights,
    software,
)
from fitkit.checkpoint.header import NO_DIGEST, digest_of, former
from fitkit.checkpoint.weights import collect_weights

__all__ = [
    "FOLDERS",
    "INDEX",
    "LARGEST_RANK",
    "NO_DIGEST",
    "Described",
    "FolderFormat",
    "FolderInThreads",
    "Numbering",
    "Reader",
    "StoredArrays",
    "collect_weights",
    "copy_file",
    "decode_extra",
    "describe_tensor",
    "digest_of",
    "encode_extra",
    "encode_state",
    "encode_weights",
    "flush_folder",
    "former",
    "is_shape",
    "is_still",
    "read_container",
    "read_description",
    "refused_writes",
    "remove_tree",
    "software",
    "unfinished_name",
    "write_array",
    "write_container",
]
