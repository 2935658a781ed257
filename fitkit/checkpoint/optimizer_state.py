"""Whether a stored state fits an optimizer, found out before the optimizer is touched.

`Optimizer.load_state_dict` compares the numbers of groups and parameters, and nothing else: a state
of another shape or optimizer is taken, and the next step fails or, worse, broadcasts. Steps in one
pass ("fused") go through the state's memory by the parameter's size, whatever size the state has.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fitkit.arguments import describe, dtype_name
from fitkit.checkpoint.weights import listing
from fitkit.errors import CheckpointError, ConfigurationError

# Options that torch has added over the years and fills in where an older state lacks them.
_ADDED_LATER = {
    *("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
    *("adjust_lr_fn", "initial_accumulator_value"),
}

# How a step is computed; a stored state's are left out (`fitkit.optimizers.HOW`).
_HOW = {"foreach", "capturable", "differentiable", "fused"}

# What each of torch's optimizers, and fitkit's own, keeps for a parameter in the parameter's shape.
_ALIKE: dict[str, tuple[str, ...]] = {
    "Adadelta": ("square_avg", "acc_delta"),
    "Adafactor": (),
    "Adagrad": ("sum",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "ASGD": ("ax",),
    "LBFGS": (),
    "Muon": ("momentum_buffer",),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "QAdamOptimizer": ("exp_avg", "exp_avg_sq", "error"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "Rprop": ("prev", "step_size"),
    "SGD": ("momentum_buffer",),
    "SparseAdam": ("exp_avg", "exp_avg_sq"),
}
# Single numbers, with the largest: a step of NAdam divides by what the product leaves of 1.
_STEP = {"step": math.inf}
_SINGLE: dict[str, dict[str, float]] = {
    "ASGD": {"step": math.inf, "eta": math.inf, "mu": math.inf},
    "NAdam": {"step": math.inf, "mu_product": 1.0},
    **{name: {} for name in ("LBFGS", "Muon", "QAdamOptimizer", "SGD", "SparseAdam")},
}
# What is kept only where an option asks for it; of what is made when it is needed, none does.
_OPTIONAL = {
    **dict.fromkeys((("Adam", "max_exp_avg_sq"), ("AdamW", "max_exp_avg_sq")), "amsgrad"),
    ("RMSprop", "grad_avg"): "centered",
    ("RMSprop", "momentum_buffer"): "momentum",
    **dict.fromkeys((("SGD", "momentum_buffer"), ("Muon", "momentum_buffer")), ""),
    ("QAdamOptimizer", "error"): "",
}
# Options that constructors don't look at; the first take memory or time by their size.
_BOUNDS: dict[str, tuple[type, float]] = {
    "history_size": (int, 10_000),
    "ns_steps": (int, 99),
    **dict.fromkeys(("max_iter", "max_eval", "steps", "adam_steps"), (int, 1 << 62)),
    **dict.fromkeys(("lambd", "alpha"), (float, 100.0)),
}
# What schedulers note in the groups.
_NOTED_RATES = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
# What torch's steps in one pass read, in the memory of each parameter's size.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
_READ_BY_FUSED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum", "momentum_buffer")


def check_optimizer_state(optimizer: torch.optim.Optimizer, state: object) -> None:
    """Check that the optimizer can use a state before it loads it.

    Groups are compared by number, parameters and options. A parameter's state is compared with the
    state that the optimizer has now. In torch's own optimizers it must also have exactly the names,
    shapes and kinds of numbers that the class keeps.

    Args:
        optimizer: the optimizer. It isn't changed.
        state: what its `state_dict()` once returned.

    Raises:
        CheckpointError: the state doesn't fit. The message lists all differences.
    """
    problems = list(_problems(optimizer, state))
    if problems:
        raise CheckpointError(
            f"The stored optimizer state doesn't fit this {type(optimizer).__name__}; nothing was "
            f"loaded.{listing('what differs', problems)}\nBuild the optimizer as the one that was "
            "saved, or load the weights alone with load_weights.",
            code="FK053",
        )


def check_fused_state(optimizer: torch.optim.Optimizer) -> None:
    """Check that a step in one pass stays within the memory of the optimizer's state.

    Torch's kernels take the parameter's size for that of everything kept for it. To be called
    before each training, because other code may have set the state.

    Raises:
        ConfigurationError: something is kept in another shape, or isn't plain numbers in memory.
    """
    if not isinstance(optimizer, _FUSED):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            entry = optimizer.state.get(parameter) or {}
            for name in (*_READ_BY_FUSED, "step"):
                value = entry.get(name)
                if value is None:
                    continue
                if name == "step":
                    is_one = isinstance(value, torch.Tensor) and value.numel() == 1
                    reason = "" if is_one else f"is {_shown(value)}, not a tensor of one number"
                else:
                    reason = _unlike(value, parameter)
                if reason:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} can't make its step in one pass "
                        f"(fused=True): for a parameter of {_words(parameter)}, {name!r} {reason}. "
                        "Give it the state of an optimizer over these parameters, or empty it: "
                        "optimizer.state.clear()."
                    )


def _problems(optimizer: torch.optim.Optimizer, state: object) -> Iterator[str]:
    if not isinstance(state, dict):
        yield f"it is a {type(state).__name__}, not a dict"
        return
    groups, entries = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        yield "its 'param_groups' isn't a list of groups of parameters"
        return
    if not isinstance(entries, dict):
        yield "its 'state' isn't a dict"
        return
    sizes = [len(group["params"]) for group in groups]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != wanted:
        yield f"its groups have {sizes} parameters, the optimizer's {wanted}"
        return
    identities = [identity for group in groups for identity in group["params"]]
    if len(set(identities)) != len(identities):
        yield "one parameter stands in its groups twice"
        return
    yield from _options(optimizer, groups)
    yield from _entries(optimizer, identities, groups, entries)


def _is_group(group: object) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(identity, (int, str)) for identity in group["params"])
    )


def _options(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[str]:
    for index, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        fits = True
        for name in optimizer.defaults:
            if name not in group:
                if name not in _ADDED_LATER:
                    yield f"group {index} has no {name!r}, so another kind of optimizer made it"
            elif name not in _HOW and not _can_stand_for(optimizer, name, group[name], own):
                fits = False
                yield (
                    f"group {index} has {name}={describe(group[name])}, the optimizer "
                    f"{describe(own.get(name))}"
                )
        for name in _NOTED_RATES:
            if name in group and not _is_number(group[name]):
                yield f"group {index} has {name}={describe(group[name])}, which isn't a number"
        if fits:
            yield from _refused_options(optimizer, index, group)


def _can_stand_for(
    optimizer: torch.optim.Optimizer, name: str, found: Any, group: Mapping[str, Any]
) -> bool:
    """Whether a stored option can take the place of a group's."""
    own: Any = group.get(name)
    if not _same_kind(found, own, optimizer.defaults[name]):
        return False
    several = isinstance(found, (tuple, list))
    same = list(found) == list(own) if several else found == own
    # Rates are whatever schedulers made of them.
    if _base(optimizer) is None or name == "lr" or same:
        return True
    if name == "line_search_fn":
        return found in (None, "strong_wolfe")
    kind, largest = _BOUNDS.get(name, (float, math.inf))
    if kind is int and type(found) is not int:
        return False
    return _is_finite(found) and (name not in _BOUNDS or 0 <= found <= largest)


