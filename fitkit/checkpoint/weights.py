"""Saving and loading a module's weights, in any format that `formats.py` has.

`load_weights` reads and checks all before it assigns anything.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fitkit.arguments import check_flag, describe
from fitkit.checkpoint.comparison import Comparison, LoadedWeights, compare
from fitkit.checkpoint.document import check_plain_data
from fitkit.checkpoint.dtypes import storable
from fitkit.checkpoint.formats import Weights, WeightSource, format_of
from fitkit.checkpoint.stored_arrays import takes_bytes
from fitkit.distributed.meta_tensors import fill_meta
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError, warn

if TYPE_CHECKING:
    from fitkit.checkpoint.formats import WeightSource


# What is held in memory before anything is assigned, where that is all that is to be loaded.
_HELD_BYTES = 64 << 20


def save_weights(path: str | os.PathLike[str], state_dict: Mapping[str, Any]) -> None:
    """Write the weights in `state_dict` to a file, whole or not at all.

    Tensors of any device, layout in memory and dtype are written as they are; tensors that share
    their memory are written once. Entries that aren't tensors (`get_extra_state`) must be plain
    data: None, booleans, numbers, strings, and lists and dicts of these.

    Args:
        path: the file; the end of its name says the format (`.h5`). An existing one is replaced.
        state_dict: what `module.state_dict()` returned. Names are kept as they are.

    Raises:
        ConfigurationError: the format is unknown, or something can't be written to a file.
        CheckpointError: the file can't be written; what was at `path` is still there.

    Example:
        >>> import torch
        >>> save_weights("digits.h5", torch.nn.Linear(2, 1).state_dict())
    """
    format_of(path).write(path, collect_weights(state_dict))


def collect_weights(state_dict: Mapping[str, Any]) -> Weights:
    """What a file of weights holds for `state_dict`.

    Raises:
        ArgumentTypeError, ConfigurationError: as `save_weights`.
    """
    if not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(
            f"state_dict={describe(state_dict)} must be a dict of tensors: "
            "pass what module.state_dict() returns."
        )
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"state_dict has the name {describe(name)}; names are strings.")
        if isinstance(value, torch.Tensor):
            tensors[name] = _storable(name, value)
        else:
            check_plain_data(value, f"state_dict[{name!r}]")
            extra[name] = value
    return Weights(tensors, extra, _versions(state_dict))


def _storable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        return storable(tensor)
    except ConfigurationError as error:
        raise ConfigurationError(f"state_dict[{name!r}]: {error}") from None


def _versions(state_dict: Mapping[str, Any]) -> dict[str, int]:
    # torch keeps these beside the entries. Without them a module that once changed the form of
    # its state takes today's for the old one and converts it again.
    metadata = getattr(state_dict, "_metadata", {})
    versions = {name: entry.get("version") for name, entry in metadata.items()}
    return {name: version for name, version in versions.items() if isinstance(version, int)}


def load_weights(
    path: str | os.PathLike[str],
    module: torch.nn.Module,
    *,
    strict: bool = True,
    skip_mismatch: bool = False,
) -> LoadedWeights:
    """Copy the weights in a file into `module`'s parameters and buffers.

    The module keeps its devices and dtypes. Floating-point numbers are converted to the module's
    floating dtype, as `Tensor.copy_` does (so float32 to float16 rounds, and overflows to inf);
    complex ones likewise. Other dtypes must be the same: no integer becomes a float or a boolean.

    Before anything is assigned, all of the file is checked. Up to 64 MiB of weights are then held
    in memory; more are read a second time, straight into the module, so that loading takes hardly
    more memory than the module has. `module.load_state_dict` assigns what is left to assign, so
    the module's own hooks, parametrizations and `set_extra_state` work; what a submodule with such
    code of its own gets is held in memory as well.

    Files of `.pt`, `.pth` and `.safetensors` that other programs wrote are read too. Where all
    names in one begin with what a wrapper puts before them (`module.`, `_orig_mod.`, `net.`,
    `model.`) and fit without it, it is left out, with a warning.

    Args:
        path: a file that `save_weights` wrote.
        module: what has the names that the file has.
        strict: whether a name that only the file or only the module has is an error. With False,
            what both have is loaded.
        skip_mismatch: whether tensors of another shape (or kind of dtype) are left out, with one
            warning that names them, instead of being an error.

    Returns:
        The names that were missing in the file, that the module doesn't have, and that were
        skipped.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file can't be read whole, or doesn't fit; the message lists all
            names that don't. The module is as it was, unless the message says otherwise: of more
            than 64 MiB, the disk may fail or another program may write to the file between the
            check and the end.
        ConfigurationError: the format is unknown, or the module has parameters without values.
    """
    check_flag("strict", strict)
    check_flag("skip_mismatch", skip_mismatch)
    file_format = format_of(path)
    _check_module(module)
    with file_format.open(path) as source:
        return fitting_weights(
            source, os.fspath(path), module, strict=strict, skip_mismatch=skip_mismatch
        ).assign()


@dataclass(frozen=True)
class FittingWeights:
    """Weights of an open file that fit a module, checked and ready to be assigned.

    Attributes:
        outcome: what is left out.
    """

    outcome: LoadedWeights
    _path: str
    _module: torch.nn.Module
    _source: WeightSource
    _held: OrderedDict[str, Any]
    _waiting: Mapping[str, torch.dtype]  # what is still in the file

    def assign(self) -> LoadedWeights:
        """Give the module its weights, while the file is still open.

        Raises:
            CheckpointError: the file can't be read any more, or the module's own
                `load_state_dict` failed.
            ConfigurationError: the module is on the meta device, and a part of it gets no weights
                and can't draw any; nothing is changed.
        """
        fill_meta(self._module, {**self._held, **self._waiting})
        state = self._held.copy()
        state._metadata = self._held._metadata  # type: ignore[attr-defined]
        if self._waiting:
            targets = plain_targets(self._module)  # the module may have been converted since
            filled = {name: targets[name] for name in self._waiting if name in targets}
            others = [name for name in self._waiting if name not in filled]
            state.update(_held(self._source, others))
            _fill(self._source, filled, self._waiting)
            # A tensor that is copied into itself stays as it is.
            state.update(filled)
        _assign(self._path, self._module, state)
        return self.outcome


def fitting_weights(
    source: WeightSource,
    path: str,
    module: torch.nn.Module,
    *,
    strict: bool = True,
    skip_mismatch: bool = False,
) -> FittingWeights:
    """Compare the weights of an open file with a module, which isn't changed.

    Args:
        source: the open file's weights, such as `Checkpoint.weights`.
        path: what the file is called in messages.
        module, strict, skip_mismatch: as for `load_weights`.

    Raises:
        CheckpointError: they don't fit; the message lists all names that don't.
        ConfigurationError: the module has parameters without values.
    """
    expected = _expected(module)
    if source.foreign:
        source = without_wrapper(source, expected, path)
    comparison = compare(source, expected)
    comparison.check(path, module, strict=strict, skip_mismatch=skip_mismatch)
    waiting = _waiting(source, comparison, module)
    held = _held(source, [name for name in comparison.fitting if name not in waiting])
    if comparison.mismatched:
        warn(comparison.describe_skipped(path))
    return FittingWeights(comparison.outcome(), path, module, source, held, waiting)


def _check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(f"module={describe(module)} must be a torch.nn.Module.")


def _expected(module: torch.nn.Module) -> dict[str, Any]:
    """The module's state dict, where all of it has values that can be replaced."""
    _check_module(module)
    state = dict(module.state_dict())
    for name, value in state.items():
        if torch.nn.parameter.is_lazy(value):
            raise ConfigurationError(
                f"The module's {name!r} isn't initialised, so nothing says which shape fits. "
                "Call the module once on a batch, then load."
            )
    return state


