"""Torch's fused optimizers as one operation each in a compiled graph.

Traced tensor by tensor, Adam of 28 tensors takes more than half of a transformer's compilation. As
one operation it takes none, and each step has the bits of an eager fused one. Optimizers of few
small tensors stay traced: there the compiler joins them to the rest of the step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

FEWEST_TENSORS, FEWEST_NUMBERS = 8, 2**16
"""From how many tensors, or numbers in them, on an optimizer's step is one operation.

In a loop only tensors count: few large ones gain from the kernels that they share with the rest. A
step of a net 784-128-10 took 0.67 of a single step's time in the loop, 0.83 with the operation.
"""

Lists = Sequence[Sequence[Any]]
"""An optimizer's states, as `Group.states`: a list for each kind, in the order of its function."""


class FusedUpdate:
    """Makes a group's updates in one operation.

    Args:
        name: the operation's, in `torch.ops.fitkit`.
        lists: what it changes: the parameters, and a list for each kind of states.
        numbers, flags: its settings.
    """

    def __init__(
        self, name: str, lists: Sequence[Sequence[Any]], numbers: list[float], flags: list[bool]
    ) -> None:
        self._in_place = getattr(torch.ops.fitkit, name)
        self._apart = getattr(torch.ops.fitkit, name + APART)
        self._lists, self._settings = lists, (numbers, flags)

    def __call__(self, gradients: Sequence[Any], rate: torch.Tensor, *, in_loop: bool) -> None:
        """Make an update; traced.

        Args:
            gradients: of the parameters.
            rate: the learning rate ().
            in_loop: whether a loop's body is traced, where an operation can't change its inputs.
                `change_inputs` lets it do so after all.
        """
        parameters, *states = self._lists
        if not in_loop:
            self._in_place(parameters, gradients, *states, rate, *self._settings)
            return
        found = self._apart(parameters, gradients, *states, rate, *self._settings)
        for before, after in zip(chain(*self._lists), found, strict=True):
            before.copy_(after)


def fused(
    kind: type[Optimizer], parameters: Sequence[nn.Parameter], states: Lists, settings: Any
) -> FusedUpdate | None:
    """Return what makes a group's updates in one operation; None if it should be traced.

    Args:
        kind: the optimizer's class.
        parameters: those that have gradients.
        states: their states.
        settings: the arguments of torch's function for the update.
    """
    described = UPDATES.get(kind)
    enough = len(parameters) >= FEWEST_TENSORS or _numbers(parameters) >= FEWEST_NUMBERS
    if described is None or not enough or not hasattr(torch, NEWEST):
        return None
    if not all(isinstance(one, (bool, int, float, type(None))) for one in settings.values()):
        return None
    dtypes = {one.dtype for one in parameters}
    tensors = [*parameters, *(one for of_kind in states for one in of_kind if one is not None)]
    plain = all(one.is_cpu and one.is_contiguous() for one in tensors)
    if not plain or len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        return None
    _library()
    name, own, numbers, flags = described(states, settings)
    return FusedUpdate(name, [parameters, *own], numbers, flags)


def _numbers(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


Described = tuple[str, Sequence[Sequence[Any]], list[float], list[bool]]
"""An operation's name, the states that it changes, and its settings."""


def _adam(states: Lists, settings: dict[str, Any]) -> Described:
    numbers = [float(settings[name]) for name in ("beta1", "beta2", "weight_decay", "eps")]
    flags = [bool(settings[name]) for name in ("amsgrad", "maximize")]
    # `torch.optim.adamw.adamw` has no such argument: it always decays so.
    flags.append(bool(settings.get("decoupled_weight_decay", True)))
    return "adam", states, numbers, flags


def _sgd(states: Lists, settings: dict[str, Any]) -> Described:
    numbers = [float(settings[name]) for name in ("weight_decay", "momentum", "dampening")]
    flags = [bool(settings[name]) for name in ("nesterov", "maximize")]
    return "sgd", [states[0] if settings["momentum"] else []], numbers, flags


def _adagrad(states: Lists, settings: dict[str, Any]) -> Described:
    numbers = [float(settings[name]) for name in ("lr_decay", "weight_decay", "eps")]
    return "adagrad", states, numbers, [bool(settings["maximize"])]


UPDATES: dict[type[Optimizer], Callable[[Lists, dict[str, Any]], Described]] = {
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.SGD: _sgd,
    optim.Adagrad: _adagrad,
}

NEWEST = "_fused_adagrad_"
"""The last one of torch's fused functions that got a kernel for CPUs."""


# ------------------------------------------------------------------ the operations


SCHEMAS = {
    "adam": "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, "
    "Tensor(c!)[] squares, Tensor(d!)[] most, Tensor(e!)[] steps, "
    "Tensor rate, float[] numbers, bool[] flags) -> ()",
    "sgd": "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] momenta, "
    "Tensor rate, float[] numbers, bool[] flags) -> ()",
    "adagrad": "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] sums, "
    "Tensor(c!)[] steps, Tensor rate, float[] numbers, bool[] flags) -> ()",
}


APART = "_apart"
"""Ends the name of an operation that returns new tensors instead of changing its inputs."""


@functools.cache
def _library() -> torch.library.Library:
    """Tell torch of the operations; they live as long as what is returned."""
    library = torch.library.Library("fitkit", "FRAGMENT")
    computed: dict[str, Callable[..., None]] = {
        "adam": _compute_adam, "sgd": _compute_sgd, "adagrad": _compute_adagrad
    }  # fmt: skip
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, computed[name], "CPU")
        torch.library.register_fake(f"fitkit::{name}", _shapeless, lib=library)
        apart = name + APART
        library.define(apart + re.sub(r"\(\w!\)", "", schema).replace("-> ()", "-> Tensor[]"))
        library.impl(apart, functools.partial(_compute_apart, computed[name]), "CPU")
        torch.library.register_fake(f"fitkit::{apart}", _copies, lib=library)
    return library


