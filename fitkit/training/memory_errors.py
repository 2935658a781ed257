"""What to say, and to let go of, when memory runs out."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fitkit import trees
from fitkit.errors import OutOfMemoryError
from fitkit.torch_errors import is_out_of_memory

if TYPE_CHECKING:
    from fitkit.model import Model
    from fitkit.training.compilation import Compilation

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


@contextlib.contextmanager
def memory_explained(
    model: Model, compilation: Compilation, verb: str, batch_size: int | None
) -> Iterator[None]:
    """Turn a device's or the allocator's error into one that says what took the memory.

    What the failed step held (activations in the frames of the error's traceback) is dropped, so
    that the next call has the memory.

    Args:
        verb: what was called.
        batch_size: samples in a batch; None where the data have their own.

    Raises:
        OutOfMemoryError: the original is its cause.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        message = explanation(model, compilation, verb, batch_size, str(error).splitlines()[0])
        let_go(error, compilation.strategy.device)
        raise OutOfMemoryError(message) from error


def let_go(error: BaseException, device: torch.device) -> None:
    """Drop what the frames of an error hold, and give unused memory back to the device."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    if device.type == "cuda":
        torch.cuda.empty_cache()


def explanation(
    model: Model, compilation: Compilation, verb: str, batch_size: int | None, original: str
) -> str:
    """What was in use, and what needs less, in numbers."""
    strategy = compilation.strategy
    held = held_by_training(model)
    batches = "" if batch_size is None else f" with batches of {batch_size} samples"
    parts = [f"{name} {size(count)}" for name, count in held.items() if count]
    parts += on_device(strategy.device, sum(held.values()))
    advice = "; ".join(suggestions(compilation, verb, batch_size, sum(held.values())))
    return (
        f"Memory ran out on {strategy.device} in {verb}{batches}. In use: {', '.join(parts)}. "
        f"What needs less: {advice}. ({original})"
    )


def held_by_training(model: Model) -> dict[str, int]:
    """Bytes of what a training holds from step to step, by its name."""
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
    """What the device says of its memory.

    Args:
        known: bytes that have a name already; the rest is activations and the like.
    """
    if device.type == "cuda":
        allocated, reserved = (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        free, total = torch.cuda.mem_get_info(device)
        rest = size(max(allocated - known, 0))
        return [
            f"activations and all else {rest}",
            f"{size(allocated)} allocated and {size(reserved)} reserved by torch",
            f"{size(free)} of {size(total)} free",
        ]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not on every system
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        return [f"{size(free)} of {size(total)} of main memory free"]
    return []


def suggestions(
    compilation: Compilation, verb: str, batch_size: int | None, held: int
) -> Iterator[str]:
    """What takes less memory, the least intrusive first."""
    learns, strategy = verb == "fit", compilation.strategy
    if batch_size is None:
        yield "batches of half as many samples"
    elif batch_size > 1:
        smaller = f"batch_size={-(-batch_size // 2)}"
        steps = 2 * compilation.accumulate_grad_batches
        yield f"{smaller} with accumulate_grad_batches={steps}" if learns else smaller
    if strategy.precision.name == "32-true" and strategy.device.type != "cpu":
        yield "precision='bf16-mixed', with which activations take about half"
    if learns:
        yield (
            "activation checkpointing (torch.utils.checkpoint in forward, or "
            "fitkit.strategies.FSDPStrategy(activation_checkpointing=True))"
        )
        if held:
            yield (
                f"strategy='fsdp' on n devices, each of which keeps an n-th of these {size(held)} "
                "of parameters, gradients and optimizer state"
            )


def size(count: float) -> str:
    """A number of bytes as people read it: `1.6 GB`."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:
        count /= 1000
        unit += 1
    digits = 0 if unit == 0 or count >= 9.95 else 1
    return f"{count:.{digits}f} {UNITS[unit]}"


def _bytes(leaves: Iterable[Any]) -> int:
    return sum(
        leaf.nbytes
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not torch.nn.parameter.is_lazy(leaf)
    )
