"""An optimizer's step as torch's compiler traces it: with torch's functional optimizers.

It is a part of a whole step (`update.py`). If gradients come from several batches or
several ranks, it is a separate compiled function.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fitkit import trees
from fitkit.accelerators import has_streams, widest_dtype
from fitkit.errors import warn
from fitkit.extras.jit.fused import FEWEST_TENSORS, fused
from fitkit.extras.jit.loop import at
from fitkit.extras.jit.net import JitNet
from fitkit.extras.jit.programs import MOST_STEPS, UpdatePrograms
from fitkit.extras.jit.proof import MisfitError
from fitkit.extras.jit.tracing import UncompiledError
from fitkit.seams.networks import Module
from fitkit.seams.optimizers import HOW, class_of, members_of
from fitkit.seams.strategies import together

Place = int | torch.Tensor | None
"""A step's index in its call; a tensor () in a loop. None: the call computes only this step."""


class Group:
    """A parameter group's tensors and settings, from which torch's function computes its update.

    Args:
        optimizer: the group's optimizer, which has the state of its parameters.
        group: one of the optimizer's groups.
        places: the index of each learning parameter among the gradients.

    Attributes:
        rates: the learning rate of each step in a call, as a tensor. So schedules change it
            without another compilation.
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
        device = parameters[0].device if parameters else torch.device("cpu")
        found = dict(zip(names[2:], states, strict=True))
        _refuse_other_numbers(group, parameters, found, device)
        if "momentum_buffer_list" in found and group.get("momentum") and "dampening" in group:
            self._begin_momentum(optimizer, group, found["momentum_buffer_list"])
        # Torch's functions take the states by position, in another order than `_init_group`.
        taken = inspect.signature(self.function).parameters
        stated = [name for name in taken if name in found]
        self.states: list[list[Any]] = [found[name] for name in stated]
        counts = found.get("state_steps", [])
        self._counts: int | None = None  # the index of the numbers of steps, if they are all equal
        if counts and len({float(count) for count in counts}) == 1:
            self._counts = stated.index("state_steps")
        kept = {n: v for n, v in group.items() if n not in ("params", "lr", *HOW)}
        self.settings: dict[str, Any] = {
            name: value for name, value in kept.items() if name in taken
        }
        if "beta1" in taken:
            self.settings["beta1"], self.settings["beta2"] = group["betas"]
        # One tensor after another: the compiler fuses them itself.
        self.settings |= {name: False for name in HOW if name in taken}
        self._names, self._values = list(kept), list(kept.values())
        rate = group["lr"]
        self.last: list[float] = [float(rate)] * MOST_STEPS
        if has_streams(device) and "capturable" in taken:
            self.settings["capturable"] = True  # all numbers stay on the GPU
        self._fused = fused(kind, parameters, self.states, self.settings)
        for state in chain.from_iterable(self.states) if has_streams(device) else ():
            torch._dynamo.mark_static_address(state)  # else CUDA graphs may not change it
        dtype = widest_dtype(device)
        self.rates: torch.Tensor = torch.tensor(self.last, dtype=dtype, device=device)

    def _begin_momentum(
        self, optimizer: Optimizer, group: dict[str, Any], buffers: list[torch.Tensor | None]
    ) -> None:
        """Fill SGD's missing momenta with zeros; its first update would make them."""
        if all(buffer is not None for buffer in buffers):
            return
        if group.get("dampening"):
            raise UncompiledError("SGD applies dampening only from its second update on")
        for place, (parameter, buffer) in enumerate(zip(self.parameters, buffers, strict=True)):
            if buffer is None:
                buffers[place] = torch.zeros_like(parameter, requires_grad=False)
                optimizer.state[parameter]["momentum_buffer"] = buffers[place]

    @property
    def counts_together(self) -> bool:
        """Whether one number of steps still stands for all, if it did; a GPU isn't asked."""
        counts = [] if self._counts is None else self.states[self._counts]
        return not counts or not counts[0].is_cpu or len(set(map(float, counts))) == 1

    def follows(self, place: int = 0) -> bool:
        """Copy the group's current rate for a step.

        Args:
            place: the step's index in the call.

        Returns:
            Whether the group's other settings are unchanged.
        """
        given, rate = self.given, self.given["lr"]
        if rate is not self.last[place]:
            self.put(float(rate), place)
        return list(map(given.__getitem__, self._names)) == self._values

    def give(self, rate: float) -> None:
        """Give the optimizer a rate for its next step."""
        if isinstance(self.given["lr"], torch.Tensor):
            self.given["lr"].fill_(rate)
        else:
            self.given["lr"] = rate

    def put(self, rate: float, place: int = 0) -> None:
        """Set the rate of a step in the next call."""
        if rate != self.last[place]:
            self.rates[place].fill_(rate)  # an assignment would wait for a GPU
            self.last[place] = rate

    def update(self, gradients: Sequence[torch.Tensor], place: Place) -> None:
        """Make a step's update, from the gradients of all learning parameters; traced."""
        own = [gradients[place] for place in self.places]
        if in_loop := isinstance(place, torch.Tensor):
            rate = at(self.rates, place)
        else:
            rate = self.rates[place or 0]
        if self._fused is not None and (not in_loop or len(own) >= FEWEST_TENSORS):
            self._fused(own, rate, in_loop=in_loop)
            return
        # Torch counts steps in float32. An eager step converts them to Python's numbers first.
        wide = [[_wide(one) for one in states] for states in self.states]
        if self._counts is not None:
            # Made of one number, all are the same to the compiler: it computes Adam's bias
            # corrections once, not for each parameter.
            counts = wide[self._counts]
            wide[self._counts] = [counts[0].clone() for _ in counts]
        self.function(self.parameters, own, *wide, lr=rate, **self.settings)
        for before, after in zip(self.states, wide, strict=True):
            for one, computed in zip(before, after, strict=True):
                if computed is not one:
                    one.copy_(computed)


