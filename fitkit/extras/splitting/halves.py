"""Whether a step may be computed in parts: what some rows give is what their halves give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fitkit import trees
from fitkit.extras.rows import LOSS
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

ROWS = 10.0
"""How much more outputs may be apart than means, in which much of the rounding cancels."""

Join = Callable[[list[Outcome], list[int]], Outcome]


def apart(
    model: Module,
    cuts: Cuts,
    batch: Batch,
    sizes: list[int],
    buffers: KeptBuffers,
    compute: Callable[[Batch], Outcome],
    join: Join = joined_losses,
) -> float | None:
    """Return how far what a batch's parts give is from what their halves give, of its size.

    The model computes it in evaluation mode, and is left as it was. So what draws for each row is
    compared, too, unless it draws in that mode.

    Args:
        sizes: the rows of the batch's parts.
        compute: computes some rows, and leaves no trace in records.
        join: makes rows' outcome of those of their halves. What it leaves out isn't compared.

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
                _difference(cuts, part.batch, part.end - part.first, compute, join)
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


def _difference(
    cuts: Cuts, part: Batch, rows: int, compute: Callable[[Batch], Outcome], join: Join
) -> float:
    if rows < 2:
        return 0.0
    halves = [rows - rows // 2, rows // 2]
    whole, found = compute(part), [compute(half.batch) for half in cuts.parts_of(part, halves)]
    try:
        made = join(found, halves)
    except (ValueError, RuntimeError):
        return math.inf
    pairs = [] if whole.loss is None else [(whole.loss, made.loss)]
    if made.outputs is not None:
        one, other = (dict(trees.leaves_with_paths(given.outputs)) for given in (whole, made))
        if one.keys() != other.keys():
            return math.inf
        pairs += [(one[path], other[path]) for path in one if path not in LOSS]
    return max((_apart(*pair) for pair in pairs), default=0.0)


def _apart(one: Any, other: Any) -> float:
    """Return how far two values are apart, of their size."""
    if isinstance(one, (float, torch.Tensor, np.ndarray)):
        found = torch.as_tensor(one), torch.as_tensor(other)
        if found[0].shape != found[1].shape:
            return math.inf
        is_exact, scale = not trees.is_inexact(found[0]), ROWS if found[0].ndim else 1.0
        if found[0].numel() == 0 or (is_exact and found[0].ndim):
            return 0.0  # classes may be ties
        one, other = (value.detach().cpu().double().nan_to_num() for value in found)
        size = max(float(one.abs().max()), float(other.abs().max()), 1e-12)
        return float((one - other).abs().max()) / size / scale
    return 0.0 if one is other or one == other else math.inf