def _same_kind(found: object, own: object, default: object) -> bool:
    """Whether an option can stand for another: a number for a number, a pair for a pair."""
    if isinstance(found, (tuple, list)) and isinstance(own, (tuple, list)):
        defaults = default if isinstance(default, (tuple, list)) else own
        return len(found) == len(own) == len(defaults) and all(
            map(_same_kind, found, own, defaults)
        )
    if found is None or own is None:
        # One that may be None may also be a number, or a word.
        return (found is own or default is None or own is None) and not isinstance(
            found, (tuple, list, dict, set)
        )
    if isinstance(own, torch.Tensor) or isinstance(found, torch.Tensor):
        return _is_number(found) and _is_number(own)
    if isinstance(own, bool) or isinstance(found, bool):
        return isinstance(own, bool) and isinstance(found, bool)
    if isinstance(own, (int, float)):
        return isinstance(found, (int, float))
    return type(found) is type(own)


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not value.is_complex()
        return plain and value.numel() == 1 and value.device.type != "meta"
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_finite, value))
    if isinstance(value, int):
        return abs(value) < 1 << 63  # torch takes no larger ones
    return not _is_number(value) or math.isfinite(value)  # type: ignore[arg-type]


def _refused_options(
    optimizer: torch.optim.Optimizer, index: int, group: dict[str, Any]
) -> Iterator[str]:
    """Yield what the constructor of one of torch's optimizers says of a group's options."""
    if _base(optimizer) is None:
        return
    taken = inspect.signature(type(optimizer)).parameters.keys() - _HOW
    options: dict[str, Any] = {
        # Schedulers bring rates down to 0, and an error of rounding below it.
        name: 1e-3 if name == "lr" else group[name]
        for name in optimizer.defaults
        if name in taken and name in group
    }
    try:
        type(optimizer)([torch.nn.Parameter(torch.zeros(1, 1))], **options)
    except Exception as error:  # each class checks in its own way
        yield f"group {index} has options that {type(optimizer).__name__} refuses ({error})"


