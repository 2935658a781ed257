"""A net's computation as torch.export traces it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.errors import ConfigurationError

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
        """The arguments' tensors, in order."""
        given = trees.leaves([list(self.args), self.kwargs])
        return [leaf for leaf in given if isinstance(leaf, torch.Tensor)]

    def batch_shapes(self) -> Any:
        """Which dimensions are free: the first of each tensor that is as long as the batch."""
        shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch")
        size = trees.sample_count(self.batch)
        for tensor in self.tensors():
            if tensor.ndim and len(tensor) == size:
                shapes[tensor] = {0: batch}
        return shapes

    def input_names(self, net: nn.Module) -> list[str] | None:
        """The tensors' names, from the net's signature; None where it names none."""
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
    """The net's computation for arguments like `call`'s, on the CPU.

    Args:
        shapes: which dimensions are free, as torch.export takes it; None: none is.

    Raises:
        ConfigurationError: torch can't trace it; its own error is the cause.
    """
    try:
        program = torch.export.export(net, call.args, call.kwargs, dynamic_shapes=shapes)
    except Exception as error:
        raise ConfigurationError(
            f"torch.export can't trace the net: {reason_of(error)} {_advice(net, call, shapes)}"
        ) from error
    if any(tensor.device.type != "cpu" for tensor in call.tensors()):
        # Whoever runs the file may have no such device.
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, "cpu")
    return program


def _advice(net: nn.Module, call: Call, shapes: Any) -> str:
    """What to do about a net that can't be traced."""
    try:
        net(*call.args, **call.kwargs)
    except Exception:
        return "Not even calling the net with this example works: give a batch such as fit gets."
    if shapes is not None:
        return (
            "The net runs as it is; where its code needs one size of batch, export for the "
            "example's with dynamic_batch=False. Else write what depends on tensors' values with "
            "torch.where or torch.cond."
        )
    return "Write what depends on tensors' values with torch.where or torch.cond."


def reason_of(error: BaseException) -> str:
    """The beginning of an error's message, as one line."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = text[:LONGEST_REASON].rsplit(" ", 1)[0] + " …"
    return f"{type(error).__name__}: {text}" + ("" if text.endswith((".", "…")) else ".")
