"""Modules that were built under `torch.device("meta")`: shapes, and no numbers until they train."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from fitkit.errors import ConfigurationError


class Unfilled:
    """The submodules of a module whose tensors have memory now, but no values yet.

    The memory is the system's promise: it takes none before it is written. Each submodule gets its
    values by its own `reset_parameters`, with a seed that follows from its name. So the values
    don't depend on the order of the submodules or the number of ranks.

    Args:
        module: its parameters and buffers on the meta device get main memory. The parameters
            stay the same objects.
        covered: names of tensors that will be overwritten. A submodule with only such tensors
            needs no values.

    Raises:
        ConfigurationError: a submodule can't draw its values. Nothing is changed then.
    """

    def __init__(self, module: nn.Module, covered: Collection[str] = ()) -> None:
        found = [(name, part) for name, part in module.named_modules() if any(_meta(part))]
        self._names = {
            part: name
            for name, part in found
            if not all(f"{name}.{own}".lstrip(".") in covered for own in _meta(part))
        }
        for part, name in self._names.items():
            if _reset_of(part) is None:
                raise ConfigurationError(
                    f"{name or 'The net'} ({type(part).__name__}) has tensors on the meta device "
                    f"({', '.join(_meta(part))}) and no reset_parameters() that fills them. Give "
                    "it one, or load weights first (model.load_weights)."
                )
        for _, part in found:
            _give_memory(part)
        # From the caller's stream of random numbers, so that its seed decides.
        self._seed = int(torch.randint(2**62, ())) if self._names else 0

    def fill(self, parts: Collection[nn.Module] | None = None) -> None:
        """Draw the numbers of these submodules (None: of all) that have none yet, on the CPU."""
        wanted = None if parts is None else self._with_those_around(parts)
        # A submodule may set its children's tensors after they have set their own.
        for part, name in reversed(list(self._names.items())):
            if wanted is None or part in wanted:
                del self._names[part]
                reset = _reset_of(part)
                assert reset is not None
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    torch.manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
                    reset()

    def _with_those_around(self, parts: Collection[nn.Module]) -> set[nn.Module]:
        """Return these submodules, and all inside parents that draw values: a parent may reset the
        tensors inside it, and can't if they are sharded.
        """
        wanted = set(parts)
        for part in reversed(self._names):  # inner ones first
            inside = set(part.modules())
            if part not in wanted and not wanted.isdisjoint(inside):
                wanted |= inside
        return wanted


def _meta(part: nn.Module) -> Iterator[str]:
    """Yield the names of a submodule's own tensors without memory."""
    for held in (part._parameters, part._buffers):
        for name, tensor in held.items():
            if tensor is not None and tensor.is_meta and not nn.parameter.is_lazy(tensor):
                yield name


def _reset_of(part: nn.Module) -> Any:
    return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)


def _give_memory(part: nn.Module) -> None:
    for name in list(_meta(part)):
        old = part._parameters.get(name)
        if old is None:
            buffer = part._buffers[name]
            assert buffer is not None
            part._buffers[name] = torch.empty_like(buffer, device="cpu")
            continue
        new = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
        # Optimizers and tied layers hold the object.
        torch.utils.swap_tensors(old, new)
