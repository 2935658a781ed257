"""A call as bytes for worker processes: code by value, data in shared memory, weights left out.

- Functions and classes of the script, notebook cells, lambdas: by value (cloudpickle).
- Tensors and arrays of 1 MiB or more: once in anonymous shared memory. Each worker maps it
  copy-on-write, so no rank holds its own copy and none sees another's changes.
- The model's parameters and buffers: as their shapes only. The ranks get rank 0's numbers when
  the module is placed; sharing them would let all ranks step the same weights.
"""

from __future__ import annotations

import copyreg
import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.nn.utils import parametrize

from fitkit.errors import ConfigurationError
from fitkit.extras.launchers.script_objects import is_of_script
from fitkit.seams.launchers import reduced_for_workers
from fitkit.seams.networks import REDUCERS, Guest
from fitkit.tensors import bytes_of

SHARED_FROM_BYTES = 2**20
"""Smaller arrays travel inside the pickle: a mapping of its own costs more than it saves."""


class Payload:
    """A pickled value and the shared memory that belongs to it.

    Args:
        value: what to send.
        shape_only: tensors of which only the shape is sent.
        parts: where to look for what can't be sent, by name.
        strategy: the call's.

    Attributes:
        data: the pickle.
        files: open files of the shared arrays, in order.
    """

    def __init__(
        self,
        value: Any,
        shape_only: Iterable[torch.Tensor],
        parts: Mapping[str, Any] | None = None,
        strategy: object = None,
    ) -> None:
        self.files: list[int] = []
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, {id(tensor) for tensor in shape_only}, self.files, strategy)
        try:
            pickler.dump(value)
            pickler.dump(pickler.named)
        except Exception as error:
            self.close()
            raise _unsendable(parts or {"the call": value}, error) from error
        self.data: bytes = buffer.getvalue()

    def close(self) -> None:
        """Give the shared memory up here; it lives as long as a worker maps it."""
        for file in self.files:
            os.close(file)
        self.files.clear()


def load(data: bytes, files: list[int]) -> tuple[Any, dict[str, Any]]:
    """Return the value of a payload, in a worker, and the classes and functions of the script by
    name.

    Args:
        data: the pickle.
        files: the received files of the shared arrays; closed here.
    """
    _received.clear()
    _received.extend(_mapped(file) for file in files)
    try:
        unpickler = pickle.Unpickler(io.BytesIO(data))
        return unpickler.load(), unpickler.load()
    finally:
        _received.clear()


_received: list[mmap.mmap] = []
"""The shared arrays of the payload that is being loaded; pickle has no way to pass them."""


def _mapped(file: int) -> mmap.mmap:
    try:
        return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)


class _Pickler(cloudpickle.Pickler):
    """Objects that ranks get otherwise than copies do say so by `_state_for_ranks(strategy)`."""

    def __init__(
        self,
        buffer: io.BytesIO,
        shape_only: set[int],
        files: list[int],
        strategy: object = None,
    ) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._shape_only = shape_only
        self._files = files
        self._strategy = strategy
        self.named: dict[str, Any] = {}  # the script's objects, which come by value

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            reduced = self._reduce_tensor(value)
        elif type(value) is np.ndarray and value.nbytes >= SHARED_FROM_BYTES:
            reduced = self._reduce_array(value)
        elif hasattr(type(value), "_state_for_ranks"):
            state = value._state_for_ranks(self._strategy)
            reduced = (copyreg.__newobj__, (type(value),), state)  # type: ignore[attr-defined]
        elif isinstance(value, torch.nn.Module) and parametrize.is_parametrized(value):
            plain = parametrize.type_before_parametrizations(value)
            reduced = (plain.__new__, (plain,), vars(value), None, None, _parametrize)
        elif isinstance(value, torch.Generator):
            reduced = (_generator, (value.get_state(), value.device.type))
        elif value is torch.ops or value is torch.classes:
            # A function that mentions torch and any attribute called `ops` would drag it along.
            reduced = (getattr, (torch, "ops" if value is torch.ops else "classes"))
        elif REDUCERS and (found := reduced_for_workers(value)) is not None:
            reduced = found
        else:
            if is_of_script(value):
                self.named[value.__qualname__] = value
            return super().reducer_override(value)
        return super().reducer_override(value) if reduced is None else reduced

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._shape_only and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            is_parameter = type(tensor) is torch.nn.Parameter
            place = tuple(tensor.shape), tensor.stride()  # DDP wants the same memory everywhere
            return _hollow, (*place, tensor.dtype, tensor.requires_grad, is_parameter)
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if tensor.device.type != "cpu" and plain:
            return _moved, (tensor.detach().cpu(), tensor.requires_grad)
        large = tensor.numel() * tensor.element_size() >= SHARED_FROM_BYTES
        if not (plain and large) or tensor.requires_grad:
            return None
        return _shared_tensor, (
            self._share(bytes_of(tensor).numpy()),
            tuple(tensor.shape),
            tensor.dtype,
        )

    def _reduce_array(self, array: np.ndarray) -> Any:
        if array.dtype.hasobject:
            return None
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return _shared_array, (self._share(flat), array.shape, array.dtype)

    def _share(self, flat: np.ndarray) -> int:
        """Copy bytes to anonymous shared memory; the index of its file."""
        file = _anonymous_file()
        self._files.append(file)
        with open(file, "wb", closefd=False) as stream:
            stream.write(flat.data)
        return len(self._files) - 1


