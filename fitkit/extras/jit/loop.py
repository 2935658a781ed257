"""A graph of several steps: a loop over the graph of one.

So `steps_per_execution` compiles one step, however many steps a call computes. The loop is torch's
`while_loop`, whose body can't contain autograd's operations. So `make_fx` writes the gradients'
operations out first.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from fitkit import trees
from fitkit.extras.jit.fused import change_inputs


def stacked(batches: Sequence[Any]) -> Any:
    """Stack batches of the same shapes, (k, B, ...); what isn't a tensor stays the first one's."""
    x, y, weight = batches[0]
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and weight is None:
        all_x, all_y, _ = zip(*batches, strict=True)
        return _stack(all_x), _stack(all_y), None
    columns = zip(*map(trees.leaves, batches), strict=True)

    def stack(leaf: Any) -> Any:
        column = next(columns)
        return _stack(column) if isinstance(leaf, torch.Tensor) else leaf

    return trees.map_leaves(stack, batches[0])


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors; without a copy if they follow one another in memory, as slices of arrays do.

    With a copy, a step of a net 784-128-10 takes 0.95 of the time.
    """
    first, last = tensors[0], tensors[-1]
    start, size = first.data_ptr(), first.nbytes
    if (
        first.is_contiguous()
        and last.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and all(one.data_ptr() == start + index * size for index, one in enumerate(tensors))
    ):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(tensors))


def at(stack: Any, place: torch.Tensor) -> Any:
    """Return what stands at a place (), of stacked tensors; traced."""
    index = place.reshape(1)

    def row(leaf: Any) -> Any:
        return leaf.index_select(0, index).squeeze(0) if isinstance(leaf, torch.Tensor) else leaf

    return trees.map_leaves(row, stack)


