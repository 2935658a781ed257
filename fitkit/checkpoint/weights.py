"""Saving and loading a module's weights, in any format that `formats.py` has.

`load_weights` reads and checks all before it assigns anything.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fitkit.arguments import check_flag, describe, dtype_name
from fitkit.buffers import attributes_restorer, extra_states, places_of, restorer
from fitkit.checkpoint.arrays import Numbering, storable, takes_bytes
from fitkit.checkpoint.formats import (
    OpenWeights,
    Weights,
    check_holds,
    encode_extra,
    format_of,
    open_weights,
)
from fitkit.checkpoint.frozen import noted
from fitkit.checkpoint.own_loading import Rehearsal, own_parts
from fitkit.checkpoint.uncompiled import plain_name, uncompiled
from fitkit.distributed.meta_tensors import fill_meta
from fitkit.errors import ArgumentTypeError, CheckpointError, ConfigurationError, warn
from fitkit.guests import Guest
from fitkit.scopes import undone_on_error

# More names than this are counted, not listed: a large net's wouldn't fit on a screen.
_LISTED = 20
# How the names of `get_extra_state`'s entries end in torch.
_EXTRA_STATE = "_extra_state"


class LoadedWeights(NamedTuple):
    """What a load left out.

    Attributes:
        missing: names that the file doesn't have, those that it leaves out on purpose
            (`trainable_only=True`) among them; the module kept its values.
        unexpected: names that only the file has.
        skipped: names whose tensors differ in shape; the module kept its values.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Matching:
    """The names in a file and in a module, sorted by what can be done with them.

    Attributes:
        fitting: what can be loaded.
        mismatched: what differs in shape or in kind of dtype, with a description each.
        missing: what only the module has.
        unexpected: what only the file has.
        lost: what is missing, and wasn't left out on purpose.
        is_open: whether only the loading itself tells what the module's own code makes of it.
    """

    fitting: tuple[str, ...]
    mismatched: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    lost: tuple[str, ...]
    is_open: bool = False

    def check(
        self, path: str, module: torch.nn.Module, *, strict: bool, skip_mismatch: bool
    ) -> None:
        """Raise one CheckpointError that lists all that doesn't fit and isn't tolerated.

        What isn't there can be tolerated only beside something that fits.
        """
        problems = []
        remedies = []
        if (strict or not self.fitting) and (self.lost or self.unexpected):
            problems.append(listing("missing in the file", self.lost))
            problems.append(listing("in the file only", self.unexpected))
            remedies.append("strict=False (what both have)")
        if self.mismatched and not (skip_mismatch and self.fitting):
            problems.append(self.list_mismatched("of another shape or kind"))
            remedies.append("skip_mismatch=True (all but what differs)")
        if problems:
            advice = f", or load its weights by load_weights with {' and '.join(remedies)}"
            raise CheckpointError(
                f"{path} doesn't fit this {module._get_name()}; nothing was loaded."
                f"{''.join(problems)}\n"
                f"{self._prefix_hint()}Load it into the module that it was saved from"
                f"{advice if self.fitting else ': this one has no tensor of it'}.",
                code="FK053",
            )

    def _prefix_hint(self) -> str:
        """Return a sentence where all names differ by one prefix, the most frequent slip."""
        for longer, shorter, where in (
            (self.unexpected, self.lost, "in the file"),
            (self.lost, self.unexpected, "in the module"),
        ):
            prefix = _common_prefix(longer, shorter)
            if prefix:
                return f"All names {where} begin with {prefix!r}, and the others don't. "
        return ""

    def list_mismatched(self, title: str) -> str:
        """Return what differs in shape or kind, under a title."""
        return listing(title, [f"{name}: {what}" for name, what in self.mismatched.items()])