def _parametrize(module: torch.nn.Module, attributes: dict[str, Any]) -> None:
    """Give a layer its parts, and the class that torch made for its parametrized weights."""
    vars(module).update(attributes)
    parametrize._inject_new_class(module)
    for name in attributes["_modules"]["parametrizations"]:
        parametrize._inject_property(module, name)


def _anonymous_file() -> int:
    """Return a file without a name: nothing is left behind, however the processes end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fitkit")
    with tempfile.TemporaryFile() as stream:
        return os.dup(stream.fileno())


def _hollow(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, strides, dtype=dtype)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _moved(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.requires_grad_(requires_grad)


def _generator(state: torch.Tensor, device: str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.set_state(state)
    return generator


def _shared_tensor(index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(_received[index], dtype=torch.uint8).view(dtype).view(shape)


def _shared_array(index: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(_received[index], dtype=np.uint8).view(dtype).reshape(shape)


# ---------------------------------------------------------------------- what can't be sent


def _unsendable(parts: Mapping[str, Any], error: Exception) -> ConfigurationError:
    name, value = next(
        ((name, part) for name, part in parts.items() if not _sendable(part)),
        ("the call", dict(parts)),
    )
    path, culprit = _culprit(value, name, set(), depth=0)
    return ConfigurationError(
        f"{path} is a {type(culprit).__name__}, which can't be sent to the worker processes "
        f"({type(error).__name__}: {error}). Create it where you use it, leave it out with "
        "__getstate__, or use strategy='ddp', which sends nothing.",
        code="FK046",
    )


def _culprit(value: Any, path: str, seen: set[int], depth: int) -> tuple[str, Any]:
    """Return the deepest part of a value that can't be pickled, and the way to it."""
    seen.add(id(value))
    parts = list(_parts(value))
    beside = {id(part) for _, part in parts}  # each is looked at by itself
    for step, part in parts if depth < 12 else ():
        if id(part) not in seen and not _sendable(part, (seen | beside) - {id(part)}):
            return _culprit(part, path + step, seen, depth + 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    if isinstance(value, torch.nn.Module):
        yield from ((f".{name}", child) for name, child in value.named_children())
    for name, part in _state(value).items():
        if name not in ("_modules", "_parameters", "_buffers"):
            # To the user, a guest is the network that it stands for.
            yield "" if isinstance(value, Guest) and name == "given" else f".{name}", part
    for variable, cell in zip(
        getattr(getattr(value, "__code__", None), "co_freevars", ()),
        getattr(value, "__closure__", None) or (),
        strict=False,
    ):
        yield f" (its variable {variable})", cell.cell_contents


def _state(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object that travel."""
    if hasattr(type(value), "_state_for_ranks"):
        state = value._state_for_ranks(None)
    else:
        reduced = reduced_for_workers(value)
        state = getattr(value, "__dict__", {}) if reduced is None else (*reduced, None)[2]
    if isinstance(state, tuple) and state:  # a container's attributes, and its content
        state = state[0]
    return state if isinstance(state, Mapping) else {}


def _sendable(part: Any, seen: Container[int] = ()) -> bool:
    """Whether a part can be pickled, apart from what it has of those on the way to it."""
    files: list[int] = []
    try:
        _Probe(io.BytesIO(), files, seen).dump(part)
    except Exception:
        return False
    finally:
        for file in files:
            os.close(file)
    return True


class _Probe(_Pickler):
    """Passes over some objects, by their ids."""

    def __init__(self, buffer: io.BytesIO, files: list[int], seen: Container[int]) -> None:
        super().__init__(buffer, set(), files)
        self._seen = seen

    def persistent_id(self, value: Any) -> int | None:
        return 0 if id(value) in self._seen else None
