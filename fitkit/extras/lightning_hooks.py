"""The hooks of a `LightningModule`: which it overrides, and how they are called."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.errors import ConfigurationError
from fitkit.seams.data import Batch, own_data
from fitkit.seams.networks import Module

BASE = "LightningModule"
"""The name of the base class, whichever package it is from."""

PACKAGES = ("lightning", "pytorch_lightning")

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

AT_BATCHES = tuple(
    f"on_{stage}_batch_{when}"
    for stage in ("train", "validation", "test", "predict")
    for when in ("start", "end")
)


def base_of(module: nn.Module) -> Any:
    """Return the library's own class among a module's bases."""
    return next(kind for kind in type(module).__mro__ if kind.__name__ == BASE)


def user_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class as its author wrote it."""
    kind: Any = type(module)
    return kind.__mro__[2] if issubclass(kind, Attached) else kind


class Attached:
    """The first base of a served module's class. Copies and pickles have the user's class."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Keep a user's `__init_subclass__` from seeing a class that isn't the user's."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        served: Any = type(self)
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        if served in arguments:  # as object's does: pickle would want this class
            function, arguments = object.__new__, (served.__mro__[2],)
        return function, arguments, *rest


def is_lightnings(value: object, name: str) -> bool:
    """Whether a value is of Lightning's class of that name, in either of its packages."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] in PACKAGES
        for kind in type(value).__mro__
    )


def defines(thing: Any, name: str) -> bool:
    """Whether a method of a data module, or a LightningModule, is the user's own."""
    if name in vars(thing):
        return True
    home = next((kind for kind in type(thing).__mro__ if name in vars(kind)), None)
    if home is None:
        return False
    package, _, rest = home.__module__.partition(".")
    return package not in PACKAGES or not rest.removeprefix("pytorch.").startswith("core.")


def defines_hook(callback: Any, name: str) -> bool:
    """Whether a callback of Lightning's kind has its own code for a hook."""
    if name in vars(callback):
        return True
    base = next(kind for kind in type(callback).__mro__ if kind.__name__ == "Callback")
    own = getattr(type(callback), name, None)
    return own is not None and own is not getattr(base, name, own)


