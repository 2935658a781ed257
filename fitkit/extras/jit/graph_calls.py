"""Calls of a compiled graph for other batches, without torch's checks.

At each call torch checks that a compiled function still fits, and collects the graph's inputs from
the model. For a small net that takes more than half of the time. If none of the user's code has run
since the last call, the result of both is known: the same inputs, except for the batches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fitkit.extras.jit.loop import looped
from fitkit.extras.jit.proof import Proven, compiler, facts_of, proven_loop

Parts = tuple[Any, ...]
"""A batch's inputs, targets and weights, on the device; the number of steps comes after stacks."""

MOST_FAILURES = 3
"""A graph is given up after so many calls in a row that can't be repeated."""


class GraphCalls:
    """The backend of a compiled function, which can call the function's graph by itself.

    The graph may be called again only if that replaces all that the function does. So two calls in
    a row must have run this very graph, whose inputs are tensors, and the same ones except for the
    batches. And its outputs must be in the function's result, and nowhere else. A net that counts
    its calls gets another graph, or a number as an input. A net that keeps an output has more.

    Args:
        backend: the name of torch's backend that compiles the graph.
        options: options for it.
        most: the most steps in a call, if the graph is that of one step of a loop; otherwise 0.

    Attributes:
        steps: the next call's number of steps, which is an input of the loop; None without a loop.
        is_steady: whether the last two calls by torch ran the same graph. Then more steps will too.
    """

    def __init__(self, backend: str, options: dict[str, Any] | None, most: int = 0) -> None:
        self.__name__ = backend  # torch's messages have it
        self._most = most
        self.steps: torch.Tensor | None = None
        self.is_steady: bool = False
        self._backend = backend
        self._options: dict[str, Any] = {"options": options} if options else {}
        self._is_watched = False
        self._latest: Callable[..., Any] | None = None  # the graph of the last call
        self._ran: Callable[..., Any] | None = None  # the graph that the watched call ran
        self._given: tuple[Any, ...] = ()  # its inputs
        self._found: Sequence[Any] = ()  # its outputs
        self._last: tuple[Sequence[Parts], Any] | None = None  # the watched call's, and its result
        self._graph: Callable[..., Any] | None = None  # the one before that
        self._seen: list[Any] = []  # its inputs without the batches, which are None
        self._places: list[tuple[int, int]] = []  # the batches' tensors among the inputs
        self._result: Any = None  # the result, with each tensor's index in place of the tensor
        self._is_known = False
        self._failures = 0

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        """Compile a graph for torch."""
        facts = facts_of(module, self._options.get("options"))
        compile_graph = compiler(self._backend, **self._options)
        compiled: Callable[..., Any]
        if self.steps is None:
            compiled = Proven(facts, compile_graph(module, inputs))
        else:
            self.is_steady = False
            if int(self.steps) > 1:
                raise RuntimeError("something has changed since the last step")
            number = next(index for index, one in enumerate(inputs) if one is self.steps)
            loop = looped(module, inputs, number, self._most, compile_graph)
            compiled = proven_loop(facts, loop, number)
        self._failures = 0

        def graph(*given: Any) -> Any:
            found = compiled(*given)
            self.is_steady, self._latest = self._latest is compiled, compiled
            if self._is_watched:
                self._ran, self._given, self._found = compiled, given, found
            return found

        return graph

    def watched(self, program: Callable[[], Any], batches: Sequence[Parts]) -> Any:
        """Call the compiled function, and note how it calls its graph.

        Args:
            program: calls the function on the batches.
            batches: their tensors.
        """
        self._is_watched, self._given = self._failures < MOST_FAILURES, ()
        try:
            found = program()
        finally:
            self._is_watched = False
        self._last = (batches, found) if self._given else None
        return found

    def forget(self) -> None:
        """Check everything at the next call, because other code may run before it."""
        self._is_known, self._last, self._given, self._found = False, None, (), ()

    def repeat(self, batches: Sequence[Parts]) -> Any:
        """Return the function's result for other batches of the same shapes, by the graph alone.

        Returns:
            None if the function must be called instead.
        """
        if self._last is not None:
            self._is_known = self._learn(*self._last)
            self._failures = 0 if self._is_known else self._failures + 1
            self._last, self._given, self._found = None, (), ()
        if not self._is_known:
            return None
        parts, given = _parts(batches), self._seen.copy()
        for place, number in self._places:
            given[place] = parts[number]
        assert self._graph is not None
        with torch.no_grad():
            found = (*self._graph(*given), *parts)
        return _filled(self._result, found)

    def _learn(self, batches: Sequence[Parts], result: Any) -> bool:
        """Learn from the watched call how to repeat it; return whether that can be done."""
        parts, seen, given = _parts(batches), self._seen, self._given
        self._graph = self._ran
        among = {id(part): number for number, part in enumerate(parts)}
        numbers = [among.get(id(tensor)) for tensor in given]
        self._places = [(i, number) for i, number in enumerate(numbers) if number is not None]
        self._seen = [
            tensor if number is None else None
            for tensor, number in zip(given, numbers, strict=True)
        ]
        places = {id(tensor): place for place, tensor in enumerate((*self._found, *parts))}
        used: set[int] = set()
        try:
            self._result = _placed(result, places, used)
        except LookupError:
            return False
        return (
            self.is_steady
            and used.issuperset(range(len(self._found)))
            and len(among) == len(parts)
            and all(isinstance(one, torch.Tensor) for one in (*parts, *given))
            and len(seen) == len(self._seen)
            and all(map(operator.is_, seen, self._seen))
        )


def _parts(batches: Sequence[Parts]) -> list[Any]:
    return [part for batch in batches for part in batch if part is not None]


def _placed(tree: Any, places: dict[int, int], used: set[int]) -> Any:
    """Replace each tensor in a tree by its place, and add that to `used`.

    Raises:
        LookupError: the tree holds something else.
    """
    if tree is None:
        return None
    if type(tree) is dict:
        return {name: _placed(value, places, used) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)([_placed(part, places, used) for part in tree])
    place = places[id(tree)]
    used.add(place)
    return place


def _filled(tree: Any, found: Sequence[Any]) -> Any:
    """Undo `_placed` with other tensors."""
    if tree is None:
        return None
    if type(tree) is int:
        return found[tree]
    if type(tree) is dict:
        return {name: _filled(value, found) for name, value in tree.items()}
    return type(tree)([_filled(part, found) for part in tree])
