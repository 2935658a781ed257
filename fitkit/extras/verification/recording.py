"""What each call of a net's modules got and gave in one training batch, gradients included.

Each module's inputs and outputs pass through copies on their way, so that the gradient of a copy is
what came from this call alone, and a layer that writes into its input leaves the record as it was.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fitkit import trees
from fitkit.extras.verification.masks import Calls, InBatches
from fitkit.tensors import is_dense

Numbers = dict[str, torch.Tensor]
Gradients = dict[int, torch.Tensor]
"""By the tensor's number among the tensors of a tree."""


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a module; or the whole step, whose calls are those of the outermost modules.

    All tensors are in main memory.

    Attributes:
        name: the module's, or None for the step.
        given: its arguments and keyword arguments, before it could change them.
        learns: for each of their tensors, whether a gradient flows back through it.
        before, after: the buffers of the module and its parts.
        calls: those of other modules, within this one.
        output: what it returned.
        came: the gradients of the output.
        left: the gradients of the inputs, by this call alone.
        draws: whether it drew random numbers itself.
    """

    name: str | None
    given: Any = ((), {})
    learns: list[bool] = dataclasses.field(default_factory=list)
    before: Numbers = dataclasses.field(default_factory=dict)
    calls: list[Call] = dataclasses.field(default_factory=list)
    output: Any = None
    after: Numbers = dataclasses.field(default_factory=dict)
    came: Gradients = dataclasses.field(default_factory=dict)
    left: Gradients = dataclasses.field(default_factory=dict)
    draws: bool = False


class Recording(InBatches):
    """Records the calls of one training batch, in the order in which they end.

    Args:
        net: whose modules are followed.

    Attributes:
        calls: of the net's modules.
        step: the step itself.
        gradients: of the parameters, by name.
        start: the parameters before the update.
        loss: what was logged.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.step = Call(None)
        self.calls: list[Call] = []
        self.gradients: Numbers = {}
        self.start: Numbers = {}
        self.loss: float = float("nan")
        self._net = net
        self._open = [self.step]
        self._draws = Calls()
        self._drawn = 0

    def mode(self, batch: int) -> TorchDispatchMode:
        return self._draws

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        for name, parameter in self._net.named_parameters():
            self.start[name] = in_memory(parameter)
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(_add, self.gradients, name))
        for name, module in self._net.named_modules():
            called, returned = (functools.partial(f, name) for f in (self._called, self._returned))
            module.register_forward_pre_hook(called, prepend=True, with_kwargs=True)
            module.register_forward_hook(returned)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self._note_draws()
        self.loss = float((logs or {}).get("loss", "nan"))

    def _called(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_backward():  # a checkpointed part is computed again
            return None
        self._note_draws()
        given = (args, kwargs)
        learns = [tensor.requires_grad for tensor in trees.tensors(given)]
        call = Call(name, copied_to_memory(given), learns, _buffers(module))
        self._open[-1].calls.append(call)
        self._open.append(call)
        return _apart(given, call.left)

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return None
        self._note_draws()
        call = self._open.pop()
        while call.name != name:  # one that ended with an error, which was caught
            call = self._open.pop()
        call.output, call.after = copied_to_memory(output), _buffers(module)
        self.calls.append(call)
        return _apart(output, call.came)

    def _note_draws(self) -> None:
        """Give what has been drawn since the last note to the call that is open."""
        if len(self._draws.seen) > self._drawn:
            self._drawn = len(self._draws.seen)
            self._open[-1].draws = True


def in_backward() -> bool:
    """Whether this is within a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _apart(tree: Any, gradients: Gradients) -> Any:
    """Return a tree whose tensors are copies, and note the gradients that they get."""
    numbers = iter(range(len(trees.tensors(tree))))

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        number = next(numbers)
        if not (leaf.requires_grad and torch.is_grad_enabled() and is_dense(leaf)):
            return leaf
        made = leaf.clone()
        made.register_hook(functools.partial(_add, gradients, number))
        return made

    return trees.map_leaves(copy, tree)


def _add(gradients: dict[Any, torch.Tensor], key: Any, gradient: torch.Tensor) -> None:
    found = in_memory(gradient)
    gradients[key] = gradients[key] + found if key in gradients else found


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's numbers in main memory."""
    found = tensor.detach().to("cpu", copy=True)
    return found.to_dense() if found.is_sparse else found


def copied_to_memory(tree: Any) -> Any:
    """Return a tree with copies of its tensors in main memory."""
    return trees.map_leaves(
        lambda leaf: in_memory(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _buffers(module: nn.Module) -> Numbers:
    named = module.named_buffers(remove_duplicate=False)
    return {name: in_memory(buffer) for name, buffer in named if not nn.parameter.is_lazy(buffer)}
