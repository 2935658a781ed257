"""How the weights of convolutions lie in memory during a call: `compile(memory_format=…)`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import torch
from torch.optim import Optimizer

from fitkit.compilation import MEMORY_FORMATS
from fitkit.typing import MemoryFormat

_uses: dict[int, int] = {}
"""How many calls now use a parameter in another layout, by the parameter's id."""


_lock = threading.RLock()


@contextlib.contextmanager
def laid_out(module: torch.nn.Module, word: MemoryFormat | None) -> Iterator[None]:
    """Change the layout of a module's four-dimensional parameters for the length of a block.

    The tensors stay the same objects with the same numbers; only their strides change. If calls
    overlap, the last one to end restores the layout.

    Args:
        word: a key of `MEMORY_FORMATS`; None leaves the module unchanged.
    """
    changed: list[torch.nn.Parameter] = []
    layout = MEMORY_FORMATS[word or "channels_last"]
    try:
        with _lock:
            for parameter in () if word is None else module.parameters():
                is_used = id(parameter) in _uses
                if not is_used and not (
                    parameter.ndim == 4
                    and parameter.is_contiguous()
                    and parameter.is_floating_point()
                ):
                    continue
                _uses[id(parameter)] = _uses.get(id(parameter), 0) + 1
                changed.append(parameter)
                if not is_used:
                    parameter.data = parameter.data.contiguous(memory_format=layout)
        yield
    finally:
        with _lock:
            for parameter in changed:
                _uses[id(parameter)] -= 1
                if not _uses[id(parameter)]:
                    del _uses[id(parameter)]
                    parameter.data = parameter.data.contiguous()


def match_strides(optimizers: Iterable[Optimizer]) -> None:
    """Give optimizers' running values the same layout as their parameters.

    Fused steps read both in memory order.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == parameter.shape
                    and value.stride() != parameter.stride()
                ):
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
