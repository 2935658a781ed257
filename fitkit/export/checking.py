"""Whether an exported file computes what the net computes."""

from __future__ import annotations

import torch
from torch import nn

from fitkit import trees
from fitkit.errors import ConfigurationError
from fitkit.export.formats import Runner, on_cpu
from fitkit.export.program import Call, reason_of

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
        size = trees.sample_count(call.batch)
        wanted = [on_cpu(leaf) for leaf in trees.tensors(net(*call.args, **call.kwargs))]
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


def _difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> str | None:
    """In words, where outputs differ; None where they don't."""
    shapes = [[tuple(tensor.shape) for tensor in given] for given in (found, wanted)]
    if shapes[0] != shapes[1]:
        return f"it gives outputs of shapes {shapes[0]}, the net {shapes[1]}"
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not _is_close(one, other):
            apart = (one.double() - other.double()).abs().max().item()
            return f"output {index} is up to {apart:.3g} away from the net's"
    return None


def _is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(found.to(wanted.dtype), wanted)
    tolerance = TOLERANCES.get(wanted.dtype, TOLERANCE)
    found, wanted = found.double(), wanted.double()
    finite = wanted[wanted.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 1.0
    return torch.allclose(found, wanted, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _advice(size: int) -> str:
    return f"Look for code in the net that treats a batch of {size} otherwise." if size == 1 else ""
