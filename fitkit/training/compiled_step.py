"""`jit_compile`: a batch's forward, loss, gradients, clipping and update as one compiled function.

In eager PyTorch a small net's step is bound by its hundreds of launches. Torch's compiler can take
all of them at once: the net, the loss, `torch.autograd.grad` of it and torch's own functional
optimizers. A part that it can't take is left out, with one warning. At the least the net alone is
compiled (`surroundings.compile_net`).

The compiled function reads everything anew from `CompiledUpdate`'s attributes, and torch guards
what it read: another net, loss or setting is compiled anew, never computed as the one before.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from fitkit import trees
from fitkit.distributed.strategies import Strategy
from fitkit.errors import warn
from fitkit.losses import Term
from fitkit.losses.compiled import total_of
from fitkit.metrics.sums import widest_dtype
from fitkit.module import Module
from fitkit.optimizers import HOW, class_of
from fitkit.random_states import random_state, set_random_state
from fitkit.training.step import CompiledStep, is_plain_wrapper, number_of

TOGETHER_ON_CPU = {"cpp_wrapper": True, "size_asserts": False}
"""Options of torch's compiler, beside the user's, for several steps in one call on a CPU.

What launches the kernels is C++ too then, which takes a third longer to compile (32-64-10: 0.85 of
the time).
"""

MOST_SHAPES = 4
"""Shapes of batches that are compiled each for itself; those that come later share one program."""


Batch = tuple[Any, Any, Any]
"""A batch's inputs, targets and weights, on the device."""

UNROLLED = 4
"""Steps that `steps_per_execution` computes in one call. Each more takes another second to compile,
and what a call costs beside its steps is a quarter of them by then."""


OTHERS_LEARN = "which parameters have a gradient changes from batch to batch"


class UncompiledError(Exception):
    """A step, or a part of it, can't be compiled: why."""


class Group:
    """What a parameter group's update is computed from, by torch's functional optimizer.

    Args:
        optimizer: whose group it is; it has the state of its parameters.
        group: one of its groups.
        places: each learning parameter's place among the gradients.

    Attributes:
        rates: the learning rate in each of a call's steps, as a tensor: schedules change it
            without another program.
    """

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], places: dict[nn.Parameter, int]
    ) -> None:
        kind = class_of(optimizer)
        self.function: Callable[..., None] = functional(kind)
        self.given = group
        init: Any = kind._init_group  # type: ignore[attr-defined]
        names = list(inspect.signature(init).parameters)[2:]
        lists: dict[str, list[Any]] = {name: [] for name in names}
        init(optimizer, group, *lists.values())
        parameters, _, *states = lists.values()
        self.places: list[int] = [places[parameter] for parameter in parameters]
        self.parameters = parameters
        found = dict(zip(names[2:], states, strict=True))
        if "momentum_buffer_list" in found and group.get("momentum") and "dampening" in group:
            self._begin_momentum(optimizer, group, found["momentum_buffer_list"])
        # By position, as torch's functions want them; the order is another than that of above.
        taken = inspect.signature(self.function).parameters
        self.states: list[list[Any]] = [found[name] for name in taken if name in found]
        kept = {n: v for n, v in group.items() if n not in ("params", "lr", *HOW)}
        self.settings: dict[str, Any] = {
            name: value for name, value in kept.items() if name in taken
        }
        if "beta1" in taken:
            self.settings["beta1"], self.settings["beta2"] = group["betas"]
        # One tensor after the other, which the compiler joins itself.
        self.settings |= {name: False for name in HOW if name in taken}
        if group.get("capturable"):
            self.settings["capturable"] = True
        self._names, self._values = list(kept), list(kept.values())
        rate = group["lr"]
        self.last: list[float] = [float(rate)] * UNROLLED
        device = parameters[0].device if parameters else torch.device("cpu")
        if device.type == "cuda" and "capturable" in taken:
            self.settings["capturable"] = True  # all numbers stay on the GPU
        dtype = widest_dtype(device)
        self.rates: torch.Tensor = torch.tensor(self.last, dtype=dtype, device=device)

    def _begin_momentum(
        self, optimizer: Optimizer, group: dict[str, Any], buffers: list[torch.Tensor | None]
    ) -> None:
        """Give SGD's momenta, which its first update would make, the value before it."""
        if all(buffer is not None for buffer in buffers):
            return
        if group.get("dampening"):
            raise UncompiledError("SGD's dampening begins with its second update only")
        for place, (parameter, buffer) in enumerate(zip(self.parameters, buffers, strict=True)):
            if buffer is None:
                buffers[place] = torch.zeros_like(parameter, requires_grad=False)
                optimizer.state[parameter]["momentum_buffer"] = buffers[place]

    def follows(self, place: int = 0) -> bool:
        """Take the rate that the group has now for a step; whether its other settings are kept.

        Args:
            place: the step's among those of a call.
        """
        given, rate = self.given, self.given["lr"]
        if rate is not self.last[place]:
            self.put(float(rate), place)
        return list(map(given.__getitem__, self._names)) == self._values

    def put(self, rate: float, place: int = 0) -> None:
        """Let a step of the next call have this rate."""
        if rate != self.last[place]:
            self.rates[place] = rate
            self.last[place] = rate

    def update(self, gradients: Sequence[torch.Tensor], place: int) -> None:
        """Make a step's update, from the gradients of all learning parameters; traced."""
        own = [gradients[place] for place in self.places]
        # Torch counts steps in float32, of which an eager step makes Python's numbers first.
        wide = [[_wide(one) for one in states] for states in self.states]
        self.function(self.parameters, own, *wide, lr=self.rates[place], **self.settings)
        for before, after in zip(self.states, wide, strict=True):
            for one, computed in zip(before, after, strict=True):
                if computed is not one:
                    one.copy_(computed)


