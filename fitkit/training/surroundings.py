"""What surrounds a call of a verb: torch's flags, the net prepared, weights put back on errors."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.callbacks import Callback, CallbackList, ProgressBar
from fitkit.data.batches import Source
from fitkit.data.sharding import sharded
from fitkit.errors import ConfigurationError, OutOfMemoryError, is_out_of_memory, warn
from fitkit.modes import in_use, modules_of, set_mode
from fitkit.module import Module
from fitkit.training.explain import explanation
from fitkit.training.own_step import StepContext, running
from fitkit.training.programs import traces_gradients
from fitkit.training.settings import MEMORY_FORMATS

LEARNING = ("fit", "train_on_batch")
"""The verbs that change the weights."""


@contextlib.contextmanager
def surroundings(model: Module, verb: str, batch_size: int | None = None) -> Iterator[None]:
    """Surround a verb's call on a rank, from its first line to its last.

    Torch's flags are as `compile` was given, and the net is compiled and laid out so; an error for
    lack of memory says what took it. Where `fit` fails before its first update, the model is as it
    was. A verb that only computes finds the model on its device.

    Args:
        batch_size: samples in a batch; None where the data have their own.

    Raises:
        OutOfMemoryError: memory was lacking; torch's error is its cause.
    """
    compilation = model._fitkit.compilation
    with contextlib.ExitStack() as stack:
        if verb == "fit":  # a batch's update does so by itself
            stack.enter_context(unchanged_on_error(model))
        try:
            for flag, value in (
                (BENCHMARK, compilation.benchmark),
                (DETERMINISTIC, compilation.deterministic),
                (MATMUL_PRECISION, compilation.matmul_precision),
            ):
                if value is not None:
                    stack.enter_context(flag.held(value))
            compiles = compilation.jit_compile is not False
            if compiles and verb in LEARNING and traces_gradients():
                stack.enter_context(TRACED_GRADIENTS.held(True))
            if verb in ("evaluate", "predict"):  # the others do it where they build their steps
                place(model)
            if compiles or compilation.memory_format is not None:
                stack.enter_context(net_prepared(model))
            yield
        except Exception as error:
            if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
                raise
            # What the failed step held (activations in the frames of the error's traceback) is
            # dropped, so that the next call has the memory.
            message = explanation(model, verb, batch_size, str(error).splitlines()[0])
            let_go(error, compilation.strategy.device)
            raise OutOfMemoryError(message) from error


def place(model: Module) -> None:
    """Bring a model to its device, which one thread does at a time."""
    with model._fitkit.contexts.placing:
        model._fitkit.compilation.strategy.place(model)


def let_go(error: BaseException, device: torch.device) -> None:
    """Drop what the frames of an error hold, and give unused memory back to the device."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def evaluating(model: Module, context: StepContext) -> Iterator[None]:
    """Have a model evaluate meanwhile: its mode, its losses' modes, the weights that evaluate.

    The model's mode stays; whoever began the call puts it back.
    """
    with running(model, context), model._fitkit.fit_state.evaluated():
        set_mode(model, training=False)
        losses = model._fitkit.compilation.loss_modules
        if context.name == "predict" or not losses:
            yield
            return
        with contextlib.ExitStack() as stack:
            for loss in losses:
                stack.enter_context(in_use(loss, "evaluate", alone=False))
                loss.eval()
            yield


@contextlib.contextmanager
def net_prepared(model: Module) -> Iterator[None]:
    """Have the net compiled, and the weights of convolutions laid out, as `compile` was given.

    The layout is for the length of a call.

    Where an engine decides how weights lie in memory, they stay as they are: the batches' layout
    alone decides there.
    """
    compilation = model._fitkit.compilation
    compile_on_this_rank(model, compilation.jit_compile)
    word = None if compilation.strategy.has_engine else compilation.memory_format
    try:
        with laid_out(model, word):
            yield
    finally:
        if word is not None:
            match_strides(model._fitkit.fit_state.optimizers)


@contextlib.contextmanager
def unchanged_on_error(model: Module, modules: list[nn.Module] | None = None) -> Iterator[None]:
    """Put a model back as it was where an error comes before its first update.

    The first forward already changes running statistics, and making a scheduler changes rates.

    Args:
        modules: the model's and its losses', where the optimizers are made already and no scheduler
            takes part; None where they aren't.
    """
    losses = model._fitkit.compilation.loss_modules
    has_buffers = any(module._buffers for module in modules or modules_of(model))
    named = model.named_buffers() if has_buffers else ()
    buffers = {name: buffer.detach().clone() for name, buffer in named}
    state, history = model._fitkit.fit_state, model.history
    before, updates = None if modules else state.snapshot(), state.updates
    try:
        # Whoever calls fit under no_grad means their own code.
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            yield
            return
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except BaseException:
        if state.updates == updates:
            _put_back(model, buffers)
            if before is not None:
                state.restore(before)
            model.history = history
        raise
    finally:
        for module in modules or modules_of(model, *losses):
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.grad = None


@torch.no_grad()
def _put_back(model: torch.nn.Module, copies: dict[str, torch.Tensor]) -> None:
    """Give buffers the values that were copied; they may be on another device by now."""
    for name, buffer in model.named_buffers():
        if name in copies and not copies[name].is_meta:
            buffer.copy_(copies[name])


class ProcessFlag:
    """A flag of torch's, which holds for the whole process, as calls want it.

    Calls nest, and those of several threads overlap: the one that began last says what the flag
    is, and what the first one found is back when none is left.

    Args:
        put: sets the flag.
        kept: notes what the flag is; gives what puts that back.
    """

    def __init__(self, put: Callable[[Any], None], kept: Callable[[], Callable[[], None]]) -> None:
        self._put = put
        self._kept = kept
        self._put_back: Callable[[], None] | None = None
        self._wanted: list[list[Any]] = []
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def held(self, value: Any) -> Iterator[None]:
        """Have the flag set meanwhile; None leaves it."""
        if value is None:
            yield
            return
        entry = [value]
        with self._lock:
            if not self._wanted:
                self._put_back = self._kept()
            self._put(value)
            self._wanted.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._wanted = [other for other in self._wanted if other is not entry]
                if self._wanted:
                    self._put(self._wanted[-1][0])
                elif self._put_back is not None:
                    self._put_back()


def _set_benchmark(value: bool) -> None:
    torch.backends.cudnn.benchmark = value


def _benchmark_kept() -> Callable[[], None]:
    before = torch.backends.cudnn.benchmark
    return lambda: _set_benchmark(before)


def _set_deterministic(value: bool | str) -> None:
    torch.use_deterministic_algorithms(bool(value), warn_only=value == "warn")


def _deterministic_kept() -> Callable[[], None]:
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return lambda: torch.use_deterministic_algorithms(strict, warn_only=warn_only)


def _matmul_precision_kept() -> Callable[[], None]:
    """Torch has two ways to say it, which know of each other only half: after
    `torch.backends.cuda.matmul.fp32_precision = …` its older getters raise until both say the same.
    Compilers ask the older ones, so the older setter, which sets both, is what is used here; both
    are put back."""
    backends: Any = torch.backends
    newer = [
        (backend, backend.fp32_precision)
        for backend in (backends.cuda.matmul, backends.mkldnn.matmul)
    ]
    older: str | None = None
    with contextlib.suppress(RuntimeError):  # the newer way was used to say something else
        older = torch.get_float32_matmul_precision()

    def put_back() -> None:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for backend, precision in newer:
            backend.fp32_precision = precision

    return put_back


BENCHMARK = ProcessFlag(_set_benchmark, _benchmark_kept)


DETERMINISTIC = ProcessFlag(_set_deterministic, _deterministic_kept)


MATMUL_PRECISION = ProcessFlag(torch.set_float32_matmul_precision, _matmul_precision_kept)


def _set_traced_gradients(value: bool) -> None:
    torch._dynamo.config.trace_autograd_ops = value


def _traced_gradients_kept() -> Callable[[], None]:
    before = torch._dynamo.config.trace_autograd_ops
    return lambda: _set_traced_gradients(before)


TRACED_GRADIENTS = ProcessFlag(_set_traced_gradients, _traced_gradients_kept)
"""Whether torch's compiler takes `torch.autograd.grad` into a graph; it has no public name."""


def compile_net(model: Module, options: bool | dict[str, Any]) -> None:
    """Compile a model's net with its next call, or let it be as it was.

    Args:
        options: False for not at all; True, or the keyword arguments of `torch.compile`.

    Raises:
        ConfigurationError: arguments that torch refuses.
    """
    target = _target(model)
    if options is False:
        target._compiled_call_impl = None
        return
    try:
        compiled = torch.compile(_entry(target), **({} if options is True else options))
    except Exception as error:
        raise ConfigurationError(
            f"jit_compile={options!r} isn't what torch.compile takes: {error}"
        ) from error
    target._compiled_call_impl = compiled


@contextlib.contextmanager
def as_written(model: Module) -> Iterator[None]:
    """Have calls of a model and its net run their own code meanwhile, not the compiled one."""
    modules = [model] if model.net is None else [model, model.net]
    compiled = [module._compiled_call_impl for module in modules]
    for module in modules:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in zip(modules, compiled, strict=True):
            if call is not None:  # else another thread does the same, and puts it back
                module._compiled_call_impl = call


