"""Precision: the base class, and full, mixed and 16- or 64-bit precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.accelerators import computes_bfloat16, name_of, widest_dtype
from fitkit.errors import ConfigurationError, warn_once
from fitkit.modes import modules_of, parameters_of

NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
"""Surrounds a step and does nothing. It is shared, so that a step creates no new object."""


class Precision:
    """The number types in which a module keeps its parameters and computes.

    The base class is right for a module that computes in its own dtype. Your own precision
    overrides what differs.

    Attributes:
        name: the name that users write.
        compute_dtype: the dtype of matrix products and convolutions. None for the module's own.

    Example:
        >>> import torch, fitkit
        >>> issubclass(fitkit.precisions.Float8Mixed, fitkit.precisions.Precision)
        True
    """

    name = ""
    compute_dtype: torch.dtype | None = None

    is_plain = False
    """Whether nothing surrounds a forward, and outputs stay as they are: a step is shorter then."""

    def check(self, device: torch.device) -> None:
        """Refuse a device that can't compute in this precision.

        Raises:
            ConfigurationError: with a table of the precisions that each device supports.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose arithmetic breaks down in this precision.

        Raises:
            ConfigurationError: with what to write instead.
        """

    def convert(self, module: nn.Module) -> None:
        """Give the module's parameters and buffers this precision's dtype, in place.

        The base class restores the module. Parameters that a "-true" precision has cast get their
        own dtype back, but digits that were rounded off stay lost. Layers that an earlier precision
        has changed get their own class back. All others stay as they are.

        Raises:
            ConfigurationError: the module can't learn in this precision.
        """
        restore_layers(module)
        restore_dtypes(module)

    def convert_loss(self, module: nn.Module) -> None:
        """Give a loss or metric the dtype of what it gets: that of `widen`'s outputs, in place."""
        restore_dtypes(module)

    def input_dtype(self, module: nn.Module) -> torch.dtype:
        """Return the dtype that floating inputs get before a step, even before `convert` was
        called.
        """
        return own_dtype(module)

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return a context manager for the net's forward.

        Args:
            device_type: the type of the net's device (`"cpu"`, `"cuda"`, …).
        """
        return NOTHING

    def widen(self, tree: Any) -> Any:
        """Return a net's outputs in the dtype in which losses and metrics are computed.

        If the precision computes in no half type, this is the same object.
        """
        return tree

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return the loss scaler that keeps small gradients from vanishing. None if none vanish.

        There is one for a whole training, because its scale adapts from step to step.
        """
        return None


class FullPrecision(Precision):
    """Computes in the module's own dtype (float32, unless its maker chose another).

    A module that a "-true" precision has cast gets its own dtypes back.
    """

    name = "32-true"

    @property
    def is_plain(self) -> bool:  # type: ignore[override]
        return type(self) is FullPrecision  # a subclass may do more


# ---------------------------------------------------------------------- which devices

FLOAT8 = "fp8-mixed"
"""Its name, which the table has for one kind of device only."""

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
"""The prefixes of the names of AMD's GPUs that multiply 8-bit floats."""


