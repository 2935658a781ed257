"""Kinds of entries in batches that torch has: packed sequences, nested and sparse tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from fitkit.seams.batches import BatchKind


class Packed(BatchKind):
    """Sequences that are packed for a recurrent layer."""

    words = "a PackedSequence"
    advice = "Give padded sequences and their lengths, and pack them in the step."

    def count(self, entry: PackedSequence) -> int:
        return int(entry.batch_sizes[0])

    def move(self, entry: PackedSequence, device: torch.device, dtype: torch.dtype) -> Any:
        # Torch's own `to` leaves the sizes on the CPU, where recurrent layers need them.
        to: Any = entry.to
        return to(device, dtype) if entry.data.is_floating_point() else to(device)

    def join(self, entries: list[PackedSequence]) -> PackedSequence:
        sequences = [one for entry in entries for one in unpack_sequence(entry)]
        return pack_sequence(sequences, enforce_sorted=False)


class Nested(BatchKind):
    """Tensors of unlike shapes in one, a sample each."""

    words = "a nested tensor"
    advice = "Give padded samples and their lengths."

    def count(self, entry: torch.Tensor) -> int:
        return int(entry.size(0))

    def join(self, entries: list[torch.Tensor]) -> torch.Tensor:
        parts = [part for entry in entries for part in entry.unbind()]
        return torch.nested.nested_tensor(parts, layout=entries[0].layout)


class Sparse(BatchKind):
    """A sparse tensor, whose rows are samples.

    Args:
        layout: torch's.
    """

    advice = "Write {place}.to_sparse_coo(), or {place}.to_dense()."
    has_rows = True
    is_target = False

    def __init__(self, layout: torch.layout) -> None:
        self.words: str = f"a sparse tensor ({layout})"

    def count(self, entry: torch.Tensor) -> int:
        return entry.shape[0]

    def join(self, entries: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(entries)


class SparseCOO(Sparse):
    """A sparse tensor whose rows torch can select."""

    def rows(self, entry: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        places = torch.arange(len(entry), device=entry.device)[start:stop]
        return entry.index_select(0, places)  # which has no views


PACKED = Packed()
NESTED = JAGGED = Nested()
COO = SparseCOO(torch.sparse_coo)
CSR, CSC = Sparse(torch.sparse_csr), Sparse(torch.sparse_csc)
BSR, BSC = Sparse(torch.sparse_bsr), Sparse(torch.sparse_bsc)
