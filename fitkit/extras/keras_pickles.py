"""Keras objects in pickles and copies, with all that they hold.

Keras's own `__reduce__` builds an object from its configuration: seeds are at their beginning, and
only registered classes come back.
"""

from __future__ import annotations

import copyreg
import io
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from fitkit.extras import keras_backend  # noqa: F401

# isort: split
import cloudpickle
import torch
from keras.src.models.functional import Functional
from keras.src.models.model import inject_functional_model_class
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import backend_utils, tracking
from torch import nn

from fitkit.seams.networks import REDUCERS, Together

WRAPPED = ("build", "quantize", "_moments")
"""The methods that a Keras layer has its own wrapper of: made by `__new__`, or for a training."""


FUNCTIONS = {"train_function", "test_function", "predict_function"}
"""What Keras's own verbs make of a model, and make again; they would act on the original."""


def reduced(value: Any) -> tuple[Any, ...]:
    """How a Keras object is pickled with all that it holds.

    Its `__new__` makes the wrappers of some methods again.
    """
    state = value.__getstate__() if isinstance(value, nn.Module) else vars(value)
    plain = {name: part for name, part in state.items() if name not in WRAPPED}
    if "_loss_ids" in plain:  # what the last call has added, with its graph
        plain.update(_losses=[], _loss_ids=set())
    plain.update(dict.fromkeys(FUNCTIONS & plain.keys()))
    if isinstance(value, Functional):
        return made_functional, (type(value),), plain
    return copyreg.__newobj__, (type(value),), plain  # type: ignore[attr-defined]


def made_functional(kind: Any) -> Any:
    """Return an object of a class that may be as its module has it, in a process of its own.

    Keras gives a subclass of `keras.Model` other bases when it first builds an object of it from
    inputs and outputs. No pickle has that.
    """
    if not issubclass(kind, Functional):
        inject_functional_model_class(kind)
    return kind.__new__(kind)


def reduced_container(value: Any) -> tuple[Any, ...]:
    """How a list, dict or set is pickled that tells a layer of what is put into it."""
    plain: Any = next(kind for kind in (list, dict, set) if isinstance(value, kind))
    state = (vars(value), plain(value))
    return copyreg.__newobj__, (type(value),), state, None, None, fill  # type: ignore[attr-defined]


def fill(container: Any, state: tuple[dict[str, Any], Any]) -> None:
    """Give a container what it had, past its own methods, which would tell the layer again."""
    attributes, content = state
    vars(container).update(attributes)
    if isinstance(content, list):
        list.extend(container, content)
    elif isinstance(content, dict):
        dict.update(container, content)
    else:
        set.update(container, content)


OWN_WAYS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    KerasSaveable: reduced,
    tracking.TrackedList: reduced_container,
    tracking.TrackedDict: reduced_container,
    tracking.TrackedSet: reduced_container,
    backend_utils.DynamicBackend: lambda value: (type(value), (value._backend,)),
}
REDUCERS.update(OWN_WAYS)


CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)


class _Apart(cloudpickle.Pickler):
    """Pickles Keras objects by `OWN_WAYS`, and keeps their tensors out of the pickle.

    Args:
        keeps_code: whether functions and classes stay out, too, as in a copy.
    """

    def __init__(self, buffer: io.BytesIO, *, keeps_code: bool) -> None:
        super().__init__(buffer)
        self.kept: list[Any] = []
        self._keeps_code = keeps_code

    def reducer_override(self, value: Any) -> Any:
        for kind, reduce in OWN_WAYS.items():
            if isinstance(value, kind):
                return reduce(value)
        return super().reducer_override(value)

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, torch.Tensor):
            self.kept.append(value if value.is_leaf else value.detach())
        elif self._keeps_code and isinstance(value, CODE):
            self.kept.append(value)
        else:
            return None
        return len(self.kept) - 1


def taken_apart(net: Any, *, keeps_code: bool) -> tuple[bytes, list[Any]]:
    """Return a network without its tensors (and functions and classes), and these."""
    buffer = io.BytesIO()
    apart = _Apart(buffer, keeps_code=keeps_code)
    apart.dump(net)
    return buffer.getvalue(), apart.kept


def put_together(data: bytes, kept: list[Any]) -> Any:
    """Return the network of `taken_apart` with these tensors."""
    return Together(io.BytesIO(data), kept).load()