def compare(source: OpenWeights, expected: Mapping[str, Any]) -> Matching:
    """Compare an open file with a module's state dict; reads no tensor."""
    found = source.describe()
    names = found.keys() | source.extra.keys()
    mismatched = {
        name: reason
        for name, value in expected.items()
        if name in names and (reason := _mismatch(name, found.get(name), value))
    }
    missing = tuple(name for name in expected if name not in names)
    return Matching(
        fitting=tuple(name for name in expected if name in names and name not in mismatched),
        mismatched=mismatched,
        missing=missing,
        unexpected=tuple(name for name in (*found, *source.extra) if name not in expected),
        lost=tuple(name for name in missing if name not in source.frozen.dtypes),
    )


def as_loaded(
    comparison: Matching, source: OpenWeights, module: nn.Module, *, skip_mismatch: bool
) -> Matching:
    """Return a comparison in which a module's own loading code has its say, as in torch.

    It is asked only about what wouldn't fit otherwise, and where the file has something for it.
    """
    problems = {*comparison.mismatched, *comparison.lost, *comparison.unexpected}
    if not problems:
        return comparison
    names = (*source.describe(), *source.extra)
    parts = tuple(part for part in own_parts(module) if any(n.startswith(part) for n in names))
    if not any(name.startswith(parts) for name in problems):
        return comparison

    def elsewhere(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if not name.startswith(parts))

    own = [name for name in names if name.startswith(parts)]
    from fitkit.extras.rehearsal import rehearsed

    found = rehearsed(module, source.content(own).state_dict())
    plain = {n: why for n, why in comparison.mismatched.items() if not n.startswith(parts)}
    refused: dict[str, str] = {}
    if found is not None and found.errors:
        shapes = comparison.mismatched.items()
        refused = {n: why for n, why in shapes if any(f" {n}:" in one for one in found.errors)}
        if not refused:
            return comparison
        if not skip_mismatch:
            return replace(comparison, mismatched={**plain, **refused})
        own = [name for name in own if name not in refused]
        found = rehearsed(module, source.content(own).state_dict())
    asked = Rehearsal() if found is None else found
    missing = [n for n in asked.missing if n.startswith(parts) and n not in refused]
    unexpected = [n for n in asked.unexpected if n.startswith(parts)]
    return Matching(
        fitting=(*elsewhere(comparison.fitting), *(n for n in own if n not in unexpected)),
        mismatched={**plain, **refused},
        missing=(*elsewhere(comparison.missing), *missing),
        unexpected=(*elsewhere(comparison.unexpected), *unexpected),
        lost=(*elsewhere(comparison.lost), *(n for n in missing if n not in source.frozen.dtypes)),
        is_open=found is None or bool(found.errors),
    )


def _mismatch(
    name: str, found: tuple[tuple[int, ...], torch.dtype] | None, expected: object
) -> str:
    """Why what was found can't become what is expected; empty where it can."""
    if name.endswith(_EXTRA_STATE):
        return ""  # its form may change from call to call; set_extra_state decides
    if not isinstance(expected, torch.Tensor):
        return "the file has a tensor, the module none" if found else ""
    wanted = (tuple(expected.shape), expected.dtype)
    if found is None:
        return f"the file has no tensor, the module {_words(*wanted)}"
    if found[0] != wanted[0] or not _convertible(found[1], expected.dtype):
        return f"the file has {_words(*found)}, the module {_words(*wanted)}"
    return ""


def _convertible(source: torch.dtype, target: torch.dtype) -> bool:
    both_floating = source.is_floating_point and target.is_floating_point
    return source == target or both_floating or (source.is_complex and target.is_complex)


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)} {shape}"


