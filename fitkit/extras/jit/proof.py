"""The proof of a compiled graph: its first call is compared with the graph as written.

Torch's compiler may write wrong code. So each graph that torch captures runs three times at first:
twice on copies of its inputs, as written and compiled, and then for real. Its outputs are compared,
and what it changes, and the gradients of its inputs if autograd follows them. All of them start
from the same state of the random generators.

Rounding differs in compiled code. A result fits if it's as close to the one as written as that is
to itself when the inputs, and what each operation gives, are slightly moved. So a chaotic net isn't
blamed, nor a gradient that is all rounding: that of a bias before a batch normalization.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fitkit import trees
from fitkit.accelerators import widest_dtype
from fitkit.extras.jit.kernels import joined
from fitkit.extras.jit.probe import remembered
from fitkit.extras.jit.tracing import UncompiledError, why_uncompiled
from fitkit.random_states import kept_random_numbers, random_state

IS_ON = True
"""Whether graphs are compared; tests set it."""

ROUNDINGS = 32
"""By how many roundings two results may always differ, as a part of the whole tensor's norm."""

SPREADS = 4
"""How far from the result as written another may be, if moved numbers lead 1 away."""

MOVES = (1, 2, 2, 4, 4, 8, 8, 16)
"""By how many roundings numbers are moved, one run each, until a result fits."""

CHANGE = "the change of {}"
"""What messages call an input's change."""

Graph = Callable[..., Any]
"""A graph's function."""


class MisfitError(UncompiledError):
    """Says by how much a compiled graph's numbers differ from those as written."""


class Facts(NamedTuple):
    """What is known of a graph before it's compiled.

    Attributes:
        written: computes the graph as written.
        coarseness: the relative size of a rounding: that of the graph's shortest type of numbers.
        names: what the user's code calls the inputs, as far as torch knows it.
        draws_alike: whether the compiled graph is to draw the same random numbers.
    """

    written: Graph
    coarseness: float
    names: Sequence[str]
    draws_alike: bool


def facts_of(module: fx.GraphModule, options: Mapping[str, Any] | None) -> Facts | None:
    """Return what is known of a graph, before torch's compiler changes it.

    Args:
        options: the compiler's.

    Returns:
        None if the graph can't run once more: it exchanges tensors with other ranks, or keeps some.
    """
    if any(map(_exchanges, module.graph.nodes)) or module.state_dict():
        return None
    written = fx.GraphModule(module, copy.deepcopy(module.graph))
    draws_alike = (options or {}).get("fallback_random") is not False
    return Facts(written, _coarseness(module), _names(module), draws_alike)


class Proven:
    """A compiled graph, which is compared at its first call.

    Args:
        facts: of the graph; None if it can't be compared.
        compiled: computes it.
        refuse: takes the error if the compiled graph fails or gives other numbers. Then the graph
            runs as written for good. None: that error is raised, and nothing has changed.
    """

    def __init__(
        self,
        facts: Facts | None,
        compiled: Graph,
        refuse: Callable[[UncompiledError], None] | None = None,
    ) -> None:
        self._facts, self._compiled, self._refuse = facts, compiled, refuse

    def __call__(self, *given: Any) -> Any:
        if self._facts is not None:
            self._prove(self._facts, given)
        return self._compiled(*given)

    def _prove(self, facts: Facts, given: Sequence[Any]) -> None:
        try:
            check(facts, self._compiled, given)
        except UncompiledError as error:
            if self._refuse is None:
                raise
            self._refuse(error)
            self._compiled = facts.written
        self._facts = None  # their memory is needed no more


