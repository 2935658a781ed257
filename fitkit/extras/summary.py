"""What a net is made of: its layers, their shapes, parameters and memory.

The net is left as it was: its mode, its buffers and the random numbers that come next.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fitkit import trees
from fitkit.arguments import check_count, describe, dtype_name
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.distillation import teachers_of
from fitkit.extras.explain import of_example
from fitkit.extras.layer_depths import scales_of
from fitkit.modes import modes_restored
from fitkit.random_states import kept_random_numbers
from fitkit.seams.data import as_tensors, is_array, made_dense
from fitkit.tensors import human_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fitkit.model import Model


LONGEST_TABLE = 120
"""The rows up to which a table shows everything when nobody says how deep to go."""


def summarize(
    net: nn.Module,
    example: Any = None,
    *,
    input_shape: Any = None,
    depth: int | None = None,
    run: Callable[[nn.Module, Any], Any] | None = None,
    rates: Mapping[int, float] | None = None,
    teachers: Sequence[nn.Module] = (),
) -> Summary:
    """Return the layers of a net with their parameters, and shapes where an input is given.

    Args:
        net: any module.
        example: a batch of inputs: a tensor or array, or a tree of them. The net is called
            with it once, without gradients and in evaluation mode.
        input_shape: the shape of one sample instead, as `(1, 28, 28)`; a dict or tuple of
            shapes for several inputs. The batch is one sample of zeros.
        depth: levels of nesting to show. Default None: all of them, fewer in a long net.
        run: how to call the net; None is `net(example)`.
        rates: what the learning rate of each parameter is multiplied by, by its id.
        teachers: nets that it learns from, which are no part of it.

    Raises:
        ConfigurationError: the net can't be called with that input; the cause says why.
    """
    if not isinstance(net, nn.Module):
        raise ArgumentTypeError(f"net={describe(net)} must be a torch.nn.Module.")
    depth = check_count("depth", depth, optional=True)
    sizes = (0, "")
    if example is not None or input_shape is not None:
        example = example_batch(example, input_shape, net)
        sizes = (trees.tensor_bytes(example), shape_text(example))
        if any(map(is_lazy, [*net.parameters(), *net.buffers()])):
            net = _copied(net)  # A first batch would fix its shapes for good.
    watch = _Watch(net)
    if example is not None:
        watch = _watched(net, example, run or (lambda net, example: net(example)))
    rows, hidden_below = _rows(net, depth, watch, rates or {})
    known = [parameter for parameter in net.parameters() if not is_lazy(parameter)]
    buffers = [buffer for buffer in net.buffers() if not is_lazy(buffer)]
    memory: Counter[str] = Counter()
    for parameter in known:
        memory[dtype_name(parameter.dtype)] += trees.tensor_bytes(parameter)
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
        teachers=tuple(map(_size_of, teachers)),
    )


def of_training(model: Model) -> dict[str, Any]:
    """Return what `summarize` is told of a model's compiled training."""
    given, net = model._fitkit.compilation.given, model._weights_module()
    decay = None if any(map(is_lazy, net.parameters())) else given.layer_decay
    return {
        "rates": None if decay is None else scales_of(net, decay),
        "teachers": teachers_of(given.loss),
    }


def _size_of(net: nn.Module) -> tuple[int, int]:
    held = [*net.parameters(), *net.buffers()]
    return sum(parameter.numel() for parameter in net.parameters()), trees.tensor_bytes(held)


def _rate_text(module: nn.Module, rates: Mapping[int, float]) -> str:
    factors = {rates[id(p)] for p in module.parameters() if p.requires_grad and id(p) in rates}
    return f"{factors.pop():.3g}" if len(factors) == 1 else ""


def shape_text(tree: Any) -> str:
    """Return the shapes in a net's input or output: `(32, 10)`, `logits (2, 5), states (2, 8)`."""
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


