"""Which precisions go on which devices."""

from __future__ import annotations

import torch

from fitkit.errors import ConfigurationError

FLOAT8 = "fp8-mixed"
"""Its name, which the table has for one kind of device alone."""

ALL = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")

GOES: dict[str, tuple[str, ...]] = {
    "cpu": ALL,
    "cuda": (*ALL, FLOAT8),
    "mps": tuple(name for name in ALL if name != "64-true"),
    "xla": ("32-true", "64-true", "bf16-mixed", "bf16-true"),
}
"""What torch 2.13 can compute, by device type."""

REASONS = {
    ("mps", "64-true"): "Apple's GPUs have no float64",
    ("xla", "16-mixed"): "TPUs have no float16",
    ("xla", "16-true"): "TPUs have no float16",
    ("cpu", FLOAT8): "CPUs have no products of 8-bit floats (precision=fitkit.precisions."
    "Float8Mixed(emulate=True) computes the same numbers there, slowly)",
    ("mps", FLOAT8): "Apple's GPUs have no products of 8-bit floats",
    ("xla", FLOAT8): "torchao's layers are for CUDA",
}

FLOAT8_CAPABILITY = (8, 9)
"""The compute capability from which on NVIDIA's GPUs multiply 8-bit floats."""

FLOAT8_ARCHITECTURES = ("gfx94", "gfx95", "gfx120")
"""How the names of AMD's GPUs that do begin."""


def check_pair(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a precision that a device can't compute in.

    Args:
        name: the precision's.
        dtype: the one that the device must know.

    Raises:
        ConfigurationError: with the reason, and the table of what goes.
    """
    kind = device.type
    reason = REASONS.get((kind, name))
    if kind == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        reason = f"{torch.cuda.get_device_name(device)} has no bfloat16"
    if kind == "cuda" and name == FLOAT8:
        reason = _why_no_float8(device)
    if reason is None and (kind not in GOES or name in GOES[kind]):
        return
    table = "; ".join(f"{device_type}: {', '.join(names)}" for device_type, names in GOES.items())
    raise ConfigurationError(
        f"precision={name!r} can't be used on {kind}: {reason}. What goes: {table}."
    )


def _why_no_float8(device: torch.device) -> str | None:
    """Why a GPU can't multiply 8-bit floats; None where it can."""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        found = str(torch.cuda.get_device_properties(device).gcnArchName)
        goes, needed = found.startswith(FLOAT8_ARCHITECTURES), "MI300 or later"
    else:
        capability = torch.cuda.get_device_capability(device)
        found = "compute capability " + ".".join(map(str, capability))
        goes, needed = capability >= FLOAT8_CAPABILITY, "8.9 or later: RTX 40, L4, H100"
    if goes:
        return None
    return f"{name} has {found}, and products of 8-bit floats need {needed}"
