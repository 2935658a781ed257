"""Activations that are dropped after a block's forward, and computed again for its backward."""

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
"""All repeated blocks or none, the outermost submodules of classes, or those a function names."""

Net = TypeVar("Net", bound=nn.Module)


def checkpoint_activations(net: Net, blocks: Blocks = True) -> Net:
    """Let blocks keep only their inputs for the backward, which computes the rest again.

    Training takes less memory and about a third more time; the numbers are the same, bit for bit.
    Dropout draws the same again, and running statistics count each batch once. It holds for this
    net under every strategy, until it is changed by another call. Names of parameters, files and
    predictions stay as they are. With `jit_compile` torch can't compile a whole step that draws
    random numbers in such blocks: then the net alone is compiled.

    Args:
        net: a module, or a model of fitkit; it is changed in place.
        blocks: True (default) for repeated blocks, such as a transformer's layers; a module class
            or a tuple of classes; or a function that says of a submodule whether it is meant. Of
            blocks that lie in each other the outermost count. False: none, as before any call.

    Returns:
        The net itself.

    Raises:
        ConfigurationError, ArgumentTypeError: there are no such blocks, or `blocks` names none.

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
        if isinstance(vars(part).get("forward"), Recomputed):
            vars(part)["forward"].remove()
    for block in found:
        Recomputed(block)
    return net


def check_blocks(name: str, asked: Any, *, functions: bool = False) -> None:
    """Refuse what says of no submodule whether its activations are computed again."""
    kinds = asked if isinstance(asked, tuple) and asked else (asked,)
    if isinstance(asked, bool) or all(
        isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds
    ):
        return
    if functions and callable(asked) and not isinstance(asked, (type, nn.Module)):
        return
    raise ArgumentTypeError(
        f"{name}={describe(asked)} must be True (all blocks), False, a module class or a tuple of "
        f"module classes{', or a function of a submodule' if functions else ''}."
    )


def matching(module: nn.Module, blocks: list[nn.Module], asked: Blocks) -> list[nn.Module]:
    """The submodules whose activations are computed again.

    Args:
        blocks: what True means.
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
"""Containers whose forward nobody calls."""


def repeated(
    module: nn.Module, is_able: Callable[[nn.Module], bool] = lambda child: True
) -> list[nn.Module]:
    """The outermost submodules of several parts that stand beside others of their class.

    Args:
        is_able: says of a submodule whether it can be a block.
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


class Recomputed:
    """A block's forward whose activations are dropped, and computed again for the backward.

    It takes the forward's place in the block, whose class and names stay. Running statistics count
    a batch once: the second time the buffers are what they were the first time, and afterwards
    what they have become.

    Args:
        block: whose forward it is.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._own: Any = vars(block).get("forward")  # of this object alone
        vars(block)["forward"] = self

    def remove(self) -> None:
        """Let the block keep its activations again."""
        del vars(self._block)["forward"]
        if self._own is not None:
            vars(self._block)["forward"] = self._own

    @property
    def plainly(self) -> Any:
        """The block's forward as it is."""
        # Found anew, for a pickled bound method would be this object.
        return self._own or type(self._block).forward.__get__(self._block)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plainly)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_exporting():
            return self.plainly(*args, **kwargs)
        # What torch compiles has the buffers' changes apart from what is computed again.
        compiles = torch.compiler.is_compiling() or next(self._block.buffers(), None) is None
        contexts: dict[str, Any] = {} if compiles else {"context_fn": self._contexts}
        return checkpoint(self.plainly, *args, use_reentrant=False, **contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        before: dict[torch.Tensor, torch.Tensor] = {}
        return self._noting(before), _with_numbers(before)

    @contextlib.contextmanager
    def _noting(self, before: dict[torch.Tensor, torch.Tensor]) -> Iterator[None]:
        """Note what those buffers have had that change meanwhile."""
        found = {buffer: (buffer._version, buffer.clone()) for buffer in self._block.buffers()}
        yield
        for part in self._block.modules():
            own = [buffer for buffer in part.buffers(recurse=False) if buffer in found]
            # Torch's normalisations write running statistics past the count of versions.
            if isinstance(part, _NormBase) or any(b._version != found[b][0] for b in own):
                before.update((buffer, found[buffer][1]) for buffer in own)


@contextlib.contextmanager
def _with_numbers(numbers: dict[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Let tensors have other numbers meanwhile."""
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
