"""Activation checkpointing: drop a block's activations, and compute them again for the backward."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError

Blocks = bool | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
"""True for all repeated blocks, False for none, classes, or a function that selects submodules."""

Net = TypeVar("Net", bound=nn.Module)


def checkpoint_activations(net: Net, blocks: Blocks = True) -> Net:
    """Save memory by recomputing the activations of blocks in the backward pass.

    The blocks keep only their inputs. Training takes less memory and about a third more time. The
    numbers are the same, bit for bit: dropout draws the same again, and running statistics count
    each batch once. It holds for this net under every strategy, until another call changes it.
    Names of parameters, files and predictions don't change. With `jit_compile`, torch can't compile
    a whole step that draws random numbers in such blocks. Then only the net is compiled.

    Args:
        net: a module or a `fitkit.Model`. It is changed in place.
        blocks: True (default) selects repeated blocks, such as a transformer's layers. Or pass a
            module class, a tuple of classes, or a function that returns True for the submodules
            you mean. Of nested blocks, the outermost count. False undoes earlier calls.

    Returns:
        The net itself.

    Raises:
        ConfigurationError, ArgumentTypeError: `blocks` is invalid or selects no submodule.

    Reference: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, arXiv:1604.06174.

    Example:
        >>> import torch, fitkit
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> net = torch.nn.TransformerEncoder(layer, num_layers=6)
        >>> model = fitkit.Model(fitkit.checkpoint_activations(net))
    """
    if not isinstance(net, nn.Module):
        raise ArgumentTypeError(f"net={describe(net)} must be a torch.nn.Module.")
    check_blocks("blocks", blocks, functions=True)
    found = matching(net, repeated(net) if blocks is True else [], blocks)
    if blocks is not False and not found:
        raise ConfigurationError(
            f"No submodule of {type(net).__name__} is meant by blocks={describe(blocks)}. Give the "
            "class of its layers, or a function that says of a submodule whether it is meant."
        )
    for part in net.modules():
        if is_recomputed(part):
            vars(part)["forward"].remove()
    recompute(found)
    return net


def check_blocks(name: str, asked: Any, *, functions: bool = False) -> None:
    """Refuse a value that can't select the submodules to recompute."""
    if isinstance(asked, bool) or are_module_classes(asked):
        return
    if functions and callable(asked) and not isinstance(asked, (type, nn.Module)):
        return
    raise ArgumentTypeError(
        f"{name}={describe(asked)} must be True (all blocks), False, a module class or a tuple of "
        f"module classes{', or a function of a submodule' if functions else ''}."
    )


def are_module_classes(given: Any) -> bool:
    """Whether a value is a module class, or a tuple of some."""
    kinds = given if isinstance(given, tuple) and given else (given,)
    return all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)


def matching(module: nn.Module, blocks: list[nn.Module], asked: Blocks) -> list[nn.Module]:
    """Return the submodules whose activations are recomputed.

    Args:
        blocks: the blocks that True selects.
        asked: as for `checkpoint_activations`.
    """
    if isinstance(asked, bool):
        return blocks if asked else []
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for part in module.modules():  # a module comes before its parts
        if part in inside or isinstance(part, UNCALLED):
            continue
        if isinstance(part, asked) if isinstance(asked, (type, tuple)) else asked(part):
            found.append(part)
            inside.update(part.modules())
    return found


UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers whose forward is never called."""


def repeated(
    module: nn.Module, is_able: Callable[[nn.Module], bool] = lambda child: True
) -> list[nn.Module]:
    """Return the outermost submodules of several parts that have siblings of the same class.

    Args:
        is_able: whether a submodule can be a block.
    """
    found: list[nn.Module] = []
    waiting = [module]
    while waiting:
        parent = waiting.pop()
        kinds = Counter(type(child) for child in parent.children())
        for child in parent.children():
            has_parts = next(child.children(), None) is not None
            able = has_parts and not isinstance(child, UNCALLED) and is_able(child)
            if able and kinds[type(child)] > 1:
                if not any(child is other for other in found):
                    found.append(child)
            else:
                waiting.append(child)
    return found


def is_recomputed(block: nn.Module) -> bool:
    """Whether a block's activations are recomputed."""
    return isinstance(vars(block).get("forward"), Recomputed)


def recompute(blocks: list[nn.Module]) -> list[Recomputed]:
    """Recompute the activations of blocks, except where they already are.

    Returns:
        The new forwards; `remove` undoes each.
    """
    return [Recomputed(block) for block in blocks if not is_recomputed(block)]


class Recomputed:
    """A block's forward that drops its activations, and recomputes them for the backward.

    It replaces the forward in the block, whose class and names stay. Running statistics count a
    batch once: during the recomputation the buffers hold what they held the first time. Afterwards
    they get their current values back.

    Args:
        block: the block whose forward it is.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._own: Any = vars(block).get("forward")  # this object's own forward, if any
        vars(block)["forward"] = self

    def remove(self) -> None:
        """Let the block keep its activations again."""
        del vars(self._block)["forward"]
        if self._own is not None:
            vars(self._block)["forward"] = self._own

    @property
    def plainly(self) -> Any:
        """The block's original forward."""
        # Looked up each time, because a pickled bound method would be this object.
        return self._own or type(self._block).forward.__get__(self._block)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plainly)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return self.plainly(*args, **kwargs)
        # When torch compiles it, changes of buffers are kept apart from the recomputation.
        compiles = torch.compiler.is_compiling() or next(self._block.buffers(), None) is None
        contexts: dict[str, Any] = {} if compiles else {"context_fn": self._contexts}
        return checkpoint(self.plainly, *args, use_reentrant=False, **contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        before: dict[torch.Tensor, torch.Tensor] = {}
        return self._noting(before), _with_numbers(before)

    @contextlib.contextmanager
    def _noting(self, before: dict[torch.Tensor, torch.Tensor]) -> Iterator[None]:
        """Record the values of the buffers that change within the block."""
        found = {buffer: (buffer._version, buffer.clone()) for buffer in self._block.buffers()}
        yield
        for part in self._block.modules():
            own = [buffer for buffer in part.buffers(recurse=False) if buffer in found]
            # torch's normalizations change running statistics without counting a version.
            if isinstance(part, _NormBase) or any(b._version != found[b][0] for b in own):
                before.update((buffer, found[buffer][1]) for buffer in own)


@contextlib.contextmanager
def _with_numbers(numbers: dict[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Give tensors other values within the block."""
    kept = {tensor: tensor.clone() for tensor in numbers}
    _overwrite(numbers)
    try:
        yield
    finally:
        _overwrite(kept)


@torch.no_grad()
def _overwrite(numbers: dict[torch.Tensor, torch.Tensor]) -> None:
    for tensor, values in numbers.items():
        tensor.copy_(values)
