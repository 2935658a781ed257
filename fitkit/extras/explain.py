"""Explain torch's errors about a batch in terms of what the user passed."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType

import torch

from fitkit import trees
from fitkit.accelerators import free_and_total_bytes, held_bytes, reserved_bytes
from fitkit.errors import (
    DTYPE_ERRORS,
    SHAPE_ERRORS,
    ConfigurationError,
    FitkitError,
    OutOfMemoryError,
    asked_by,
    is_out_of_memory,
    raised_in_torch,
    with_code,
)
from fitkit.extras.held_tensors import fault_of_index, fault_of_loss, fault_of_net
from fitkit.samples import LABELS
from fitkit.seams.networks import Module
from fitkit.typing import AnyCallable, Tree

ONE_SAMPLE = re.compile(r"Expected more than 1 value per channel")
DEVICE_ERRORS = re.compile(r"same device|is on cpu, different from other tensors")
HALF_LSTM = re.compile(r"could not create a primitive descriptor")
INDEX_ERRORS = re.compile(
    r"index out of range in self|Expected i < index_size|is not in the valid range"
)
LENGTH_ERRORS = re.compile(r"Expected input batch_size|batch or spatial sizes don't match")
LABEL_ERRORS = re.compile(r"Target (-?\d+) is out of bounds")
CALL_ERRORS = re.compile(
    r"(forward|_forward_unimplemented)\(\) (got|missing|takes)|multiple values for argument"
)
CHANNEL_ERRORS = re.compile(r"to have (\d+) channels")
CONTAINER_ERRORS = re.compile(
    r"'(dict|tuple|list)' object has no attribute|must be Tensor, not (dict|tuple|list)|"
    r"invalid combination of arguments - got \((dict|tuple|list)"
)


def raise_explained(
    error: Exception,
    net: AnyCallable,
    x: Tree,
    y: Tree,
    name: str = "x",
    *,
    needs_target: bool = False,
) -> None:
    """Raise a clearer error for one that a batch caused, if `explained` knows one.

    Args:
        needs_target: whether a batch without targets can't be right.
    """
    if needs_target and y is None and isinstance(x, Mapping) and len(x) > 1:
        raise ConfigurationError(
            f"A batch of {name} is a dict without targets beside it ({', '.join(x)}), "
            f"which led to {type(error).__name__}: {error}\nIf one of these entries holds the "
            f"targets, write for example compile(target={list(x)[-1]!r}). Otherwise give "
            "(x, y) by a collate_fn."
        ) from error
    explanation = None if isinstance(error, FitkitError) else explained(error, net, x, y, name)
    if explanation is not None:
        raise explanation from error


def raise_explained_of_own_step(error: Exception, model: AnyCallable) -> None:
    """Raise a clearer error for one in a step of the user's, whose batch is the user's matter: if
    it is about an index that a table lacks, or about the weights of a loss.
    """
    if isinstance(error, (IndexError, RuntimeError, ValueError)):
        explanation = of_index(error, model) or fault_of_loss(error)
        if explanation is not None:
            raise explanation from error


def explained(
    error: Exception, net: AnyCallable, x: Tree, y: Tree, name: str = "x"
) -> FitkitError | None:
    """Return a clearer error for one that a batch caused, or None.

    Returns None for errors that the user's own code raises, for out-of-memory errors and for all
    unknown ones. What is said of the net is said only of errors that arose in it.

    Args:
        error: the error.
        net: the net that was called.
        x: the batch's inputs.
        y: the batch's targets; None if there are none.
        name: the name of the inputs in messages.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return None
    text = str(error)
    given = shape_words(x, name)
    if isinstance(y, (list, tuple)) and y and all(isinstance(one, Mapping) for one in y):
        return ConfigurationError(
            f"The targets are {len(y)} dicts, as detectors take them beside their images, which "
            f"led to {type(error).__name__}: {error}\nWrite a training_step, which calls the net "
            "with both: return sum(self.net(images, targets).values())."
        )
    if not isinstance(error, RuntimeError) and not _raised_by_torch(error):
        return None
    asked = asked_by(error)
    if asked in ("losses", "metrics", "callbacks"):
        return _of_targets(error, x, y, name) if asked == "losses" else None
    if isinstance(error, ValueError) and ONE_SAMPLE.search(text):
        return ConfigurationError(
            f"Batch normalisation can't train on one sample: {given}. Choose a batch_size that "
            "leaves no last batch of 1, or give a DataLoader with drop_last=True.",
            code="FK014",
        )
    if isinstance(error, (RuntimeError, ValueError)) and SHAPE_ERRORS.search(text):
        advice = _channels_last(text, x) or (
            "The first dimension is the batch; check the others (features or channels) against "
            "what the layer expects."
        )
        return ConfigurationError(
            f"The net can't take this batch{_layer(error, net)}: {given}. {_first_line(text)} "
            f"{advice}",
            code="FK001",
        )
    if isinstance(error, (RuntimeError, ValueError)) and DTYPE_ERRORS.search(text):
        layer = _layer_of(error, net)
        is_of_floats = not re.search(r"Long|Int", text)  # else the data are what the net can't take
        fault = None
        if layer is not None and is_of_floats:
            fault = fault_of_net(net, layer[1], trees.tensors(x))
        if fault is not None:
            return ConfigurationError(
                f"The net can't compute{_layer(error, net)}. {_first_line(text)} {fault}",
                code="FK002",
            )
        return ConfigurationError(
            f"The numbers of this batch are of a type that the net or loss can't take: {given}"
            f"{'' if y is None else ', ' + shape_words(y, 'y')}. {_first_line(text)} Convert the "
            "data: images and features to floats (x.astype('float32')), tokens, codes of "
            "categories and classes to integers of 64 bits (x.astype('int64')).",
            code="FK002",
        )
    if isinstance(error, RuntimeError) and DEVICE_ERRORS.search(text):
        return ConfigurationError(
            f"The net combines tensors on different devices. {_first_line(text)} In forward, "
            "create tensors on the input's device (torch.zeros(…, device=x.device)), and keep "
            "constants with register_buffer.",
            code="FK039",
        )
    if isinstance(error, RuntimeError) and HALF_LSTM.search(text):
        return ConfigurationError(
            f"This CPU can't compute a layer of the net in this number type. {_first_line(text)} "
            "Write precision='bf16-mixed'. On some CPUs torch has no float16 LSTM."
        )
    if (lacking := of_index(error, net, f" ({given})")) is not None:
        return lacking
    calls = list(_calls_in(error, net))
    whole = not isinstance(x, torch.Tensor) and CONTAINER_ERRORS.search(text)
    if isinstance(error, (TypeError, AttributeError)) and whole and _takes_whole(calls, x):
        target = next((key for key in LABELS if isinstance(x, Mapping) and key in x), None)
        inside = "" if target is None else f" Or write compile(target={target!r})."
        return ConfigurationError(
            f"The net's forward{_signature(net)} takes a single input, so it got the "
            f"{type(x).__name__} whole: {given}. {_first_line(text)} Give the net one argument for "
            f"each input, or one tensor as x.{inside}"
        )
    if isinstance(error, TypeError) and CALL_ERRORS.search(text) and not any(map(_is_own, calls)):
        return ConfigurationError(
            f"The net's forward{_signature(net)} can't be called with this batch: {given}. "
            f"{_first_line(text)} A tuple goes to the net by position, a dict by keyword."
            f"{_taken_for_target(text, x, name)}",
            code="FK003",
        )
    return None


