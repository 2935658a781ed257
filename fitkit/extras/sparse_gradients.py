"""Sparse gradients over the ranks: of embeddings with `sparse=True`, which a batch may not use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def mean_sparse_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace the gradients of such layers by their mean over the ranks, which stays sparse.

    A rank that didn't use a layer counts as zero there, as in `Collectives.mean_gradients`. If a
    rank has a dense gradient (its weight is used elsewhere, too), the mean is dense.

    Ranks:
        Collective.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        return
    gradients = [parameter.grad for parameter in parameters]
    kinds = [[one is not None, one is not None and not one.is_sparse] for one in gradients]
    users = torch.tensor(kinds, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(users)
    for parameter, (uses, dense) in zip(parameters, users.tolist(), strict=True):
        if not uses:
            continue
        gradient = _empty(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.to_dense() if dense and gradient.is_sparse else gradient
        dist.all_reduce(gradient)
        parameter.grad = gradient / dist.get_world_size()


def _empty(parameter: nn.Parameter) -> torch.Tensor:
    """Return a sparse gradient of no rows."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
        parameter.new_empty(0, *parameter.shape[1:]),
        parameter.shape,
        check_invariants=False,
    )
