"""Hyperparameters: the arguments of a model's `__init__`, kept by `save_hyperparameters`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError


class Hyperparameters(dict[str, Any]):
    """A dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r} among {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def arguments_of(
    frame: FrameType | None, model: Any, names: tuple[Any, ...], ignore: Iterable[str]
) -> Hyperparameters:
    """Return the arguments of the `__init__` that a frame runs.

    Args:
        frame: of the `__init__` that asks.
        model: the object that it makes.
        names: only these; none for all but `ignore`.

    Raises:
        ConfigurationError: the frame runs no `__init__` of the model, or lacks a name.
    """
    if (
        frame is None
        or frame.f_code.co_name != "__init__"
        or all(model is not value for value in frame.f_locals.values())
    ):
        raise ConfigurationError("save_hyperparameters() belongs into the model's __init__.")
    found = inspect.getargvalues(frame)
    values = {name: found.locals[name] for name in found.args[1:] if name in found.locals}
    if found.keywords:
        values.update(found.locals.get(found.keywords, {}))
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise ArgumentTypeError(
            f"save_hyperparameters got {describe(wrong[0])}; it takes names of arguments of "
            "__init__. Write self.save_hyperparameters() for all of them."
        )
    missing = [name for name in names if name not in values]
    if missing:
        raise ConfigurationError(
            f"save_hyperparameters got {missing}, but __init__ has {', '.join(values)}."
        )
    chosen = names or [name for name in values if name not in ignore and name != "__class__"]
    return Hyperparameters({name: values[name] for name in chosen})