def listing(title: str, lines: tuple[str, ...] | list[str]) -> str:
    """Return the lines under a title with their number, indented; nothing where there are none."""
    if not lines:
        return ""
    more = [f"… and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return f"\n  {title} ({len(lines)}):\n    " + "\n    ".join([*lines[:_LISTED], *more])


def _common_prefix(longer: tuple[str, ...], shorter: tuple[str, ...]) -> str:
    """Return what stands before the names of `shorter` in `longer`, where that is all that
    differs.
    """
    if not shorter or len(longer) != len(shorter) or not longer[0].endswith(shorter[0]):
        return ""
    prefix = longer[0][: len(longer[0]) - len(shorter[0])]
    same = {prefix + name for name in shorter} == set(longer)
    return prefix if same else ""


# What is held in memory before anything is assigned, where that is all that is to be loaded.
_HELD_BYTES = 64 << 20


def save_weights(path: str | os.PathLike[str], state_dict: Mapping[str, Any]) -> None:
    """Write the weights in `state_dict` to a file, whole or not at all.

    Tensors of any device, layout in memory and dtype are written as they are; tensors that share
    their memory are written once. Entries that aren't tensors (`get_extra_state`) must be plain
    data: None, booleans, numbers, strings, bytes, lists, tuples, dicts, sets, `torch.Size`, dtypes
    and tensors, nested at will.

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
    weights = collect_weights(state_dict)
    check_holds(path, weights)
    format_of(path).write(path, weights)


def collect_weights(state_dict: Mapping[str, Any]) -> Weights:
    """Return what a file of weights holds for `state_dict`.

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
            extra[name] = value
    encode_extra(extra, _TensorsOnly())  # refuses what some format can't hold
    metadata = getattr(state_dict, "_metadata", {})
    return Weights(tensors, extra, _versions(metadata), noted(metadata))


class _TensorsOnly(Numbering):
    """Refuses NumPy's arrays, which a `.pt` file would need code for."""

    def add(self, value: object) -> int:
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(f"{describe(value)} is NumPy's. Make it a tensor.")
        return super().add(value)


def _storable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        return storable(tensor)
    except ConfigurationError as error:
        raise ConfigurationError(f"state_dict[{name!r}]: {error}") from None


def _versions(metadata: Mapping[str, Any]) -> dict[str, int]:
    # torch keeps these beside the entries. Without them a module that once changed the form of
    # its state takes today's for the old one and converts it again.
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
    floating dtype, as `Tensor.copy_` does (so float32 to float16 rounds, and overflows to inf).
    Complex numbers are, too. Other dtypes must be the same: no integer becomes a float or a
    boolean.

    The whole file is checked before anything is assigned. Up to 64 MiB of weights are then held in
    memory. Beyond that, the weights are read a second time, straight into the module. So loading
    takes hardly more memory than the module has. `module.load_state_dict` assigns the rest, so the
    module's own hooks, parametrizations and `set_extra_state` work. The weights of a submodule with
    such code are held in memory as well.

    If a file leaves out what didn't learn (`trainable_only=True`), the module keeps its values
    there. A warning says so if they aren't those that the file was made with.

    Files of `.pt`, `.pth` and `.safetensors` by other programs can be read, too. If all names in
    one begin with a wrapper's prefix (`module.`, `net.`, `model.`) and fit without it, the prefix
    is dropped, with a warning. The names of `torch.compile`'s wrappers (`_orig_mod`) are left out,
    in the file and in the module.

    Args:
        path: a file that `save_weights` wrote.
        module: the module whose names the file has.
        strict: whether a name that only the file or only the module has is an error. If False,
            what both have is loaded.
        skip_mismatch: whether tensors of another shape (or kind of dtype) are skipped, with one
            warning that names them, instead of being an error.

    Returns:
        The names that were missing in the file, that the module doesn't have, and that were
        skipped.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file can't be read completely, or doesn't fit. The message lists all
            names that don't. The module is as it was, unless the message says otherwise. With more
            than 64 MiB, the disk may fail, or another program may change the file after the check.
        ConfigurationError: the format is unknown, or the module has parameters without values.
    """
    strict = check_flag("strict", strict)
    skip_mismatch = check_flag("skip_mismatch", skip_mismatch)
    _check_module(module)
    with open_weights(path) as source:
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
    _source: OpenWeights
    _held: OrderedDict[str, Any]
    _waiting: Mapping[str, torch.dtype]  # what is still in the file
    _decides: bool  # whether the loading itself says what is missing

    def restorer(self) -> Callable[[], None]:
        """Return a function that gives the module back what it has now. Copies of its values wait
        in main memory.
        """
        attributes = attributes_restorer(self._module.modules())
        values = restorer(places_of(self._module).values(), "cpu")
        extra = extra_states(self._module)

        def restore() -> None:
            attributes()
            values()
            for part, state in extra:
                with contextlib.suppress(Exception):  # it may refuse any state
                    part.set_extra_state(state)

        return restore

    def assign(self) -> LoadedWeights:
        """Give the module its weights, while the file is still open.

        Raises:
            CheckpointError: the file can't be read any more, or the module's own loading failed;
                then the module is as it was.
            ConfigurationError: the module is on the meta device, and a part of it gets no weights
                and can't draw any; nothing is changed.
        """
        with uncompiled(self._module) as module, undone_on_error() as undo:
            if _runs_own_code(module):
                undo.callback(self.restorer())
            self._assign_to(module)
        return self.outcome

    def _assign_to(self, module: torch.nn.Module) -> None:
        fill_meta(module, {**self._held, **self._waiting})
        state = self._held.copy()
        state._metadata = self._held._metadata  # type: ignore[attr-defined]
        if self._waiting:
            targets = plain_targets(module)  # the module may have been converted since
            filled = {name: targets[name] for name in self._waiting if name in targets}
            others = [name for name in self._waiting if name not in filled]
            state.update(self._source.content(others).state_dict())
            _fill(self._source, filled, self._waiting)
            # A tensor that is copied into itself stays as it is.
            state.update(filled)
        _assign(self._path, module, state, decides=self._decides)


def fitting_weights(
    source: OpenWeights,
    path: str,
    module: torch.nn.Module,
    *,
    strict: bool = True,
    skip_mismatch: bool = False,
    same_base: bool = False,
) -> FittingWeights:
    """Compare the weights of an open file with a module, which isn't changed.

    Args:
        source: the open file's weights, such as `Checkpoint.weights`.
        path: what the file is called in messages.
        module, strict, skip_mismatch: as for `load_weights`.
        same_base: whether it is an error instead of a warning when the parameters that the file
            leaves out aren't those that it was made beside.

    Raises:
        CheckpointError: they don't fit; the message lists all names that don't.
        ConfigurationError: the module has parameters without values.
    """
    _check_module(module)
    source = _without_compilers(source)
    with uncompiled(module) as plain:
        expected, targets = _expected(plain), plain_targets(plain)
        if source.foreign:
            source = without_wrapper(source, expected, path)
        comparison = compare(source, expected)
        comparison = as_loaded(comparison, source, plain, skip_mismatch=skip_mismatch)
    comparison.check(path, module, strict=strict, skip_mismatch=skip_mismatch)
    frozen = source.frozen
    if frozen.dtypes and (reason := frozen.differs(expected)):
        problem = f"{path} was saved beside another base: {reason}."
        if same_base:
            raise CheckpointError(
                f"{problem} Nothing was loaded. Build the net with the weights that it had when "
                "that training began, or use load_weights."
            )
        warn(f"{problem} What it has was loaded; the rest of the module stays as it is.")
    waiting = _waiting(source, comparison, targets)
    held = source.content([n for n in comparison.fitting if n not in waiting]).state_dict()
    if comparison.mismatched:
        warn(f"{path}: the module keeps its own values{comparison.list_mismatched('for')}")
    outcome = LoadedWeights(comparison.missing, comparison.unexpected, tuple(comparison.mismatched))
    decides = strict and comparison.is_open and not (frozen.dtypes or comparison.mismatched)
    return FittingWeights(outcome, path, module, source, held, waiting, decides)


def _check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(f"module={describe(module)} must be a torch.nn.Module.")


def _expected(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's state dict, where all of it has values that can be replaced."""
    if isinstance(module, Guest) and module.awaits_batch:
        raise ConfigurationError(
            f"{module._get_name()} has no weights before its first batch, so nothing "
            "says which fit. Call it on one, as net(x[:1]) or model.predict_on_batch(x[:1]), then "
            "load."
        )
    state = dict(module.state_dict())
    for name, value in state.items():
        if torch.nn.parameter.is_lazy(value):
            raise ConfigurationError(
                f"The module's {name!r} isn't initialised, so nothing says which shape fits. "
                "Call the module once on a batch, then load."
            )
    return state


def _waiting(
    source: OpenWeights, comparison: Matching, targets: Mapping[str, torch.Tensor]
) -> dict[str, torch.dtype]:
    """Return the names of what is read straight into the module, with the dtypes in the file.

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
    return {
        name: described[name][1]
        for name in sizes
        if name in targets
        and tuple(targets[name].shape) == described[name][0]
        and described[name][1] != torch.bool
    }


def _fill(
    source: OpenWeights,
    targets: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Read what the file has for these tensors into them."""
    # Tied ones once.
    once = {id(tensor): name for name, tensor in targets.items()}
    try:
        with torch.no_grad():
            for name in once.values():
                tensor = targets[name]
                if tensor.dtype == dtypes[name] and takes_bytes(tensor):
                    source.read_into(name, tensor)
                else:
                    tensor.copy_(source.read(name))
    except Exception as error:
        raise CheckpointError(
            f"{error} It was whole when it was checked, so some weights may have been replaced: "
            "build the module again before you continue."
        ) from error


def _assign(
    path: str, module: torch.nn.Module, state: OrderedDict[str, Any], *, decides: bool
) -> None:
    try:
        # Names and shapes are checked; what is left to fail is the module's own code.
        module.load_state_dict(state, strict=decides)
    except Exception as error:
        raise CheckpointError(
            f"{path} fits {module._get_name()} by names and shapes, but the module's own "
            f"loading failed ({type(error).__name__}: {error}). Nothing was loaded."
        ) from error


def _runs_own_code(module: nn.Module) -> bool:
    """Whether a module, or a part of it, brings code that may refuse what it is to load."""
    if not _copies(module.load_state_dict, nn.Module.load_state_dict):
        return True
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or not _copies(part._load_from_state_dict, *_COPYING)
        or type(part).set_extra_state is not nn.Module.set_extra_state
        for part in module.modules()
    )