def _shapeless(*given: Any) -> None:
    """Compute nothing: an update returns nothing, and changes no shape."""


def _changed(given: Sequence[Any], kind: type = torch.Tensor) -> list[int]:
    """Return the places of the lists that an operation changes: of tensors, but the gradients."""
    return [
        place
        for place, one in enumerate(given)
        if place != 1 and isinstance(one, (list, tuple)) and all(isinstance(of, kind) for of in one)
    ]


def _copies(*given: Any) -> list[torch.Tensor]:
    """Return tensors of the shapes that an operation with new tensors returns."""
    return [one.clone() for place in _changed(given) for one in given[place]]


def _compute_apart(compute: Callable[..., None], *given: Any) -> list[torch.Tensor]:
    """Make an update of copies, and return these."""
    taken = list(given)
    for place in _changed(given):
        taken[place] = [one.clone() for one in given[place]]
    compute(*taken)
    return [one for place in _changed(given) for one in taken[place]]


def _compute_adam(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    most: list[torch.Tensor],
    steps: list[torch.Tensor],
    rate: torch.Tensor,
    numbers: list[float],
    flags: list[bool],
) -> None:
    beta1, beta2, decay, eps = numbers
    amsgrad, maximize, decoupled = flags
    torch._foreach_add_(steps, 1)
    update: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    update(
        parameters, _contiguous(gradients), means, squares, most, steps,
        lr=rate.item(), beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps,
        amsgrad=amsgrad, maximize=maximize,
    )  # fmt: skip


def _compute_sgd(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momenta: list[torch.Tensor],
    rate: torch.Tensor,
    numbers: list[float],
    flags: list[bool],
) -> None:
    decay, momentum, dampening = numbers
    nesterov, maximize = flags
    torch._fused_sgd_(
        parameters, _contiguous(gradients), momenta,
        weight_decay=decay, momentum=momentum, lr=rate.item(), dampening=dampening,
        nesterov=nesterov, maximize=maximize, is_first_step=False,
    )  # fmt: skip


def _compute_adagrad(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    sums: list[torch.Tensor],
    steps: list[torch.Tensor],
    rate: torch.Tensor,
    numbers: list[float],
    flags: list[bool],
) -> None:
    slower, decay, eps = numbers
    torch._foreach_add_(steps, 1)
    torch._fused_adagrad_(
        parameters, _contiguous(gradients), sums, steps,
        lr=rate.item(), lr_decay=slower, weight_decay=decay, eps=eps, maximize=flags[0],
    )  # fmt: skip


def _contiguous(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients in the order of their parameters, for kernels that read plain memory."""
    return [gradient.contiguous() for gradient in gradients]


# ------------------------------------------------------------------ in a loop's body


def change_inputs(graph: torch.fx.Graph) -> None:
    """Let the operations of a loop's body change its inputs, as those of a single step do.

    As they are, they make new tensors, which are copied over the inputs. If that's all that becomes
    of these, the operation that changes the inputs comes in their place: at the body's end, after
    all that reads them. (Torch's compiler would read some of them too late otherwise.)
    """
    [output] = graph.find_nodes(op="output")
    for name in SCHEMAS if _library.cache_info().currsize else ():
        operation = getattr(torch.ops.fitkit, name).default
        apart = getattr(torch.ops.fitkit, name + APART).default
        nodes: list[Any] = list(graph.find_nodes(op="call_function", target=apart))
        for node in nodes:
            copies = _copies_of(node)
            if copies is None:
                continue
            for gradient in node.args[1]:
                gradient.meta["inductor_realize_to_strides"] = True  # written before all updates
            # By names: the compiler looks for changes among unnamed arguments, but not in lists.
            names = [argument.name for argument in operation._schema.arguments]
            with graph.inserting_before(output):
                graph.call_function(operation, kwargs=dict(zip(names, node.args, strict=True)))
            for copy in copies:  # to itself: so the compiler knows what the body changes
                result = copy.args[1]
                copy.update_arg(1, copy.args[0])
                graph.erase_node(result)
                output.prepend(copy)
            graph.erase_node(node)


def _copies_of(node: Any) -> list[Any] | None:
    """Return what copies an operation's results over the body's inputs that they replace.

    Returns:
        None if something else becomes of them.
    """
    changed = [one for place in _changed(node.args, torch.fx.Node) for one in node.args[place]]
    copies = []
    for result in node.users:
        uses = list(result.users)
        before = changed[result.args[1]]
        if len(uses) != 1 or uses[0].target is not torch.ops.aten.copy_.default:
            return None
        if before.op != "placeholder" or uses[0].args != (before, result):
            return None
        copies += uses
    return copies if len(set(changed)) == len(changed) == len(copies) else None
