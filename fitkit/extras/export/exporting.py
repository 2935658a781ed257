"""Exporting a net: trace it, write it, read it back, compare."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fitkit import trees
from fitkit.arguments import check_choice, check_count, check_flag, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.explain import of_example
from fitkit.extras.export.formats import (
    FORMATS,
    Call,
    Format,
    Labels,
    Runner,
    on_cpu,
    reason_of,
    traced,
)
from fitkit.extras.summary import evaluating, example_batch, shape_text
from fitkit.samples import samples_among
from fitkit.seams.files import replacing
from fitkit.seams.precisions import plain_layers

Caller = Callable[[Callable[..., Any], Any], Any]
"""Calls a function with a batch's inputs, by position or by keyword."""


def export(
    net: nn.Module,
    path: str | os.PathLike[str],
    format: str | None = None,
    example: Any = None,
    *,
    caller: Caller = lambda function, x: function(x),
    input_shape: Any = None,
    dynamic_batch: bool = True,
    dynamic_shapes: Any = None,
    opset_version: int | None = None,
    check: bool = True,
) -> None:
    """Write a net, as it computes in evaluation mode, to a file.

    Args:
        net: the network; its modes, buffers and gradients stay as they are.
        caller: how its inputs enter it.
        path, format, example, input_shape, dynamic_batch, dynamic_shapes, opset_version, check:
            as in `Model.export`.

    Raises:
        ConfigurationError: an argument is invalid, a net that torch can't export, or a file
            that computes something else.
        MissingPackageError: what the format needs isn't installed.
        CheckpointError: the file can't be written; one that was there is untouched.
    """
    chosen = _chosen(path, format)
    dynamic_batch = check_flag("dynamic_batch", dynamic_batch)
    check = check_flag("check", check)
    opset_version = check_count("opset_version", opset_version, optional=True)
    if opset_version is not None and not chosen.has_opsets:
        raise ConfigurationError(f"opset_version is for format='onnx', not {chosen.name!r}.")
    if any(map(is_lazy, [*net.parameters(), *net.buffers()])):
        raise ConfigurationError(
            "The net has lazy modules, whose shapes a first batch settles. Call it (or fit) once."
        )
    chosen.check_installed()
    batch = example_batch(example, input_shape, net)
    with _evaluating(net):
        is_free = dynamic_batch and dynamic_shapes is None
        call = Call(caller, _at_least_two(batch) if is_free else batch)
        shapes = call.batch_shapes() if is_free else dynamic_shapes
        program = traced(net, call, shapes)
        expected = [(Call(caller, some), net) for some in _checked_sizes(batch, is_free)]
        with replacing(path) as file:
            chosen.write(program, file, Labels(call.input_names(net), is_free, opset_version))
            if check:
                check_file(chosen.runner(file), expected, chosen.name)


def _chosen(path: Any, name: str | None) -> Format:
    """Return the format that was asked for, or that the path's suffix names."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"path={describe(path)} must be a string or a Path.")
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    by_suffix = {item.suffix: item for item in FORMATS.values()}
    if name is None:
        if suffix in by_suffix:
            return by_suffix[suffix]
        raise ConfigurationError(
            f"{os.fspath(path)} doesn't tell the format: end it in .pt2 (torch.export) or .onnx, "
            "or give format='torch_export' or 'onnx'."
        )
    check_choice("format", name, tuple(FORMATS))
    chosen = FORMATS[name]
    if suffix != chosen.suffix:
        raise ConfigurationError(
            f"format={name!r} writes {chosen.suffix} files, but the path is {os.fspath(path)}. "
            f"End it in {chosen.suffix}: other programs go by it."
        )
    return chosen


def _at_least_two(batch: Any) -> Any:
    """Return the batch, or one of two samples: torch takes a size of 1 for a constant."""
    return batch if samples_among(batch) >= 2 else _of_size(batch, 2)


def _checked_sizes(batch: Any, is_free: bool) -> list[Any]:
    """Batches to compare on: two sizes other than the traced one, where the size is free."""
    size = samples_among(batch)
    return [_of_size(batch, 1), _of_size(batch, max(size, 2) + 1)] if is_free else [batch]


def _of_size(batch: Any, size: int) -> Any:
    """Return a batch of another size, with the samples of this one over and over."""
    count = samples_among(batch)

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != count:
            return leaf
        return leaf.index_select(0, torch.arange(size, device=leaf.device) % count)

    if not count:
        raise ConfigurationError("example has no samples. Give a batch of one or more.")
    return trees.map_leaves(repeated, batch)


@contextlib.contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    """As `evaluating`, and with plain layers, of which none is compiled."""
    compiled = [(module, module._compiled_call_impl) for module in net.modules()]
    with evaluating(net), plain_layers(net):
        try:
            for module in net.modules():
                module._compiled_call_impl = None  # jit_compile: what is traced is the net itself
            yield
        finally:
            for module, call in compiled:
                module._compiled_call_impl = call


TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest difference that passes, as a fraction of the output's largest value."""
TOLERANCE = 1e-4
"""That of all other numbers: float32 sums in another order."""


def check_file(runner: Runner | None, calls: list[tuple[Call, nn.Module]], format: str) -> None:
    """Run the file and the net on some batches, and compare all outputs.

    Args:
        runner: runs the file; None: nothing here can.
        calls: the batches' arguments, each with the net.
        format: for the message.

    Raises:
        ConfigurationError: the file doesn't run, or gives something else.
    """
    if runner is None:
        return
    for call, net in calls:
        size = samples_among(call.batch)
        wanted = [on_cpu(leaf) for leaf in trees.tensors(_outputs(net, call))]
        try:
            found = runner(call)
        except Exception as error:
            raise ConfigurationError(
                f"The {format} file was not kept: it doesn't run with a batch of {size}. "
                f"{reason_of(error)} {_advice(size)}"
            ) from error
        difference = _difference(found, wanted)
        if difference is not None:
            raise ConfigurationError(
                f"The {format} file was not kept: with a batch of {size} {difference}. "
                f"{_advice(size)} A net that draws random numbers in evaluation mode can be "
                "exported with check=False."
            )


def _outputs(net: nn.Module, call: Call) -> Any:
    """Return what the net gives for a batch.

    Tracing computes with shapes alone. So this is where an index that a layer lacks shows.
    """
    try:
        return net(*call.args, **call.kwargs)
    except Exception as error:
        if (explanation := of_example(error, net, shape_text(call.batch))) is not None:
            raise explanation from error
        raise


def _difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> str | None:
    """In words, where outputs differ; None where they don't."""
    shapes = [[tuple(tensor.shape) for tensor in given] for given in (found, wanted)]
    if shapes[0] != shapes[1]:
        return f"it gives outputs of shapes {shapes[0]}, the net {shapes[1]}"
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not _is_close(one, other):
            apart = (_widest(one) - _widest(other)).abs().max().item()
            return f"output {index} is up to {apart:.3g} away from the net's"
    return None


def _is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if not trees.is_inexact(wanted) or not wanted.numel():
        return torch.equal(found.to(wanted.dtype), wanted)
    tolerance = TOLERANCES.get(wanted.dtype.to_real(), TOLERANCE)
    found, wanted = _widest(found), _widest(wanted)
    finite = wanted[wanted.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 1.0
    return torch.allclose(found, wanted, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _widest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _advice(size: int) -> str:
    return (
        f"Look for code in the net that treats a batch of {size} differently." if size == 1 else ""
    )