def _copies(method: Any, *known: Any) -> bool:
    """Whether a method of a module's only copies, as torch's own do."""
    loading = getattr(method, "__func__", None)
    return loading in known or hasattr(loading, "copies_as_torch")


# The code that only copies; batch norm's adds a counter that older files lack.
_COPYING = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


def plain_targets(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that torch's own loading overwrites, by name.

    Three kinds are left out: those at or below a submodule with its own loading code or hooks,
    tensors of other classes than torch's, and those that share memory with another tensor.
    """
    if not _copies(module.load_state_dict, nn.Module.load_state_dict):
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


def _without_compilers(source: OpenWeights) -> OpenWeights:
    """`source`, under the names that its weights have without `torch.compile`'s wrappers."""
    names = [*source.describe(), *source.extra, *source.frozen.dtypes]
    plain = set(map(plain_name, names))
    is_needed = len(plain) == len(set(names)) and plain != set(names)
    return source.renamed(plain_name) if is_needed else source


# DataParallel and DDP; what models that hold a net mostly call it.
_PREFIXES = ("module.", "net.", "model.")


def without_wrapper(source: OpenWeights, expected: Mapping[str, Any], path: str) -> OpenWeights:
    """`source`, without a wrapper's prefix where all names have one and fit without it.

    Says so with a warning. Where the names fit as they are, or don't fit either way, `source`
    itself is returned.
    """
    names = [*source.describe(), *source.extra, *source.frozen.dtypes]
    if not names or set(names) & expected.keys():
        return source
    prefix = ""
    while shared := _shared_prefix(names, len(prefix)):
        prefix += shared
        if {name[len(prefix) :] for name in names} == expected.keys():
            warn(f"{path}: all names begin with {prefix!r}, as a wrapper's do; it was left out.")
            return source.without_prefix(prefix)
    return source


def _shared_prefix(names: list[str], start: int) -> str:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix, start) for name in names):
            return prefix
    return ""