def check_pair(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a precision that a device can't compute in.

    Args:
        name: the precision's name.
        dtype: the dtype that the device must support.

    Raises:
        ConfigurationError: with the reason, and a table of what each device supports.
    """
    kind = device.type
    reason = REASONS.get((kind, name))
    if reason is None and name == FLOAT8 and kind not in GOES:
        reason = "torchao's layers are for CUDA"
    if reason is None and dtype is torch.float64 and widest_dtype(device) is not dtype:
        reason = f"{name_of(device)} has no float64"
    if dtype is torch.bfloat16 and not computes_bfloat16(device):
        warn_once(
            f"{name_of(device)} has no bfloat16 of its own and emulates it, at a fraction of its "
            f"speed. Write precision='16-mixed' instead of {name!r}."
        )
    if kind == "cuda" and name == FLOAT8:
        reason = _why_no_float8(device)
    if reason is None:
        return
    table = "; ".join(f"{device_type}: {', '.join(names)}" for device_type, names in GOES.items())
    raise ConfigurationError(
        f"precision={name!r} can't be used on {kind}: {reason}. Supported: {table}.", code="FK038"
    )


def _why_no_float8(device: torch.device) -> str | None:
    """Why a GPU can't multiply 8-bit floats; None if it can."""
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
    """Half-precision tensors of a tree as float32, differentiably. Others stay as they are.

    A tree without any is returned itself, so that a net keeps its own output class.
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


# ---------------------------------------------------------------------- cast, and back

CAST = "_dtypes_before_precision"
"""The module's attribute: the dtype that it was cast to, and each tensor's own by its name.

It is on the module itself, so that a copy in another process has it too; it enters no `state_dict`.
"""

CASTS: dict[torch.dtype, Callable[[nn.Module], Any]] = {
    torch.float16: nn.Module.half,
    torch.bfloat16: nn.Module.bfloat16,
    torch.float32: nn.Module.float,
    torch.float64: nn.Module.double,
}
"""Torch's casts of floating tensors; `module.to(dtype)` would take complex ones' imaginary part."""


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters and buffers in place; integer and complex ones stay.

    Args:
        dtype: one of `CASTS`.
    """
    present = dict(_floating(module))
    if all(tensor.dtype is dtype for tensor in present.values()):
        return
    own = {name: _own(module, name, tensor) for name, tensor in present.items()}
    CASTS[dtype](module)
    setattr(module, CAST, (dtype, own))


def restore_dtypes(module: nn.Module) -> None:
    """Undo `cast`. A tensor whose dtype has changed since then keeps it."""
    if CAST not in vars(module):
        return
    present = dict(_floating(module))
    own = {name: _own(module, name, tensor) for name, tensor in present.items()}
    kinds = set(own.values())
    if len(kinds) == 1 and kinds <= CASTS.keys():
        CASTS[kinds.pop()](module)
    else:
        for name, tensor in present.items():
            _cast_tensor(tensor, own[name])
    delattr(module, CAST)


def own_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the module's floating parameters when nothing has cast them.

    For a module without any: that of its complex parameters' parts, else torch's default.
    """
    parameters = list(parameters_of(module))
    first = next((p for p in parameters if p.is_floating_point()), None)
    if first is None:
        complexes = (p.dtype.to_real() for p in parameters if p.is_complex())
        return next(complexes, torch.get_default_dtype())
    if CAST not in vars(module):
        return first.dtype
    name = next(name for name, parameter in module.named_parameters() if parameter is first)
    return _own(module, name, first)


def match_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer's state the dtype and device that its parameters have now.

    After a training in another precision it would meet gradients of another dtype. After a sharded
    training it is in main memory, and after one on another device it is there.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for parameter, state in optimizer.state.items():
        group = groups.get(parameter, {})
        # As torch's load_state_dict has it: where a kernel reads them, they are on the device.
        on_device = bool(group.get("fused") or group.get("capturable"))
        for key, value in state.items():
            # Torch counts steps in float32 beside parameters of any dtype.
            dtype = None if key == "step" else parameter.dtype
            state[key] = _matched(value, parameter.device, dtype, on_device)


def _matched(value: Any, device: torch.device, dtype: torch.dtype | None, on_device: bool) -> Any:
    if isinstance(value, torch.Tensor) and trees.is_inexact(value):
        # Numbers of no dimension are in main memory, where the host reads them without a wait.
        stays = value.ndim == 0 and not on_device
        alike = dtype is not None and value.is_complex() == dtype.is_complex
        return value.to("cpu" if stays else device, dtype if alike else value.dtype)
    if isinstance(value, list):  # LBFGS keeps its history in lists
        return [_matched(item, device, dtype, on_device) for item in value]
    return value


def _own(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that a tensor had before `cast`, or its current one if `cast` didn't set
    that.
    """
    record: tuple[torch.dtype | None, dict[str, torch.dtype]] = vars(module).get(CAST, (None, {}))
    cast_to, own = record
    return own.get(name, tensor.dtype) if tensor.dtype is cast_to else tensor.dtype


def _floating(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter or buffer and its gradient; the object stays, so optimizers keep it."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    tensor.grad = None if gradient is None else gradient.to(dtype)


# ---------------------------------------------------------------------- other layers, and back

CHANGED = "_changed_by_precision"
"""The layer's attribute: its own class, and the names of the attributes added to it."""


def change_layer(layer: nn.Module, made: nn.Module) -> None:
    """Give a layer the class and settings of another one. It stays the same object.

    So its parameters, optimizers, hooks and names stay valid.
    """
    added = {name: value for name, value in vars(made).items() if name not in vars(layer)}
    vars(layer).update(added, **{CHANGED: (type(layer), tuple(added))})
    layer.__class__ = type(made)


def changed_layers(module: nn.Module) -> list[Any]:
    """Return the layers that are changed now."""
    return [layer for layer in modules_of(module) if CHANGED in vars(layer)]


def restore_layers(module: nn.Module) -> None:
    """Undo `change_layer` for all layers of a module."""
    for layer in changed_layers(module):
        restore_layer(layer)


def restore_layer(layer: nn.Module) -> None:
    """Undo `change_layer`."""
    kind, added = vars(layer)[CHANGED]
    for name in (*added, CHANGED):
        del vars(layer)[name]
    layer.__class__ = kind


@contextlib.contextmanager
def plain_layers(module: nn.Module) -> Iterator[None]:
    """Make a module's layers ordinary within the block: for a file that runs without torchao."""
    layers = changed_layers(module)
    before = [(type(layer), dict(vars(layer))) for layer in layers]
    restore_layers(module)
    try:
        yield
    finally:
        for layer, (kind, attributes) in zip(layers, before, strict=True):
            vars(layer).update(
                {name: attributes[name] for name in (*attributes[CHANGED][1], CHANGED)}
            )
            layer.__class__ = kind


class MixedPrecision(Precision):
    """Autocast: matrix products and convolutions in a half type, the rest in float32.

    Reference: Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740.
    """

    compute_dtype: torch.dtype

    def check(self, device: torch.device) -> None:
        check_pair(self.name, self.compute_dtype, device)

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        # A new one each time: one object can't surround a step within a step.
        return torch.autocast(device_type, self.compute_dtype)

    def widen(self, tree: Any) -> Any:
        return widened(tree)


class BFloat16Mixed(MixedPrecision):
    """Autocast to bfloat16, which has float32's range: no loss scaling is needed."""

    name = "bf16-mixed"
    compute_dtype: torch.dtype = torch.bfloat16


class HalfMixed(MixedPrecision):
    """Autocast to float16, with the loss scaled so that small gradients don't vanish."""

    name = "16-mixed"
    compute_dtype: torch.dtype = torch.float16

    def convert(self, module: torch.nn.Module) -> None:
        super().convert(module)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.float16:
                raise ConfigurationError(
                    f"precision='16-mixed' keeps the weights in float32, but {name} is float16, "
                    "whose gradients can't be unscaled. Call .float() on the net, or write "
                    "precision='16-true' or 'bf16-mixed'."
                )

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type)


class TruePrecision(Precision):
    """The module is cast, in place, to one dtype.

    Integer, boolean and complex tensors stay as they are. The module keeps that dtype after a run.
    If you compile `"32-true"` or a mixed precision, it gets its own dtype back with the next run,
    but not the digits that were rounded off.
    """

    compute_dtype: torch.dtype

    def check(self, device: torch.device) -> None:
        check_pair(self.name, self.compute_dtype, device)

    def convert(self, module: torch.nn.Module) -> None:
        restore_layers(module)
        cast(module, self.compute_dtype)

    def convert_loss(self, module: torch.nn.Module) -> None:
        if self.compute_dtype in HALF_TYPES:
            restore_dtypes(module)
        else:
            cast(module, self.compute_dtype)

    def input_dtype(self, module: torch.nn.Module) -> torch.dtype:
        return self.compute_dtype

    def widen(self, tree: Any) -> Any:
        return widened(tree)


class DoublePrecision(TruePrecision):
    """All in float64."""

    name = "64-true"
    compute_dtype: torch.dtype = torch.float64


class BFloat16Precision(TruePrecision):
    """All in bfloat16: float32's range with 2 to 3 digits, in half the memory.

    An update of less than 1/512 of a weight is rounded off; `"bf16-mixed"` keeps it.
    """

    name = "bf16-true"
    compute_dtype: torch.dtype = torch.bfloat16


class HalfPrecision(TruePrecision):
    """All in float16: numbers from 6e-8 to 65504, and no loss scaling.

    Meant for inference and for nets that are known to train so; `"16-mixed"` keeps the weights
    in float32 and scales the loss.
    """

    name = "16-true"
    compute_dtype: torch.dtype = torch.float16

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or eps == 0 or not _vanishes(eps):
                continue
            kind = type(optimizer).__name__
            raise ConfigurationError(
                f"{kind}'s eps={eps:g} is 0 in float16, so precision='16-true' would divide by "
                f"0 and train to NaN. Give compile functools.partial({kind}, eps=1e-4), "
                "or write precision='16-mixed' or 'bf16-true'.",
                code="FK027",
            )


def _vanishes(number: float) -> bool:
    return torch.tensor(number, dtype=torch.float16).item() == 0
