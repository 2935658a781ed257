"""The public names of a `Model` beside torch's. Keras's helpers give way to a subclass's own layers
and methods of the same name. A subclass can't use the other names for something else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from fitkit import trees
from fitkit.callbacks.history import History
from fitkit.errors import ConfigurationError
from fitkit.foreign_names import no_attribute
from fitkit.guests import Guest
from fitkit.module import Module


class GivesWay:
    """A method with Keras's name. A subclass's own attribute, layer or method takes precedence."""

    def __init__(self, function: Callable[..., Any], is_property: bool = False) -> None:
        self.function: Callable[..., Any] = function
        self.is_property: bool = is_property
        functools.update_wrapper(self, function)  # type: ignore[arg-type]

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        if model is None:
            return self.function
        name = self.function.__name__
        for entries in (model._modules, model._parameters, model._buffers):
            if name in entries:
                return entries[name]
        bound = self.function.__get__(model)
        return bound() if self.is_property else bound


class NotHere:
    """A class method of another library. Looking it up raises an error that says what to write."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, kind: type | None = None) -> NoReturn:
        owner = repr(kind.__name__) if kind else "The model"
        raise no_attribute(owner, "fitkit.Model", self.name)


def get_weights(model: Module) -> list[np.ndarray[Any, Any]]:
    """Copy the weights into NumPy arrays, in the order of the net's `state_dict()`.

    Ranks:
        Local within a run. Collective if a strategy has sharded the weights.
    """
    with model._fitkit.fit_state.evaluated():
        found = [_whole(value).clone() for value in _held_weights(model)]
    arrays: list[np.ndarray[Any, Any]] = trees.to_numpy([value.cpu() for value in found])
    return arrays


def set_weights(model: Module, weights: Any) -> None:
    """Set the weights to the arrays that `get_weights` returned.

    Args:
        weights: the arrays: equally many, in the same order, with the same shapes.

    Raises:
        ConfigurationError: they don't fit (the weights stay as they were), or a strategy has
            sharded the weights over the ranks of a run.
    """
    held, given = _held_weights(model), [torch.as_tensor(weight) for weight in weights]
    now, then = ([tuple(part.shape) for part in parts] for parts in (held, given))
    if now != then:
        raise ConfigurationError(
            f"set_weights got {len(then)} arrays of the shapes {_some(then)}, but the net has "
            f"{len(now)} of the shapes {_some(now)}. Give what its get_weights() returns."
        )
    if any(hasattr(part, "full_tensor") for part in held):
        raise ConfigurationError(
            "set_weights can't be called in a run that has sharded the weights over its ranks. "
            "Call it between two calls of fit."
        )
    with torch.no_grad():
        for weight, new in zip(held, given, strict=True):
            weight.copy_(new)


def count_params(model: Module) -> int:
    """Return the number of parameters, including frozen ones. A shared parameter counts once."""
    return sum(parameter.numel() for parameter in _without_lazy(model.parameters()))


def layers(model: Module) -> list[nn.Module]:
    """Return the net's first-level layers, in a new list each time."""
    net = model._weights_module()
    if isinstance(net, Guest):
        return list(getattr(net.given, "layers", [net.given]))
    return [layer for layer in net.children() if layer is not None] or [net]


def _held_weights(model: Module) -> list[torch.Tensor]:
    """Return the tensors of the net's state dict that are in use."""
    state = model._weights_module().state_dict().values()
    return _without_lazy(part for part in state if isinstance(part, torch.Tensor))


def _without_lazy(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found = list(tensors)
    if any(nn.parameter.is_lazy(tensor) for tensor in found):
        raise ConfigurationError(
            "The net has lazy layers whose shapes aren't known yet. Run one batch through it "
            "first: model.predict_on_batch(x[:1])."
        )
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, gathered from all ranks if a strategy has sharded it (a `DTensor`)."""
    joined = getattr(tensor, "full_tensor", None)
    return tensor.detach() if joined is None else joined().detach()


def _some(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes[:4])) + (", …" if len(shapes) > 4 else "")


@functools.cache
def public_names(base: type) -> frozenset[str]:
    """Return the public names that `Model` adds to torch's, and that mean the same in each
    subclass.

    Args:
        base: the class `Model`, here and below.
    """
    names = {name for name in dir(base) if not name.startswith("_")} - set(dir(nn.Module))
    names -= {name for name in names if isinstance(vars(base).get(name), (GivesWay, NotHere))}
    return frozenset(names | {"compile", "history"})


def check_definitions(subclass: type, base: type) -> None:
    """Refuse a subclass that defines a public name as a different kind of thing.

    Raises:
        ConfigurationError: with what the name stands for.
    """
    for name, value in vars(subclass).items():
        if name in public_names(base) and not _may_define(base, name, value):
            raise _other_meaning(subclass, base, name)


def check_attribute(model: Module, name: str, value: Any, base: type) -> None:
    """Refuse a value that a model can't have under a public name.

    Raises:
        ConfigurationError: with what the name stands for.
    """
    defined = inspect.getattr_static(base, name, None)
    if isinstance(defined, property):
        may_set = defined.fset is not None
    elif name == "history":
        may_set = value is None or isinstance(value, History)
    else:
        may_set = _may_define(base, name, value)
    if not may_set:
        raise _other_meaning(type(model), base, name)


def _may_define(base: type, name: str, value: Any) -> bool:
    """Whether a subclass may have `value` under a public name: the same kind of thing."""
    defined = inspect.getattr_static(base, name, None)
    if isinstance(defined, property):
        return isinstance(value, property)
    if callable(defined):
        is_method = callable(value) or isinstance(value, (staticmethod, classmethod))
        return is_method and not isinstance(value, (type, nn.Module))
    return not callable(value)


def _other_meaning(kind: type, base: type, name: str) -> ConfigurationError:
    """Return the error for a public name that a subclass uses for something else."""
    defined = inspect.getattr_static(base, name, None)
    text = "the History of the last fit" if name == "history" else inspect.getdoc(defined) or ""
    first = text.partition("\n")[0].rstrip(".")
    about = f" ({first[:1].lower()}{first[1:]})" if first else ""
    return ConfigurationError(
        f"{kind.__name__} can't use the name {name!r} for something of its own: a fitkit.Model has "
        f"it already{about}. Use another name, such as 'own_{name}'."
    )
