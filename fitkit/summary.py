"""What a net is made of: its layers, their shapes, parameters and memory.

The net is left as it was: its mode, its buffers and the random numbers that come next.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from fitkit import trees
from fitkit.arguments import check_count, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.example_batch import example_batch
from fitkit.summary_table import Row, Summary

LONGEST_TABLE = 120
"""The rows up to which a table shows everything when nobody says how deep to go."""


def summarize(
    net: nn.Module,
    example: Any = None,
    *,
    input_shape: Any = None,
    depth: int | None = None,
    run: Callable[[nn.Module, Any], Any] | None = None,
) -> Summary:
    """The layers of a net with their parameters, and shapes where an input is given.

    Args:
        net: any module.
        example: a batch of inputs: a tensor or array, or a tree of them. The net is called
            with it once, without gradients and in evaluation mode.
        input_shape: the shape of one sample instead, as `(1, 28, 28)`; a dict or tuple of
            shapes for several inputs. The batch is one sample of zeros.
        depth: levels of nesting to show. Default None: all of them, fewer in a long net.
        run: how to call the net; None is `net(example)`.

    Raises:
        ConfigurationError: the net can't be called with that input; the cause says why.
    """
    if not isinstance(net, nn.Module):
        raise ArgumentTypeError(f"net={describe(net)} must be a torch.nn.Module.")
    check_count("depth", depth, optional=True)
    sizes = (0, "")
    if example is not None or input_shape is not None:
        example = example_batch(example, input_shape, net)
        sizes = (trees.tensor_bytes(example), shape_text(example))
        if any(map(is_lazy, [*net.parameters(), *net.buffers()])):
            net = _copied(net)  # A first batch would settle its shapes for good.
    watch = _Watch(net)
    if example is not None:
        watch = _watched(net, example, run or (lambda net, example: net(example)))
    rows, hidden_below = _rows(net, depth, watch)
    known = [parameter for parameter in net.parameters() if not is_lazy(parameter)]
    buffers = [buffer for buffer in net.buffers() if not is_lazy(buffer)]
    memory: Counter[str] = Counter()
    for parameter in known:
        memory[str(parameter.dtype).removeprefix("torch.")] += trees.tensor_bytes(parameter)
    total = sum(parameter.numel() for parameter in known)
    trainable = sum(parameter.numel() for parameter in known if parameter.requires_grad)
    return Summary(
        rows=rows,
        parameters=total,
        trainable=trainable,
        non_trainable=total - trainable,
        buffers=sum(buffer.numel() for buffer in buffers),
        unknown=sum(map(is_lazy, net.parameters())),
        parameter_bytes=dict(memory),
        buffer_bytes=trees.tensor_bytes(buffers),
        input=sizes[1],
        input_bytes=sizes[0],
        activation_bytes=None if example is None else watch.activation_bytes,
        multiply_adds=sum(watch.multiply_adds.values()) if watch.counts else None,
        hidden_below=hidden_below,
    )


def shape_text(tree: Any) -> str:
    """The shapes in a net's input or output: `(32, 10)`, `logits (2, 5), states (2, 8)`."""
    if tree is None:
        return ""
    if not trees.is_container(tree) and not isinstance(tree, torch.Tensor):
        attributes = getattr(tree, "__dict__", {})
        tree = {k: v for k, v in attributes.items() if torch.is_tensor(v)} or type(tree).__name__
    parts = []
    for path, leaf in trees.leaves_with_paths(tree):
        names = re.findall(r"\['(.*?)'\]|\.(\w+)", path)
        name = "".join(names[-1]) if names else ""
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{name} {tuple(leaf.shape)}".strip())
        elif leaf is tree:
            parts.append(leaf)
    return ", ".join(parts[:3]) + (f", +{len(parts) - 3} more" if len(parts) > 3 else "")


# ------------------------------------------------------------------ the call


def _attention_operations(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of the CPU's fused attention: queries with keys, and the weights with values."""
    batch, heads, length, width = query
    return int(2 * batch * heads * length * key[2] * (width + value[3]))


def _recurrent_operations(inputs: Any, of_input: Any, of_state: Any, *_: Any, **__: Any) -> int:
    """Of one direction of one layer of oneDNN's LSTM: both matrices, for each step and sample."""
    steps, batch, _width = inputs
    return int(2 * steps * batch * of_input[0] * (of_input[1] + of_state[1]))


LACKING = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_operations,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_operations,
}
"""Operations of the CPU that torch's counter has no formula for, from their inputs' shapes."""


class _Watch:
    """Notes what each module gives and computes while a net runs.

    Attributes:
        shapes: each module's (first) output's shapes.
        calls: how often each ran.
        multiply_adds: each module's own, without those of the modules that it calls.
        activation_bytes: the memory of the outputs of modules that called no other.
        counts: whether multiply-adds are counted.
        operations: counts while the net runs; a multiplication and an addition are two.
    """

    def __init__(self, net: nn.Module, *, counts: bool = False) -> None:
        self.counts = counts
        self.shapes: dict[nn.Module, str] = {}
        self.calls: Counter[nn.Module] = Counter()
        self.multiply_adds: Counter[nn.Module] = Counter()
        self.activation_bytes = 0
        self.operations = FlopCounterMode(display=False, custom_mapping=LACKING)
        self._counted = 0
        self._running = [net]
        self._calls_inside = [0]

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """A module is called."""
        self._settle()
        self._calls_inside[-1] += 1
        self._calls_inside.append(0)
        self._running.append(module)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's call has ended."""
        self._settle()
        self._running.pop()
        self.calls[module] += 1
        self.shapes.setdefault(module, shape_text(output))
        if self._calls_inside.pop() == 0:
            self.activation_bytes += trees.tensor_bytes(output)

    def _settle(self) -> None:
        """What was computed since the last time was the running module's."""
        counted = self.operations.get_total_flops()
        self.multiply_adds[self._running[-1]] += (counted - self._counted) // 2
        self._counted = counted


