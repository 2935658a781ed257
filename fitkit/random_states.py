"""The states of all random number generators, so that a run can be resumed exactly."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fitkit.accelerators import current_device, generator_states, set_generator_states
from fitkit.arguments import check_count
from fitkit.errors import ConfigurationError

_NUMBERS = 624
"""How many numbers the state of a Mersenne Twister has. Python, NumPy and torch use it."""

_SEED_BYTES = 8
"""The start of torch's state. Then come the draws left, a flag, the place, and the numbers."""


_MOST_BYTES = 1 << 14
"""More than any device's state has: CUDA's has 16 bytes, a Mersenne Twister's 5056."""


def random_state(
    generators: Sequence[torch.Generator] = (), devices: Sequence[torch.device] | None = None
) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, on the CPU and this rank's
    device.

    A run's device is its rank's, whatever its index. So a run can be resumed on another one.

    Args:
        generators: further generators (a loader's own).
        devices: the devices of this process; None for the current one, a call's own within it.

    Returns:
        Numbers and words, in tuples, lists and dicts; tensors; and NumPy's key, an array.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "own": [generator.get_state() for generator in generators],
        "devices": generator_states([current_device()] if devices is None else devices),
    }
    return state


def digest_of_random_state() -> int:
    """Return a number that changes when this process draws a random number on the CPU."""
    numpy = np.random.get_state(legacy=False)["state"]
    parts = (numpy["key"].tobytes(), numpy["pos"], torch.get_rng_state().numpy().tobytes())
    return hash((random.getstate(), *parts))


def set_random_state(
    state: dict[str, Any],
    generators: Sequence[torch.Generator] = (),
    devices: Sequence[torch.device] | None = None,
) -> None:
    """Restore the states that `random_state` returned. Another number of devices keeps its own.

    Args:
        generators, devices: as given to `random_state`. If there are others now, they stay
            unchanged.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(generators) == len(state["own"]):
        for generator, own in zip(generators, state["own"], strict=True):
            if is_of_a_gpu(own) == (generator.device.type == "cuda"):
                generator.set_state(own)
    places = [current_device()] if devices is None else devices
    with contextlib.suppress(RuntimeError):  # of another type of device: as if there were none
        set_generator_states(places, state.get("devices", []))


@contextlib.contextmanager
def kept_random_numbers(
    generators: Sequence[torch.Generator] = (), devices: Sequence[torch.device] | None = None
) -> Iterator[None]:
    """Give the random numbers back at the block's end. The arguments are `random_state`'s."""
    before = random_state(generators, devices)
    try:
        yield
    finally:
        set_random_state(before, generators, devices)


def is_of_a_gpu(state: Any) -> bool:
    """Whether a generator's state looks like a CUDA generator's: a seed and an offset."""
    return isinstance(state, torch.Tensor) and state.dtype is torch.uint8 and state.numel() == 16


def _may_be_a_devices(state: Any) -> bool:
    """Whether a device may be given this state. It checks the rest itself."""
    is_bytes = isinstance(state, torch.Tensor) and state.dtype is torch.uint8 and state.ndim == 1
    return is_bytes and state.numel() <= _MOST_BYTES


def check_random_state(state: Any) -> None:
    """Refuse a state that `random_state` never returns, from a file that anyone may have written.

    Each library tries the state on an unused generator. Two of them don't check all of it. NumPy
    takes any place in the Mersenne Twister's 624 numbers, and reads there. Torch takes a place and
    a number of draws left that together lead past the end.

    Raises:
        ValueError: with what is wrong.
    """
    if not isinstance(state, dict):
        raise ValueError("a random state isn't a dict")
    try:
        version, numbers, gauss = state["python"]
        python = random.Random()
        python.setstate((version, tuple(numbers), gauss))
        _check_twister(python.getstate()[1][:-1])
        _check_numpy(state["numpy"])
        if not isinstance(state["own"], list):
            raise TypeError("'own' isn't a list")
        for own in state["own"]:
            if not is_of_a_gpu(own):
                _check_torch(own)
        _check_torch(state["torch"])
    except Exception as error:  # each library raises what it likes
        raise ValueError(f"a random state can't be one ({error})") from error
    of_devices = state.get("devices") or []
    if not isinstance(of_devices, list) or not all(map(_may_be_a_devices, of_devices)):
        raise ValueError("a random state of a device isn't some bytes")


def _check_twister(numbers: Any) -> None:
    """Refuse the one state that yields only zeros, on which some draws would never end."""
    first, *others = (int(number) & 0xFFFFFFFF for number in numbers)
    if not any(others) and first < 1 << 31:  # of the first number, the top bit alone counts
        raise ValueError("all of it is zero")


def _check_numpy(state: Any) -> None:
    trial = np.random.RandomState()
    trial.set_state(state)  # refuses another kind of generator
    inner = trial.get_state(legacy=False)["state"]
    if not 0 <= inner["pos"] <= _NUMBERS:
        raise ValueError(f"NumPy's place in it is {inner['pos']}")
    _check_twister(inner["key"])


def _check_torch(state: Any) -> None:
    torch.Generator().set_state(state)  # refuses another size, or a place outside
    raw = state.contiguous().numpy().tobytes()
    left, _, place = struct.unpack_from("=iiQ", raw, _SEED_BYTES)
    if left < 1 or (left > 1 and place + left - 1 > _NUMBERS):
        raise ValueError(f"torch's place in it is {place}, with {left - 1} numbers left")
    start = _SEED_BYTES + 16
    _check_twister(np.frombuffer(raw[start : start + 8 * _NUMBERS], np.uint64))


def set_seed(seed: int) -> int:
    """Seed the random numbers of Python, NumPy and torch (on all devices).

    The same seed before the same calls gives the same bits on a CPU: weights, shuffling, dropout.

    Args:
        seed: an int from 0 to 2**32 - 1 (NumPy's limit).

    Returns:
        The seed.

    Raises:
        ArgumentTypeError: `seed` isn't an int.
        ConfigurationError: `seed` is out of range.

    Example:
        >>> import torch, fitkit
        >>> first = fitkit.set_seed(0), torch.randn(3)
        >>> again = fitkit.set_seed(0), torch.randn(3)
        >>> torch.equal(first[1], again[1])
        True
    """
    seed = check_count("seed", seed, minimum=0)
    if seed >= 2**32:
        raise ConfigurationError(f"seed={seed} must be below 2**32 = {2**32}.")
    seed = int(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed
