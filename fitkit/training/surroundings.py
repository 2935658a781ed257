"""What surrounds a verb's call on a rank.

These are the device, torch's flags, the form of the net, its mode, the rank's share of the data,
and what is restored after an error.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fitkit.accelerators import current, empty_cache
from fitkit.buffers import Place, restorer
from fitkit.data.batches import CountedSource, Source
from fitkit.distributed.strategies import Strategy
from fitkit.distributed.world import in_own_group
from fitkit.errors import ConfigurationError, OutOfMemoryError, is_out_of_memory
from fitkit.hooks import evaluation_stage
from fitkit.modes import in_use, weights_cast_anew
from fitkit.module import Module, is_metric
from fitkit.pulse import running
from fitkit.training.compiler import compiler_of
from fitkit.training.forks import FORK, Begun
from fitkit.training.lone_watch import watch_calls
from fitkit.training.memory_layout import laid_out, match_strides
from fitkit.training.parts_of_batches import counter_of
from fitkit.training.step_context import StepContext, as_current
from fitkit.training.torch_flags import BENCHMARK, DETERMINISTIC, MATMUL_PRECISION


@contextlib.contextmanager
def surroundings(model: Module, verb: str, batch_size: int | None = None) -> Iterator[None]:
    """Set up and clean up around a verb's whole call on a rank.

    Inside, the call's device is the current one, torch's flags are set, and the net is compiled and
    laid out, as `compile` was told. An out-of-memory error says what took the memory. If `fit`
    fails before its first update, the model is restored. For `evaluate` and `predict`, the model is
    moved to its device, where it also gets rank 0's weights if this rank lacks them. `fit` does so
    in `Fit`.

    Args:
        batch_size: samples in a batch; None if the data come in batches already.

    Raises:
        OutOfMemoryError: there was too little memory; torch's error is its cause.
    """
    compilation = model._fitkit.compilation
    given = compilation.given
    with contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled(compilation.strategy.device.type):  # the caller's
            stack.enter_context(weights_cast_anew())
        stack.enter_context(current(compilation.strategy.device))
        is_pass = not verb.endswith("_on_batch")  # those read no data
        if is_pass:
            stack.enter_context(FORK.held(Begun))
            alone = compilation.strategy.world.size == 1 and not in_own_group()
            stack.enter_context(running(verb, alone=alone))
            if alone:
                watch_calls()
        if verb == "fit":  # train_on_batch does this itself
            stack.enter_context(unchanged_on_error(model))
        try:
            for flag, value in (
                (BENCHMARK, given.benchmark),
                (DETERMINISTIC, given.deterministic),
                (MATMUL_PRECISION, given.matmul_precision),
            ):
                if value is not None:
                    stack.enter_context(flag.held(value))
            if is_pass and verb != "fit":  # the others do it where they build their steps
                place(model)
            if model._fitkit.compiler is not None or given.memory_format is not None:
                stack.enter_context(net_prepared(model))
            yield
        except Exception as error:
            raise_out_of_memory(error, model, verb, batch_size)
            raise


def raise_out_of_memory(
    error: Exception, model: Module, verb: str, batch_size: int | None = None
) -> None:
    """Say what took the memory, if that is why a call failed, and free what the failed step held.

    So the next call has the memory. The frames of the error's traceback hold its activations.
    """
    if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
        return
    from fitkit.extras.explain import explanation

    message = explanation(model, verb, batch_size, str(error).splitlines()[0])
    let_go(error, model._fitkit.compilation.strategy.device)
    raise OutOfMemoryError(message) from error


def computing(model: Module, verb: str) -> AbstractContextManager[Collection[nn.Module]]:
    """Surround a call that computes and changes nothing, so that threads can run several.

    Only one such call runs at a time if several processes or replicas take part in it. The same
    is true if the model's own steps update metrics that are part of the model.
    """
    strategy = model._fitkit.compilation.strategy
    alone = strategy.world.size > 1 or strategy.replicas > 1
    if not alone and verb in ("evaluate", "test_on_batch") and evaluation_stage(model):
        alone = any(map(is_metric, model.modules()))
    return in_use(model, verb, alone=alone)


def place(model: Module) -> None:
    """Move a model to its device; only one thread at a time does this."""
    with model._fitkit.contexts.placing:
        compilation = model._fitkit.compilation
        compilation.trained(model).place(compilation.strategy)


def let_go(error: BaseException, device: torch.device) -> None:
    """Clear the frames of an error, and give unused memory back to the device."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    empty_cache(device)


@contextlib.contextmanager
def evaluating(
    model: Module, context: StepContext, modules: Collection[nn.Module] | None = None
) -> Iterator[None]:
    """Put a model and its losses into evaluation mode, with the weights for evaluation.

    The caller restores the model's mode. This restores the rest.

    Args:
        modules: the model and its submodules, if they are known.
    """
    losses = list(model._fitkit.compilation.trained(model).losses.values())
    evaluates_losses = losses and context.name != "predict"
    with as_current(model, context):
        if not model._fitkit.fit_state.has_training_weights and not evaluates_losses:
            model._to_evaluation(modules)
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(model._fitkit.fit_state.evaluated())
            model._to_evaluation(modules)
            for loss in losses if evaluates_losses else ():
                stack.enter_context(in_use(loss, "evaluate", alone=False))
                loss.eval()
            yield


@contextlib.contextmanager
def net_prepared(model: Module) -> Iterator[None]:
    """Compile the net, and lay out the weights of convolutions, as `compile` was told.

    The layout lasts for one call. Under an engine, which decides how weights lie in memory, the
    weights stay as they are. There only the batches are laid out.
    """
    compilation = model._fitkit.compilation
    if (compiler := compiler_of(model)) is not None:
        compiler.compile_net(model)
    word = None if compilation.strategy.has_engine else compilation.given.memory_format
    try:
        with laid_out(model, word):
            yield
    finally:
        if word is not None:
            match_strides(model._fitkit.fit_state.optimizers)


@contextlib.contextmanager
def unchanged_on_error(model: Module, modules: list[nn.Module] | None = None) -> Iterator[None]:
    """Restore a model if an error occurs before its first update.

    The first forward already changes running statistics, and creating a scheduler changes rates.

    Args:
        modules: the modules of the model and its losses, if the optimizers already exist and no
            scheduler takes part; otherwise None.
    """
    trained = model._fitkit.compilation.trained(model)
    parts = modules or trained.modules()
    restore_buffers = restorer(
        # By `items`, because a traced module's holder can't be iterated over.
        Place(part._buffers, name)
        for part in parts
        for name, _ in part._buffers.items()
    )
    state, history = model._fitkit.fit_state, model.history
    restore, updates = None if modules else state.restorer(), state.updates
    try:
        # A no_grad block around a call of fit is meant for the caller's own code.
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            yield
            return
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except BaseException:
        if state.updates == updates:
            restore_buffers()
            if restore is not None:
                restore()
            model.history = history
        raise
    finally:
        for module in modules or trained.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.grad = None


def rank_source(
    model: Module,
    source: Source,
    *,
    training: bool,
    steps: int | None = None,
    fills: bool = False,
    samples_of: Callable[[Any], int] | None = None,
) -> Source:
    """Return this rank's share of a source: all of it if no other rank reads it.

    Args:
        steps: as in `sharded`.
        fills: as in `sharded`.
        samples_of: counts a batch's samples; None for `counter_of(model)`.

    Ranks:
        Collective.
    """
    compilation = model._fitkit.compilation
    ranks = compilation.strategy.data_ranks
    samples_of = samples_of or counter_of(model)
    if ranks.world_size == 1:
        return CountedSource(source, samples_of)
    from fitkit.extras.data_on_ranks.sharding import sharded

    return sharded(
        source,
        ranks,
        training=training,
        replace_sampler=compilation.given.replace_sampler,
        scatter=compilation.strategy.reads_on_rank_zero,
        steps=steps,
        fills=fills,
        samples_of=samples_of,
    )


_loops: dict[int, str] = {}
"""The threads that read the outputs of a pass on several ranks, by their ids."""


@contextlib.contextmanager
def reading_on_ranks(strategy: Strategy) -> Iterator[None]:
    """Note for the length of a block that this thread reads what several ranks compute."""
    thread = threading.get_ident()
    is_first = strategy.world.size > 1 and thread not in _loops
    if is_first:
        _loops[thread] = strategy.name
    try:
        yield
    finally:
        if is_first:
            _loops.pop(thread, None)


def check_outside_of_loop(strategy: Strategy) -> None:
    """Refuse a call on several ranks while the thread reads the outputs of another one.

    Raises:
        ConfigurationError: the ranks are in use until that loop ends.
    """
    if _loops and strategy.world.size > 1 and threading.get_ident() in _loops:
        raise ConfigurationError(
            "A loop over predict_batches on several devices is running in this thread, and its "
            "processes are in use. End the loop first (or call its iterator's close()), or compile "
            "this model with devices=1."
        )