def _watched(net: nn.Module, example: Any, run: Callable[[nn.Module, Any], Any]) -> _Watch:
    """What was seen while the net ran once."""
    watch = _Watch(net, counts=True)
    try:
        _call(net, example, run, watch)
    except ConfigurationError:
        # torch's counter refuses what it doesn't know of the higher-order operations.
        watch = _Watch(net)
        _call(net, example, run, watch)
    return watch


def _call(
    net: nn.Module, example: Any, run: Callable[[nn.Module, Any], Any], watch: _Watch
) -> None:
    """Run the net once with `watch` looking on; it leaves no trace in the net."""
    handles = []
    try:
        for module in net.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # It takes no hooks.
            handles.append(module.register_forward_pre_hook(watch.enter, prepend=True))
            # Called after an error too, so that a net may catch it and go on.
            handles.append(module.register_forward_hook(watch.leave, always_call=True))
        with _untouched(net), watch.operations if watch.counts else contextlib.nullcontext():
            run(net, example)
    except Exception as error:
        raise ConfigurationError(
            f"The net can't be called with an input of {shape_text(example)}: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Give a batch of inputs such as "
            "fit gets. (input_shape is one sample's shape and makes a batch of zeros; a net that "
            "takes other inputs, such as token ids, needs example=.)"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _untouched(net: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes, buffers and random state are back."""
    modes = [(module, module.training) for module in net.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone(), buffer._version)
        for module in net.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    gpus = {p.device.index for p in net.parameters() if p.device.type == "cuda"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=sorted(gpus)))
        stack.enter_context(torch.no_grad())
        # A compiled net would be compiled again. (The stance imports dynamo, which takes seconds;
        # without it nothing is compiled.)
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        fast = torch.backends.mha.get_fastpath_enabled()
        # One fused operation would pass by the modules inside.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, value, version in buffers:
                module._buffers[name] = buffer
                if buffer._version != version:
                    buffer.copy_(value)


def _copied(net: nn.Module) -> nn.Module:
    # torch copies a lazy parameter, but refuses to copy a lazy buffer.
    memo: dict[int, Any] = {
        id(buffer): nn.UninitializedBuffer(  # type: ignore[call-arg]
            device=buffer.device, dtype=buffer.dtype
        )
        for buffer in net.buffers()
        if is_lazy(buffer)
    }
    try:
        return copy.deepcopy(net, memo)
    except Exception as error:
        raise ConfigurationError(
            "The net has lazy modules, whose shapes a first batch settles, and can't be copied "
            f"to try one ({error}). Call the net once, or ask for the summary without an example."
        ) from error


# ------------------------------------------------------------------ the rows


@dataclasses.dataclass
class _Node:
    """A module with its children, and what it adds to the numbers above it."""

    row: Row
    all_parameters: int | None
    all_multiply_adds: int
    children: list[_Node]


def _rows(net: nn.Module, depth: int | None, watch: _Watch) -> tuple[list[Row], int | None]:
    """The table's rows, and the level of the last ones where there are deeper modules."""
    tree = _node("", net, 0, watch, set(), set())
    levels = Counter(_levels(tree))
    deepest = max(levels)
    if depth is None:
        depth = deepest
        while depth > 1 and sum(levels[level] for level in range(depth + 1)) > LONGEST_TABLE:
            depth -= 1
    return list(_flat(tree, depth)), depth if depth < deepest else None


def _node(
    name: str, module: nn.Module, level: int, watch: _Watch, seen: set[nn.Module], counted: set[int]
) -> _Node:
    reused = module in seen
    seen.add(module)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    new = [parameter for parameter in own if id(parameter) not in counted]
    counted.update(map(id, new))
    known = None if any(map(is_lazy, new)) else sum(parameter.numel() for parameter in new)
    children = []
    if not reused:
        for child_name, child in module._modules.items():
            if child is not None:
                children.append(_node(child_name, child, level + 1, watch, seen, counted))
    parts = [known, *(child.all_parameters for child in children)]
    row = Row(
        name=name,
        type=type(module).__name__,
        level=level,
        output=watch.shapes.get(module, ""),
        parameters=known,
        trainable=_trainable(module),
        calls=watch.calls[module],
        multiply_adds=0 if reused else watch.multiply_adds[module],
        reused=reused,
        shared=len(new) < len(own) and not reused,
        is_group=bool(children),
    )
    operations = row.multiply_adds + sum(child.all_multiply_adds for child in children)
    return _Node(row, None if None in parts else sum(filter(None, parts)), operations, children)


def _trainable(module: nn.Module) -> str:
    flags = {parameter.requires_grad for parameter in module.parameters()}
    return "partly" if len(flags) == 2 else "yes" if True in flags else "no" if flags else ""


def _levels(node: _Node) -> Iterator[int]:
    yield node.row.level
    for child in node.children:
        yield from _levels(child)


def _flat(node: _Node, depth: int) -> Iterator[Row]:
    if node.row.level == depth and node.children:
        yield dataclasses.replace(
            node.row,
            parameters=node.all_parameters,
            multiply_adds=node.all_multiply_adds,
            is_group=False,
        )
        return
    yield node.row
    for child in node.children:
        yield from _flat(child, depth)