LACKING: dict[Any, Callable[..., Any]] = {
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
        from torch.utils.flop_counter import FlopCounterMode

        self.operations = FlopCounterMode(display=False, custom_mapping=LACKING)
        self._counted = 0
        self._running = [net]
        self._calls_inside = [0]

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Note that a module is called."""
        self._add_up()
        self._calls_inside[-1] += 1
        self._calls_inside.append(0)
        self._running.append(module)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note that a module's call has ended."""
        self._add_up()
        self._running.pop()
        self.calls[module] += 1
        self.shapes.setdefault(module, shape_text(output))
        if self._calls_inside.pop() == 0:
            self.activation_bytes += trees.tensor_bytes(output)

    def _add_up(self) -> None:
        """Count what was computed since the last time as the running module's."""
        counted = self.operations.get_total_flops()
        self.multiply_adds[self._running[-1]] += (counted - self._counted) // 2
        self._counted = counted


def _watched(net: nn.Module, example: Any, run: Callable[[nn.Module, Any], Any]) -> _Watch:
    """Return what was seen while the net ran once."""
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
        counting = watch.operations if watch.counts else contextlib.nullcontext()
        with evaluating(net), _module_by_module(), counting:
            run(net, example)
    except Exception as error:
        if (explanation := of_example(error, net, shape_text(example))) is not None:
            raise explanation from error
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
def evaluating(net: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients; then modes, buffers and random state are back."""
    buffers = [
        (module, name, buffer, buffer.detach().clone(), buffer._version)
        for module in net.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]
    with (
        kept_random_numbers(devices=[*{parameter.device for parameter in net.parameters()}]),
        torch.no_grad(),
        modes_restored(net),
    ):
        try:
            for module in net.modules():
                module.training = False
            yield
        finally:
            for module, name, buffer, value, version in buffers:
                module._buffers[name] = buffer
                if buffer._version != version:
                    buffer.copy_(value)


@contextlib.contextmanager
def _module_by_module() -> Iterator[None]:
    """No compiled net and no fused operation, which would pass by the modules inside."""
    # A compiled net would be compiled again. (The stance imports dynamo, which takes seconds;
    # without it nothing is compiled.)
    can_stand = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager") if can_stand else contextlib.nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


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
            "The net has lazy modules, whose shapes a first batch fixes, and can't be copied "
            f"to try one ({error}). Call the net once, or ask for the summary without an example."
        ) from error


# ------------------------------------------------------------------ the rows


def _rows(
    net: nn.Module, depth: int | None, watch: _Watch, rates: Mapping[int, float]
) -> tuple[list[Row], int | None]:
    """Return the table's rows, and the level of the last ones where there are deeper modules."""
    rows = list(_all_rows("", net, 0, watch, rates, set(), set()))
    levels = Counter(row.level for row in rows)
    if depth is None:
        depth = max(levels)
        while depth > 1 and sum(levels[level] for level in range(depth + 1)) > LONGEST_TABLE:
            depth -= 1
    shown: list[Row] = []
    for row in rows:
        if row.level <= depth:
            shown.append(row)
            continue
        above = shown[-1]  # the module at that depth that holds this one
        known = None not in (above.parameters, row.parameters)
        shown[-1] = dataclasses.replace(
            above,
            parameters=above.parameters + row.parameters if known else None,  # type: ignore[operator]
            multiply_adds=above.multiply_adds + row.multiply_adds,
            is_group=False,
        )
    return shown, depth if depth < max(levels) else None


def _all_rows(
    name: str,
    module: nn.Module,
    level: int,
    watch: _Watch,
    rates: Mapping[int, float],
    seen: set[nn.Module],
    counted: set[int],
) -> Iterator[Row]:
    """Yield a module's row, then those of all modules in it."""
    reused = module in seen
    seen.add(module)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    new = [parameter for parameter in own if id(parameter) not in counted]
    counted.update(map(id, new))
    children = {} if reused else {n: c for n, c in module._modules.items() if c is not None}
    yield Row(
        name=name,
        type=module._get_name(),
        level=level,
        output=watch.shapes.get(module, ""),
        parameters=None if any(map(is_lazy, new)) else sum(p.numel() for p in new),
        trainable=_trainable(module),
        calls=watch.calls[module],
        multiply_adds=0 if reused else watch.multiply_adds[module],
        reused=reused,
        shared=len(new) < len(own) and not reused,
        is_group=bool(children),
        rate=_rate_text(module, rates),
    )
    for child_name, child in children.items():
        yield from _all_rows(child_name, child, level + 1, watch, rates, seen, counted)


def _trainable(module: nn.Module) -> str:
    flags = {parameter.requires_grad for parameter in module.parameters()}
    return "partly" if len(flags) == 2 else "yes" if True in flags else "no" if flags else ""


PLAIN_WIDTH = 80
WIDEST = 120


@dataclasses.dataclass(frozen=True)
class Row:
    """A module in the table.

    Attributes:
        name: its name in the module that holds it; empty for the net itself.
        type: its class's name.
        level: how deep it is nested; 0 is the net.
        output: the shape of its (first) output; empty where it didn't run.
        parameters: the numbers in its parameters, without those counted in another row. A
            module whose children have no rows has them in its own. None: not yet known.
        trainable: `"yes"`, `"no"`, `"partly"`, or empty without parameters, children included.
        calls: how often it ran.
        multiply_adds: of all its calls, forward, without those counted in another row; 0 where
            it didn't run. See `Summary.multiply_adds`.
        reused: whether the same module has a row above.
        shared: whether some of its own parameters are counted in a row above.
        is_group: whether its children have rows.
        rate: what the learning rate is multiplied by (`compile(layer_decay=…)`); empty where it
            isn't, or where children differ.
    """

    name: str
    type: str
    level: int
    output: str
    parameters: int | None
    trainable: str
    calls: int = 0
    multiply_adds: int = 0
    reused: bool = False
    shared: bool = False
    is_group: bool = False
    rate: str = ""


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `summarize` found; `str()` gives the table in plain ASCII, 80 columns wide.

    Attributes:
        rows: the modules, each before its children.
        parameters: the numbers in all parameters; shared ones count once.
        trainable: those of them that training may change.
        non_trainable: the others.
        buffers: the numbers in all buffers.
        unknown: how many parameters get their shape with the first batch only.
        parameter_bytes: the parameters' memory by type (`{"float32": 4096}`).
        buffer_bytes: the buffers' memory.
        input: the input's shape; empty without an example.
        input_bytes: the input's memory.
        activation_bytes: about what the forward pass keeps for the backward pass: the
            outputs of all modules that called no other. None without an example.
        multiply_adds: the multiplications with an addition of one forward pass with the example:
            those of matrix products, convolutions and attention. What has no product of
            matrices (norms, activations) or no known formula counts as none. None without an
            example.
        hidden_below: the level of the last rows, where there are deeper modules.
        teachers: of each teacher (`losses.Distillation`) the numbers in its parameters, and its
            memory.
    """

    rows: list[Row]
    parameters: int
    trainable: int
    non_trainable: int
    buffers: int
    unknown: int
    parameter_bytes: dict[str, int]
    buffer_bytes: int
    input: str = ""
    input_bytes: int = 0
    activation_bytes: int | None = None
    multiply_adds: int | None = None
    hidden_below: int | None = None
    teachers: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = PLAIN_WIDTH) -> str:
        """Return the table in plain ASCII, at most `width` columns wide."""
        file = io.StringIO()
        console = _console(file, width=width, color_system=None, force_terminal=False)
        console.print(self._table(ascii_only=True))
        lines = file.getvalue().replace("…", "~").splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def print(
        self, file: IO[str] | None = None, *, print_fn: Callable[[str], Any] | None = None
    ) -> None:
        """Print the table: with rich in a terminal, else as `str()`.

        Args:
            file: where to; None is `sys.stdout`.
            print_fn: called with the text instead.
        """
        if print_fn is not None:
            print_fn(str(self))
            return
        file = sys.stdout if file is None else file
        encoding = getattr(file, "encoding", None) or "utf-8"
        is_terminal = hasattr(file, "isatty") and file.isatty()
        if is_terminal and encoding.lower().startswith("utf"):
            console = _console(file, force_terminal=True)
            console.print(self._table(ascii_only=False), width=min(console.width, WIDEST))
        else:
            file.write(str(self).encode(encoding, "replace").decode(encoding) + "\n")

    def _table(self, *, ascii_only: bool) -> RenderableType:
        from rich.box import Box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        line = "-" if ascii_only else "─"
        rule = Box(f"    \n    \n {line}{line} \n" + "    \n" * 5, ascii=ascii_only)
        layers = Table(box=rule, show_edge=False, pad_edge=False, header_style="bold")
        layers.add_column("Layer", min_width=12)
        if self.input:
            layers.add_column("Output shape", min_width=12)
        layers.add_column("Parameters", justify="right", no_wrap=True)
        layers.add_column("Trainable", no_wrap=True)
        has_rates = any(row.rate for row in self.rows)
        if has_rates:
            layers.add_column("Rate x" if ascii_only else "Rate ×", justify="right", no_wrap=True)
        if self.multiply_adds:
            layers.add_column("Mult-adds", justify="right", no_wrap=True)
        times = "x" if ascii_only else "×"
        for row in self.rows:
            repeated = f" {times}{row.calls}" if row.calls > 1 and not row.reused else ""
            name = Text.assemble("  " * row.level, (f"{row.name} ", "bold") if row.name else "")
            name.append(f"({row.type})" if row.name else row.type, "cyan").append(repeated)
            cells = [name, *([Text(row.output)] if self.input else [])]
            for cell in cells:
                cell.no_wrap, cell.overflow = True, "ellipsis"
            dim = "" if row.trainable == "yes" else "bright_black"
            cells += [Text(_parameters_text(row), dim), Text(row.trainable, dim)]
            if has_rates:
                cells.append(Text(row.rate))
            if self.multiply_adds:
                cells.append(Text(human_count(row.multiply_adds) if row.multiply_adds else ""))
            layers.add_row(*cells)
        totals = Table.grid(padding=(0, 2))
        totals.add_column(no_wrap=True)
        totals.add_column(justify="right", no_wrap=True)
        totals.add_column()
        for total in self._totals():
            totals.add_row(*total)
        parts: list[RenderableType] = [layers, "", totals]
        if self.hidden_below is not None:
            parts.insert(
                1,
                f"Deeper modules are counted in their parents; depth={self.hidden_below + 1} "
                "shows more.",
            )
        return Group(*parts)

    def _totals(self) -> Iterator[tuple[str, str, str]]:
        notes = [f"{human_bytes(size)} ({name})" for name, size in self.parameter_bytes.items()]
        if self.unknown:
            notes.append(f"{self.unknown} tensors not yet known")
        yield "Parameters", f"{self.parameters:,}", ", ".join(notes)
        yield "Trainable", f"{self.trainable:,}", ""
        yield "Non-trainable", f"{self.non_trainable:,}", ""
        yield "Buffers", f"{self.buffers:,}", human_bytes(self.buffer_bytes) * bool(self.buffers)
        if self.activation_bytes is not None:
            yield "Input", "", f"{human_bytes(self.input_bytes)}, {self.input}"
            kept = human_bytes(self.activation_bytes)
            yield "Activations", "", f"about {kept}, forward and kept for backward"
        for parameters, size in self.teachers:
            yield "Teacher", f"{parameters:,}", f"{human_bytes(size)}, on each device, in no file"
        if self.multiply_adds:
            yield "Mult-adds", f"{self.multiply_adds:,}", "forward, with this input"


def human_count(number: int) -> str:
    """Return a large number in four digits at most: `812`, `1.50 k`, `23.1 M`, `4.06 G`."""
    size = float(number)
    for unit in ("", " k", " M", " G", " T"):
        if size < 999.5 or unit == " T":
            break
        size /= 1000
    digits = 0 if not unit or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f}{unit}"


def _console(file: IO[str], **options: Any) -> Console:
    """Return a console that takes text as it is, whatever brackets and numbers stand in it."""
    from rich.console import Console

    return Console(
        file=file, markup=False, highlight=False, emoji=False, force_jupyter=False, **options
    )


def _parameters_text(row: Row) -> str:
    if row.reused:
        return "(reused)"
    if row.parameters is None:
        return "not yet known"
    if row.is_group and not row.parameters:
        return ""
    return f"{row.parameters:,}" + (" + shared" if row.shared else "")


def example_batch(example: Any, input_shape: Any, net: nn.Module) -> Any:
    """Return the batch that a user described, as tensors on the net's device.

    Args:
        example: a batch of inputs: a tensor or array, or a tree of them; None where a shape is
            given. Arrays are read as `predict` reads them.
        input_shape: the shape of one sample, as `(1, 28, 28)`; a dict or tuple of shapes for
            several inputs. The batch is one sample of zeros.
        net: whose device and number type count.

    Raises:
        ConfigurationError: both, neither, or nothing that makes a batch.
    """
    if (example is None) == (input_shape is None):
        given = "neither an example nor" if example is None else "an example and"
        raise ConfigurationError(
            f"Got {given} an input_shape; one is needed, not both. Give a batch of inputs as "
            "example=x[:2], or the shape of one sample as input_shape=(1, 28, 28)."
        )
    if example is None:
        example = zeros(input_shape, number_type(net))
    return prepared(example, net)


def zeros(shape: Any, dtype: torch.dtype) -> Any:
    """Return a batch of one sample of zeros, for a shape or a dict or sequence of shapes."""
    if isinstance(shape, Mapping):
        return {name: zeros(item, dtype) for name, item in shape.items()}
    if isinstance(shape, (tuple, list)):
        if shape and all(isinstance(item, (tuple, list, Mapping)) for item in shape):
            return tuple(zeros(item, dtype) for item in shape)
        if all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
            return torch.zeros(1, *shape, dtype=dtype)
    raise ConfigurationError(
        f"input_shape={describe(shape)} must be the shape of one sample, without the batch's "
        "dimension, as (1, 28, 28); or a dict or tuple of such shapes."
    )


def number_type(net: nn.Module) -> torch.dtype:
    """Return the real type of the net's first floating-point or complex parameter."""
    types = (tensor.dtype.to_real() for tensor in net.parameters() if trees.is_inexact(tensor))
    return next(types, torch.get_default_dtype())


def prepared(example: Any, net: nn.Module) -> Any:
    """Return the example as tensors on the net's device, read as `predict` reads arrays."""
    weights = next(iter([*net.parameters(), *net.buffers()]), None)
    device = None if weights is None else weights.device
    dtype = number_type(net)

    def as_tensor(leaf: Any) -> Any:
        if is_array(leaf) and (not isinstance(leaf, torch.Tensor) or leaf.ndim):
            leaf = made_dense(as_tensors(leaf, "example", dtype))
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    # The net may write into its inputs.
    example = trees.cloned(trees.map_leaves(as_tensor, example))
    if not any(isinstance(leaf, torch.Tensor) for leaf in trees.leaves(example)):
        raise ConfigurationError(
            f"example={describe(example)} has no tensor or array. Give a batch of inputs; "
            f"or the shape of one sample, as input_shape=(1, 28, 28)."
        )
    return example
