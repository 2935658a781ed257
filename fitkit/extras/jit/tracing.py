"""How torch traces what fitkit compiles: Python's numbers stay what they are.

Torch's defaults give wrong numbers in places. A float that changes becomes a symbol at its second
value, and the compiler writes the third one into its code. Draws of `random` are read as another
type. NumPy's draws come from torch's generator. A change in place of a single float64 on the CPU
is left out.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from fitkit.extras.jit.leftovers import Leftovers
from fitkit.outputs import of_hugging_face


class UncompiledError(Exception):
    """Says why a step, or a part of it, can't be compiled."""


SETTINGS = {
    "specialize_float": True,  # a changed float is compiled again, as a changed integer is
    "use_numpy_random_stream": True,  # NumPy itself draws, outside of graphs
    "skip_nnmodule_hook_guards": False,  # a hook that is added or removed is noticed
    "allow_unspec_int_on_nn_module": True,  # global_step changes, as batch_idx does
    "trace_autograd_ops": True,  # `torch.autograd.grad` becomes a part of a graph
}
"""Settings of `torch._dynamo.config` while torch traces, if this torch has them."""


def compiled(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    failed: Callable[[Exception], None] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Return `torch.compile(function, backend=backend, **options)`, traced with `SETTINGS`.

    The settings hold only while torch traces this function, also when it does so again. So calls
    cost nothing more, and what others compile is traced as ever.

    Args:
        function: has a code of its own (`give_own_code`).
        backend: it lives as long as what is returned, as does all that torch keeps of both.
        failed: takes an error of the compiler's, of any class. Then the frame that torch reads
            runs as written in this call. None: `UncompiledError` is raised instead.
    """
    left = Leftovers(function.__code__)
    torch.compiler.assume_constant_result(of_hugging_face)
    with left.noted():
        found = torch.compile(function, backend=_Unowned(backend), **options)
    weakref.finalize(found, left.drop).atexit = False
    inner: Any = found
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    tracer = getattr(cells["self"].cell_contents, "callback", None) if "self" in cells else None
    if hasattr(tracer, TRACER):
        setattr(tracer, TRACER, _Traced(getattr(tracer, TRACER), backend, failed, left))
        return found

    def call(*args: Any, **kwargs: Any) -> Any:
        with _settings(suppress_errors=failed is not None), left.noted():
            return found(*args, **kwargs)

    call.backend = backend  # type: ignore[attr-defined]
    return call  # this torch has the tracer elsewhere


class _Unowned:
    """A backend without its owner, for torch, which keeps every backend longer than that.

    Backends know graphs, whose inputs are a model's weights.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.__name__ = backend.__name__  # torch's messages have it
        self._backend = weakref.ref(backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        backend = self._backend()
        assert backend is not None, "what it compiles is gone"
        return backend(*args, **kwargs)


TRACER = "_torchdynamo_orig_backend"
"""The attribute of torch's callback for frames that has the function which traces them."""


TENSORIFIES = "_is_tensorify_enabled"
"""Torch's function that says whether its pass for floats that change runs; `bool()` is False.

`specialize_float` leaves it nothing to do. For a single float64 on the CPU, it makes torch trace
again. Then torch 2.13 removes each change in place of this tensor whose result isn't used.
"""


class _Traced:
    """Torch's function that traces a frame, with `SETTINGS`."""

    def __init__(
        self,
        tracer: Any,
        backend: object,
        failed: Callable[[Exception], None] | None,
        left: Leftovers,
    ) -> None:
        self._tracer, self._backend, self._failed, self._left = tracer, backend, failed, left
        self._torchdynamo_orig_backend = getattr(tracer, TRACER)  # torch follows it to the backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with _settings(), self._left.noted():
                return self._tracer(*args, **kwargs)
        except Exception as error:
            if self._failed is None:
                raise UncompiledError(why_uncompiled(error)) from error
            from torch._dynamo.types import ConvertFrameReturn

            self._failed(error)
            return ConvertFrameReturn(apply_to_code=False, skip_reason="the compiler failed")

    def _clone_with_backend(self, backend: Any) -> _Traced:
        """Return what traces for another backend: for DDP's, which has a graph for each bucket."""
        tracer = self._tracer._clone_with_backend(backend)
        return _Traced(tracer, self._backend, self._failed, self._left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracer, name)


_lock = threading.RLock()


@contextmanager
def _settings(**more: Any) -> Iterator[None]:
    from torch._dynamo import config
    from torch._dynamo.variables import misc, user_defined
    from torch.fx.passes import _tensorify_python_scalars as tensorify

    known = {name: SETTINGS[name] for name in SETTINGS if hasattr(config, name)}
    with _lock, config.patch({**known, **more}), ExitStack() as stack:
        for module in (user_defined, misc):
            if hasattr(module, "call_random_fn"):
                stack.enter_context(patch.object(module, "call_random_fn", _refuse_draw))
        if hasattr(tensorify, TENSORIFIES):
            stack.enter_context(patch.object(tensorify, TENSORIFIES, bool))
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


def why_uncompiled(error: BaseException) -> str:
    """Say why torch couldn't compile something: its error's first line, and the user's line."""
    text = str(error).strip()
    if own := re.search(r"UncompiledError\(([\"'])(.*?)\1\)", text):  # raised while torch traces
        return own[2]
    if AGAIN_AND_AGAIN in text:
        return "it reads a number that changes, and torch would compile it anew for each"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    first, *rest = lines
    if first.endswith("raised:") and rest:  # "backend='inductor' raised:", then the error itself
        first = f"{first} {rest[0]}"
    places = [line for line in rest if line.startswith("File ")]
    return f"{first.rstrip('.')} ({places[-1]})" if places else first.rstrip(".")


AGAIN_AND_AGAIN = "Hard failure due to fullgraph=True"
"""What torch says where it has compiled a function too often."""
OTHERS_LEARN = "which parameters have a gradient changes from batch to batch"
