"""Compiled functions of batches: one for each shape, kept between calls of `fit` and the like.

Each one computes a method, which reads all that it needs from its object's attributes. Torch
guards these values: a different net, loss or setting is compiled again, never mistaken for the
previous one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import _has_any_global_hook

from fitkit import trees
from fitkit.extras.jit.graph_calls import GraphCalls
from fitkit.extras.jit.net import give_own_code
from fitkit.extras.jit.passes import faster, with_passes
from fitkit.extras.jit.proof import Backend
from fitkit.extras.jit.tracing import UncompiledError, compiled, why_uncompiled
from fitkit.printing import say

ON_CPU = {"size_asserts": False}
"""Options of torch's compiler, besides the user's, on a CPU.

The compiled function's inputs are checked before. Its own results aren't checked again: a step of
a net 32-64-10 takes 0.93 of the time.
"""

MOST_SHAPES = 4
"""How many shapes of batches get a program each; all later shapes share one program."""

FEWEST_TOGETHER = 4
"""The fewest batches that several copies of a graph compute in one call."""

MOST_STEPS, MOST_COPIES = 32, 8
"""How many training steps `steps_per_execution` computes in one call, at most.

Where there is no loop, each is a copy of the step's graph, which takes one to two seconds to
compile.
"""


class Programs:
    """Compiled functions, one for each shape of batches and each number of batches in a call.

    Args:
        options: the options for `torch.compile`.
        what: the name of what is compiled, for messages.

    Attributes:
        what: as given.
        operations: how many operations the first batch's forward took, and how many of them can
            be fused. None until they have been counted.
        is_announced: whether to print that something is being compiled.
    """

    def __init__(self, options: bool | dict[str, Any], what: str) -> None:
        self._options = {} if isinstance(options, bool) else options
        self.what = what
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._graphs: dict[Any, GraphCalls] = {}
        self.is_announced = False
        self.operations: tuple[int, int] | None = None

    def clear(self) -> None:
        """Drop all programs, so that they are compiled again."""
        self._compiled.clear()
        self._graphs.clear()

    def run(
        self,
        function: Callable[..., Any],
        batches: Sequence[Any],
        shapes: Any,
        device: str,
        *,
        entered: Callable[[Any], Any] | None = None,
        may_repeat: bool = False,
        most: int = 0,
    ) -> Any:
        """Run a function on some batches. Compile it first if these shapes and count are new.

        Args:
            function: takes the list of the batches. Torch guards the values that it reads.
            batches: all have the same shapes.
            shapes: the shapes of one batch, from `shapes_of`; None for any shapes.
            device: the type of the device.
            entered: what turns each batch into what the function takes; None for the batch itself.
            may_repeat: whether torch may skip its checks. So nothing that the function reads may
                have changed since the last call or `check`, except for its tensors' numbers.
            most: the most steps in a call, if the only batch is a stack of up to so many. Its last
                part is the number of steps. The function computes the step at that place.

        Raises:
            UncompiledError: torch can't compile the function.
        """
        key = most or len(batches), None if self._options.get("dynamic") else shapes
        graph = self._graphs.get(key) if may_repeat else None
        if graph is not None and (found := graph.repeat(batches)) is not None:
            return found
        if _has_any_global_hook():
            raise UncompiledError("all modules have hooks, whose changes torch doesn't notice")
        given = batches if entered is None else [entered(batch) for batch in batches]
        program = self._compiled.get(key)
        is_new = program is None
        if program is None:
            if len(self._compiled) >= MOST_SHAPES:
                key = key[0], None
                program = self._compiled.get(key)
            is_new = program is None
            program = program or self._program(key, device, most)
        began = time.monotonic()
        if is_new and self.is_announced:
            say(f"compiling {self.what} …", end="")
        try:
            with torch.no_grad():
                # Within no_grad, torch's compiler writes new weights over the old ones. Otherwise
                # it expects the graph to be differentiated, and copies the weights at its end.
                graph = self._graphs.get(key)
                if graph is not None and most:
                    graph.steps = batches[0][-1]
                if graph is None or not may_repeat:
                    found = program(function, given)
                else:
                    found = graph.watched(partial(program, function, given), batches)
        except _compilers_errors() as error:
            if is_new and self.is_announced:
                say("")
            if isinstance(error, UncompiledError):
                raise
            raise UncompiledError(why_uncompiled(error)) from error
        if is_new:
            self._compiled[key] = program
            if self.is_announced:
                say(f" {time.monotonic() - began:.1f} s")
        return found

    def has(self, shapes: Any) -> bool:
        """Whether there is a program for batches of these shapes, or one for any shapes."""
        if self._options.get("dynamic"):
            return True
        return any(of_program in (shapes, None) for _, of_program in self._compiled)

    def may_loop(self, device: str) -> bool:
        """Whether a loop in the graph can compute several steps.

        Its number of steps is on the CPU, so a GPU would be waited for at each step. The shapes
        must be fixed. Backends that write no code can't compile loops.
        """
        options = self._options
        is_own = options.get("backend", "inductor") == "inductor"
        return device == "cpu" and is_own and not options.get("dynamic")

    def is_steady(self, most: int, shapes: Any) -> bool:
        """Whether a loop's last two calls computed the same, so that it may take several steps."""
        graph = self._graphs.get((most, shapes))
        return graph is not None and graph.is_steady

    def check(self) -> None:
        """Let torch check at the next call whether a compiled function still fits."""
        for graph in self._graphs.values():
            graph.forget()

    def _program(self, key: tuple[int, Any], device: str, most: int) -> Callable[..., Any]:
        """Make a new function.

        Args:
            key: how many batches it computes, and their shapes; None for any shapes.
        """

        def program(function: Callable[..., Any], batches: Any) -> Any:
            return function(batches)

        give_own_code(program)
        _, shapes = key
        own: dict[str, Any] = {}
        if device == "cpu":
            own = {**ON_CPU, "post_grad_custom_post_pass": faster()}
        options = with_passes(self._options, own)
        name: str = options.pop("backend", "inductor")
        options["fullgraph"] = True
        # With None, numbers that change (batch_idx) become dynamic, and shapes stay fixed.
        options.setdefault("dynamic", True if shapes is None else None)
        if most or (shapes is not None and device == "cpu"):
            graphs = self._graphs[key] = GraphCalls(name, options.pop("options", None), most)
            return compiled(program, graphs, **options)
        return compiled(program, Backend(name), **options)


