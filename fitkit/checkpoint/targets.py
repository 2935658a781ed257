"""The tensors of a module into which loading does nothing but copy.

A file can be read straight into these, by several threads. Where a submodule has loading code of
its own, that code decides what becomes of the numbers, and gets them in memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

# The code that only copies; batch norm's adds a counter that older files lack.
_COPYING = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def plain_targets(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that torch's own loading overwrites, by name.

    Left out are those at or below a submodule that has loading code or hooks of its own, tensors
    of other classes than torch's, and those that share memory with another tensor.
    """
    loading = getattr(module.load_state_dict, "__func__", None)
    if loading is not nn.Module.load_state_dict:
        return {}
    found = {name: tensor for name, tensor in _copied(module, "") if _is_plain(tensor)}
    # Of one memory's numbers, one writer: several at once would mix them.
    users: dict[int, set[int]] = {}
    for tensor in found.values():
        if not tensor.is_meta:
            users.setdefault(_memory(tensor), set()).add(id(tensor))
    return {
        name: tensor
        for name, tensor in found.items()
        if tensor.is_meta or len(users[_memory(tensor)]) == 1
    }


def _copied(part: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    loading = getattr(part._load_from_state_dict, "__func__", None)
    if loading not in _COPYING or part._load_state_dict_pre_hooks:
        return
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and name not in part._non_persistent_buffers_set:
            yield prefix + name, tensor
    for name, inner in part._modules.items():
        if inner is not None:
            yield from _copied(inner, f"{prefix}{name}.")


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