class Hooks:
    """The hooks that a module's class overrides, and how they are called.

    Args:
        module: the module.

    Attributes:
        kind: its class, as its author wrote it.
        beside: callbacks of Lightning's kind that the module brings, called before it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind: type[nn.Module] = user_class(module)
        self._base = base_of(module)
        self._threads = threading.local()
        self._known: dict[tuple[str, ...], bool] = {}
        self._steps: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}  # by `step`
        self.beside: tuple[Any, ...] = ()

    def bring(self, callbacks: Iterable[Any]) -> None:
        """Call these callbacks' hooks, too, from now on."""
        self.beside = tuple(callbacks)
        for one in self.beside:  # as Lightning's Trainer does
            one.log, one.log_dict = self.module.log, self.module.log_dict
        self._known.clear()
        vars(self).pop("moves", None)

    def has(self, *names: str) -> bool:
        """Whether the module has its own code for one of these hooks."""
        found = self._known.get(names)
        if found is None:
            own, kind, base = vars(self.module), self.kind, self._base
            found = self._known[names] = any(
                name in own or getattr(kind, name, None) is not getattr(base, name, None)
                for name in names
            ) or any(defines_hook(one, name) for one in self.beside for name in names)
        return found

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a hook with as many of the arguments as it takes, if the module overrides it."""
        return self.call(name, *arguments) if self.has(name) else None

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a hook with as many of the arguments as it takes, and before that the callbacks'."""
        self.call_beside(name, *arguments)
        return self.call_own(name, *arguments, **named)

    def call_beside(self, name: str, *arguments: Any) -> None:
        """Call a hook of the callbacks that the module brings."""
        for one in self.beside:
            if defines_hook(one, name):
                theirs = getattr(one, name)
                given = (self.module.trainer, self.module, *arguments)
                self.run(name, theirs, *given[: numbers_for(theirs)[1]])

    def call_own(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a hook of the module alone."""
        hook = getattr(self.module, name)
        return self.run(name, hook, *arguments[: numbers_for(hook)[1]], **named)

    def at_batch(self, name: str, *arguments: Any, loader: int | None) -> None:
        """Call a batch's hook, if the module overrides it.

        Args:
            loader: the number of the data set, which a hook may also need; None if there is one.
        """
        if self.has(name):
            hook = getattr(self.module, name)
            least, _ = numbers_for(hook)
            if loader is not None or least > len(arguments):
                arguments = *arguments, loader or 0
            self.call(name, *arguments)

    def step(self, name: str, batch: Any, index: int, loader: int = 0) -> Any:
        """Call a step with what its signature names beside the batch."""
        step = getattr(self.module, name)
        function = getattr(step, "__func__", step)
        known = self._steps.get(name)  # torch traces this step, but not how a signature is read
        if known is None or known[0] is not function:
            names = step_names(function, name, is_bound=inspect.ismethod(step))
            known = self._steps[name] = function, names
        values = {"batch_idx": index, "dataloader_idx": loader, "optimizer_idx": 0}
        outputs = self.run(name, step, batch, *[values[one] for one in known[1]])
        if self.has(*AT_BATCHES):  # else nobody asks for them, and no graph can leave a trace
            self._threads.outputs = outputs
        return outputs

    def run(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function as the hook of that name, which `log` asks for."""
        threads = self._threads
        before = getattr(threads, "running", None)
        threads.running = name
        try:
            return function(*arguments, **named)
        finally:
            threads.running = before

    @property
    def running(self) -> str | None:
        """The name of the hook that runs in this thread."""
        return getattr(self._threads, "running", None)

    @property
    def outputs(self) -> Any:
        """What the last step in this thread returned."""
        return getattr(self._threads, "outputs", None)

    @outputs.setter
    def outputs(self, outputs: Any) -> None:
        self._threads.outputs = outputs

    # ------------------------------------------------------------------ batches

    @functools.cached_property
    def moves(self) -> bool:
        """Whether a batch must be on the device before its step, or gets there by hooks."""
        return self.has(*TRANSFERS, *AT_BATCHES)

    def begin_batch(self, model: Module, batch: Batch) -> Any:
        """Return a batch on the device, and keep it for its step."""
        batch.data, batch.is_lent = own_data(batch), False
        self._threads.moved = batch, self.moved(model, batch.data)
        return self._threads.moved[1]

    def moved(self, model: Module, batch: Any) -> Any:
        """Return a batch on the device: the one that is kept, or moved by the hooks now."""
        context: Any = model._fitkit.contexts.current
        kept, found = getattr(self._threads, "moved", (None, None))
        if kept is not None and kept is context.batch:
            return found
        precision = model._fitkit.compilation.strategy.precision
        before, move, after = hooks = [self._transfer(model, name) for name in TRANSFERS]
        found = batch
        if any(hooks) and precision.name in ("64-true", "16-true", "bf16-true"):
            dtype = precision.input_dtype(model)
            found = trees.map_leaves(partial(_as_float, dtype=dtype), found)
        loader = 0
        if context.name == "validation":  # perhaps of one of several sets
            loader = vars(model)["loader"] or 0
        if before is not None:
            found = before(found, loader)
        found = context.transferred(found) if move is None else move(found, model.device, loader)
        return found if after is None else after(found, loader)

    def _transfer(self, model: Module, name: str) -> Callable[..., Any] | None:
        """Return a hook of batches on their way: the data module's, else the module's."""
        data = vars(model)["call"].get("datamodule")
        if data is not None and defines(data, name):
            found: Callable[..., Any] = getattr(data, name)
            return found
        return partial(self.call, name) if self.has(name) else None

    def forget_batch(self) -> None:
        """Let a batch's memory go, and what its step returned."""
        self._threads.moved = None, None
        self._threads.outputs = None


def _as_float(leaf: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if is_float else leaf


def numbers_for(hook: Any) -> tuple[int, int | None]:
    """Return how many arguments a hook needs, and takes, by place; None for any number."""
    return numbers_of_arguments(getattr(hook, "__func__", hook), inspect.ismethod(hook))


@functools.lru_cache(maxsize=1024)
def numbers_of_arguments(function: Any, is_bound: bool) -> tuple[int, int | None]:
    """Return how many arguments a hook needs, and takes, by place; None for any number."""
    parameters = list(inspect.signature(function).parameters.values())[is_bound:]
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    least = sum(one.default is one.empty for one in placed)
    return least, None if takes_all else len(placed)


@functools.lru_cache(maxsize=1024)
def step_names(function: Any, name: str, *, is_bound: bool) -> tuple[str, ...]:
    """Return what a step takes beside the batch, in its order.

    Raises:
        ConfigurationError: it takes no batch, or needs what there isn't.
    """
    parameters = list(inspect.signature(function).parameters.values())[is_bound:]
    takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    named = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if not named and not takes_all:
        raise ConfigurationError(
            f"{name} takes no batch. Write def {name}(self, batch, batch_idx)."
        )
    if named and named[0].name == "dataloader_iter":
        raise ConfigurationError(
            f"{name} takes dataloader_iter, but fitkit reads the batches. Write def {name}(self, "
            "batch, batch_idx)."
        )
    found: list[str] = []
    for place, one in enumerate(named[1:]):
        if one.name in ("dataloader_idx", "optimizer_idx", "batch_idx"):
            found.append(one.name)
        elif place == 0:
            found.append("batch_idx")
        elif one.default is one.empty:
            raise ConfigurationError(
                f"{name} needs {one.name!r}, which fitkit doesn't have. Write def {name}(self, "
                "batch, batch_idx)."
            )
        else:
            break
    return ("batch_idx",) if takes_all and len(named) < 2 else tuple(found)
