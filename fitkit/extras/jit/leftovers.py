"""What torch's compiler keeps of a function for as long as the process lives, and its end.

Torch counts on a program that compiles a few functions once. A search over hundreds of models
compiles hundreds, so each one's leftovers end with it.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any


class Leftovers:
    """What torch keeps of a compiled function.

    Args:
        code: the function's own (`give_own_code`).
    """

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._backends: set[int] = set()
        self._sources: set[str] = set()
        self._modules: list[weakref.ref[ModuleType]] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what torch keeps of what it does in a block: of `torch.compile`, or of a trace."""
        backends, sources, modules = set(_backends()), set(_sources()), set(map(id, _modules()))
        try:
            yield
        finally:
            self._backends |= set(_backends()) - backends
            self._sources |= set(_sources()) - sources
            self._modules += [weakref.ref(one) for one in _modules() if id(one) not in modules]

    def drop(self) -> None:
        """Drop all of it, once the function is gone.

        These are private names of torch's. What another version keeps elsewhere stays there, as
        after any `torch.compile`.
        """
        ends = self._end_checks, self._end_backends, self._end_sources, self._end_modules
        for end in (*ends, self._end_states):
            with contextlib.suppress(Exception):
                end()

    def _end_checks(self) -> None:
        """Drop the compiled code, and the checks of whether it fits.

        Whatever lives longer and was checked by its identity, such as a class, keeps the checks.
        """
        from torch._dynamo import eval_frame
        from torch._dynamo.guards import CheckFunctionManager

        entries = eval_frame._debug_get_cache_entry_list(self._code)
        checks = [entry.guard_manager for entry in entries]
        # Torch's map from compiled code to code as written has the two keep each other, and with
        # them the graphs, which hold weights.
        eval_frame.remove_from_cache(self._code)
        for one in checks:
            vars(one).update(dict.fromkeys(vars(one)))
        mine = set(map(id, checks))
        for finalizer, info in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
            manager = getattr(getattr(info.func, "func", None), "__self__", None)
            if isinstance(manager, CheckFunctionManager):
                held = getattr(manager, "guard_manager", None)
                if id(held) in mine or type(held).__name__ == ENDED:
                    finalizer.detach()

    def _end_backends(self) -> None:
        kept = _backends()
        for key in self._backends:
            kept.pop(key, None)

    def _end_sources(self) -> None:
        kept = _sources()
        for key in self._sources:
            kept.pop(key, None)
            linecache.cache.pop(key, None)

    def _end_modules(self) -> None:
        gone = {id(one): one for one in (ref() for ref in self._modules) if one is not None}
        kept = _modules()
        kept[:] = [one for one in kept if id(one) not in gone]
        for one in gone.values():
            if sys.modules.get(one.__name__) is one:
                del sys.modules[one.__name__]

    def _end_states(self) -> None:
        """Drop what torch remembers of sizes, of the code's variables and of its own callers."""
        from torch._dynamo import guards, pgo, utils

        states: dict[Any, Any] = getattr(pgo, "_CODE_STATE", None) or {}
        own = self._code.co_filename, self._code.co_name
        for key in [one for one in states if (one.filename, one.name) == own]:
            del states[key]
        guards.code_framelocals_names_reversed_cached.cache_clear()
        metrics = utils.get_metrics_context()
        if not metrics.in_progress():
            metrics._edits.clear()


ENDED = "DeletedGuardManagerWrapper"
"""The class of checks that torch itself has ended. Their finalizers have nothing left to do."""


def _backends() -> dict[int, Any]:
    """Return torch's backends by their id, which it keeps for `torch._dynamo.reset`."""
    found: dict[int, Any] = getattr(_loaded("torch._dynamo.eval_frame"), "cached_backends", {})
    return found


def _sources() -> dict[str, str]:
    """Return the texts of all graphs, which torch keeps for tracebacks."""
    loader = getattr(_loaded("torch.fx.graph_module"), "_loader", None)
    found: dict[str, str] = getattr(loader, "eval_cache", {})
    return found


def _modules() -> list[ModuleType]:
    """Return the modules that inductor wrote; it loads one anew for each graph, with constants."""
    cache = getattr(_loaded("torch._inductor.codecache"), "PyCodeCache", None)
    found: list[ModuleType] = getattr(cache, "modules", [])
    return found


def _loaded(name: str) -> ModuleType | None:
    """Return one of torch's modules, which take seconds to import, if it is there already."""
    return sys.modules.get(name)
