"""Compiled functions of batches: one for each shape of them, kept from call to call of the verbs.

What they compute is a method that reads all that it needs from its object's attributes. Torch
guards what it read: another net, loss or setting is compiled anew, never taken for the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fitkit import trees
from fitkit.hooks import has_own_steps, overridden
from fitkit.module import Module
from fitkit.optimizers import needs_closure

TOGETHER_ON_CPU = {"cpp_wrapper": True, "size_asserts": False}
"""Options of torch's compiler, beside the user's, for several batches in one call on a CPU.

What launches the kernels is C++ too then, which takes a third longer to compile (32-64-10: 0.85 of
the time).
"""

MOST_SHAPES = 4
"""Shapes of batches that are compiled each for itself; those that come later share one program."""

UNROLLED = 4
"""Batches that `steps_per_execution` computes in one call. Each more takes another second to
compile a training step, and what a call costs beside its steps is a quarter of them by then."""

Batch = tuple[Any, Any, Any]
"""A batch's inputs, targets and weights, on the device."""


class UncompiledError(Exception):
    """A step, or a part of it, can't be compiled: why."""


class Programs:
    """Compiled functions, one for each shape of batches, and for one batch or several in a call.

    A model's copy compiles for itself: it gets none of them.

    Args:
        options: what `torch.compile` is given.
        what: is compiled, as users are told.

    Attributes:
        what: as given.
        operations: how many a first batch's forward took, and how many of them can be fused, where
            somebody has counted them.
        is_announced: whether to print that something is being compiled.
    """

    def __init__(self, options: bool | dict[str, Any], what: str) -> None:
        self._options = {} if isinstance(options, bool) else options
        self.what = what
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self.is_announced = False
        self.operations: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    def clear(self) -> None:
        """Let everything be compiled anew."""
        self._compiled.clear()

    def run(
        self, function: Callable[..., Any], batches: Sequence[Any], shapes: Any, device: str
    ) -> Any:
        """What a function gives for some batches, compiled if they are the first such.

        Args:
            function: takes `batches`. What it reads is guarded.
            batches: all of the same shapes.
            shapes: of one of them (`shapes_of`); None where they may be any.
            device: its type.

        Raises:
            UncompiledError: torch can't compile it.
        """
        key = len(batches), None if self._options.get("dynamic") else shapes
        program = self._compiled.get(key)
        is_new = program is None
        if program is None:
            if len(self._compiled) >= MOST_SHAPES:
                key = len(batches), None
                program = self._compiled.get(key)
            is_new = program is None
            program = program or self._program(len(batches) > 1, device, dynamic=key[1] is None)
        began = time.monotonic()
        if is_new and self.is_announced:
            print(f"compiling {self.what} …", end="", flush=True)
        try:
            with torch.no_grad():
                # Within no_grad torch's compiler writes new weights where the old ones are; else it
                # takes the graph for one that will be differentiated, and copies them at its end.
                found = program(function, batches)
        except _compilers_errors() as error:
            if is_new and self.is_announced:
                print(flush=True)
            raise UncompiledError(reason_of(error)) from error
        if is_new:
            self._compiled[key] = program
            if self.is_announced:
                print(f" {time.monotonic() - began:.1f} s", flush=True)
        return found

    def _program(self, together: bool, device: str, *, dynamic: bool) -> Callable[..., Any]:
        """A function of its own for one shape of batches, or for any.

        Args:
            together: whether it computes several batches.
        """

        def program(function: Callable[..., Any], batches: Any) -> Any:
            return function(batches)

        # Torch counts compilations by code object, up to a limit.
        program.__code__ = program.__code__.replace()
        options = dict(self._options)
        mode = options.pop("mode", None)
        if options.get("backend", "inductor") == "inductor":
            of_mode = {} if mode is None else torch._inductor.list_mode_options(mode)
            own = TOGETHER_ON_CPU if together and device == "cpu" else {}
            options["options"] = {**own, **of_mode, **(options.get("options") or {})} or None
        options["fullgraph"] = True
        # None lets numbers become dynamic that change (batch_idx), and keeps shapes as they are.
        options.setdefault("dynamic", True if dynamic else None)
        return torch.compile(program, **options)


def compiles_steps(options: bool | dict[str, Any]) -> bool:
    """Whether `jit_compile` asks for compiled steps: a backend of the user's own gets the net."""
    if isinstance(options, bool):
        return options
    return not options.get("disable") and not callable(options.get("backend"))


def compiles_updates(model: Module) -> bool:
    """Whether a model's updates are to be compiled, as far as its options and optimizers tell."""
    compilation, state = model._fitkit.compilation, model._fitkit.fit_state
    strategy = compilation.strategy
    if not compiles_steps(compilation.jit_compile) or not model._updates_all:
        return False
    if strategy.precision.scaler(strategy.device) is not None:
        return False
    if compilation.sync_batchnorm and strategy.collectives.world_size > 1:
        return False
    moves_batches = overridden(model, "transfer_batch_to_device")
    if moves_batches and has_own_steps(model, "training"):
        return False
    return not any(map(needs_closure, state.optimizers))


def traces_gradients() -> bool:
    """Whether torch's compiler can take `torch.autograd.grad` into a graph: torch 2.10 can't."""
    return hasattr(torch._dynamo.config, "trace_autograd_ops")


def shapes_of(batch: Any) -> Any:
    """What programs are kept by: the shapes and types of a batch's tensors."""
    x, y, weight = batch
    if isinstance(x, torch.Tensor) and weight is None:
        if y is None:
            return x.shape, None, x.dtype, None
        if isinstance(y, torch.Tensor):
            return x.shape, y.shape, x.dtype, y.dtype
    leaves = trees.leaves(batch)
    return tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)


def copied(leaf: Any) -> Any:
    """A tensor in memory of its own; anything else as it is."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def reason_of(error: BaseException) -> str:
    """Why torch couldn't compile something: its first sentence, and the user's line."""
    text = str(error).strip()
    if OTHERS_LEARN in text:
        return OTHERS_LEARN
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    first, *rest = lines
    if first.endswith("raised:") and rest:  # "backend='inductor' raised:", and what on the next
        first = f"{first} {rest[0]}"
    places = [line for line in rest if line.startswith("File ")]
    return f"{first.rstrip('.')} ({places[-1]})" if places else first.rstrip(".")


OTHERS_LEARN = "which parameters have a gradient changes from batch to batch"


def _compilers_errors() -> tuple[type[Exception], ...]:
    """What torch raises for what it can't compile (torch 2.13 has no public names for it)."""
    from torch._dynamo import exc  # takes a second, which only those wait for who compile

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def _nothing() -> None:
    return None
