"""The files that hold an exported net: how each is written and run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import nn

from fitkit import trees
from fitkit.errors import ConfigurationError, missing_package
from fitkit.extras.explain import of_example
from fitkit.extras.summary import shape_text
from fitkit.samples import samples_among

LONGEST_REASON = 400
"""Characters of torch's own message that ours repeats; all of it is the error's cause."""


class Call:
    """A net's arguments for one batch.

    Args:
        caller: how a batch's inputs enter a function.
        batch: the inputs.

    Attributes:
        args, kwargs: the arguments by position and by keyword.
    """

    def __init__(self, caller: Callable[[Callable[..., Any], Any], Any], batch: Any) -> None:
        self.args: tuple[Any, ...]
        self.kwargs: dict[str, Any]
        self.args, self.kwargs = caller(lambda *args, **kwargs: (args, kwargs), batch)
        self.batch = batch

    def tensors(self) -> list[torch.Tensor]:
        """Return the arguments' tensors, in order."""
        return trees.tensors([list(self.args), self.kwargs])

    def batch_shapes(self) -> Any:
        """Which dimensions are free: the first of each tensor that is as long as the batch."""
        shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch")
        size = samples_among(self.batch)
        for tensor in self.tensors():
            if tensor.ndim and len(tensor) == size:
                shapes[tensor] = {0: batch}
        return shapes

    def input_names(self, net: nn.Module) -> list[str] | None:
        """Return the tensors' names, from the net's signature; None where it names none."""
        try:
            bound = inspect.signature(net.forward).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            return None
        names = []
        for path, leaf in trees.leaves_with_paths(dict(bound.arguments)):
            if isinstance(leaf, torch.Tensor):
                parts = path.replace("['", ".").replace("']", "").replace("[", "_")
                names.append(parts.replace("]", "").lstrip(".").replace(".", "_"))
        return names


def traced(net: nn.Module, call: Call, shapes: Any) -> torch.export.ExportedProgram:
    """Return the net's computation for arguments like `call`'s, on the CPU.

    Args:
        shapes: which dimensions are free, as torch.export takes it; None: none is.

    Raises:
        ConfigurationError: torch can't trace it; its own error is the cause.
    """
    try:
        program = torch.export.export(net, call.args, call.kwargs, dynamic_shapes=shapes)
    except Exception as error:
        if (explanation := of_example(error, net, shape_text(call.batch))) is not None:
            raise explanation from error
        raise ConfigurationError(
            f"torch.export can't trace the net: {reason_of(error)} {_advice(net, call, shapes)}"
        ) from error
    if any(tensor.device.type != "cpu" for tensor in call.tensors()):
        # Whoever runs the file may have no such device.
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, "cpu")
    return program


def _advice(net: nn.Module, call: Call, shapes: Any) -> str:
    """Return what to do about a net that can't be traced."""
    try:
        net(*call.args, **call.kwargs)
    except Exception:
        return "The net fails with this example itself. Give a batch like those that fit gets."
    if shapes is not None:
        return (
            "The net itself runs. If its code needs one batch size, write dynamic_batch=False, "
            "which exports for the example's. If it branches on tensors' values, use torch.where "
            "or torch.cond."
        )
    return "If the net branches on tensors' values, use torch.where or torch.cond."


def reason_of(error: BaseException) -> str:
    """Return the beginning of an error's message, as one line."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = text[:LONGEST_REASON].rsplit(" ", 1)[0] + " …"
    return f"{type(error).__name__}: {text}" + ("" if text.endswith((".", "…")) else ".")


Runner = Callable[[Call], list[torch.Tensor]]
"""Computes a file's outputs for a call."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """What a file says of itself, where its format has a place for that.

    Attributes:
        input_names: one for each tensor that goes in; None: torch's names.
        batch_is_free: whether the only free dimension is the batch's.
        opset_version: of ONNX's operators; None: torch's choice.
    """

    input_names: list[str] | None
    batch_is_free: bool
    opset_version: int | None


LARGEST_ONNX = 2**31 - 1
"""Bytes: a protobuf message can't be longer."""


