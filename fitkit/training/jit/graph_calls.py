"""Calls of a compiled graph for other batches, without torch's checks.

At each call torch checks that a compiled function still fits, and collects the graph's inputs from
the model. For a small net that takes a third of the time. If none of the user's code has run since
the last call, the result of both is known: the same inputs, except for the batches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

Batch = tuple[Any, Any, Any]
"""A batch's inputs, targets and weights, on the device."""


class GraphCalls:
    """The backend of a compiled function, which keeps the graph's last call.

    The graph may be called again only if that replaces all that the function does: its inputs are
    tensors, and the same ones in two calls except for the batches; its outputs are the function's
    result, and nothing else. A net that counts its calls, or that keeps an output, does more.

    Args:
        backend: the name of torch's backend that compiles the graph.
        options: options for it.

    Attributes:
        is_watched: whether to keep the next call's inputs and outputs, for `may_repeat`.
    """

    def __init__(self, backend: str, options: dict[str, Any] | None) -> None:
        self.__name__ = backend  # torch's messages have it
        self._backend, self._options = backend, options or {}
        self.is_watched = False
        self._graph: Callable[..., Any] | None = None  # the one that the watched call ran
        self._given: tuple[Any, ...] = ()  # its inputs
        self._found: Sequence[Any] = ()  # its outputs
        self._seen: list[Any] = []  # its inputs without the batches, which are None
        self._places: list[tuple[int, int]] = []  # the batches' tensors among the inputs
        self._results: list[int | None] = []  # where the outputs have the result's tensors

    def __call__(self, module: Any, inputs: Any) -> Callable[..., Any]:
        """Compile a graph for torch."""
        options: dict[str, Any] = {}
        if self._backend == "inductor":
            named = {name.replace("-", "_"): value for name, value in self._options.items()}
            options = {"config_patches": named}
        elif self._options:
            options = {"options": self._options}
        compiled = torch._dynamo.lookup_backend(self._backend)(module, inputs, **options)

        def graph(*given: Any) -> Any:
            found = compiled(*given)
            if self.is_watched:
                self.is_watched, self._graph = False, compiled
                self._given, self._found = given, found
            return found

        return graph

    def may_repeat(self, batches: Sequence[Batch], result: Any) -> bool:
        """Note the watched call of the function; return whether its graph may be called again.

        Args:
            batches: the call's batches.
            result: what the function returned.
        """
        parts, seen = _parts(batches), self._seen
        given, found, self._given, self._found = self._given, self._found, (), ()
        among = {id(part): number for number, part in enumerate(parts)}
        numbers = [among.get(id(tensor)) for tensor in given]
        self._places = [(i, number) for i, number in enumerate(numbers) if number is not None]
        self._seen = [
            tensor if number is None else None
            for tensor, number in zip(given, numbers, strict=True)
        ]
        outputs = {id(output): i for i, output in enumerate(found)}
        results = result if type(result) is tuple else (result,)
        self._results = [None if one is None else outputs.pop(id(one), -1) for one in results]
        return (
            type(result) is tuple
            and not outputs
            and -1 not in self._results
            and len(among) == len(parts)
            and all(isinstance(one, torch.Tensor) for one in (*parts, *given))
            and len(seen) == len(self._seen)
            and all(map(operator.is_, seen, self._seen))
        )

    def repeat(self, batches: Sequence[Batch]) -> Any:
        """Return the function's result for other batches of the same shapes."""
        parts, given = _parts(batches), self._seen.copy()
        for place, number in self._places:
            given[place] = parts[number]
        assert self._graph is not None
        with torch.no_grad():
            found = self._graph(*given)
        return tuple([None if place is None else found[place] for place in self._results])


def _parts(batches: Sequence[Batch]) -> list[Any]:
    return [part for batch in batches for part in batch if part is not None]
