"""What surrounds the loops: how inputs enter, where the model is, weights put back on errors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fitkit.data.to_device import Transfer
from fitkit.distributed.strategies import Strategy
from fitkit.hooks import overridden
from fitkit.training.calling import Caller, parameters_of
from fitkit.training.compilation import Compilation
from fitkit.training.jit import compile_on_this_rank
from fitkit.training.memory_format import MEMORY_FORMATS, laid_out, match_strides
from fitkit.training.moving import Mover

if TYPE_CHECKING:
    from fitkit.model import Model


def caller_of(model: torch.nn.Module) -> Caller:
    """How inputs enter the model: by the signature of its own forward, else its net's."""
    net = getattr(model, "net", None)
    forward = model.forward
    if isinstance(net, torch.nn.Module) and _spreads(forward):
        forward = net.forward
    return Caller(forward)


def _spreads(forward: Any) -> bool:
    """Whether a forward takes anything and hands it on."""
    kinds = {item.kind for item in parameters_of(forward)}
    return kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def mover_of(model: Model, strategy: Strategy) -> Mover:
    """What brings batches to the model's device in the model's dtype."""
    word = model._fitkit.compilation.memory_format
    format_of_images = None if word is None else MEMORY_FORMATS[word]
    transfer = Transfer(strategy.device, strategy.precision.input_dtype(model), format_of_images)
    own = model.transfer_batch_to_device if overridden(model, "transfer_batch_to_device") else None
    return Mover(transfer, own)


def place(model: Model, strategy: Strategy) -> None:
    """Bring a model to its device, before a call that only computes."""
    with model._fitkit.stages.placing:
        strategy.place(model)


@contextlib.contextmanager
def net_prepared(model: Model, compilation: Compilation) -> Iterator[None]:
    """Have the net compiled, and the weights of convolutions laid out, as `compile` was told.

    The layout is for the length of a call.

    Where a strategy keeps module or optimizers in a form of its own, the weights stay as they are:
    the batches' layout alone decides there.
    """
    compile_on_this_rank(model, compilation.jit_compile)
    keeps = type(compilation.strategy).begin_training is Strategy.begin_training
    word = compilation.memory_format if keeps else None
    try:
        with laid_out(model, word):
            yield
    finally:
        if word is not None:
            match_strides(model._fitkit.fit_state.optimizers)


@contextlib.contextmanager
def unchanged_on_error(model: Model) -> Iterator[None]:
    """Put a model back as it was where an error comes before its first update.

    The first forward already changes running statistics, and making a scheduler changes rates.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state, history = model._fitkit.fit_state, model.history
    before, updates = state.snapshot(), state.updates
    try:
        # Whoever calls fit under no_grad means their own code.
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except BaseException:
        if state.updates == updates:
            _put_back(model, buffers)
            state.restore(before)
            model.history = history
        raise
    finally:
        for parameter in model._fitkit.compilation.trainable(model):
            parameter.grad = None


@torch.no_grad()
def _put_back(model: torch.nn.Module, copies: dict[str, torch.Tensor]) -> None:
    """Give buffers the values that were copied; they may be on another device by now."""
    for name, buffer in model.named_buffers():
        if name in copies and not copies[name].is_meta:
            buffer.copy_(copies[name])