class TorchExport:
    """torch.export's own files, for `torch.export.load`.

    Attributes:
        name: as users write it.
        suffix: how its files end.
        has_opsets: whether it comes in versions of an operator set.
    """

    name = "torch_export"
    suffix = ".pt2"
    has_opsets = False

    def check_installed(self) -> None:
        """Raise MissingPackageError where writing needs what isn't installed."""

    def write(self, program: torch.export.ExportedProgram, file: BinaryIO, labels: Labels) -> None:
        """Write the program to an empty file."""
        with _quietly():
            torch.export.save(program, file)

    def runner(self, file: BinaryIO) -> Runner | None:
        """Return what runs the file that was written; None where nothing is installed that can."""
        file.seek(0)
        with _quietly():
            net = torch.export.load(file).module()

        def run(call: Call) -> list[torch.Tensor]:
            args = trees.map_leaves(on_cpu, list(call.args))
            return trees.tensors(net(*args, **trees.map_leaves(on_cpu, call.kwargs)))

        return run


class Onnx:
    """ONNX, through torch's exporter; its members are those of `TorchExport`."""

    name = "onnx"
    suffix = ".onnx"
    has_opsets = True

    def check_installed(self) -> None:
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise missing_package(package, "onnx", "Exporting to ONNX")

    def write(self, program: torch.export.ExportedProgram, file: BinaryIO, labels: Labels) -> None:
        """Write one file with the weights inside.

        Raises:
            ConfigurationError: an operation that ONNX lacks, or weights too large for one file.
        """
        # Beyond, protobuf fails only after it has filled the memory.
        size = sum(value.numel() * value.element_size() for value in program.state_dict.values())
        if size > LARGEST_ONNX:
            raise ConfigurationError(
                f"The net's weights take {size / 1e9:.1f} GB, and an .onnx file holds at most 2 "
                "GB. Use format='torch_export'."
            )
        try:
            with _quietly():
                written = torch.onnx.export(
                    program,
                    input_names=labels.input_names,
                    opset_version=labels.opset_version,
                    dynamo=True,
                    verbose=False,
                )
        except Exception as error:
            raise ConfigurationError(
                f"torch can't put the net into ONNX: {reason_of(error.__cause__ or error)} Use "
                "format='torch_export', or another operation in the net."
            ) from error
        assert written is not None
        model = written.model_proto
        if labels.batch_is_free:
            _name_batch(model.graph)
        file.write(model.SerializeToString())

    def runner(self, file: BinaryIO) -> Runner | None:
        """Return an onnxruntime session; without onnxruntime, a look by ONNX's own checker."""
        file.seek(0)
        content = file.read()
        if importlib.util.find_spec("onnxruntime") is None:
            import onnx

            onnx.checker.check_model(content, full_check=True)
            return None
        import onnxruntime

        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        names = [item.name for item in session.get_inputs()]

        def run(call: Call) -> list[torch.Tensor]:
            arrays = [on_cpu(tensor).numpy() for tensor in call.tensors()]
            outputs = session.run(None, dict(zip(names, arrays, strict=True)))
            return [torch.as_tensor(output) for output in outputs]

        return run


def _name_batch(graph: Any) -> None:
    """Call the free dimension `batch`; torch gives it a number of its own (`s31`)."""
    dimensions = [
        dimension
        for value in (*graph.input, *graph.output, *graph.value_info)
        for dimension in value.type.tensor_type.shape.dim
        if dimension.dim_param
    ]
    own = [found for dimension in dimensions for found in re.findall(r"\w+", dimension.dim_param)]
    symbols = {name for name in own if re.fullmatch(r"s\d+", name)}
    if len(symbols) == 1:
        for dimension in dimensions:
            dimension.dim_param = re.sub(r"\bs\d+\b", "batch", dimension.dim_param)


Format: TypeAlias = TorchExport | Onnx

FORMATS: dict[str, Format] = {item.name: item for item in (TorchExport(), Onnx())}
"""The formats by name."""


def on_cpu(leaf: Any) -> Any:
    """Return a tensor in main memory; anything else as it is."""
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's notes on packages that it looks for and on its own deprecated code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
