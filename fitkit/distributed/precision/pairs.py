"""Which precisions go on which devices."""

from __future__ import annotations

import torch

from fitkit.errors import ConfigurationError

ALL = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")

GOES: dict[str, tuple[str, ...]] = {
    "cpu": ALL,
    "cuda": ALL,
    "mps": tuple(name for name in ALL if name != "64-true"),
    "xla": ("32-true", "64-true", "bf16-mixed", "bf16-true"),
}
"""What torch 2.13 can compute, by device type."""

REASONS = {
    ("mps", "64-true"): "Apple's GPUs have no float64",
    ("xla", "16-mixed"): "TPUs have no float16",
    ("xla", "16-true"): "TPUs have no float16",
}


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
    if reason is None and (kind not in GOES or name in GOES[kind]):
        return
    table = "; ".join(f"{device_type}: {', '.join(names)}" for device_type, names in GOES.items())
    raise ConfigurationError(
        f"precision={name!r} can't be used on {kind}: {reason}. What goes: {table}."
    )
