"""How exact float32 matrix products are, for the length of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def matmul_precision(word: str | None) -> Iterator[None]:
    """Set torch's precision of float32 matrix products meanwhile; None leaves it.

    Torch has two ways to say it, which know of each other only half: after
    `torch.backends.cuda.matmul.fp32_precision = …` its older getters raise until both say the same.
    Compilers ask the older ones, so the older setter, which sets both, is what is used here; both
    are put back.

    Args:
        word: `"highest"`, `"high"` or `"medium"`, as `torch.set_float32_matmul_precision` takes it.
    """
    if word is None:
        yield
        return
    backends: Any = torch.backends
    newer = [
        (backend, backend.fp32_precision)
        for backend in (backends.cuda.matmul, backends.mkldnn.matmul)
    ]
    older = _older()
    torch.set_float32_matmul_precision(word)
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for backend, precision in newer:
            backend.fp32_precision = precision


def _older() -> str | None:
    """What the older way says; None where the newer one was used to say something else."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
