"""The state of everything that draws numbers, so that a run can go on as if never cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def random_state(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, on all devices in use.

    Args:
        generators: further ones (a loader's own).

    Returns:
        Plain data and tensors.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "own": [generator.get_state() for generator in generators],
    }
    # Asking would start CUDA in a process that has no use for it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Go on drawing as `random_state` found it; a state for other devices is left out.

    Args:
        generators: as given to `random_state`; where there are others now, they stay.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(generators) == len(state["own"]):
        for generator, own in zip(generators, state["own"], strict=True):
            generator.set_state(own)
    cuda = state.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
