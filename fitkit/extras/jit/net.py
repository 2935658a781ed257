"""`jit_compile` of the net alone: compile how it is called, or call it as written in a block."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from fitkit.arguments import describe
from fitkit.errors import ConfigurationError, warn
from fitkit.extras.jit.leftovers import Leftovers
from fitkit.extras.jit.passes import with_passes
from fitkit.extras.jit.proof import Backend, MisfitError
from fitkit.extras.jit.tracing import UncompiledError, compiled, why_uncompiled
from fitkit.seams.networks import Module

NUMBERS = itertools.count()
"""The numbers in the names of `give_own_code`."""


class JitNet:
    """Compiles how a model's net is called.

    Args:
        options: True, or the keyword arguments of `torch.compile`.

    Raises:
        ConfigurationError: torch refuses them.

    Attributes:
        given_up: why all is computed as written; None while it isn't.
    """

    def __init__(self, options: bool | dict[str, Any]) -> None:
        self._options = {} if isinstance(options, bool) else options
        self.given_up: str | None = None

        def call() -> None: ...

        try:
            arguments = with_passes(self._options)
            left = Leftovers(call.__code__)
            with left.noted():
                torch.compile(call, **copy.deepcopy(arguments))  # refuses what it doesn't know
            left.drop()
        except Exception as error:
            raise ConfigurationError(
                f"jit_compile={describe(options)} isn't accepted by torch.compile: {error}"
            ) from error

    def compile(self, model: Module) -> None:
        """Compile a model's net at its next call, unless that is done, or was given up.

        A net that came from another process isn't compiled: modules are sent as written.
        """
        target = _module_to_compile(model)
        if target._compiled_call_impl is None and self.given_up is None:
            name_globals(model)
            target._compiled_call_impl = self._with_last_resort(model, _call_of(target))

    def _with_last_resort(self, model: Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a net's call, which runs as written where the compiler fails.

        What fails within a call is left out piece by piece, since nothing may run twice. The net
        runs as written from the next call on. If its own code raises an error, that one reaches the
        user, and tells nothing of the compiler.
        """
        failures: list[Exception] = []
        arguments = with_passes(self._options)
        backend = Backend(arguments.pop("backend", "inductor"), self.give_up, model)
        compiled_call = compiled(
            call,
            backend,
            None if arguments.get("fullgraph") else failures.append,  # the user wants the error
            **arguments,
        )

        def with_last_resort(*args: Any, **kwargs: Any) -> Any:
            if _has_any_global_hook():  # torch doesn't notice when these are added or removed
                return call(*args, **kwargs)
            failures.clear()
            found = compiled_call(*args, **kwargs)
            if failures:
                self.give_up(model, UncompiledError(why_uncompiled(failures[0])))
            return found

        with_last_resort._torchdynamo_inline = call  # type: ignore[attr-defined]  # in a whole step
        return with_last_resort

    def give_up(self, model: Module, why: UncompiledError) -> None:
        """Compile nothing of a model any more, until `compile` is called; say why, once."""
        if self.given_up is not None:
            return
        self.given_up = str(why)
        _module_to_compile(model)._compiled_call_impl = None
        warn_of(why)


def warn_of(why: UncompiledError) -> None:
    """Say why a net is computed as written."""
    if isinstance(why, MisfitError):
        warn(f"jit_compile gave other numbers, so this is computed as written: {why}", "FK072")
    else:
        warn(f"torch's compiler failed, so the net is computed as written: {why}", "FK073")


@contextlib.contextmanager
def as_written(model: Module) -> Iterator[None]:
    """Run a model and its net uncompiled for the length of a block."""
    modules = [model] if model.net is None else [model, model.net]
    calls = [module._compiled_call_impl for module in modules]
    for module in modules:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in zip(modules, calls, strict=True):
            if call is not None:  # else another thread does the same and restores it
                module._compiled_call_impl = call


def name_globals(model: nn.Module) -> None:
    """Add the globals that the net's code refers to to this process's `__main__`.

    A worker receives the classes of the user's script together with the globals that they use.
    But torch's compiler looks for these globals in `__main__`, which is the worker's own program.
    """
    main = vars(sys.modules["__main__"])
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        for function in filter(inspect.isfunction, vars(kind).values()):
            if function.__module__ == "__main__" and function.__globals__ is not main:
                used = function.__globals__.items()
                main.update({name: value for name, value in used if not name.startswith("__")})


def _module_to_compile(model: Module) -> Any:
    return model if model.net is None else model.net


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """Wrap a module's call in a function of this file.

    Torch 2.13 doesn't compile frames in torch's files, and `Module.compile` enters through one.
    A net made only of torch's layers would silently stay uncompiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    give_own_code(call)
    return call


def give_own_code(function: Any) -> None:
    """Give a function a code object and a name of its own, before torch compiles it.

    Torch limits the compilations of each code object. And if sizes differ between two compilations
    of code with one name, torch makes them variable in the second, whose code is then slower.
    """
    name = f"{function.__name__}_{next(NUMBERS)}"
    function.__code__ = function.__code__.replace(co_name=name)