def compile_on_this_rank(model: Module, options: bool | dict[str, Any]) -> None:
    """Compile the net where it came from another process: modules travel uncompiled."""
    if options is not False and _target(model)._compiled_call_impl is None:
        _name_globals(model)
        compile_net(model, options)


def _name_globals(model: nn.Module) -> None:
    """Have this process's `__main__` name what the net's own code refers to.

    Classes of the user's script come to a worker with the globals that they use, but not in the
    module where torch's compiler looks for them: there the worker's own program is.
    """
    main = vars(sys.modules["__main__"])
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        for function in filter(inspect.isfunction, vars(kind).values()):
            if function.__module__ == "__main__" and function.__globals__ is not main:
                used = function.__globals__.items()
                main.update({name: value for name, value in used if not name.startswith("__")})


def _target(model: Module) -> Any:
    return model if model.net is None else model.net


def _entry(module: nn.Module) -> Callable[..., Any]:
    """A module's call, as a function of this file.

    Torch doesn't compile from frames in files of its own, and leaves `Module.compile`'s entry as it
    is (torch 2.13): a net of torch's layers alone would go uncompiled, without a word.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # Torch counts compilations by code object, up to a limit: each net gets one of its own.
    call.__code__ = call.__code__.replace()
    return call


_uses: dict[int, int] = {}
"""How many calls have a parameter laid out otherwise now, by its id."""


_lock = threading.RLock()


@contextlib.contextmanager
def laid_out(module: torch.nn.Module, word: str | None) -> Iterator[None]:
    """Lay out a module's four-dimensional parameters otherwise, meanwhile.

    The tensors stay the same objects with the same numbers; only their strides change. Where calls
    overlap, the last one that ends lays them out as they were.

    Args:
        word: a key of `MEMORY_FORMATS`; None leaves the module as it is.
    """
    changed: list[torch.nn.Parameter] = []
    layout = MEMORY_FORMATS[word or "channels_last"]
    try:
        with _lock:
            for parameter in () if word is None else module.parameters():
                is_used = id(parameter) in _uses
                if not is_used and not (
                    parameter.ndim == 4
                    and parameter.is_contiguous()
                    and parameter.is_floating_point()
                ):
                    continue
                _uses[id(parameter)] = _uses.get(id(parameter), 0) + 1
                changed.append(parameter)
                if not is_used:
                    parameter.data = parameter.data.contiguous(memory_format=layout)
        yield
    finally:
        with _lock:
            for parameter in changed:
                _uses[id(parameter)] -= 1
                if not _uses[id(parameter)]:
                    del _uses[id(parameter)]
                    parameter.data = parameter.data.contiguous()


def match_strides(optimizers: Iterable[Optimizer]) -> None:
    """Lay out optimizers' running values as their parameters are.

    Fused steps read both from the first number to the last.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == parameter.shape
                    and value.stride() != parameter.stride()
                ):
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def rank_source(model: Module, source: Source, *, training: bool) -> Source:
    """This rank's shard of a source; the source itself where no other rank reads it.

    Ranks:
        Collective.
    """
    compilation = model._fitkit.compilation
    ranks = compilation.strategy.data_ranks
    if ranks.world_size == 1:
        return source
    return sharded(
        source,
        ranks,
        training=training,
        replace_sampler=compilation.replace_sampler,
        scatter=compilation.strategy.reads_on_rank_zero,
    )


def with_built_in(callbacks: CallbackList, verbose: Any, *built_in: Callback) -> CallbackList:
    """The user's callbacks, then fitkit's, which see what the user's have added to the logs.

    At the end those that come last: what saves has to see what all others have done. A backup is
    the very last: a run goes on from it with the files that the others wrote.
    """

    def place(callback: Callback) -> tuple[bool, bool]:
        last = callback.comes_last
        return last, last and bool(getattr(callback, "restores", False))

    added: list[Callback] = list(built_in)
    if verbose != 0 and not any(isinstance(c, ProgressBar) for c in callbacks.callbacks):
        added.append(ProgressBar(verbose=verbose))
    together = [*callbacks.callbacks, *added]
    return CallbackList(sorted(together, key=place))


def close_bars(callbacks: CallbackList) -> None:
    """Give the terminal back, whatever has happened."""
    for callback in callbacks.callbacks:
        if isinstance(callback, ProgressBar):
            callback.close()


def report_error(error: BaseException, callbacks: CallbackList) -> None:
    """Call `on_exception`; what fails in it is a warning, and hides neither error nor others."""
    for hook in callbacks.hooks("on_exception"):
        try:
            hook(error)
        except Exception as another:
            warn(f"on_exception failed: {type(another).__name__}: {another}")
