"""What a module's own loading code makes of weights, found out before anything changes.

A module may say itself how it is loaded: by `_load_from_state_dict`, by hooks around it, or by a
`load_state_dict` of its own. So it takes names and shapes that it doesn't have now, such as a
buffer that grows. Such code is rehearsed (`extras/rehearsal.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Rehearsal:
    """How loading a state dict would end.

    Attributes:
        missing: names that the module wants, and doesn't get.
        unexpected: names that it doesn't take.
        errors: torch's sentences on what can't be copied. With them, the names aren't known.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def own_parts(module: nn.Module) -> tuple[str, ...]:
    """Return what begins the names of the tensors that a module's own code loads."""
    loading = getattr(module.load_state_dict, "__func__", None)
    if loading is not nn.Module.load_state_dict and not hasattr(loading, "copies_as_torch"):
        return ("",)
    return tuple(_parts(module, ""))


def _parts(part: nn.Module, prefix: str) -> Iterator[str]:
    if _is_own(part):
        yield prefix
        return
    for name, inner in part._modules.items():
        if inner is not None:
            yield from _parts(inner, f"{prefix}{name}.")


def _is_own(part: nn.Module) -> bool:
    loading = getattr(part._load_from_state_dict, "__func__", None)
    hooks = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
    own = [hook for hook in hooks if not hasattr(getattr(hook, "hook", hook), "copies_as_torch")]
    return loading is not nn.Module._load_from_state_dict or bool(own)