def proven_loop(facts: Facts | None, loop: Graph, number: int) -> Graph:
    """Return a compiled loop that is compared at its first call.

    Two steps are, as the second one begins with what the first one left. The call itself may be of
    one: the inputs have batches for more.

    Args:
        facts: of the graph of one step, for its place; from `loop.marked`. None as of `Proven`.
        loop: computes several steps, from `loop.looped`.
        number: which input is the place, or the number of steps.
    """

    if facts is None:
        return loop
    step = facts.written

    def written(*given: Any) -> list[torch.Tensor]:
        own, found = list(given), []
        for place in range(int(given[number])):
            own[number] = torch.tensor(place)
            found.append(step(*own)[:-1])
        return [torch.stack(column) for column in zip(*found, strict=True)]

    def compiled(*given: Any) -> list[torch.Tensor]:
        return [one[: int(given[number])] for one in loop(*given)[:-1]]

    of_loop = facts._replace(written=written)
    is_proven = False

    def call(*given: Any) -> Any:
        nonlocal is_proven
        if not is_proven:
            two = list(given)
            two[number] = torch.tensor(2)
            check(of_loop, compiled, two)
            is_proven = True
        return loop(*given)

    return call


class Backend:
    """A backend of torch's compiler whose graphs are compared at their first calls.

    Args:
        backend: torch's name for the backend, or a function.
        refuse: as of `Proven`, but with the owner as its first argument.
        owner: whose graphs they are. Compiled graphs are among the globals of a module while
            torch may call them, so they don't keep their owner.
    """

    def __init__(
        self,
        backend: str | Graph,
        refuse: Callable[[Any, UncompiledError], None] | None = None,
        owner: object = None,
    ) -> None:
        # Torch's messages have the name.
        self.__name__: str = (
            backend if isinstance(backend, str) else getattr(backend, "__name__", "")
        )
        self._backend = backend
        self._refuse = None if refuse is None else _unowned(refuse, owner)

    def __call__(self, module: fx.GraphModule, inputs: Any, **options: Any) -> Proven:
        """Compile a graph for torch."""
        facts = facts_of(module, options.get("options"))
        return Proven(facts, compiler(self._backend, **options)(module, inputs), self._refuse)


def _unowned(
    refuse: Callable[[Any, UncompiledError], None], owner: object
) -> Callable[[UncompiledError], None]:
    owner_of = weakref.ref(owner)

    def call(error: UncompiledError) -> None:
        if (there := owner_of()) is not None:
            refuse(there, error)

    return call


def compiler(backend: str | Graph, **options: Any) -> Graph:
    """Return what compiles a graph for inputs.

    Args:
        options: those of `torch.compile` that belong to the backend.
    """
    if backend == "inductor":
        given = options.pop("options", None) or {}
        named = {name.replace("-", "_"): value for name, value in given.items()}
        options = {**options, "config_patches": named}
    found: Graph = torch._dynamo.lookup_backend(backend)
    if backend != "inductor":
        return partial(found, **options)

    def compile_graph(module: fx.GraphModule, inputs: Any) -> Any:
        with remembered(), joined():
            return found(module, inputs, **options)

    return compile_graph


def _exchanges(node: fx.Node) -> bool:
    place = getattr(node.target, "__module__", None) or ""
    return "c10d" in str(node.target) or place.startswith("torch.distributed")


def _names(module: fx.GraphModule) -> list[str]:
    found: list[str] = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = node.name if source is None else _plain(source.name)
        found.append(node.name if name in found else name)
    return found


def _plain(source: Any) -> str:
    """Shorten torch's name of an input: `net[0].weight`."""
    text = str(source() if callable(source) else source)
    for part in ("_modules['", "_parameters['", "_buffers['"):
        text = text.replace("." + part, ".").replace(part, "")
    return text.replace("']", "").replace("L['", "").replace("self.", "")


def _coarseness(module: fx.GraphModule) -> float:
    found = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}[
        torch.get_float32_matmul_precision()
    ]
    for node in module.graph.nodes:
        for leaf in trees.leaves(node.meta.get("example_value")):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                found = max(found, torch.finfo(leaf.dtype).eps)
    return found or torch.finfo(torch.float32).eps


