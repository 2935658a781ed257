"""Tensors as bytes, as numbers and as one vector, and how amounts of memory read."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.nn.parameter import is_lazy


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a place in memory for each of its numbers: it isn't nested or sparse."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a process holds a tensor's numbers as such: not a part, a shape or a code of them."""
    return (
        not is_lazy(tensor)
        and is_dense(tensor)
        and not (tensor.is_meta or tensor.is_quantized or hasattr(tensor, "full_tensor"))
    )


def first_spoiled(weights: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first weight with a number that isn't finite; None if there is none.

    Of weights that ranks hold in parts nothing is said, nor of layouts and types that torch can't
    ask.

    Args:
        weights: by name, as `named_parameters` gives them.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, weight in weights:
        is_inexact = weight.is_floating_point() or weight.is_complex()
        if is_whole(weight) and is_inexact and weight.element_size() > 1:
            found = by_device.setdefault(weight.device, {})
            found[name] = torch.isfinite(weight.detach()).all()
    for found in by_device.values():  # one wait for a device, not one for each weight
        are_finite = torch.stack([*found.values()]).tolist()
        bad = (name for name, is_finite in zip(found, are_finite, strict=True) if not is_finite)
        if (first := next(bad, None)) is not None:
            return first.removeprefix("net.")
    return None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, in its own memory where that is contiguous: (bytes,) uint8.

    Example:
        >>> import torch
        >>> from fitkit.tensors import bytes_of
        >>> bytes_of(torch.zeros(()).expand(1, 1))
        tensor([0, 0, 0, 0], dtype=torch.uint8)
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor may have any strides along dimensions of one entry, which a view keeps.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def values_for_copies(thing: object) -> dict[int, torch.Tensor]:
    """Return a memo for `copy.deepcopy` in which what a last call has left is without a graph.

    Torch copies no tensor that was computed with gradients. A torchmetrics object keeps one if it
    has returned a batch's loss, for example.

    Args:
        thing: a module, or an object like one.

    Example:
        >>> import copy, torch
        >>> from fitkit.tensors import values_for_copies
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer.last = layer(torch.ones(1, 2))
        >>> copy.deepcopy(layer, values_for_copies(layer)).last.requires_grad
        False
    """
    found: dict[int, torch.Tensor] = {}
    for part in thing.modules() if isinstance(thing, torch.nn.Module) else [thing]:
        for value in vars(part).values():
            held = list(value.values()) if isinstance(value, dict) else value
            for one in held if isinstance(held, (list, tuple)) else [held]:
                if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                    found[id(one)] = one.detach().clone()
    return found


def human_bytes(size: float) -> str:
    """Return an amount of memory as people read it: `512 B`, `4.0 KiB`, `97.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class FlatTensors:
    """A view of floating tensors as one vector, in the widest of their dtypes, at least float32.

    Args:
        tensors: on one device; complex ones count as pairs.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._held = list(tensors)
        self._sizes = [tensor.numel() for tensor in self._tensors]
        dtypes = (tensor.dtype for tensor in self._tensors)
        self._dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """The tensors as real ones; their memory may have changed since the last time."""
        found = [tensor.detach() for tensor in self._held]
        return [torch.view_as_real(t) if t.is_complex() else t for t in found]

    def read(self) -> torch.Tensor:
        """Return a vector of the tensors' numbers; a copy."""
        if not self._held:
            return torch.empty(0)
        return torch.cat([tensor.reshape(-1).to(self._dtype) for tensor in self._tensors])

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Give the tensors a vector's numbers; none of them shares its memory afterwards."""
        for tensor, part in zip(self._tensors, vector.split(self._sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))

    @torch.no_grad()
    def add(self, vector: torch.Tensor) -> None:
        """Add a vector's numbers to the tensors'."""
        for tensor, part in zip(self._tensors, vector.split(self._sizes), strict=True):
            tensor.add_(part.view(tensor.shape))
