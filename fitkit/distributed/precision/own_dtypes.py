"""Casting a module in place, and giving it its own dtypes back.

The dtypes from before are written down on the module itself, so that a copy of it in another
process knows them too; they enter no `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

RECORD = "_dtypes_before_precision"
"""The module's attribute: the dtype that it was cast to, and each tensor's own by its name."""

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
    setattr(module, RECORD, (dtype, own))


def give_back(module: nn.Module) -> None:
    """Undo `cast`, where it was called; a tensor whose dtype changed since then keeps it."""
    if not hasattr(module, RECORD):
        return
    present = dict(_floating(module))
    own = {name: _own(module, name, tensor) for name, tensor in present.items()}
    kinds = set(own.values())
    if len(kinds) == 1 and kinds <= CASTS.keys():
        CASTS[kinds.pop()](module)
    else:
        for name, tensor in present.items():
            _cast_tensor(tensor, own[name])
    delattr(module, RECORD)


def own_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the module's floating parameters, as it is when nothing has cast them.

    Of a module without any: torch's default.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            return _own(module, name, parameter)
    return torch.get_default_dtype()


def match_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer's running values the dtype and the device that their parameters have now.

    Those of a training in another precision would meet gradients of another dtype, and those of
    a sharded one are in main memory.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            # Torch counts steps in float32 beside parameters of any dtype.
            if key != "step":
                state[key] = _matched(value, parameter)


def _matched(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(parameter.device if value.ndim else value.device, parameter.dtype)
    if isinstance(value, list):  # LBFGS keeps its history in lists
        return [_matched(item, parameter) for item in value]
    return value


def _own(module: nn.Module, name: str, tensor: torch.Tensor) -> torch.dtype:
    """The dtype that a tensor had before `cast`; its present one where that isn't from there."""
    record: tuple[torch.dtype | None, dict[str, torch.dtype]] = getattr(module, RECORD, (None, {}))
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
