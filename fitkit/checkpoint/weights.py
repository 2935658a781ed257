"""Saving and loading a module's weights, in any format that `formats.py` has.

`load_weights` reads and checks all before it assigns anything.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fitkit.arguments import check_flag, describe
from fitkit.checkpoint.comparison import Comparison, LoadedWeights, compare
from fitkit.checkpoint.document import check_plain_data
from fitkit.checkpoint.dtypes import storable
from fitkit.checkpoint.formats import Weights, WeightSource, format_of
from fitkit.checkpoint.stored_arrays import takes_bytes
from fitkit.checkpoint.targets import plain_targets
from fitkit.checkpoint.wrappers import without_wrapper
from fitkit.distributed.meta_tensors import fill_meta
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError, warn

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
