"""Whether a step may be computed in parts: some rows' loss is the mean of their halves' losses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fitkit.extras.splitting.attempts import KeptBuffers
from fitkit.extras.splitting.cuts import Cuts
from fitkit.extras.splitting.joins import joined_losses
from fitkit.modes import modes_restored
from fitkit.random_states import kept_random_numbers
from fitkit.seams.data import Batch
from fitkit.seams.networks import Module
from fitkit.seams.steps import Outcome

EXACT, ON_DEVICES, IN_HALF = 1e-5, 1e-3, 2e-2
"""How far the two may be apart: in whole precision on a CPU, on other devices, in half precision.

Kernels of a GPU follow from the number of rows, and so do last bits.
"""


def apart(
    model: Module,
    cuts: Cuts,
    batch: Batch,
    sizes: list[int],
    buffers: KeptBuffers,
    compute: Callable[[Batch], Outcome],
) -> float | None:
    """Return how far the losses of a batch's parts are from their halves' means, of their size.

    The model computes it in evaluation mode, and is left as it was. So what draws for each row is
    compared, too, unless it draws in that mode.

    Args:
        sizes: the rows of the batch's parts.
        compute: computes some rows, and leaves no trace in records.

    Returns:
        None where both are alike, or can't be compared.
    """
    if max(sizes) < 2 or not batch.samples:
        return None
    strategy = model._fitkit.compilation.strategy
    buffers.note()
    try:
        with kept_random_numbers(devices=[strategy.device]), modes_restored(model):
            model.eval()
            before = torch.get_rng_state()
            found = max(
                _difference(cuts, part.batch, part.end - part.first, compute)
                for part in cuts.parts_of(batch, sizes)
            )
            if not torch.equal(before, torch.get_rng_state()):
                return None
    except Exception:  # in that mode it computes something else
        return None
    finally:
        buffers.restore()
    bound = EXACT if strategy.device.type == "cpu" else ON_DEVICES
    if strategy.precision.name not in ("32-true", "64-true"):
        bound = IN_HALF
    return found if found > bound else None


def _difference(cuts: Cuts, part: Batch, rows: int, compute: Callable[[Batch], Outcome]) -> float:
    if rows < 2:
        return 0.0
    halves = [rows - rows // 2, rows // 2]
    whole = compute(part).loss
    mean = joined_losses([compute(half.batch) for half in cuts.parts_of(part, halves)], halves).loss
    assert whole is not None
    assert mean is not None
    one, other = float(whole), float(mean)
    return abs(one - other) / max(abs(one), abs(other), 1e-12)