def _base(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of torch's or fitkit's class; None for a user's, which keeps what it
    likes.
    """
    kind = type(optimizer)
    ours = f"{kind.__module__}.".startswith(("torch.optim.", "fitkit."))
    return kind.__name__ if ours and kind.__name__ in _ALIKE else None


def _entries(
    optimizer: torch.optim.Optimizer,
    identities: list[Any],
    groups: list[dict[str, Any]],
    entries: Mapping[Any, Any],
) -> Iterator[str]:
    parameters = [
        (item, stored)
        for group, stored in zip(optimizer.param_groups, groups, strict=True)
        for item in group["params"]
    ]
    known = dict(zip(identities, parameters, strict=True))
    total = sum(parameter.numel() for parameter, _ in parameters)
    base = _base(optimizer)
    for identity, entry in entries.items():
        parameter, group = known.get(identity, (None, {}))
        if parameter is None:
            if base is not None:
                yield f"it keeps something for parameter {describe(identity)}, which is in no group"
            continue
        if not isinstance(entry, dict):
            yield f"what it keeps for parameter {describe(identity)} is a {type(entry).__name__}"
            continue
        own = optimizer.state.get(parameter) or {}
        for name in sorted(own.keys() - entry.keys(), key=str):
            if isinstance(own[name], torch.Tensor):
                yield f"parameter {describe(identity)}: {name!r} is missing"
        for name, value in entry.items():
            reason = _other_than_own(value, own.get(name))
            if reason:
                yield f"parameter {describe(identity)}: {name!r} {reason}"
        for name, reason in _unusable(base, entry, parameter, total, group):
            if not _other_than_own(entry.get(name), own.get(name)):
                yield f"parameter {describe(identity)}: {name!r} {reason}"


def _other_than_own(value: object, own: object) -> str:
    """Why a value can't stand for the one that the optimizer keeps; empty where it can."""
    if not isinstance(own, torch.Tensor):
        return ""
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, the optimizer has {_words(own)}"
    fits = value.shape == own.shape and value.is_complex() == own.is_complex()
    return "" if fits else f"is {_words(value)}, the optimizer has {_words(own)}"


def _unusable(
    base: str | None,
    entry: Mapping[Any, Any],
    parameter: torch.Tensor,
    total: int,
    group: Mapping[str, Any],
) -> Iterator[tuple[Any, str]]:
    """Yield what a step of one of torch's optimizers couldn't use of what is kept for a
    parameter.
    """
    if base is None or not entry:  # one that is empty is made anew
        return
    checks = _lbfgs(total, group) if base == "LBFGS" else _kept(base, parameter)
    for name, check in checks.items():
        option = _OPTIONAL.get((base, name))
        if name in entry:
            if reason := check(entry[name]):
                yield name, reason
        elif base != "LBFGS" and (option is None or group.get(option)):
            yield name, "is missing"
    for name in entry:
        if name not in checks:
            yield name, f"is nothing that {base} keeps"
    if base == "LBFGS" and entry.get("n_iter") != 0:
        for name in ("n_iter", "d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad"):
            if entry.get(name) is None:
                yield name, "is missing"
        lengths = {len(entry.get(name) or ()) for name in ("old_dirs", "old_stps", "ro")}
        if len(lengths) > 1:
            yield "old_dirs", "has another length than 'old_stps' or 'ro'"


def _kept(base: str, parameter: torch.Tensor) -> dict[Any, Callable[[Any], str]]:
    """Return what a class keeps for a parameter, with what says why a value can't be that."""

    def alike(shape: tuple[int, ...]) -> Callable[[Any], str]:
        return lambda value: _unlike(value, parameter, shape)

    def single(largest: float) -> Callable[[Any], str]:
        return lambda value: (
            "" if _is_single(value, largest) else f"is {_shown(value)}, not one number from 0"
        )

    shape = tuple(parameter.shape)
    checks = {name: alike(shape) for name in _ALIKE[base]}
    if base == "Adafactor" and len(shape) > 1:
        checks = {
            "row_var": alike((*shape[:-1], 1)),
            "col_var": alike((*shape[:-2], 1, shape[-1])),
        }
    elif base == "Adafactor":
        checks = {"variance": alike(shape)}
    elif base == "SGD":
        # Before the first step with momentum, it is None.
        like = alike(shape)
        checks = {"momentum_buffer": lambda value: "" if value is None else like(value)}
    elif base == "SparseAdam":
        checks["step"] = lambda value: (
            "" if _is_count(value) else f"is {_shown(value)}, not a number from 0"
        )
    for name, largest in _SINGLE.get(base, _STEP).items():
        checks[name] = single(largest)
    return checks


def _unlike(value: object, parameter: torch.Tensor, shape: tuple[int, ...] | None = None) -> str:
    """Why a value isn't a tensor of numbers like a parameter's; empty where it is."""
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, the parameter {_words(parameter)}"
    fits = (
        value.layout is parameter.layout
        and tuple(value.shape) == (tuple(parameter.shape) if shape is None else shape)
        and (value.is_floating_point(), value.is_complex())
        == (parameter.is_floating_point(), parameter.is_complex())
        and (value.device.type != "meta" or parameter.device.type == "meta")
    )
    return "" if fits else f"is {_words(value)}, the parameter {_words(parameter)}"


def _is_single(value: object, largest: float) -> bool:
    """Whether a value is a tensor of one real number, from 0 on."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return False
    numbers = value.is_floating_point() or value.dtype in (torch.int32, torch.int64)
    if not numbers or value.layout is not torch.strided or value.numel() != 1:
        return False
    return 0 <= float(value) <= largest and math.isfinite(float(value))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _lbfgs(total: int, group: Mapping[str, Any]) -> dict[Any, Callable[[Any], str]]:
    """Return what LBFGS keeps, all of it for the first parameter: vectors over all parameters."""
    longest = group.get("history_size")

    def of(check: Callable[[Any], bool]) -> Callable[[Any], str]:
        return lambda value: "" if value is None or check(value) else f"is {_shown(value)}"

    def each(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda value: (
            isinstance(value, list)
            and (not isinstance(longest, int) or len(value) <= longest)
            and all(map(check, value))
        )

    def vector(value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.is_floating_point()
            and tuple(value.shape) == (total,)
        )

    def room(value: object) -> bool:  # for a number of each step that is kept
        return (
            isinstance(value, list)
            and (isinstance(longest, int) and len(value) == longest)
            and all(item is None or _is_number(item) for item in value)
        )

    return {
        **dict.fromkeys(("func_evals", "n_iter"), of(_is_count)),
        **dict.fromkeys(("d", "prev_flat_grad"), of(vector)),
        **dict.fromkeys(("old_dirs", "old_stps"), of(each(vector))),
        **dict.fromkeys(("t", "H_diag", "prev_loss"), of(_is_number)),
        "ro": of(each(_is_number)),
        "al": of(room),
    }


def _shown(value: object) -> str:
    return _words(value) if isinstance(value, torch.Tensor) else describe(value)


def _words(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}{layout}"
