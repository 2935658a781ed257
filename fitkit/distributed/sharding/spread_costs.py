"""What a net costs each device whose parameters, gradients and optimizer state are spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from torch import nn

from fitkit.distributed.costs import Costs, Sizes, all_gather, all_reduce, whole


def spread_costs(
    module: nn.Module,
    sizes: Sizes,
    ranks: int,
    blocks: list[nn.Module],
    *,
    within: int,
    divided: Collection[nn.Parameter],
    together: int,
    reshards: bool,
    offloads: bool,
) -> Costs:
    """The costs of the fullest device.

    Args:
        module: the net.
        sizes: of a training of the whole net.
        blocks: submodules that are gathered as one.
        within: ranks that share one copy.
        divided: parameters of which each of `together` ranks has a part.
        together: ranks that compute a batch together.
        reshards: whether a block is gathered anew for its backward.
        offloads: whether what is kept is kept in main memory.
    """

    def held(parameters: Iterable[nn.Parameter]) -> float:
        return sum(p.numel() / (together if p in divided else 1) for p in parameters)

    parameters = list(module.parameters())
    learning = [p for p in parameters if p.requires_grad]
    of_all = held(parameters) / max(sum(p.numel() for p in parameters), 1)
    of_learning = held(learning) / max(sum(p.numel() for p in learning), 1)
    travelling = sizes.numbers * sizes.element * of_learning
    gradients = sizes.gradients * of_learning
    inside = [held(block.parameters()) for block in blocks]
    rest = held(parameters) - sum(inside)
    # One block at work, the next on its way, and what belongs to none, all along.
    at_once = rest + (2 * max(inside, default=0) if reshards else sum(inside))
    on_device = 0 if offloads else 1 / within
    return dataclasses.replace(
        whole(sizes),
        parameters=sizes.parameters * of_all * on_device,
        gradients=gradients * on_device,
        optimizer=sizes.optimizer * of_learning * on_device,
        exchange=at_once * sizes.element,
        sent=(2 if reshards else 1) * all_gather(travelling, within)
        + all_gather(gradients, within)
        + all_reduce(gradients / within, ranks // together // within),
    )
