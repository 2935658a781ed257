"""What a precision decides."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from fitkit import trees
from fitkit.distributed.precision.float8_layers import make_plain
from fitkit.distributed.precision.own_dtypes import give_back, own_dtype
from fitkit.errors import ConfigurationError

NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
"""Surrounds a step and does nothing; shared, so that a step pays for no new object."""


class Precision:
    """In which number types a module keeps its parameters and computes.

    What is here is right for a module that computes in the dtype that it has. A precision of
    your own overrides what it decides otherwise.

    Attributes:
        name: as users write it.
        compute_dtype: of matrix products and convolutions; None for the module's own.
    """

    name = ""
    compute_dtype: torch.dtype | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing surrounds a forward, and outputs stay as they are."""
        kind = type(self)
        return kind.forward is Precision.forward and kind.predictions is Precision.predictions

    def check(self, device: torch.device) -> None:
        """Refuse a device that can't compute in this precision.

        Raises:
            ConfigurationError: with the table of what goes.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose arithmetic breaks down in this precision.

        Raises:
            ConfigurationError: with what to write instead.
        """

    def convert(self, module: torch.nn.Module) -> None:
        """Give the module's parameters and buffers this precision's dtype, in place.

        Here: those that an earlier "-true" precision has cast get their own dtype back (what
        it rounded off stays lost), and layers that multiplied 8-bit floats are ordinary again; all
        others stay as they are.

        Raises:
            ConfigurationError: a module that can't learn in this precision.
        """
        make_plain(module)
        give_back(module)

    def input_dtype(self, module: torch.nn.Module) -> torch.dtype:
        """The dtype that floating inputs get before a step, also before `convert` was called."""
        return own_dtype(module)

    def forward(self, device_type: str) -> AbstractContextManager[Any]:
        """Surrounds the net's forward.

        Args:
            device_type: of the net's device (`"cpu"`, `"cuda"`, …).
        """
        return NOTHING

    def predictions(self, tree: Any) -> Any:
        """A net's outputs in the dtype in which losses and metrics are computed.

        Here and in the precisions that compute in no half type: the very same object.
        """
        return tree

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """What keeps small gradients from vanishing; None where none vanish.

        There is one for all of a training, because its scale adapts from step to step.
        """
        return None


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


HALF_TYPES = (torch.float16, torch.bfloat16)


def widened(tree: Any) -> Any:
    """`tree` with half-precision tensors in float32, differentiably; others as they are.

    A tree without any is returned itself, so that a net's own output class survives.
    """
    if isinstance(tree, torch.Tensor):
        return _wide(tree)
    if any(_is_half(leaf) for leaf in trees.leaves(tree)):
        return trees.map_leaves(_wide, tree)
    return tree


def _wide(leaf: Any) -> Any:
    return leaf.float() if _is_half(leaf) else leaf


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in HALF_TYPES
