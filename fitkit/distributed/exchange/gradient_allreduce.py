"""Bagua's `gradient_allreduce`: the exact mean of gradients, which is DDP itself."""

from __future__ import annotations

from fitkit.distributed.exchange.base import Exchange


class GradientAllreduce(Exchange):
    """Gradients are averaged exactly, while the backward pass goes on.

    Reference: Gan et al., BAGUA, 2021, arXiv:2107.01499 (C_FP_S); Li et al., PyTorch
    Distributed, 2020, arXiv:2006.15704, which does the work.
    """

    name = "gradient_allreduce"
