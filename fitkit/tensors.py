"""A tensor's bytes, as ranks exchange them and digests read them."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, in its own memory where that is contiguous: (bytes,) uint8.

    Example:
        >>> import torch
        >>> from fitkit.tensors import bytes_of
        >>> bytes_of(torch.zeros(()).expand(1, 1))
        tensor([0, 0, 0, 0], dtype=torch.uint8)
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor may have any strides along dimensions of one entry, which a view keeps.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
