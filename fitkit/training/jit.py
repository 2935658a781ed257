"""`torch.compile` of a net, in place: its parameters keep their names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fitkit.errors import ConfigurationError

if TYPE_CHECKING:
    from fitkit.model import Model


def compile_net(model: Model, options: bool | dict[str, Any]) -> None:
    """Compile a model's net with its next call, or let it be as it was.

    Args:
        options: False for not at all; True, or the keyword arguments of `torch.compile`.

    Raises:
        ConfigurationError: arguments that torch refuses.
    """
    target = _target(model)
    if options is False:
        target._compiled_call_impl = None
        return
    try:
        compiled = torch.compile(_entry(target), **({} if options is True else options))
    except Exception as error:
        raise ConfigurationError(
            f"jit_compile={options!r} isn't what torch.compile takes: {error}"
        ) from error
    target._compiled_call_impl = compiled


def compile_on_this_rank(model: Model, options: bool | dict[str, Any]) -> None:
    """Compile the net where it came from another process: modules travel uncompiled."""
    if options is not False and _target(model)._compiled_call_impl is None:
        _name_globals(model)
        compile_net(model, options)


def _name_globals(model: nn.Module) -> None:
    """Have this process's `__main__` name what the net's own code refers to.

    Classes of the user's script come to a worker with the globals that they use, but not in the
    module where torch's compiler looks for them: there the worker's own program is.
    """
    main = vars(sys.modules["__main__"])
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        for function in filter(inspect.isfunction, vars(kind).values()):
            if function.__module__ == "__main__" and function.__globals__ is not main:
                used = function.__globals__.items()
                main.update({name: value for name, value in used if not name.startswith("__")})


def _target(model: Model) -> Any:
    return model if model.net is None else model.net


def _entry(module: nn.Module) -> Callable[..., Any]:
    """A module's call, as a function of this file.

    Torch doesn't compile from frames in files of its own, and leaves `Module.compile`'s entry as it
    is (torch 2.13): a net of torch's layers alone would go uncompiled, without a word.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # Torch counts compilations by code object, up to a limit: each net gets one of its own.
    call.__code__ = call.__code__.replace()
    return call
