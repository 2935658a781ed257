"""Devices of whatever type torch knows: what `torch.accelerator` and a type's module don't say.

NVIDIA's and AMD's GPUs ("cuda"), Intel's ("xpu"), Apple's ("mps"), Ascend's ("npu"), Gaudi's
("hpu") and every type that a package registers with torch are asked in the same way. What a type
lacks is None or 0.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

WITHOUT_INDEX = ("cpu", "mps", "meta")
"""Types of which a machine has one device, which is written without an index."""


def visible() -> dict[str, int]:
    """How many devices this process sees, by type; types without a device are left out.

    CUDA isn't started by it.
    """
    found = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    current = torch.accelerator.current_accelerator()
    if current is not None and current.type not in found:
        found[current.type] = torch.get_device_module(current).device_count()
    return {kind: count for kind, count in found.items() if count}


def device_for(kind: str, index: int) -> torch.device:
    """Return the device of a type and an index."""
    return torch.device(kind) if kind in WITHOUT_INDEX else torch.device(kind, index)


def is_accelerator(device: torch.device) -> bool:
    """Whether torch has a module for devices of this type, so that memory and streams are its."""
    return device.type not in ("cpu", "meta", "xla")


def current(device: torch.device) -> AbstractContextManager[None]:
    """Make a device the current one within the block, and the caller's again at its end.

    So `.cuda()`, kernels that others compile, and streams without a name mean this device.
    """
    if device.type in WITHOUT_INDEX or not is_accelerator(device):
        return contextlib.nullcontext()
    return _made_current(device)


@contextlib.contextmanager
def _made_current(device: torch.device) -> Iterator[None]:
    module = torch.get_device_module(device)
    before = module.current_device()
    module.set_device(device.index or 0)
    try:
        yield
    finally:
        module.set_device(before)


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a module to a device, with the same objects as parameters, which optimizers hold.

    torch replaces them where a backend's tensors aren't of the CPU's kind: a registered one's.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    there = torch.empty(0, device=device)
    plain = {one.device: one for one in module.parameters() if type(one.data) is torch.Tensor}
    stay = all(torch._has_compatible_shallow_copy_type(one, there) for one in plain.values())
    torch.__future__.set_swap_module_params_on_conversion(before or not stay)
    try:
        module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def has_streams(device: torch.device) -> bool:
    """Whether copies may run beside computation: the type has streams, and memory knows of them."""
    if device.type == "mps" or not is_accelerator(device):
        return False
    return hasattr(torch.get_device_module(device), "Stream")


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, in which sums over an epoch stay exact; float32 where the device lacks it.

    Apple's GPUs lack it, and so do some others.
    """
    return torch.float64 if device.type in ("cpu", "cuda") else _widest(device.type)


@functools.cache
def _widest(kind: str) -> torch.dtype:
    try:
        torch.zeros(1, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def exact_count(count: torch.Tensor) -> float | torch.Tensor:
    """Return a count (()) as a number; on a device, where reading it would wait, in `widest_dtype`.

    Torch divides whole numbers in float32.
    """
    return count.item() if count.is_cpu else count.to(widest_dtype(count.device))


def number_of(value: float | torch.Tensor | None) -> float | torch.Tensor | None:
    """Return a count as Python's number if reading it doesn't wait; else as `exact_count`."""
    return exact_count(value) if isinstance(value, torch.Tensor) else value


def backends_for(device: torch.device) -> str:
    """Return the backends of process groups for ranks on such devices, by torch's own map.

    Objects and numbers go through main memory by gloo, so that they take none of the device's, and
    the host waits for none of its work.
    """
    own = dist.get_default_backend_for_device(device) if is_accelerator(device) else "gloo"
    return own if own == "gloo" else f"cpu:gloo,{device.type}:{own}"


def empty_cache(device: torch.device) -> None:
    """Give the memory that torch keeps for later back to the device."""
    _called(device, "empty_cache")


def free_and_total_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the device's free and whole memory; None where its type doesn't say."""
    if not is_accelerator(device) or not hasattr(torch.get_device_module(device), "mem_get_info"):
        return None
    free, total = torch.get_device_module(device).mem_get_info(device)
    return int(free), int(total)


def held_bytes(device: torch.device) -> int:
    """Return the memory of tensors on the device."""
    return int(_called(device, "memory_allocated", device) or 0)


def reserved_bytes(device: torch.device) -> int:
    """Return the memory that torch holds on the device, for tensors or for later."""
    return int(_called(device, "memory_reserved", device) or held_bytes(device))


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that tensors took since `reset_peak`."""
    return int(_called(device, "max_memory_allocated", device) or 0)


def reset_peak(device: torch.device) -> None:
    """Begin to measure the most memory."""
    _called(device, "reset_peak_memory_stats", device)


def name_of(device: torch.device) -> str:
    """Return the device's own name, or its type's where it has none."""
    return str(_called(device, "get_device_name", device) or device.type)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device itself computes in bfloat16, and doesn't only emulate it."""
    if not is_accelerator(device):
        return True
    asked = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if asked is None:
        return True
    with current(device):
        return bool(asked(including_emulation=False))


def generator_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Return the states of the random numbers of devices, those in use; a CPU's isn't among
    them.
    """
    states: list[torch.Tensor] = []
    for device in filter(is_accelerator, devices):
        module = torch.get_device_module(device)
        # Asking would start it in a process that has no use for it.
        if getattr(module, "is_initialized", lambda: True)():
            states.append(module.get_rng_state(device))
    return states


def set_generator_states(devices: Iterable[torch.device], states: list[torch.Tensor]) -> None:
    """Restore what `generator_states` returned, on these or on other devices of the type."""
    own = [*filter(is_accelerator, devices)]
    if len(own) == len(states):
        for device, state in zip(own, states, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)


def current_device() -> torch.device:
    """Return the accelerator's current device: a call's own within a verb; the CPU where there is
    none.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type in WITHOUT_INDEX:
        return kind or torch.device("cpu")
    return torch.device(kind.type, torch.get_device_module(kind).current_device())


def _called(device: torch.device, name: str, *given: Any) -> Any:
    """Return a function of the type's module; None where there is no such type or function."""
    if not is_accelerator(device):
        return None
    function = getattr(torch.get_device_module(device), name, None)
    return None if function is None else function(*given)
