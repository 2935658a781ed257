"""Whether a training ends early, which its ranks decide together.

Any code may set `model.stop_training` on one rank alone. The others must end at the same batch:
else they would wait in the next batch's exchange for a rank that doesn't come. Around an epoch's
batches the ranks always ask each other. After each batch they ask only if some code that runs there
names the flag: that costs an exchange. Where unread code sets it at a batch, it is refused at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from fitkit.callbacks import Callback
from fitkit.callbacks.base import SHORT_NAMES, overrides
from fitkit.data.batches import Batch
from fitkit.distributed.collectives import Collectives
from fitkit.errors import ConfigurationError
from fitkit.module import Module
from fitkit.training.compiler import Updates
from fitkit.training.log import Logbook

BATCH_HOOKS = (*SHORT_NAMES, *SHORT_NAMES.values())
"""Hooks in which a callback can stop an epoch."""

LIBRARIES = frozenset({"builtins", "fitkit", "keras", "lightning", "pytorch_lightning", "torch"})
"""Packages whose classes don't stop a training by themselves."""

METHODS = (MethodType, staticmethod, classmethod)
"""What holds a function."""


class Stopping:
    """Says whether a fit ends before its last batch.

    Args:
        model: the model that is trained.
        collectives: of all ranks.
        callbacks: the user's.

    Attributes:
        asks: whether ranks ask each other after each batch.
    """

    def __init__(self, model: Module, collectives: Collectives, callbacks: list[Callback]) -> None:
        self._model = model
        self._collectives = collectives
        self.asks: bool = collectives.world_size > 1 and (
            any(_acts_at_batches(callback) for callback in callbacks)
            or _names_any(_code_of(model), model._stopped_by)
        )

    def agreed(self) -> bool:
        """Let every rank stop if one does; return whether they do.

        Ranks:
            Collective.
        """
        model = self._model
        stops = self._collectives.sums([float(bool(model.stop_training))])[0] > 0
        model.stop_training = stops
        return stops

    def watched(self, update: Updates) -> Callable[[Batch, int, Logbook], object]:
        """Return what learns from a batch, and refuses a stop that only this rank may know of."""
        if self.asks or self._collectives.world_size == 1:
            return update
        model = self._model

        def learn(batch: Batch, index: int, record: Logbook) -> None:
            before = model.stop_training
            update(batch, index, record)
            if model.stop_training and not before:
                raise ConfigurationError(
                    f"stop_training was set on rank {self._collectives.rank} in batch {index} of "
                    f"epoch {model.current_epoch}, by code that fitkit doesn't read, so the other "
                    "ranks can't know. Set it in a method of the model or of a callback."
                )

        return learn


def _acts_at_batches(callback: Callback) -> bool:
    """Whether a callback may stop one rank at a batch."""
    return not callback.stops_alike and any(overrides(callback, hook) for hook in BATCH_HOOKS)


# ---------------------------------------------------------------------- what code names


def _code_of(model: Module) -> Iterator[FunctionType]:
    """Yield the functions of a model's class, and of those of its modules, but libraries'.

    What acts beside the modules has its own, too.
    """
    kinds: set[type] = set()
    for part in (*model.modules(), *model._acting):
        yield from _functions(vars(part).values())
        kinds.update(kind for kind in type(part).__mro__ if _package(kind) not in LIBRARIES)
    for kind in kinds:
        yield from _functions(vars(kind).values())


def _functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    for value in values:
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            # Asked for an attribute, a library's stand-in for a module would import it.
            function = part.__func__ if isinstance(part, METHODS) else part
            if isinstance(function, FunctionType):
                yield function


def _names_any(functions: Iterable[FunctionType], names: frozenset[str]) -> bool:
    """Whether some functions name an attribute, or functions of their package that they call."""
    waiting, seen = list(functions), set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        wrapped = inspect.unwrap(function)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        waiting += _functions([wrapped, *cells])
        for code in _codes(function.__code__):
            if not names.isdisjoint(code.co_names) or any(one in names for one in _texts(code)):
                return True
            called = _functions(map(function.__globals__.get, code.co_names))
            waiting += [one for one in called if _package(one) == _package(function)]
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _texts(code: CodeType) -> Iterator[str]:
    """Yield a code's texts, as `setattr` takes them."""
    return (constant for constant in code.co_consts if isinstance(constant, str))


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _package(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "").partition(".")[0]
