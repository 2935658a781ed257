"""Changes of a graph for torch's compiler: for right numbers, and for faster code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fitkit.extras.jit import fused, loop

EARLY = "joint_custom_pre_pass"
"""The compiler's option for what changes a graph before all of its patterns."""


EXACT = {"fallback_random": True}
"""The compiler's options with which random numbers are those of the code as written."""


def with_passes(given: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of `torch.compile` with which its compiler computes the right numbers.

    Args:
        given: the user's arguments.
        own: options for the compiler, where the user's mode and options don't set them.
    """
    arguments = dict(given)
    if arguments.get("backend", "inductor") != "inductor":
        return arguments
    from torch._inductor import config, list_mode_options

    mode = arguments.pop("mode", None)
    of_mode = {} if mode is None else list_mode_options(mode)
    options = {**EXACT, **(own or {}), **of_mode, **(arguments.get("options") or {})}
    theirs = options.get(EARLY, getattr(config, EARLY))
    options[EARLY] = without_alphas(*(theirs if isinstance(theirs, (list, tuple)) else [theirs]))
    return {**arguments, "options": options}


def without_alphas(*others: Callable[[torch.fx.Graph], Any] | None) -> Any:
    """Return what writes `a + alpha * b` as a product and a sum.

    Torch 2.13 takes `mm(a, b).add(w, alpha=k)` for `addmm(w, a, b)`, and a scaled mask of an
    attention for the mask: these patterns ignore alpha (pytorch#167313). So weights would be
    decayed by 1 instead of `weight_decay`.

    Args:
        others: what else changes the graph, after that.
    """
    return _alphas_pass()([one for one in others if one is not None])


@functools.cache
def _alphas_pass() -> Any:
    """Return the class of what `without_alphas` gives."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class WithoutAlphas(CustomGraphPass):
        def __init__(self, others: list[Callable[[torch.fx.Graph], Any]]) -> None:
            self._others = others

        def __call__(self, graph: torch.fx.Graph) -> None:
            _write_alphas_out(graph)
            for one in self._others:
                one(graph)

        def uuid(self) -> Any:
            hashes = [
                one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._others
            ]
            # With None the compiler keeps nothing on the disk.
            return None if None in hashes else (get_hash_for_files((__file__,)), *hashes)

    return WithoutAlphas


def _write_alphas_out(graph: torch.fx.Graph) -> None:
    aten = torch.ops.aten
    for target in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor):
        place = 0 if target is aten.rsub.Tensor else 1  # `rsub` is other - alpha * self
        for node in graph.find_nodes(op="call_function", target=target):
            scaled: Any = node.args[place]
            alpha = node.kwargs.get("alpha", 1)
            if alpha == 1 or not isinstance(scaled, torch.fx.Node):
                continue
            with graph.inserting_before(node):
                dtype = node.meta["val"].dtype
                if scaled.meta["val"].dtype is not dtype:  # an eager sum converts first
                    convert = torch.ops.prims.convert_element_type.default
                    scaled = _called(graph, convert, scaled, dtype)
                node.update_arg(place, _called(graph, aten.mul.Tensor, scaled, alpha))
            node.kwargs = {name: one for name, one in node.kwargs.items() if name != "alpha"}


def _called(graph: torch.fx.Graph, target: Any, *given: Any) -> torch.fx.Node:
    """Add a call to a graph, with its result's shape."""
    node = graph.call_function(target, given)
    values = [one.meta["val"] if isinstance(one, torch.fx.Node) else one for one in given]
    node.meta["val"] = target(*values)
    return node


@functools.cache
def faster() -> Any:
    """Return what makes a graph faster before torch's compiler writes its code for a CPU."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class GraphPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for part in (*loop.bodies(graph), graph):
                _compute_numbers_once(part)
                _add_biases_apart(part)

        def uuid(self) -> bytes:  # the compiler's cache on the disk asks for it
            return get_hash_for_files((__file__, loop.__file__, fused.__file__))

    return GraphPass()


def _compute_numbers_once(graph: torch.fx.Graph) -> None:
    """Compute powers and roots of single numbers once.

    The compiler would join them to the loops that use them: Adam's update would compute its bias
    corrections again for every 8 or 16 weights. With this, a step of a net 784-128-10 with batches
    of 32 takes 0.78 of the time.
    """
    costly: set[torch.fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.ndim or not value.is_cpu:
            continue
        is_costly = getattr(node.target, "overloadpacket", None) in COSTLY
        if is_costly or not costly.isdisjoint(node.all_input_nodes):
            costly.add(node)
            node.meta["inductor_realize_to_strides"] = True  # written to memory


def _add_biases_apart(graph: torch.fx.Graph) -> None:
    """Add a linear layer's bias after its product of matrices, where the next loop does it too.

    `addmm` writes the bias to every row before it multiplies. With this, a training step of a
    transformer of four layers takes 0.93 of the time, and a step of a net 784-128-10 0.96.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        bias, *matrices = node.args
        value = bias.meta["val"]
        if node.kwargs or value.ndim != 1 or value.dtype not in (torch.float32, torch.float64):
            continue  # a shorter type would be rounded twice
        with graph.inserting_before(node):
            product = graph.call_function(aten.mm.default, tuple(matrices))
            whole = graph.call_function(aten.add.Tensor, (product, bias))
        product.meta, whole.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


COSTLY = (torch.ops.aten.pow, torch.ops.aten.sqrt, torch.ops.aten.rsqrt)
"""Operations on single numbers that take much longer than to read a number."""