def _waiting(
    source: WeightSource, comparison: Comparison, module: torch.nn.Module
) -> dict[str, torch.dtype]:
    """The names of what is read straight into the module, with the dtypes in the file.

    Not booleans: their numbers have to be looked at first.
    """
    described = source.describe()
    sizes = {
        name: math.prod(described[name][0]) * described[name][1].itemsize
        for name in comparison.fitting
        if name in described
    }
    if sum(sizes.values()) <= _HELD_BYTES:
        return {}
    targets = plain_targets(module)
    return {
        name: described[name][1]
        for name in sizes
        if name in targets
        and tuple(targets[name].shape) == described[name][0]
        and described[name][1] != torch.bool
    }


def _held(source: WeightSource, names: list[str]) -> OrderedDict[str, Any]:
    state: OrderedDict[str, Any] = OrderedDict()
    for name in names:
        state[name] = source.extra[name] if name in source.extra else source.read(name)
    metadata = OrderedDict((name, {"version": value}) for name, value in source.versions.items())
    state._metadata = metadata  # type: ignore[attr-defined]
    return state


def _fill(
    source: WeightSource,
    targets: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Read what the file has for these tensors into them."""
    # Tied ones once.
    once = {id(tensor): name for name, tensor in targets.items()}
    try:
        for name in once.values():
            tensor = targets[name]
            if tensor.dtype == dtypes[name] and takes_bytes(tensor):
                source.read_into(name, tensor)
            else:
                with torch.no_grad():
                    tensor.copy_(source.read(name))
    except Exception as error:
        raise CheckpointError(
            f"{error} It was whole when it was checked, so some weights may have been replaced: "
            "build the module anew before you go on."
        ) from error


def _assign(path: str, module: torch.nn.Module, state: OrderedDict[str, Any]) -> None:
    try:
        # Names and shapes are checked; what is left to fail is the module's own code.
        module.load_state_dict(state, strict=False)
    except Exception as error:
        raise CheckpointError(
            f"{path} fits {type(module).__name__} by names and shapes, but the module's own "
            f"loading failed ({type(error).__name__}: {error}). Some of its weights may have been "
            "replaced: build it anew before you go on."
        ) from error


# The code that only copies; batch norm's adds a counter that older files lack.
_COPYING = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def plain_targets(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that torch's own loading overwrites, by name.

    Left out are those at or below a submodule that has loading code or hooks of its own, tensors
    of other classes than torch's, and those that share memory with another tensor.
    """
    loading = getattr(module.load_state_dict, "__func__", None)
    if loading is not nn.Module.load_state_dict:
        return {}
    found = {name: tensor for name, tensor in _copied(module, "") if _is_plain(tensor)}
    # Of one memory's numbers, one writer: several at once would mix them.
    users: dict[int, set[int]] = {}
    for tensor in found.values():
        if not tensor.is_meta:
            users.setdefault(_memory(tensor), set()).add(id(tensor))
    return {
        name: tensor
        for name, tensor in found.items()
        if tensor.is_meta or len(users[_memory(tensor)]) == 1
    }


def _copied(part: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    loading = getattr(part._load_from_state_dict, "__func__", None)
    if loading not in _COPYING or part._load_state_dict_pre_hooks:
        return
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and name not in part._non_persistent_buffers_set:
            yield prefix + name, tensor
    for name, inner in part._modules.items():
        if inner is not None:
            yield from _copied(inner, f"{prefix}{name}.")


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# DataParallel and DDP; torch.compile; what models that hold a net mostly call it.
_PREFIXES = ("module.", "_orig_mod.", "net.", "model.")


def without_wrapper(source: WeightSource, expected: Mapping[str, Any], path: str) -> WeightSource:
    """`source`, without a wrapper's prefix where all names have one and fit without it.

    Says so with a warning. Where the names fit as they are, or don't fit either way, `source`
    itself is returned.
    """
    names = [*source.describe(), *source.extra]
    if not names or set(names) & expected.keys():
        return source
    prefix = ""
    while shared := _shared_prefix(names, len(prefix)):
        prefix += shared
        if {name[len(prefix) :] for name in names} == expected.keys():
            warn(f"{path}: all names begin with {prefix!r}, as a wrapper's do; it was left out.")
            return _Unwrapped(source, prefix)
    return source


def _shared_prefix(names: list[str], start: int) -> str:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix, start) for name in names):
            return prefix
    return ""


class _Unwrapped:
    """A source of weights whose names lack a prefix."""

    foreign = True

    def __init__(self, source: WeightSource, prefix: str) -> None:
        self._source = source
        self._prefix = prefix
        self.extra = self._renamed(source.extra)
        # A submodule's name has no dot at its end; the wrapper itself has no place here.
        versions = {f"{name}.": value for name, value in source.versions.items()}
        self.versions = {
            name[len(prefix) : -1]: value
            for name, value in versions.items()
            if name.startswith(prefix)
        }

    def _renamed(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        return {name[len(self._prefix) :]: value for name, value in mapping.items()}

    def describe(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor, by name."""
        return self._renamed(self._source.describe())

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the CPU."""
        return self._source.read(self._prefix + name)

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the tensor of that name into one of its shape and dtype."""
        self._source.read_into(self._prefix + name, tensor)
