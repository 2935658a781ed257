"""How torch traces what fitkit compiles: Python's numbers stay what they are.

Torch's defaults give wrong numbers in places. A float that changes becomes a symbol at its second
value, and the compiler writes the third one into its code. Draws of `random` are read as another
type. NumPy's draws come from torch's generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

SETTINGS = {
    "specialize_float": True,  # a changed float is compiled again, as a changed integer is
    "use_numpy_random_stream": True,  # NumPy itself draws, outside of graphs
    "trace_autograd_ops": True,  # `torch.autograd.grad` becomes a part of a graph
}
"""Settings of `torch._dynamo.config` while torch traces, if this torch has them."""


def compiled_net(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return what `compiled` does, for a net that DDP may call.

    Then torch puts tracers for DDP's buckets in place of the one that `compiled` changes. So the
    settings hold around the whole call, which takes 0.1 ms.
    """
    alone, within_ddp = compiled(function, **options), torch.compile(function, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        if DistributedDataParallel._active_ddp_module is None:
            return alone(*args, **kwargs)
        with _settings():
            return within_ddp(*args, **kwargs)

    return call


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, **options)`, traced with `SETTINGS`.

    The settings hold only while torch traces this function, also when it does so again. So calls
    cost nothing more, and what others compile is traced as ever.
    """
    found = torch.compile(function, **options)
    inner: Any = found
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    tracer = getattr(cells["self"].cell_contents, "callback", None) if "self" in cells else None
    if hasattr(tracer, TRACER):
        setattr(tracer, TRACER, _Traced(getattr(tracer, TRACER)))
        return found

    def call(*args: Any, **kwargs: Any) -> Any:
        with _settings():
            return found(*args, **kwargs)

    return call  # this torch has the tracer elsewhere


TRACER = "_torchdynamo_orig_backend"
"""The attribute of torch's callback for frames that has the function which traces them."""


class _Traced:
    """Torch's function that traces a frame, with `SETTINGS`."""

    def __init__(self, tracer: Any) -> None:
        self._torchdynamo_orig_backend = tracer  # torch follows this name to the backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _settings():
            return self._torchdynamo_orig_backend(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchdynamo_orig_backend, name)


_lock = threading.RLock()


@contextmanager
def _settings() -> Iterator[None]:
    from torch._dynamo import config
    from torch._dynamo.variables import misc, user_defined

    known = {name: SETTINGS[name] for name in SETTINGS if hasattr(config, name)}
    with _lock, config.patch(dict[str, Any](known)), ExitStack() as stack:
        for module in (user_defined, misc):
            if hasattr(module, "call_random_fn"):
                stack.enter_context(patch.object(module, "call_random_fn", _refuse_draw))
        yield


def _refuse_draw(*args: Any) -> Any:
    """Leave a draw of Python's `random` out of the graph."""
    from torch._dynamo.exc import unimplemented

    unimplemented(
        gb_type="draw of Python's random",
        context="",
        explanation="torch would read the number as another type",
        hints=[],
    )
