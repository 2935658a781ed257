"""A recorded call of a module, computed once more by the CPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fitkit import trees
from fitkit.extras.verification.cutting import SEED
from fitkit.extras.verification.recording import Call, in_backward
from fitkit.tensors import is_dense

Change = Callable[[torch.Tensor], torch.Tensor]

SHARE = 4.0
"""How much more than a nudge of all that a module gets may change a result, until it is off."""


class Result(NamedTuple):
    """A result of a call: on the device, by the CPU, and how far rounding may bring them apart.

    A parameter's gradient is that of all calls on the device, and so isn't known here.
    """

    name: str
    device: torch.Tensor | None
    cpu: torch.Tensor | None
    reach: float = 0.0


class Replay:
    """A module's call, computed by the CPU from what the device recorded.

    It runs twice. In the second run all that the module gets is changed by a small part of itself,
    and what that does to a result says how much of it is left after rounding.

    Args:
        net: in main memory, with the same parameters.
        call: as it was recorded.
        nudge: the part.

    Attributes:
        forward: the outputs, the buffers, and what it gives to other modules.
        backward: the gradients of its inputs, and those that it sends to other modules.
        parameters: the gradients of the net's parameters, by this call.
    """

    def __init__(self, net: nn.Module, call: Call, nudge: float) -> None:
        self._net, self._call = net, call
        self._name = call.name or ""
        plain, nudged = self._run(0.0), self._run(nudge)
        self.forward, self.backward, self.parameters = (
            [
                one._replace(reach=SHARE * _moved(one.cpu, other.cpu))
                for one, other in zip(*runs, strict=True)
            ]
            for runs in zip(plain, nudged, strict=True)
        )

    def _run(self, nudge: float) -> tuple[list[Result], list[Result], list[Result]]:
        call, change = self._call, changed_by(nudge)
        module = self._net.get_submodule(self._name)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        for name, value in call.before.items():
            if name in buffers:
                buffers[name].data = value.clone()
        given, leaves = _leaves(call.given, call.learns, change)
        own = dict(module.named_parameters())
        with Stubs(self._net, call.calls, change) as stubs, _changed(own, change):
            args, kwargs = trees.cloned(given)  # a layer may write into its inputs
            output = module(*args, **kwargs)
            stubs.check_end()
            pairs = enumerate(_pairs(call.output, output))
            forward = [Result(_numbered("output", n), *pair) for n, pair in pairs]
            forward += [*stubs.inputs(), *self._buffers(module)]
            # What gradients are asked of: the inputs, what the other modules returned, parameters.
            names = [("gradient of its input", call.left.get(n)) for n in leaves]
            tensors = [*leaves.values()]
            for other, found in zip(call.calls, stubs.leaves, strict=True):
                what = f"gradient that it sends to {other.name!r}"
                names += [(what, other.came.get(n)) for n in found]
                tensors += found.values()
            # A module may use another's parameter, as a head does that shares a table's.
            learning = {n: p for n, p in self._net.named_parameters() if p.requires_grad}
            came = [(t, call.came.get(n)) for n, t in enumerate(trees.tensors(output))]
            gradients = _gradients([*came, *stubs.left()], [*tensors, *learning.values()], change)
        backward = [Result(*named, cpu) for named, cpu in zip(names, gradients, strict=False)]
        rest = zip(learning, gradients[len(names) :], strict=True)
        return forward, backward, [Result(name, None, cpu) for name, cpu in rest]

    def _buffers(self, module: nn.Module) -> Iterator[Result]:
        """Yield the buffers after the call, without those of the modules that it calls."""
        start = len(self._name) + 1 if self._name else 0
        called = [(other.name or "")[start:] for other in self._call.calls]
        # A module may have put other tensors in their places.
        buffers = dict(module.named_buffers(remove_duplicate=False))
        for name, value in self._call.after.items():
            if name in buffers and not any(is_in(name, part) for part in called):
                yield Result(f"buffer {name}", value, buffers[name].clone())


def is_in(name: str, module: str) -> bool:
    """Whether a parameter's or buffer's name is within that of a module."""
    return not module or name.startswith(f"{module}.")


def _gradients(
    came: list[tuple[torch.Tensor, torch.Tensor | None]],
    tensors: list[torch.Tensor],
    change: Change,
) -> list[torch.Tensor | None]:
    """Return the gradients of tensors, from those that came back on the device."""
    ends = [(tensor, gradient) for tensor, gradient in came if gradient is not None]
    ends = [(tensor, gradient) for tensor, gradient in ends if tensor.requires_grad]
    if not ends or not tensors:
        return [None] * len(tensors)
    found = torch.autograd.grad(
        [tensor for tensor, _ in ends],
        tensors,
        [change(gradient) for _, gradient in ends if gradient is not None],
        allow_unused=True,
    )
    return [one.to_dense() if one is not None and one.is_sparse else one for one in found]


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else f"{name} {number}"


def _moved(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """How far a nudge has moved a result."""
    if one is None or other is None or one.shape != other.shape or not trees.is_inexact(one):
        return 0.0
    apart = (one - other).detach().abs().nan_to_num(0.0, 0.0, 0.0)
    return float(apart.max()) if apart.numel() else 0.0


def _pairs(one: Any, other: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    mine, others = trees.tensors(one), trees.tensors(other)
    if len(mine) != len(others):
        raise ValueError("it returns something else on the CPU")
    pairs = zip(mine, others, strict=True)
    return ((a, b.detach()) for a, b in pairs if is_dense(a) and is_dense(b))


def changed_by(part: float) -> Change:
    """Return what changes each number by up to that part of itself, drawn alike each time."""
    generator = torch.Generator().manual_seed(SEED)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not part or not trees.is_inexact(tensor):
            return tensor
        drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        return (tensor * (1 + part * (2 * drawn - 1))).to(tensor.dtype)

    return change


def _leaves(tree: Any, learns: list[bool], change: Change) -> tuple[Any, dict[int, torch.Tensor]]:
    """Return a recorded tree with tensors that gradients can be asked of, and these by number."""
    found: dict[int, torch.Tensor] = {}
    numbers = itertools.count()

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        number = next(numbers)
        if not is_dense(leaf):
            return leaf
        own = change(leaf).detach().clone()
        if learns[number]:
            found[number] = own.requires_grad_()
        return own

    return trees.map_leaves(made, tree), found


@contextlib.contextmanager
def _changed(parameters: Mapping[str, torch.Tensor], change: Change) -> Iterator[None]:
    """Change parameters for a while."""
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.data = change(parameter.data)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]


HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Stubs(contextlib.AbstractContextManager["Stubs"]):
    """Lets modules return what was recorded of them, in the order of their calls.

    Args:
        net: whose modules they are.
        calls: in their order.
        change: changes what they return.

    Attributes:
        leaves: of each call, the tensors of the output that gradients can be asked of, by number.
    """

    def __init__(self, net: nn.Module, calls: list[Call], change: Change) -> None:
        self._net, self._calls, self._change = net, calls, change
        self._given: list[Any] = []
        self._outputs: list[Any] = []
        self.leaves: list[dict[int, torch.Tensor]] = []
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Stubs:
        for name in {call.name or "" for call in self._calls}:
            module = self._net.get_submodule(name)
            hooks = {kind: OrderedDict[Any, Any]() for kind in HOOKS}  # they were part of the call
            self._put(module, forward=functools.partial(self._called, name), **hooks)
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def _put(self, module: nn.Module, **values: Any) -> None:
        before = {name: vars(module)[name] for name in values if name in vars(module)}
        vars(module).update(values)

        def back() -> None:
            for name in values:
                del vars(module)[name]
            vars(module).update(before)

        self._ends.callback(back)

    def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            return self._again(name, (args, kwargs))
        number = len(self._given)
        if number == len(self._calls) or self._calls[number].name != name:
            raise ValueError(f"on the CPU it calls {name!r} where the device calls another")
        self._given.append((args, kwargs))
        call = self._calls[number]
        learns = [n in call.came for n in range(len(trees.tensors(call.output)))]
        output, leaves = _leaves(call.output, learns, self._change)
        self.leaves.append(leaves)
        self._outputs.append(output)
        return trees.cloned(output)

    def _again(self, name: str, given: Any) -> Any:
        """Return what a call returned that a checkpointed part makes again."""
        same = [number for number, call in enumerate(self._calls) if call.name == name]
        for number in same:
            if all(itertools.starmap(torch.equal, _pairs(self._given[number], given))):
                return trees.cloned(self._outputs[number])
        return trees.cloned(self._outputs[same[0]])

    def check_end(self) -> None:
        """Refuse that some calls haven't been made.

        Raises:
            ValueError: so it is.
        """
        if len(self._given) < len(self._calls):
            name = self._calls[len(self._given)].name
            raise ValueError(f"on the CPU it doesn't call {name!r}, as the device does")

    def inputs(self) -> Iterator[Result]:
        """Yield what the modules were given."""
        for call, given in zip(self._calls, self._given, strict=True):
            for pair in _pairs(call.given, given):
                yield Result(f"input for {call.name!r}", *pair)

    def left(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the tensors that the modules were given, with the gradients that left them."""
        return [
            (tensor, call.left.get(number))
            for call, given in zip(self._calls, self._given, strict=True)
            for number, tensor in enumerate(trees.tensors(given))
        ]

    def came(self) -> Iterator[Result]:
        """Yield the gradients that a backward pass has brought to the modules' outputs."""
        for call, leaves in zip(self._calls, self.leaves, strict=True):
            for number, leaf in leaves.items():
                what = f"gradient of the output of {call.name!r}"
                yield Result(what, call.came.get(number), leaf.grad)