class UpdatePrograms:
    """What is compiled of a model's updates, and what can't be. One `fit` leaves it to the next.

    Args:
        options: the options for `torch.compile`.

    Attributes:
        steps: compute batches, with their updates or without.
        updates: make updates from gradients.
        stopped: why batches are computed as written; None while they aren't.
        update_stopped: why updates are made as written; None while they aren't.
        may_join: whether several steps can be computed in one call.
        why_alone: why not, until that is said.
    """

    def __init__(self, options: bool | dict[str, Any]) -> None:
        self.steps: Programs = Programs(options, "the step")
        self.updates: Programs = Programs(options, "the update")
        self.stopped: str | None = None
        self.update_stopped: str | None = None
        self.may_join: bool = True
        self.why_alone: str = ""


def compiles_steps(options: bool | dict[str, Any]) -> bool:
    """Whether `jit_compile` asks for compiled steps; a callable backend compiles only the net."""
    if isinstance(options, bool):
        return options
    return not options.get("disable") and not callable(options.get("backend"))


def most_steps(steps_per_execution: int, *, loops: bool) -> int:
    """Return how many training steps one call computes at most.

    Args:
        steps_per_execution: how many there are between two calls of callbacks.
        loops: whether a loop computes them. If not, a group of `steps_per_execution` batches should
            leave few for calls of one batch.
    """
    if loops:
        return min(steps_per_execution, MOST_STEPS)
    if steps_per_execution < FEWEST_TOGETHER:
        return 1
    return FEWEST_TOGETHER if steps_per_execution % MOST_COPIES else MOST_COPIES


def traces_gradients() -> bool:
    """Whether torch's compiler can trace `torch.autograd.grad`; torch 2.10 can't."""
    return hasattr(torch._dynamo.config, "trace_autograd_ops")


def shapes_of(batch: Any) -> Any:
    """Return the key of a batch's program: the shapes and types of the batch's tensors."""
    x, y, weight = batch
    if isinstance(x, torch.Tensor) and weight is None:
        if y is None:
            return x.shape, None, x.dtype, None
        if isinstance(y, torch.Tensor):
            return x.shape, y.shape, x.dtype, y.dtype
    leaves = trees.leaves(batch)
    return tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)


def copied(leaf: Any) -> Any:
    """Copy a tensor or an array; return anything else as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _compilers_errors() -> tuple[type[Exception], ...]:
    """Return the errors of `compiled`; torch 2.13 has no public names for its compiler's."""
    from torch._dynamo import exc  # takes a second, so only users who compile wait for it

    return UncompiledError, exc.TorchDynamoException, exc.FailOnRecompileLimitHit
