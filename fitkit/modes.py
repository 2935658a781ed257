"""Training and evaluation modes of modules, and the calls in any thread that use the modules."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

import torch
from torch import nn

from fitkit.errors import ConfigurationError

FLAG = attrgetter("training")
"""Read a module's training flag."""


class Call(contextlib.AbstractContextManager[list[nn.Module]]):
    """A call that uses a module, as a context manager. It is made by `in_use`.

    Attributes:
        verb: the name of what was called.
        is_alone: whether no other thread may use the module during the call.
        thread: the id of the thread that called it.
    """

    __slots__ = ("_flags", "_module", "_modules", "is_alone", "thread", "verb")

    def __init__(
        self, module: nn.Module, verb: str, is_alone: bool, modules: list[nn.Module] | None
    ) -> None:
        self._module, self._modules = module, modules
        self.verb: str = verb
        self.is_alone: bool = is_alone

    @property
    def modes(self) -> dict[nn.Module, bool]:
        """For each submodule, the training flag to restore."""
        assert self._modules is not None
        return dict(zip(self._modules, self._flags, strict=True))

    def __enter__(self) -> list[nn.Module]:
        self.thread: int = threading.get_ident()
        with _lock:
            modules = self._modules
            if modules is None:
                modules = self._modules = modules_of(self._module)
            self._flags = [*map(FLAG, modules)]
            if _calls:
                self._join(modules)
            _calls.append(self)
        return modules

    def _join(self, modules: list[nn.Module]) -> None:
        """Check the calls in progress, and take over the flags that they will restore.

        Within a call in this thread, the current flag is restored. Otherwise it is what the first
        overlapping call found.
        """
        holders: dict[nn.Module, list[tuple[Call, bool]]] = {}
        for other in _calls:
            modes = other.modes
            if modes.keys().isdisjoint(modules):
                continue
            if other.thread != self.thread and (self.is_alone or other.is_alone):
                ending = "until that call ends"
                if other.verb == "predict_batches":
                    ending = "until its loop ends (or call its iterator's close())"
                raise ConfigurationError(
                    f"{self.verb} can't start: another thread runs {other.verb} on this model (or "
                    "on one that shares its layers), and "
                    f"{self.verb if self.is_alone else other.verb} needs the model alone. Wait "
                    f"{ending}, or give each thread its own model."
                )
            for module, flag in modes.items():
                holders.setdefault(module, []).append((other, flag))
        for number, module in enumerate(modules):
            held = holders.get(module)
            if held and all(other.thread != self.thread for other, _ in held):
                self._flags[number] = held[0][1]

    def __exit__(self, *error: object) -> None:
        assert self._modules is not None
        with _lock:
            _calls.remove(self)
            if self._flags == [*map(FLAG, self._modules)]:
                return
            flags = zip(self._modules, self._flags, strict=True)
            wrong = [pair for pair in flags if pair[0].training != pair[1]]
            if _calls:
                others = [other.modes for other in _calls if other.thread != self.thread]
                wrong = [pair for pair in wrong if not any(pair[0] in modes for modes in others)]
            set_flags(wrong)


_calls: list[Call] = []
"""The calls in progress, in the order in which they began."""
_lock = threading.RLock()  # reentrant, because a signal handler may also call a verb


def in_use(
    module: nn.Module, verb: str, *, alone: bool, modules: list[nn.Module] | None = None
) -> contextlib.AbstractContextManager[list[nn.Module]]:
    """Use a module for the length of a call, and restore its training flags at the end.

    The flags belong to the module, not to the call. If calls in several threads overlap, the last
    one to end restores the flags that the first one found. Calls within a call nest.

    Args:
        module: the module, with all its submodules; models may share some of them.
        verb: the name of what was called, for messages.
        alone: whether the call changes the module; calls in other threads can't overlap with it.
        modules: the module and its submodules, if they are known.

    Returns:
        A context manager. It gives the module and its submodules, as `modules_of` orders them.

    Raises:
        ConfigurationError: another thread uses the module, and one of the two calls needs it alone.
    """
    return Call(module, verb, alone, modules)


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
        set_flags([(child, flag) for child, flag in flags if child.training != flag])


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
    in_evaluation = [part for part in kept if not part.training]
    set_mode(module, training=True)
    for part in in_evaluation:
        part.training = False
    return in_evaluation


def set_mode(
    module: nn.Module, *, training: bool, modules: Collection[nn.Module] | None = None
) -> None:
    """Do the same as `module.train(training)`, but write only the flags that are wrong.

    Args:
        modules: the module and its submodules, if they are known.
    """
    modules = modules_of(module) if modules is None else modules
    if not has_plain_modes(modules):
        module.train() if training else module.eval()
        return
    set_flags([(part, training) for part in modules if part.training != training])


def has_plain_modes(modules: Collection[nn.Module]) -> bool:
    """Return whether no module overrides `train` or `eval`."""
    kinds: set[type[nn.Module]] = {*map(type, modules)}
    for kind in kinds:
        if kind.train is not nn.Module.train or kind.eval is not nn.Module.eval:
            return False
    return not [part for part in modules if "train" in part.__dict__ or "eval" in part.__dict__]


PLAIN_SETTERS = (nn.Module.__setattr__.__module__, "fitkit.model")
"""The modules whose `__setattr__` only stores a flag."""


def set_flags(flags: Iterable[tuple[nn.Module, bool]]) -> None:
    """Set training flags, past setters that do nothing else for them."""
    for module, training in flags:
        own = module.__dict__
        if "training" in own and type(module).__setattr__.__module__ in PLAIN_SETTERS:
            own["training"] = training  # the setters look for modules and parameters first
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


@contextlib.contextmanager
def weights_cast_anew() -> Iterator[None]:
    """Let autocast cast a weight at each use within the block, so that no copy outlives a change.

    An autocast keeps the half-precision copies of the weights until the outermost one ends. The
    user's own code may change the weights before that: by an update, in place, by swapping an
    average in.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()