def _refuse_other_numbers(
    group: dict[str, Any],
    parameters: Sequence[nn.Parameter],
    states: dict[str, list[Any]],
    device: torch.device,
) -> None:
    """Refuse a group whose update torch refuses, or would compute with other numbers if traced.

    Traced, all single numbers have the widest dtype. Torch's own step rounds some of them to the
    dtype of a tensor.

    Raises:
        UncompiledError: it is such a group.
    """
    if group.get("differentiable"):
        raise UncompiledError("differentiable=True keeps the graph of its update")
    if group.get("capturable") and not has_streams(device):
        raise UncompiledError("capturable=True is for GPUs")
    widest = widest_dtype(device)
    others = [value for name, value in group.items() if name not in ("params", "lr")]
    for value in trees.leaves(others):
        if isinstance(value, torch.Tensor) and value.dtype is not widest:
            raise UncompiledError(f"one of its settings is a tensor of {value.dtype}")
    if any(parameter.dtype is torch.float64 for parameter in parameters):
        rounded = [group["lr"], *states.get("mu_products", [])]  # NAdam's products of momenta
        for value in rounded:
            if isinstance(value, torch.Tensor) and value.dtype is not torch.float64:
                raise UncompiledError(f"it has a number of {value.dtype} for weights of float64")


def _wide(state: Any) -> Any:
    """Convert a float32 number of a state to the widest dtype; return anything else as it is."""
    if isinstance(state, torch.Tensor) and state.ndim == 0 and state.dtype is torch.float32:
        return state.to(widest_dtype(state.device))
    return state


def functional(kind: type[Optimizer]) -> Callable[..., None]:
    """Return torch's function for an optimizer's update: `torch.optim.adam.adam` for `Adam`.

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


def _parts(optimizer: Optimizer) -> list[Any]:
    """Return what an optimizer's step is made from, but for its settings: tensors, dicts, a bool.

    The states come first, then the list of groups.
    """
    parts: list[Any] = [optimizer.state, optimizer.param_groups, *optimizer.param_groups]
    parts += [vars(optimizer).get("step"), _has_hooks(optimizer)]
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        parts.append(parameter)
        parts += optimizer.state.get(parameter, {}).values()
    return parts


def _has_hooks(optimizer: Optimizer) -> bool:
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def _steps_as_its_class(optimizer: Optimizer) -> bool:
    """Whether an optimizer's `step` is its class's, around which torch's schedulers put another."""
    step = vars(optimizer).get("step")
    if step is None:
        return True
    return hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step