def of_example(error: Exception, net: AnyCallable, given: str) -> FitkitError | None:
    """Return a clearer error for one of a net that was called on an example, beside a training.

    Args:
        given: the example in words, such as its shape.
    """
    if is_out_of_memory(error):
        return OutOfMemoryError(
            f"Memory ran out on an example of {given}, with which the net was called. Give a "
            f"smaller one. ({str(error).strip().splitlines()[0]})",
            code="FK040",
        )
    return of_index(error, net)


def of_index(error: Exception, net: AnyCallable, given: str = "") -> FitkitError | None:
    """Return a clearer error for an index that a table of embeddings lacks."""
    if not isinstance(error, (IndexError, RuntimeError)) or not INDEX_ERRORS.search(str(error)):
        return None
    if (fault := fault_of_index(error)) is None:
        return None
    return ConfigurationError(
        f"The net got an index that it doesn't have{_layer(error, net)}: {fault}{given}",
        code="FK012",
    )


def _of_targets(error: Exception, x: Tree, y: Tree, name: str) -> FitkitError | None:
    """Return a clearer error for one that arose in a loss."""
    text = str(error)
    if y is None or not isinstance(error, (RuntimeError, ValueError, IndexError)):
        return None
    if (fault := fault_of_loss(error)) is not None:
        return fault
    if LENGTH_ERRORS.search(text):
        return ConfigurationError(
            f"The loss needs a target for each prediction, but {shape_words(x, name)}, "
            f"{shape_words(y, 'y')}. {_first_line(text)} Give a batch's x and y the same number of "
            "samples."
        )
    if DTYPE_ERRORS.search(text):
        return ConfigurationError(
            f"The loss can't take numbers of this type: {shape_words(y, 'y')}. "
            f"{_first_line(text)} Convert them: classes to integers (y.astype('int64')), all else "
            "to floats (y.astype('float32')).",
            code="FK002",
        )
    if label := LABEL_ERRORS.search(text):
        return ConfigurationError(
            f"y has the label {label.group(1)}, but the net gives fewer classes. Labels are class "
            "numbers from 0 to the number of outputs - 1. If it marks what doesn't count, write "
            f"loss=torch.nn.CrossEntropyLoss(ignore_index={label.group(1)})."
        )
    return None


