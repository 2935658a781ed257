"""What torch's errors about shapes, number types and memory look like."""

from __future__ import annotations

import re
from pathlib import Path

import torch

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