class JitOptimizer:
    """Compiles an optimizer's step, and the clipping of gradients before it.

    Args:
        model: the model to train.
        optimizer: the optimizer whose step is compiled.
        parameters: the trainable parameters.
        kept: what earlier calls of `fit` have compiled.
        net: what is given up if numbers differ.

    Attributes:
        groups: the optimizer's groups that have parameters with gradients.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        kept: UpdatePrograms,
        net: JitNet,
    ) -> None:
        self._kept, self._net = kept, net
        compilation = model._fitkit.compilation
        self._model, self._ranks = model, compilation.strategy.collectives
        self._device: str = compilation.strategy.device.type
        self._clip_value = compilation.given.gradient_clip_val
        self._clip_algorithm = compilation.given.gradient_clip_algorithm
        self._fit_state = model._fitkit.fit_state
        self._optimizer, self._parameters = optimizer, parameters
        self.groups: list[Group] = []
        self._clips: list[int] = []  # the places of its parameters among those with gradients
        self._seen: list[Any] = []  # the optimizer's parts
        self._is_known = False  # whether they are still those that it has
        self._learns: list[bool] = []  # which parameters had a gradient
        self._updates = 0  # by the separate function since `collect`

    @property
    def is_asked_for_norms(self) -> bool:
        """Whether a callback looks at the gradients, which only eager updates show."""
        return self._fit_state.grad_norms is not None or self._fit_state.guard is not None

    def stop(self, why: str) -> None:
        """Stop compiling the optimizer's step from now on, and warn."""
        self._kept.update_stopped = why
        self._kept.updates.clear()
        kinds = [class_of(optimizer).__name__ for optimizer in members_of(self._optimizer)]
        alone = "steps by itself" if len(kinds) == 1 else "step by themselves"
        who = f"{' and '.join(kinds)} {alone}"
        warn(f"jit_compile compiles forward, loss and backward; {who}: {why}.")

    # ------------------------------------------------------------------ its groups

    def collect(self) -> None:
        """Collect the groups, with the states of the parameters that have a gradient now.

        Raises:
            UncompiledError: the optimizer's step can't be compiled.
        """
        optimizer = self._optimizer
        if len(members_of(optimizer)) > 1:
            raise UncompiledError("only one optimizer's step can be compiled")
        if _has_hooks(optimizer):
            raise UncompiledError("it has hooks")
        if not _steps_as_its_class(optimizer):
            raise UncompiledError("its step has been replaced")
        learning = [parameter for parameter in self._parameters if parameter.grad is not None]
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in learning):
            raise UncompiledError("some gradients are sparse")
        places = {parameter: place for place, parameter in enumerate(learning)}
        groups = [Group(optimizer, group, places) for group in optimizer.param_groups]
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask
        self.groups = [group for group in groups if group.places]
        self._clips = sorted(place for group in groups for place in group.places)
        self._seen, self._is_known = _parts(optimizer), True

    def check(self) -> None:
        """Compare all parts of the optimizer at the next batch, because other code may run now."""
        self._is_known = False

    @property
    def has_same_state(self) -> bool:
        """Whether the optimizer still has the collected state and groups; loading replaces them."""
        optimizer, seen = self._optimizer, self._seen
        if optimizer.state is not seen[0] or optimizer.param_groups is not seen[1]:
            return False
        if not self._is_known:
            parts = _parts(optimizer)
            is_same = len(parts) == len(seen) and all(map(operator.is_, parts, seen))
            self._is_known = is_same and all(group.counts_together for group in self.groups)
        return self._is_known

    def follows(self, place: int = 0) -> bool:
        """Copy the groups' current rates for a step.

        Args:
            place: the step's index in the call.

        Returns:
            Whether the groups' other settings are unchanged.
        """
        return all(group.follows(place) for group in self.groups)

    def trace(self, gradients: Sequence[torch.Tensor], place: Place = None) -> None:
        """Clip gradients and make the update; traced."""
        clipped = self._clipped(gradients)
        for group in self.groups:
            group.update(clipped, place)

    def _clipped(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Clip gradients as `engine.clip_gradients` clips those of parameters."""
        limit = self._clip_value
        if limit is None:
            return gradients
        if self._clip_algorithm != "norm":
            return [gradient.clamp(-limit, limit) for gradient in gradients]
        # torch's compiler writes no code for `_foreach_norm`; called as it is, it costs a small
        # net on a CPU 15 % of a step, and 33 % with steps_per_execution=32.
        foreach = None if any(gradient.is_cuda for gradient in gradients) else False
        norm = get_total_norm([gradients[place] for place in self._clips], foreach=foreach)
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        return [gradient * factor for gradient in gradients]

    # ------------------------------------------------------------------ a separate function

    def __call__(self) -> bool:
        """Make an update from the parameters' gradients.

        Returns:
            Whether that was done. If not, no weight has changed.

        Ranks:
            Collective while the step is compiled. It is compiled on all ranks or on none.
            Otherwise the weights would differ in their last bits, more with each update.
        """
        if self._kept.update_stopped is not None or self.is_asked_for_norms:
            return False
        learns = [parameter.grad is not None for parameter in self._parameters]
        try:
            if learns != self._learns or not self._seen or not self.has_same_state:
                self._compile(learns)
            elif not self.follows():
                if self._updates == 1:
                    raise UncompiledError("its settings change from step to step")
                self._compile(learns)
            else:
                self._run()
                self._updates += 1
        except MisfitError as error:  # on some rank
            self._kept.stopped = self._kept.update_stopped = str(error)
            self._net.give_up(self._model, error)
            return False
        except UncompiledError as error:
            self.stop(str(error))
            return False
        return True

    def _run(self) -> None:
        gradients = [
            p.grad for p, learns in zip(self._parameters, self._learns, strict=True) if learns
        ]
        self._kept.updates.run(self._from_gradients, [gradients], "gradients", self._device)

    def _from_gradients(self, given: Sequence[Sequence[torch.Tensor]]) -> None:
        self.trace(given[0])

    def _compile(self, learns: list[bool]) -> None:
        """Collect the groups and make a first update.

        Raises:
            UncompiledError: some rank couldn't do it. The weights are unchanged.

        Ranks:
            Collective.
        """
        before: list[tuple[torch.Tensor, torch.Tensor]] = []

        def work() -> None:
            self._learns = learns
            self.collect()
            if self._ranks.world_size > 1:
                before.extend((tensor, tensor.detach().clone()) for tensor in self._tensors())
            self._run()

        try:
            together(self._ranks, work)
        except UncompiledError:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            raise
        self._updates = 1

    def _tensors(self) -> list[torch.Tensor]:
        """Return what an update changes: the parameters and the optimizer's states."""
        lists = [tensors for group in self.groups for tensors in (group.parameters, *group.states)]
        return [tensor for tensors in lists for tensor in tensors if tensor is not None]