def check(facts: Facts, compiled: Graph, given: Sequence[Any]) -> None:
    """Compare a compiled graph with the one as written. Nothing is left behind.

    A graph is taken as it is where nothing can be compared: if its inputs aren't plain tensors, if
    it can't run as written, or if there's no memory for a second run.

    Args:
        compiled: computes the graph.
        given: the inputs.

    Raises:
        MisfitError: they give different numbers.
        UncompiledError: the compiled graph fails.
    """
    if not IS_ON or not all(map(_is_plain, given)):
        return
    written, coarse, names, draws_alike = facts
    before = random_state()

    def run(graph: Graph, moved: float = 0.0, seed: int = 0) -> tuple[dict[str, Any], Any]:
        with kept_random_numbers():
            return _results(graph, given, names, moved, seed), random_state()

    try:
        right, drawn = run(written)
    except Exception:  # of the user's, which comes again, or a graph that only compiles
        return
    if not draws_alike and _differ(drawn, before):
        return
    try:
        found, drew = run(compiled)
    except torch.OutOfMemoryError:
        return
    except Exception as error:
        raise UncompiledError(why_uncompiled(error)) from error
    if _differ(drew, drawn):
        raise MisfitError("it draws other random numbers")
    if found.keys() != right.keys():
        raise MisfitError("the compiled graph has other outputs")
    sizes = {what: _norm(one) for what, one in right.items()}
    errors = {what: _distance(one, right[what]) for what, one in found.items()}
    allowed = {what: ROUNDINGS * coarse * size for what, size in sizes.items()}
    for name, one in zip(names, given, strict=True):  # a sum has only so many bits
        what = CHANGE.format(name)
        if right[what] is not None and one.is_floating_point():
            allowed[what] += 2 * torch.finfo(one.dtype).eps * (_norm(one) + sizes[what])
    misfits = [what for what in right if not errors[what] <= allowed[what]]
    spreads = dict.fromkeys(misfits, 0.0)
    for seed, roundings in enumerate(MOVES):
        if not misfits:
            return
        try:
            moved, _ = run(written, roundings * coarse, seed)
        except Exception:  # such numbers can't be
            break
        for what in misfits:
            spreads[what] = max(spreads[what], _distance(moved[what], right[what]))
        misfits = [w for w in misfits if not errors[w] <= allowed[w] + SPREADS * spreads[w]]
    if misfits:  # what is as written is right
        worst = max(misfits, key=lambda what: errors[what] / (sizes[what] or 1e-300))
        raise MisfitError(
            f"{worst} differs by {errors[worst]:.3g} in norm, of {sizes[worst]:.3g} as written"
        )