def _calls_in(error: Exception, net: AnyCallable) -> Iterator[FrameType]:
    """Yield the calls of forward, of the net and of its layers, within which an error arose."""
    modules = {id(module) for module in getattr(net, "modules", list)()}
    step = error.__traceback__
    while step is not None:
        frame, step = step.tb_frame, step.tb_next
        is_fitkits = frame.f_globals.get("__name__", "").startswith("fitkit.")
        if not is_fitkits and frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            itself = frame.f_locals.get(frame.f_code.co_varnames[0])
            if id(itself) in modules:
                yield frame


def _is_own(call: FrameType) -> bool:
    """Whether it is the user's forward. Torch's containers only pass their inputs on."""
    return not call.f_globals.get("__name__", "").startswith("torch.")


def _taken_for_target(text: str, x: Tree, name: str) -> str:
    """Say what to write if an input may have been taken for the target."""
    if "missing" not in text or not isinstance(x, torch.Tensor):
        return ""
    return (
        f" Of data (a, b) only a is {name}, and b is the target: write ((a, b), y) for two "
        "inputs, or predict((a, b))."
    )


def _takes_whole(calls: list[FrameType], x: Tree) -> bool:
    """Whether the net got the inputs as one argument."""
    return bool(calls) and any(value is x for value in calls[0].f_locals.values())


def _channels_last(text: str, x: Tree) -> str:
    """Say what to write if images have Keras's order (N, H, W, C); return "" otherwise."""
    found = CHANNEL_ERRORS.search(text)
    images = [
        leaf for leaf in trees.tensors(x) if found and leaf.ndim == 4
        and leaf.shape[3] == int(found[1]) != leaf.shape[1]
    ]  # fmt: skip
    if not images:
        return ""
    return (
        "These images are (N, H, W, C), but torch's layers take (N, C, H, W). Write "
        "x.transpose(0, 3, 1, 2), or for a tensor x.permute(0, 3, 1, 2)."
    )


def _raised_by_torch(error: Exception) -> bool:
    """Return whether torch raised the error, or Python did at a call within the net."""
    return raised_in_torch(error) or isinstance(error, (TypeError, AttributeError, IndexError))


def _layer(error: Exception, net: AnyCallable) -> str:
    """Name the layer of the net that an error comes from: ` in its layer '2', Linear(…)`."""
    found = _layer_of(error, net)
    if found is None:
        return ""
    name, layer = found
    return f" in its layer {name!r}, {type(layer).__name__}({layer.extra_repr()})"


def _layer_of(error: Exception, net: AnyCallable) -> tuple[str, torch.nn.Module] | None:
    """Return the name and the layer of the net that an error comes from."""
    names = {id(module): name for name, module in getattr(net, "named_modules", dict)()}
    found: tuple[str, torch.nn.Module] | None = None
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        name = names.get(id(module), "").removeprefix("net.")
        if name and isinstance(module, torch.nn.Module) and not list(module.children()):
            found = name, module
        frame = frame.tb_next
    return found


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0].strip().removesuffix(", but expected one of:")
    return f"torch says: {line}{'' if line.endswith('.') else '.'}"


def _signature(net: AnyCallable) -> str:
    inner = getattr(net, "net", None)
    target = inner if isinstance(inner, torch.nn.Module) else net
    try:
        return str(inspect.signature(getattr(target, "forward", target)))
    except (TypeError, ValueError):
        return "(…)"


