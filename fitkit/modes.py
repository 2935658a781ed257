"""Training and evaluation modes of modules, and the calls in any thread that use the modules."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator

import torch
from torch import nn

from fitkit.errors import ConfigurationError


@dataclasses.dataclass(eq=False)
class Call:
    """Describes a call that uses a module.

    Attributes:
        verb: the name of what was called.
        thread: the id of the thread that called it.
        is_alone: whether no other thread may use the module during the call.
        modes: for each submodule, the training flag to restore.
    """

    verb: str
    thread: int
    is_alone: bool
    modes: dict[nn.Module, bool]


_calls: list[Call] = []
"""The calls in progress, in the order in which they began."""
_lock = threading.RLock()  # reentrant, because a signal handler may also call a verb


@contextlib.contextmanager
def in_use(module: nn.Module, verb: str, *, alone: bool) -> Iterator[None]:
    """Use a module for the length of a call, and restore its training flags at the end.

    The flags belong to the module, not to the call. If calls in several threads overlap, the last
    one to end restores the flags that the first one found. Calls within a call nest.

    Args:
        module: the module, with all its submodules; models may share some of them.
        verb: the name of what was called, for messages.
        alone: whether the call changes the module; calls in other threads can't overlap with it.

    Raises:
        ConfigurationError: another thread uses the module, and one of the two calls needs it alone.
    """
    call = _begun(module, verb, alone)
    try:
        yield
    finally:
        _end(call)


def _begun(module: nn.Module, verb: str, alone: bool) -> Call:
    own = threading.get_ident()
    with _lock:
        call = Call(verb, own, alone, {child: child.training for child in modules_of(module)})
        others = [other for other in _calls if not other.modes.keys().isdisjoint(call.modes)]
        for other in others:
            if other.thread != own and (alone or other.is_alone):
                raise ConfigurationError(
                    f"{verb} can't begin: another thread is in {other.verb} of this model (or of "
                    f"one with the same layers), and {verb if alone else other.verb} needs it "
                    "alone. Wait until that has ended, or give each thread a model of its own."
                )
        for child in call.modes if others else ():
            holders = [other for other in others if child in other.modes]
            # Within a call in this thread, restore the current flag. Otherwise restore what the
            # first overlapping call found.
            if holders and all(other.thread != own for other in holders):
                call.modes[child] = holders[0].modes[child]
        _calls.append(call)
    return call


def _end(call: Call) -> None:
    with _lock:
        _calls.remove(call)
        others = [other for other in _calls if other.thread != call.thread]
        for child, training in call.modes.items():
            if child.training != training and not any(child in other.modes for other in others):
                _set_flag(child, training)


def _in_child() -> None:
    """After a fork, keep only the calls of the one thread that continues."""
    global _lock
    _lock = threading.RLock()
    _calls[:] = [call for call in _calls if call.thread == threading.get_ident()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def modes_restored(module: nn.Module) -> Iterator[None]:
    """Restore every submodule's training flag at the end; use it in a call with `alone=True`."""
    flags = [(child, child.training) for child in modules_of(module)]
    try:
        yield
    finally:
        for child, training in flags:
            if child.training != training:
                _set_flag(child, training)


def kept_in_evaluation(net: nn.Module) -> list[nn.Module]:
    """Return the submodules that training leaves in evaluation mode.

    These are the submodules already in evaluation mode; none if the whole net is.
    """
    modules = modules_of(net)
    found = [module for module in modules if not module.training]
    return found if len(found) < len(modules) else []


def to_training(module: nn.Module, kept: list[nn.Module]) -> list[nn.Module]:
    """Put a module into training mode, except for some of its submodules.

    Args:
        kept: submodules that stay in evaluation mode, if they are in it.

    Returns:
        The submodules in `kept` that stayed in evaluation mode.
    """
    still = [part for part in kept if not part.training]
    set_mode(module, training=True)
    for part in still:
        part.training = False
    return still


def set_mode(module: nn.Module, *, training: bool) -> None:
    """Do the same as `module.train(training)`, but write only the flags that are wrong."""
    modules = modules_of(module)
    if not has_plain_modes(modules):
        module.train() if training else module.eval()
        return
    for part in modules:
        if part.training != training:
            _set_flag(part, training)


def has_plain_modes(modules: list[nn.Module]) -> bool:
    """Return whether no module overrides `train` or `eval`."""
    return all(
        type(part).train is nn.Module.train
        and type(part).eval is nn.Module.eval
        and part.__dict__.keys().isdisjoint(("train", "eval"))
        for part in modules
    )


def _set_flag(module: nn.Module, training: bool) -> None:
    own = vars(module)
    if "training" in own and type(module).__setattr__ is nn.Module.__setattr__:
        own["training"] = training  # torch's setter first checks for a module
    else:
        module.training = training


def modules_of(*modules: nn.Module) -> list[nn.Module]:
    """Return the same as `modules()` of each, in a quarter of the time; this builds no names."""
    found: dict[nn.Module, None] = {}
    waiting = list(reversed(modules))
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            children = module._modules
            if children:
                waiting += [child for child in reversed(children.values()) if child is not None]
    return list(found)


def parameters_of(*modules: nn.Module) -> list[nn.Parameter]:
    """Return the same as `parameters()` of each, without building names."""
    found = {
        id(parameter): parameter
        for module in modules_of(*modules)
        for parameter in module._parameters.values()
        if parameter is not None
    }
    return list(found.values())


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers, without building names."""
    return [
        tensor
        for part in modules_of(module)
        for held in (part._parameters, part._buffers)
        for tensor in held.values()
        if tensor is not None
    ]
