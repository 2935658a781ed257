"""Names without `torch.compile`'s wrappers: files hold a net's own names, compiled or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

CHILD = "_orig_mod"
"""The name under which `torch.compile(module)` holds the module."""


def plain_name(name: str) -> str:
    """Return the name of a tensor or submodule as it is without the wrappers.

    Example:
        >>> plain_name("_orig_mod.body._orig_mod.0.weight")
        'body.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != CHILD)


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """Give a module without the wrappers that `torch.compile` has put around it, or around its
    parts, for the length of a block. They are left out of names only: the modules stay the same.
    """
    wrapped = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if name != CHILD and child is not None and CHILD in child._modules
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = _inner(child)
    try:
        yield _inner(module)
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def _inner(module: nn.Module) -> nn.Module:
    while (inner := module._modules.get(CHILD)) is not None:
        module = inner
    return module
