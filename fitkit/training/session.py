"""What surrounds the loops: modes, backend flags and weights put back as they were."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fitkit.data.transfer import Transfer
from fitkit.distributed.strategies import Strategy
from fitkit.hooks import overridden
from fitkit.training.calling import Caller, parameters_of
from fitkit.training.compilation import Compilation
from fitkit.training.jit import compile_on_this_rank
from fitkit.training.matmul_precision import matmul_precision
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
    word = model.compilation.memory_format
    format_of_images = None if word is None else MEMORY_FORMATS[word]
    transfer = Transfer(strategy.device, strategy.precision.input_dtype(model), format_of_images)
    own = model.transfer_batch_to_device if overridden(model, "transfer_batch_to_device") else None
    return Mover(transfer, own)


@contextlib.contextmanager
def modes_restored(module: torch.nn.Module) -> Iterator[None]:
    """Put every submodule's training flag back at the end."""
    flags = [(child, child.training) for child in module.modules()]
    try:
        yield
    finally:
        for child, training in flags:
            child.training = training


@contextlib.contextmanager
def backend_flags(compilation: Compilation) -> Iterator[None]:
    """Set torch's flags that `compile` was given for the length of a call: cuDNN's benchmark mode,
    deterministic algorithms, the precision of matrix products."""
    benchmark, deterministic = compilation.benchmark, compilation.deterministic
    cudnn = torch.backends.cudnn.benchmark
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    try:
        with matmul_precision(compilation.matmul_precision):
            yield
    finally:
        torch.backends.cudnn.benchmark = cudnn
        if deterministic is not None:
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)


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
            match_strides(model.fit_state.optimizers)


@contextlib.contextmanager
def unchanged_on_error(model: Model) -> Iterator[None]:
    """Put a model back as it was where an error comes before its first update.

    The first forward already changes running statistics, and making a scheduler changes rates.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state, history = model.fit_state, model.history
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
        for parameter in model.compilation.trainable(model):
            parameter.grad = None


@torch.no_grad()
def _put_back(model: torch.nn.Module, copies: dict[str, torch.Tensor]) -> None:
    """Give buffers the values that were copied; they may be on another device by now."""
    for name, buffer in model.named_buffers():
        if name in copies and not copies[name].is_meta:
            buffer.copy_(copies[name])