def marked(result: Any, place: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return what a step of a loop must return: new tensors, and their number; traced.

    `looped` finds the number in the graph. A graph with more outputs belongs to a step that keeps
    tensors elsewhere, which would be those of all steps.
    """
    count = 0

    def copied(leaf: Any) -> Any:
        nonlocal count
        if not isinstance(leaf, torch.Tensor):
            return leaf
        count += 1
        return leaf.clone()

    result = trees.map_leaves(copied, result)
    return result, torch.add(place, count)


NUMBERS = "the step takes numbers that change"


def looped(
    step: fx.GraphModule,
    inputs: Sequence[Any],
    number: int,
    most: int,
    compile_graph: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile a graph that computes a step for the places 0, 1, ... in turn.

    Args:
        step: the graph of one step, which returns what `marked` does. It may change its inputs.
        inputs: the inputs of the first call, which have the shapes of all others.
        number: which of them is the step's place. The loop takes the number of steps instead.
        most: the most steps in a call.
        compile_graph: compiles a graph for inputs.

    Returns:
        A function of the same inputs. It returns the outputs of `step` for all places, (most, ...),
        but for the last one, in whose place is the number of steps.

    Raises:
        RuntimeError: this step can't be in a loop.
    """
    from torch._guards import tracing
    from torch._higher_order_ops.while_loop import while_loop_op
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    if not all(isinstance(one, torch.Tensor) for one in inputs):
        raise RuntimeError(NUMBERS)
    [output] = step.graph.find_nodes(op="output")
    *found, mark = output.args[0]
    if mark.target is not torch.add or mark.args[1] != len(found):
        raise RuntimeError("the step keeps tensors for later")
    count = len(inputs)

    def body(place: torch.Tensor, *passed: torch.Tensor) -> tuple[torch.Tensor]:
        own, stacks = list(passed[:count]), passed[count:]
        own[number] = place
        for stack, found in zip(stacks, step(*own)[:-1], strict=True):
            stack.index_put_((place,), found)
        return (place + 1,)

    def condition(place: torch.Tensor, *passed: torch.Tensor) -> torch.Tensor:
        return place < passed[number]

    with tracing(None), torch.no_grad(), FakeTensorMode():
        like = [one.meta["example_value"] for one in found]  # of Dynamo
        stacks = [torch.empty((most, *one.shape), dtype=one.dtype) for one in like]
        given = (torch.zeros((), dtype=torch.int64), *map(_without_numbers, inputs), *stacks)
        versions = [one._version for one in given]
        root = torch.nn.Module()
        root.condition = make_fx(condition)(*given)
        try:
            root.body = make_fx(body)(*given)
        except DataDependentOutputException:
            raise RuntimeError(NUMBERS) from None
        changed = [index for index, one in enumerate(given) if one._version != versions[index]]
        for node in root.body.graph.find_nodes(
            op="call_function", target=torch.ops.aten.detach.default
        ):
            node.replace_all_uses_with(node.args[0])  # nothing follows gradients any more
        root.body.graph.eliminate_dead_code()
        root.body.recompile()

    graph = fx.Graph()
    entered = [graph.placeholder(f"input_{index}") for index in range(count)]
    kept = [
        graph.call_function(
            torch.ops.aten.empty.memory_format, (list(one.shape),), {"dtype": one.dtype}
        )
        for one in stacks
    ]
    first = graph.call_function(torch.ops.aten.full.default, ([], 0), {"dtype": torch.int64})
    end = graph.call_function(
        while_loop_op,
        (graph.get_attr("condition"), graph.get_attr("body"), (first,), (*entered, *kept)),
        {"mutated_arg_indices": ",".join(map(str, changed))},
    )
    # Without a use of the loop's own result, the compiler would leave it out.
    graph.output((*kept, graph.call_function(operator.getitem, (end, 0))))
    whole = fx.GraphModule(root, graph)
    with _random_order_comes_later(), _kept_on_disk(whole, inputs):
        return compile_graph(whole, inputs)


def _without_numbers(one: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and kind; a fake one within `FakeTensorMode`."""
    return torch.empty_strided(
        one.size(), one.stride(), dtype=one.dtype, requires_grad=one.requires_grad
    )


def bodies(graph: fx.Graph) -> list[fx.Graph]:
    """Return the bodies of a graph's loops just as torch's compiler will write their code.

    A loop that changes its inputs is hidden in another operation at first. The compiler would take
    it out later and trace its body again, without the marks of those who change graphs. So it is
    taken out here.
    """
    from torch._higher_order_ops.while_loop import while_loop_op

    hiding = torch.ops.higher_order.auto_functionalized_v2
    hidden = graph.find_nodes(op="call_function", target=hiding)
    if not any(node.args[0] is while_loop_op for node in hidden):
        return []
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
    from torch._inductor.fx_utils import FakeTensorUpdater

    module = graph.owning_module
    assert module is not None
    reinplace_inplaceable_ops(FakeTensorUpdater(module), graph)
    decompose_auto_functionalized(graph)
    found = []
    for node in graph.find_nodes(op="call_function", target=while_loop_op):
        body = getattr(module, node.args[1].target)
        body.graph = fx_graph_cse(body.graph)
        change_inputs(body.graph)
        body.recompile()
        found.append(body.graph)
    order = getattr(getattr(post_grad, ORDER, None), "original", None)
    if order is not None:
        for body in found:
            order(body)
    return found


ORDER = "_chain_random_ops_for_ordering"
"""Torch's pass that keeps random operations in their order, from the second one of a graph on.

It writes operations that can't be traced once more, as a loop's body is.
"""


@contextmanager
def _random_order_comes_later() -> Iterator[None]:
    """Leave torch's pass for random operations to `bodies`, which runs it on what stays."""
    from torch._inductor.fx_passes import post_grad

    def later(graph: fx.Graph) -> None: ...

    later.original = getattr(post_grad, ORDER, None)  # type: ignore[attr-defined]
    with patch.object(post_grad, ORDER, later, create=True):
        yield


CACHEABLE = "unsafe_marked_cacheable_functions"
"""The compiler's setting that names operations whose traces may be kept, each with a key.

Torch doesn't keep a `while_loop`'s by itself, so each process would trace the loop again.
"""


@contextmanager
def _kept_on_disk(whole: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Let torch keep a loop's trace on the disk, under all that decides what it computes.

    That is the code of its graphs, and what its inputs are. If a graph holds tensors, whose numbers
    its code doesn't show, nothing is kept.
    """
    from torch._inductor import config

    if [*whole.buffers(), *whole.parameters()] or not hasattr(config, CACHEABLE):
        yield
        return
    graphs = [one for one in whole.modules() if isinstance(one, fx.GraphModule)]
    facts = [(one.shape, one.stride(), one.dtype, one.device) for one in inputs]
    text = "\n".join([*(one.code for one in graphs), repr(facts)])
    key = hashlib.sha256(text.encode()).hexdigest()
    known = {**getattr(config, CACHEABLE), "torch.ops.higher_order.while_loop": key}
    with config.patch({CACHEABLE: known}):
        yield
