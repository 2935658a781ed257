"""Training and evaluation mode of modules, and the calls that use them, from any thread."""

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
    """A call that uses a module.

    Attributes:
        verb: what was called.
        thread: which thread called it.
        is_alone: whether no other thread may use the module meanwhile.
        modes: for each submodule the training flag that it gets back.
    """

    verb: str
    thread: int
    is_alone: bool
    modes: dict[nn.Module, bool]


_calls: list[Call] = []
"""The calls that are going on, in the order in which they began."""
_lock = threading.RLock()  # a signal's handler may call a verb, too


@contextlib.contextmanager
def in_use(module: nn.Module, verb: str, *, alone: bool) -> Iterator[None]:
    """Use a module for the length of a call, and put its training flags back at the end.

    The flags belong to the module, not to the call. So where calls of several threads overlap, the
    last one that ends puts back what the first one found. Calls within a call nest.

    Args:
        module: with all its submodules; models may share some.
        verb: what was called, for messages.
        alone: whether the call changes the module: other threads' calls can't overlap with it.

    Raises:
        ConfigurationError: another thread uses the module, and one of both calls needs it alone.
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
            # Within a call of this thread: what is set now. Else what was set before the others'.
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
    """After a fork: of the calls, those of the one thread that goes on."""
    global _lock
    _lock = threading.RLock()
    _calls[:] = [call for call in _calls if call.thread == threading.get_ident()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def modes_restored(module: nn.Module) -> Iterator[None]:
    """Put every submodule's training flag back at the end, within a call that is alone."""
    flags = [(child, child.training) for child in modules_of(module)]
    try:
        yield
    finally:
        for child, training in flags:
            if child.training != training:
                _set_flag(child, training)


def kept_in_evaluation(net: nn.Module) -> list[nn.Module]:
    """The submodules that a training leaves in evaluation mode: those that are in it, unless the
    whole net is."""
    modules = modules_of(net)
    found = [module for module in modules if not module.training]
    return found if len(found) < len(modules) else []


def to_training(module: nn.Module, kept: list[nn.Module]) -> list[nn.Module]:
    """Put a module into training mode, but for parts of it.

    Args:
        kept: submodules that stay in evaluation mode, if they are in it.

    Returns:
        Those of them that were in it.
    """
    still = [part for part in kept if not part.training]
    set_mode(module, training=True)
    for part in still:
        part.training = False
    return still


def set_mode(module: nn.Module, *, training: bool) -> None:
    """As `module.train(training)`, which writes each flag, also those that are right."""
    modules = modules_of(module)
    if not has_plain_modes(modules):
        module.train() if training else module.eval()
        return
    for part in modules:
        if part.training != training:
            _set_flag(part, training)


def has_plain_modes(modules: list[nn.Module]) -> bool:
    """Whether no module has a `train` or `eval` of its own."""
    return all(
        type(part).train is nn.Module.train
        and type(part).eval is nn.Module.eval
        and part.__dict__.keys().isdisjoint(("train", "eval"))
        for part in modules
    )


def _set_flag(module: nn.Module, training: bool) -> None:
    own = vars(module)
    if "training" in own and type(module).__setattr__ is nn.Module.__setattr__:
        own["training"] = training  # torch's way looks first whether that is a module
    else:
        module.training = training


def modules_of(*modules: nn.Module) -> list[nn.Module]:
    """As `modules()` of each, in a quarter of its time: it makes no names."""
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
    """As `parameters()` of each, and as quickly."""
    found = {
        id(parameter): parameter
        for module in modules_of(*modules)
        for parameter in module._parameters.values()
        if parameter is not None
    }
    return list(found.values())


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """A module's parameters and buffers, as quickly."""
    return [
        tensor
        for part in modules_of(module)
        for held in (part._parameters, part._buffers)
        for tensor in held.values()
        if tensor is not None
    ]