def shape_words(tree: Tree, name: str) -> str:
    """Describe the shapes and dtypes in a tree for a message: `x has shape (32, 64), float32`."""
    parts = []
    for path, leaf in trees.leaves_with_paths(tree):
        if isinstance(leaf, torch.Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            parts.append(f"{name}{path} has shape {tuple(leaf.shape)}, {dtype}")
        else:
            parts.append(f"{name}{path} is a {type(leaf).__name__}")
    return "; ".join(parts[:6]) + ("; …" if len(parts) > 6 else "")


UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


def explanation(model: Module, verb: str, batch_size: int | None, original: str) -> str:
    """Explain an out-of-memory error: say how much memory was in use, and what needs less.

    Args:
        model: the model.
        verb: the method that was called, such as `fit`.
        batch_size: samples in a batch; None if unknown.
        original: the first line of the original error's message.
    """
    strategy = model._fitkit.compilation.strategy
    held = held_by_training(model)
    batches = "" if batch_size is None else f" with batches of {batch_size} samples"
    parts = [f"{name} {size(count)}" for name, count in held.items() if count]
    parts += on_device(strategy.device, sum(held.values()))
    advice = "; ".join(suggestions(model, verb, batch_size, sum(held.values())))
    return with_code(
        f"Memory ran out on {strategy.device} in {verb}{batches}. In use: {', '.join(parts)}. To "
        f"use less: {advice}. ({original})",
        "FK040",
    )


def held_by_training(model: Module) -> dict[str, int]:
    """Return the bytes that training holds from step to step, by name."""
    parameters = list(model.parameters())
    states = [
        leaf
        for optimizer in model._fitkit.fit_state.optimizers
        for state in optimizer.state.values()
        for leaf in trees.leaves(state)
    ]
    return {
        "parameters and buffers": _bytes([*parameters, *model.buffers()]),
        "gradients": _bytes(p.grad for p in parameters),
        "optimizer state": _bytes(states),
    }


def on_device(device: torch.device, known: int) -> list[str]:
    """Describe the device's memory.

    Args:
        device: the device.
        known: bytes that are accounted for already; the rest is activations and other tensors.
    """
    there = free_and_total_bytes(device)
    if there is not None:
        allocated, reserved = held_bytes(device), reserved_bytes(device)
        free, total = there
        rest = size(max(allocated - known, 0))
        return [
            f"activations and other tensors {rest}",
            f"{size(allocated)} allocated and {size(reserved)} reserved by torch",
            f"{size(free)} of {size(total)} free",
        ]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not on every system
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        return [f"{size(free)} of {size(total)} of main memory free"]
    return []


def suggestions(model: Module, verb: str, batch_size: int | None, held: int) -> Iterator[str]:
    """Suggest what takes less memory, the smallest change first."""
    compilation = model._fitkit.compilation
    learns, strategy = verb == "fit", compilation.strategy
    if batch_size is None:
        yield "batches of half as many samples"
    elif batch_size > 1:
        smaller = f"batch_size={-(-batch_size // 2)}"
        steps = 2 * compilation.given.accumulate_grad_batches
        yield f"{smaller} with accumulate_grad_batches={steps}" if learns else smaller
    can_split = strategy.cuts_batches and not strategy.has_engine and not strategy.replicates
    if can_split and compilation.given.out_of_memory == "raise" and batch_size != 1:
        yield "compile(out_of_memory='split'), which computes such a batch in parts"
    if strategy.precision.name == "32-true" and strategy.device.type != "cpu":
        yield "precision='bf16-mixed', with which activations take about half"
    if learns:
        yield (
            "activation checkpointing (fitkit.checkpoint_activations(net), or "
            "fitkit.strategies.FSDPStrategy(activation_checkpointing=True))"
        )
        if held:
            yield (
                f"strategy='fsdp' on n devices, each of which keeps an n-th of these {size(held)} "
                "of parameters, gradients and optimizer state"
            )


def size(count: float) -> str:
    """Write a number of bytes for people: `1.6 GB`."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:
        count /= 1000
        unit += 1
    digits = 0 if unit == 0 or count >= 9.95 else 1
    return f"{count:.{digits}f} {UNITS[unit]}"


def _bytes(leaves: Iterable[object]) -> int:
    return sum(
        leaf.nbytes
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not torch.nn.parameter.is_lazy(leaf)
    )