def _differ(states: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether two states of torch's random generators differ."""
    return not all(
        torch.equal(one, other)
        for one, other in zip(
            [states["torch"], *states["devices"]],
            [others["torch"], *others["devices"]],
            strict=False,  # a device may have been started in between
        )
    )


def _is_plain(one: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return True
    return type(one) in (torch.Tensor, nn.Parameter) and one.layout is torch.strided


# ------------------------------------------------------------------ a run on copies


def _results(
    graph: Graph, given: Sequence[Any], names: Sequence[str], moved: float, seed: int
) -> dict[str, Any]:
    """Run a graph on copies of its inputs.

    Args:
        given: the inputs.
        names: their names.
        moved: by which part of themselves the copies, and the results of the graph's operations
            and of their gradients', are moved at random.
        seed: of these random numbers.

    Returns:
        The outputs, the inputs' gradients if autograd follows the graph, and each input's change,
        by what messages call them. An input that hasn't changed has None.
    """
    generator = torch.Generator().manual_seed(seed)
    copies = _copied(given, moved, generator)
    starts = _copied(copies, 0.0, generator) if moved else given
    with _MovedResults(moved, generator) if moved else nullcontext():
        outputs = [leaf for leaf in trees.leaves(graph(*copies)) if isinstance(leaf, torch.Tensor)]
        found = {f"output {place}": leaf.detach() for place, leaf in enumerate(outputs)}
        if torch.is_grad_enabled():
            inputs = {name: one for name, one in zip(names, copies, strict=True) if _follows(one)}
            found |= _gradients(list(filter(_follows, outputs)), inputs)
    with torch.no_grad():
        for name, after, before in zip(names, copies, starts, strict=True):
            found[CHANGE.format(name)] = _change(after, before)
    return found


class _MovedResults(TorchDispatchMode):
    """Moves what each operation gives, as other roundings in it would. Changes in place stay."""

    def __init__(self, moved: float, generator: torch.Generator) -> None:
        super().__init__()
        self._moved, self._generator = moved, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or func.is_view:
            return found
        return tree_map_only(torch.Tensor, self._of, found)

    def _of(self, one: torch.Tensor) -> torch.Tensor:
        return _moved(one, self._moved, self._generator)


def _follows(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.requires_grad


def _gradients(outputs: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the inputs' gradients, of the outputs weighted at random."""
    if not outputs or not inputs:
        return {}
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(one.shape, generator=generator).to(one) for one in outputs]
    found = torch.autograd.grad(outputs, list(inputs.values()), weights, allow_unused=True)
    return {
        f"the gradient of {name}": torch.zeros_like(one) if gradient is None else gradient
        for (name, one), gradient in zip(inputs.items(), found, strict=True)
    }


def _change(after: Any, before: Any) -> Any:
    if not isinstance(after, torch.Tensor) or torch.equal(after, before):
        return None
    if after.dtype is torch.bool:
        return after ^ before
    return after.detach() - before


@torch.no_grad()
def _copied(given: Sequence[Any], moved: float, generator: torch.Generator) -> list[Any]:
    """Copy tensors. Those that share memory still do."""
    owners: dict[Any, list[torch.Tensor]] = {}
    for one in given:
        if isinstance(one, torch.Tensor) and one.numel():
            key = one.untyped_storage().data_ptr(), one.dtype
            owners.setdefault(key, []).append(one)
    copies: dict[int, torch.Tensor] = {}
    for sharing in owners.values():
        if len(sharing) == 1:
            copies[id(sharing[0])] = _moved(sharing[0].detach().clone(), moved, generator)
            continue
        start = min(one.storage_offset() for one in sharing)
        stop = max(one.storage_offset() + _span(one) for one in sharing)
        whole = sharing[0].detach().as_strided((stop - start,), (1,), start).clone()
        whole = _moved(whole, moved, generator)
        for one in sharing:
            copies[id(one)] = whole.as_strided(
                one.size(), one.stride(), one.storage_offset() - start
            )
    found = []
    for one in given:
        if isinstance(one, torch.Tensor):
            requires_grad = one.requires_grad
            one = copies[id(one)] if one.numel() else one.detach().clone()
            one.requires_grad_(requires_grad)
        found.append(one)
    return found


def _span(one: torch.Tensor) -> int:
    """Return how many numbers lie between a tensor's first and last one in memory, with both."""
    steps = zip(one.size(), one.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _moved(one: torch.Tensor, moved: float, generator: torch.Generator) -> torch.Tensor:
    """Move numbers up or down by a part of themselves; whole ones stay, which may count."""
    if not moved or not one.is_floating_point():
        return one
    part = max(moved, torch.finfo(one.dtype).eps)
    signs = torch.randint(0, 2, one.shape, generator=generator).to(one.device) * 2 - 1
    return torch.where(one == one.round(), one, (one * (1 + part * signs)).to(one.dtype))


# ------------------------------------------------------------------ sizes


def _norm(one: Any) -> float:
    """Return a tensor's norm, without its numbers that aren't finite."""
    return 0.0 if one is None else _wide(one).nan_to_num(0.0, 0.0, 0.0).norm().item()


def _distance(one: Any, other: Any) -> float:
    """Return the norm of two results' difference. Equal infinities and NaN have none."""
    if one is None or other is None:
        return _norm(one if other is None else other)
    if one.shape != other.shape:
        return float("inf")
    one, other = _wide(one), _wide(other)
    same = (one == other) | (one.isnan() & other.isnan())
    found: float = torch.where(same, 0.0, one - other).norm().item()
    return found if found == found else float("inf")


def _wide(one: torch.Tensor) -> torch.Tensor:
    one = one.detach() if one.layout is torch.strided else one.detach().to_dense()
    one = torch.view_as_real(one.resolve_conj()) if one.is_complex() else one
    return one.to(widest_dtype(one.device))