def _wide(state: Any) -> Any:
    """A number of an optimizer's state in float64; anything else as it is."""
    if isinstance(state, torch.Tensor) and state.ndim == 0 and state.dtype is torch.float32:
        return state.to(widest_dtype(state.device))
    return state


def functional(kind: type[Optimizer]) -> Callable[..., None]:
    """Torch's function that makes an optimizer's update: `torch.optim.adam.adam` for `Adam`.

    Raises:
        UncompiledError: the optimizer has none.
    """
    if kind.__module__.startswith("torch.optim.") and hasattr(kind, "_init_group"):
        found = getattr(sys.modules[kind.__module__], kind.__name__.lower(), None)
        if found is not None and "lr" in inspect.signature(found).parameters:
            return found
    raise UncompiledError(
        f"{kind.__name__} isn't one of torch.optim's optimizers that can be traced"
    )


class CompiledUpdate:
    """A batch's whole update as compiled functions, one for each shape of batches.

    It stays with the model from one `fit` to the next, so that a second one compiles nothing;
    `begin` gives it what a new one has. Only one rank's updates by one optimizer are compiled so,
    each from one batch.

    Args:
        options: what `torch.compile` is given.

    Attributes:
        stopped: why nothing is compiled as a whole any more; None while it is.
        optimizes: whether the optimizer's step is among what is compiled.
        is_announced: whether to print that something is being compiled.
        loss: the last batch's, where only its gradients were computed: `backward` takes it.
    """

    def __init__(self, options: bool | dict[str, Any]) -> None:
        self._options = {} if isinstance(options, bool) else options
        self._programs: dict[Any, Callable[..., Any]] = {}
        self.stopped: str | None = None
        self.optimizes: bool = True
        self.is_announced = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a model's copy compiles for itself

    def begin(
        self,
        model: Module,
        step: CompiledStep,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        after_update: Callable[[], Any],
    ) -> None:
        """Take what a new call of `fit` has.

        Args:
            parameters: those that may learn.
            after_update: called after each update; it may change the optimizer's rates.
        """
        compilation = model._fitkit.compilation
        strategy: Strategy = compilation.strategy
        self._model, self._step, self._loss = model, step, step.loss
        self._net = model.net if is_plain_wrapper(model) else model
        self._is_plain = strategy.precision.is_plain
        self._precision, self._kind = strategy.precision, strategy.device.type
        self._optimizer, self._parameters = optimizer, parameters
        self._clip_value = compilation.gradient_clip_val
        self._clip_algorithm = compilation.gradient_clip_algorithm
        self._counts, self._keeps_prediction = step.may_count, step.meters is not None
        self._may_learn: list[nn.Parameter] = []
        self._learns: list[bool] = []  # whether each of them has a gradient
        self._learning: list[nn.Parameter] = []  # those that have
        self._requires_grad: list[bool] = []
        self._groups: list[Group] = []
        self._seen: tuple[Any, ...] = ()  # the optimizer's tensors, groups, and how many
        self._gradients: Sequence[torch.Tensor] = ()
        self.loss: torch.Tensor | None = None
        self._after_update = after_update
        self._joins_steps = compilation.steps_per_execution >= UNROLLED
        self._places: list[Batch] = []  # where batches wait
        self._shapes: Any = None
        self._held = 0
        self.accumulates(False)

    def accumulates(self, is_part: bool) -> None:
        """Take whether batches are parts of an update from now on, which is made elsewhere then."""
        self._is_part, self._updates = is_part, self.optimizes and not is_part
        self._batches = -1  # since a batch was looked at

    # ------------------------------------------------------------------ one batch

    def __call__(self, batch: Any) -> bool:
        """Learn from a batch, or hold it until there are as many as are computed in one call.

        Returns:
            Whether that was done; where it wasn't, nothing has been changed.
        """
        if self.stopped is not None:
            return False
        parts = self._step.moved_parts(batch)
        # The first steps see whether a schedule changes more than rates.
        if self._joins_steps and self._updates and self._batches > 1 and self._hold(parts):
            return True
        self.flush()
        return self._learn(parts)

    def _learn(self, batch: Batch) -> bool:
        """Learn from one batch, on the device; whether that could be done."""
        try:
            if self._batches < 0 or not self._follows():
                self._look(*batch)
            try:
                (found,) = self._run(batch)
            except UncompiledError as error:
                if not self._updates:
                    raise
                self._updates = False  # the optimizer's step may be what can't be compiled
                (found,) = self._run(batch)
                self._leave_optimizer_out(str(error))
        except UncompiledError as error:
            self.stopped = str(error)
            warn(f"jit_compile compiles the net alone, not the whole step: {error}")
            return False
        gradients = self._note(found, batch)
        self.loss = None
        if self._updates:
            self._after_update()
        else:
            self._gradients = gradients
            self.loss = found[1].detach().requires_grad_()
        return True

    def _note(self, found: Any, batch: Batch, *, measures: bool = True) -> Any:
        """Take what a step gave into the pass's values; its gradients are what is left."""
        if self._kind != "cpu":  # a CUDA graph's next replay writes its results in the same place
            found = trees.map_leaves(_copied, found)
        prediction, loss, parts, counted, gradients = found
        step = self._step
        step.count = step.terms = None
        if isinstance(counted, list):
            step.terms = [Term(name, s, value, number_of(c)) for name, s, value, c in counted]
        elif counted is not None:
            step.count = number_of(counted)
        step.note(prediction, loss, parts, batch, measures=measures)
        return gradients

    # ------------------------------------------------------------------ several in one call

    def _hold(self, batch: Batch) -> bool:
        """Copy a batch beside those that wait, and learn from them where there are enough.

        They are copied because a generator may fill its arrays anew for its next batch.

        Returns:
            Whether the batch was taken.
        """
        shapes = _shapes(batch)
        if shapes != self._shapes:
            self.flush()
            if any(type(leaf) not in (torch.Tensor, type(None)) for leaf in trees.leaves(batch)):
                return False
            self._places = [trees.map_leaves(_room, batch) for _ in range(UNROLLED)]
            self._shapes = shapes
        place = self._places[self._held]
        if _is_plain(shapes):
            place[0].copy_(batch[0])
            place[1].copy_(batch[1])
        else:
            for leaf, room in zip(trees.leaves(batch), trees.leaves(place), strict=True):
                if leaf is not None:
                    room.copy_(leaf)
        self._held += 1
        if self._held == UNROLLED:
            self._learn_together()
        return True

    def _learn_together(self) -> None:
        """Learn from the batches that wait, in one call."""
        self._held = ready = 0
        while ready < UNROLLED and self._follows(ready):
            self._after_update()  # each step's rates are known before the call
            ready += 1
        if ready == UNROLLED:
            try:
                self._note_together(self._run(*self._places))
                return
            except UncompiledError as error:
                self._joins_steps = False
                warn(f"jit_compile computes each step in a call of its own: {error}")
        for number, batch in enumerate(self._places):
            if number >= ready:  # a schedule has changed more than rates
                self._learn(batch)
                continue
            for group in self._groups:
                group.put(group.last[number])
            (found,) = self._run(batch)
            self._note(found, batch)

    def _note_together(self, found: Any) -> None:
        """Take what several steps gave into the pass's values; metrics take it as one batch."""
        meters = self._step.meters
        joins = type(found[0][0]) is torch.Tensor and _is_plain(self._shapes)
        if meters is None or meters.has_user_code:
            joins = False
        for one, batch in zip(found, self._places, strict=True):
            self._note(one, batch, measures=not joins)
        if meters is not None and joins:
            predictions, targets = [one[0] for one in found], [batch[1] for batch in self._places]
            meters.update(torch.cat(predictions), torch.cat(targets))

    def flush(self) -> None:
        """Learn from the batches that wait, each by itself."""
        held, self._held = self._held, 0
        for batch in self._places[:held]:
            self._learn(batch)

    # ------------------------------------------------------------------ its parts

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss that was made of the last batch's by a factor."""
        assert self.loss is not None
        with torch.no_grad():
            gradients = list(self._gradients)
            if loss is not self.loss:
                (factor,) = torch.autograd.grad(loss, self.loss)
                gradients = [gradient * factor for gradient in gradients]
            for parameter, gradient in zip(self._learning, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

    def _run(self, *batches: Batch) -> Any:
        """What the program for such batches gives, which is compiled if they are the first.

        Raises:
            UncompiledError: torch can't compile it.
        """
        key = len(batches), _shapes(batches[0])
        program = self._programs.get(key)
        is_new = program is None
        if program is None:
            if len(self._programs) >= MOST_SHAPES:
                key = len(batches), None
                program = self._programs.get(key)
            program = program or self._compiled(len(batches) > 1, dynamic=key[1] is None)
        given = [(*self._entered(x), y, weight) for x, y, weight in batches]
        began = time.monotonic()
        if is_new and self.is_announced:
            print("compiling the step …", end="", flush=True)
        try:
            with torch.no_grad():
                # Within no_grad torch's compiler writes new weights where the old ones are; else it
                # takes the graph for one that will be differentiated, and copies them at its end.
                found = program(given)
        except _compilers_errors() as error:
            if is_new and self.is_announced:
                print(flush=True)
            raise UncompiledError(reason_of(error)) from error
        if is_new:
            self._programs[key] = program
            if self.is_announced:
                print(f" {time.monotonic() - began:.1f} s", flush=True)
        return found

    def _entered(self, x: Any) -> tuple[Any, Any]:
        """What the net gets for a batch's inputs: by position, and by keyword."""
        return ((x,), {}) if isinstance(x, torch.Tensor) else self._step.caller.arguments(x)

    def _compiled(self, together: bool, *, dynamic: bool) -> Callable[..., Any]:
        """A function of its own for one shape of batches, or for any.

        Args:
            together: whether it computes several steps.
        """

        def step(batches: Any) -> Any:
            return [self._whole(place, *batch) for place, batch in enumerate(batches)]

        # Torch counts compilations by code object, up to a limit.
        step.__code__ = step.__code__.replace()
        options = dict(self._options)
        mode = options.pop("mode", None)
        if options.get("backend", "inductor") == "inductor":
            of_mode = {} if mode is None else torch._inductor.list_mode_options(mode)
            own = TOGETHER_ON_CPU if together and self._kind == "cpu" else {}
            options["options"] = {**own, **of_mode, **(options.get("options") or {})} or None
        options["fullgraph"] = True
        options.setdefault("dynamic", dynamic)
        return torch.compile(step, **options)

    # ------------------------------------------------------------------ what is traced

    def _whole(self, place: int, given: Any, named: Any, y: Any, weight: Any) -> Any:
        """The step as a function of a batch: what is traced.

        Args:
            place: among the steps of a call.
            given, named: what the net gets.

        Returns:
            The net's output, where metrics want it; the loss, its parts, what it is the mean over;
            the gradients, where the optimizer's step isn't compiled.
        """
        with torch.enable_grad():
            if self._is_plain:
                prediction = self._net(*given, **named)
            else:
                with self._precision.autocast(self._kind):
                    prediction = self._net(*given, **named)
                prediction = self._precision.widen(prediction)
            loss, parts, counted = self._losses(prediction, y, weight)
            found = torch.autograd.grad(loss, self._may_learn, allow_unused=True)
            if [gradient is not None for gradient in found] != self._learns:
                raise UncompiledError(OTHERS_LEARN)
            gradients = [gradient for gradient in found if gradient is not None]
        loss = loss.detach()
        kept = trees.map_leaves(_detached, prediction) if self._keeps_prediction else None
        if not self._updates:
            return kept, loss, parts, counted, gradients
        clipped = self._clipped(gradients)
        for group in self._groups:
            group.update(clipped, place)
        return kept, loss, parts, counted, None

    def _losses(self, prediction: Any, y: Any, weight: Any) -> Any:
        if not self._counts:
            return *self._loss(prediction, y, weight), None
        if not self._loss.part_names:
            loss, count = self._loss.counted(prediction, y, weight, is_part=self._is_part)
            return loss, {}, count
        terms = self._loss.terms(prediction, y, weight, is_part=self._is_part)
        found = [(term.name, term.scale, term.value.detach(), term.count) for term in terms]
        if all(term.count is None for term in terms):
            return total_of(terms), {name: value for name, _, value, _ in found}, None
        return total_of(terms), {}, found

    def _clipped(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The gradients, clipped as `engine.clip_gradients` does it with those of parameters."""
        limit = self._clip_value
        if limit is None:
            return gradients
        if self._clip_algorithm != "norm":
            return [gradient.clamp(-limit, limit) for gradient in gradients]
        factor = (limit / (get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
        return [gradient * factor for gradient in gradients]

    # ------------------------------------------------------------------ before it

    def _follows(self, place: int = 0) -> bool:
        """Whether the optimizer's tensors and settings are those of the last batch."""
        optimizer, seen = self._optimizer, self._seen
        if optimizer.state is not seen[0] or optimizer.param_groups is not seen[1]:
            return False  # a state was loaded
        if len(optimizer.param_groups) != seen[2]:
            return False
        if [parameter.requires_grad for parameter in self._parameters] != self._requires_grad:
            return False
        self._batches += 1
        if not self._updates or all(group.follows(place) for group in self._groups):
            return True
        if self._batches == 1:
            self._leave_optimizer_out("its settings change from step to step")
        return False

    def _look(self, x: Any, y: Any, weight: Any) -> None:
        """Compute a first batch's gradients as torch does without compiling, and leave no trace.

        The first batch's checks are made, and it is seen which parameters have a gradient.

        Raises:
            UncompiledError: what this computes can't be compiled.
        """
        step, optimizer = self._step, self._optimizer
        may_learn = [p for p in self._parameters if p.requires_grad]
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in may_learn):
            raise UncompiledError("a parameter has hooks on its gradient")
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        counted = [(module, _numbers_of(module)) for module in self._model.modules()]
        drawn = random_state()
        with _as_written(self._model):
            _, loss, _ = step.compute(self._net, x, y, weight)
        gradients = torch.autograd.grad(loss, may_learn, allow_unused=True)
        set_random_state(drawn)
        for module, numbers in counted:
            vars(module).update(numbers)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        own = self._loss.own
        if own is not None and not own.is_decided:
            raise UncompiledError("what the net's own loss is the mean over isn't known")
        if any(g is not None and g.layout is not torch.strided for g in gradients):
            raise UncompiledError("some gradients are sparse")
        self._may_learn, self._learns = may_learn, [g is not None for g in gradients]
        self._learning = list(itertools.compress(may_learn, self._learns))
        self._requires_grad = [p.requires_grad for p in self._parameters]
        self._seen = (optimizer.state, optimizer.param_groups, len(optimizer.param_groups))
        if self._model._fitkit.fit_state.grad_norms is not None:
            self._updates = False  # a callback wants the gradients' norm
        if self._updates:
            try:
                self._groups = self._collected(gradients, may_learn)
            except UncompiledError as error:
                self._leave_optimizer_out(str(error))
        self._batches = 0

    def _collected(self, gradients: Sequence[Any], may_learn: list[nn.Parameter]) -> list[Group]:
        """The optimizer's groups, with the states of the parameters that have gradients."""
        optimizer = self._optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise UncompiledError("it has hooks")
        places = {parameter: place for place, parameter in enumerate(self._learning)}
        try:
            for parameter, gradient in zip(may_learn, gradients, strict=True):
                parameter.grad = gradient  # torch looks at what has one
            groups = [Group(optimizer, group, places) for group in optimizer.param_groups]
        finally:
            for parameter in may_learn:
                parameter.grad = None
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask
        return [group for group in groups if group.places]

    def _leave_optimizer_out(self, why: str) -> None:
        """Let the optimizer make its step by itself from now on, and say so."""
        self._updates = self.optimizes = False
        self._programs.clear()
        kind = class_of(self._optimizer).__name__
        warn(f"jit_compile compiles forward, loss and backward; {kind} steps by itself: {why}.")


def compiles_steps(options: bool | dict[str, Any]) -> bool:
    """Whether `jit_compile` asks for compiled steps: a backend of the user's own gets the net."""
    if isinstance(options, bool):
        return options
    return not options.get("disable") and not callable(options.get("backend"))


def _compilers_errors() -> tuple[type[Exception], ...]:
    """What torch raises for what it can't compile (torch 2.13 has no public names for it)."""
    from torch._dynamo import exc  # takes a second, which only those wait for who compile

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def _nothing() -> None:
    return None


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that its forward may count with."""
    return {name: it for name, it in vars(module).items() if isinstance(it, (int, float, bool))}


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _shapes(batch: Batch) -> Any:
    """What programs are kept by: the shapes and types of a batch's tensors."""
    x, y, weight = batch
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and weight is None:
        return x.shape, y.shape, x.dtype, y.dtype
    leaves = trees.leaves(batch)
    return tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves)


def _is_plain(shapes: Any) -> bool:
    """Whether a batch's key is that of one tensor of inputs and one of targets."""
    return type(shapes[0]) is torch.Size


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _room(leaf: Any) -> Any:
    return None if leaf is None else torch.empty_like(leaf)


@contextmanager
def _as_written(model: Module) -> Iterator[None]:
    """Have calls of a model and its net run their own code meanwhile, not the compiled one."""
    modules = [model] if model.net is None else [model, model.net]
    compiled = [module._compiled_call_impl for module in modules]
    for module in modules:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in zip(modules, compiled, strict=True):
            module._compiled_call_impl = call


def reason_of(error: BaseException) -> str:
    """Why torch couldn't compile something: its first sentence, and the user's line."""
    text = str(error).strip()
    if OTHERS_LEARN in text:
        return OTHERS_LEARN
    first = text.splitlines()[0].rstrip(".") if text else type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    return f"{first} ({lines[-1]})" if lines else first
