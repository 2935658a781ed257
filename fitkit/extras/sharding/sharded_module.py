"""A module whose parameters are spread over the ranks, in place, until they come together again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.arguments import check_choice, check_count, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.activation_checkpointing import UNCALLED, are_module_classes, recompute, repeated
from fitkit.seams.optimizers import uses_closure
from fitkit.seams.strategies import ModuleInPlace, as_parts, held_by, whole, whole_on_host

Giving = Literal["whole", "whole on rank 0", "spread"]
"""What state dicts have for spread tensors: the whole (on rank 0 alone), or what they are."""


class ShardedModule(ModuleInPlace):
    """Spreads a module's parameters over the ranks.

    The ordinary parameters give up their memory meanwhile, and others of torch's `DTensor` stand
    in their places. A `state_dict()` in between is collective, and whole.

    Args:
        module: the same numbers on all ranks.
        root: the module whose call enters it.
        blocks: submodules that are gathered apart, inner ones first.
        prepare: brings submodules' own tensors to the device, with rank 0's numbers.
        shard: torch's `fully_shard` with its options.
        rank: this one.
        recomputed: submodules whose activations are computed again in the backward pass.
        backup: whether rank 0 keeps the numbers, for `abandon`.
    """

    hook_origins: tuple[str, ...] = ("torch.distributed.fsdp", "torch.distributed.tensor")

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        blocks: list[nn.Module],
        prepare: Callable[[list[nn.Module]], None],
        shard: Callable[[nn.Module], Any],
        rank: int,
        *,
        recomputed: list[nn.Module],
        backup: bool,
    ) -> None:
        super().__init__(module)
        self._rank = rank
        self._gives: Giving = "whole"
        self._recomputed = recompute(recomputed)  # those that the user has made so stay so
        self._sharded: list[Any] = []
        done: set[nn.Module] = set()
        try:
            for part in (*blocks, root):
                own = [inner for inner in part.modules() if inner not in done]
                prepare(own)
                self._sharded.append(shard(part))
                done.update(own)
                self._take_twins(set(own), keeps=backup and rank == 0)
        except BaseException:
            self.abandon()
            raise
        self._translate_state_dicts()

    def _take_twins(self, own: set[nn.Module], *, keeps: bool) -> None:
        """Note which parameters `fully_shard` has put there, and empty the ordinary ones."""
        for part, name, parameter in self._places:
            twin = part._parameters[name]
            if part in own and twin is not None:
                if parameter not in self.twins:
                    self._empty(parameter, keeps=keeps)
                self.twins[parameter] = twin

    def _translate_state_dicts(self) -> None:
        for part in {part: None for part, _, _ in self._places}:
            # Torch sets an attribute on the first, which a method doesn't take.
            self._handles += [
                part.register_state_dict_post_hook(partial(self._give_whole)),
                part.register_load_state_dict_pre_hook(self._take_parts),
            ]

    def reshard(self) -> None:
        """Drop what a forward without a backward has gathered."""
        for part in self._sharded:
            part.reshard()

    def end(self, *, wanted: bool) -> None:
        """In main memory, as a device may be too small for all; unwanted ones stay empty."""
        self.reshard()
        numbers = {}
        for parameter, twin in self.twins.items():
            found = whole(twin)
            if wanted:
                numbers[parameter] = found.cpu()
        self.give_back(numbers)

    def give_back(self, numbers: Mapping[nn.Parameter, torch.Tensor]) -> None:
        for forward in self._recomputed:
            forward.remove()
        self._recomputed, self._sharded = [], []
        super().give_back(numbers)

    def _is_added(self, name: str) -> bool:
        parts = ("fsdp", "composable", "_distribute_module")
        return name.startswith("__") or any(part in name for part in parts)

    # ------------------------------------------------------------------ state dicts

    @contextlib.contextmanager
    def giving(self, what: Giving) -> Iterator[None]:
        """Let state dicts give something else than whole tensors meanwhile."""
        before, self._gives = self._gives, what
        try:
            yield
        finally:
            self._gives = before

    def for_state_dict(self, value: Any) -> Any:
        """Return what a state dict gives for a tensor at this moment.

        Ranks:
            Collective, where it is to be whole.
        """
        if self._gives == "spread":
            return value
        return whole_on_host(value, wanted=self._rank == 0 or self._gives == "whole")

    def _give_whole(self, part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in part._parameters:
            if prefix + name not in state:
                continue
            state[prefix + name] = self.for_state_dict(state[prefix + name])

    def _take_parts(
        self, part: nn.Module, state: dict[str, Any], prefix: str, *others: Any
    ) -> None:
        for name, parameter in part._parameters.items():
            found = state.get(prefix + name)
            if isinstance(found, torch.Tensor) and parameter is not None:
                state[prefix + name] = as_parts(found, parameter)


def check_trains(
    module: nn.Module, optimizers: list[Optimizer], strategy: str, *, compiles: bool = False
) -> None:
    """Refuse what can't be trained so.

    Args:
        module: the model.
        optimizers: its optimizers.
        strategy: the strategy's name, for messages.
        compiles: whether the net may be compiled as a whole.

    Raises:
        ConfigurationError: with what to write instead.
    """
    instead = "Write strategy='ddp_sharded' or 'ddp'."
    if not getattr(module, "automatic_optimization", True):
        raise ConfigurationError(
            f"automatic_optimization = False doesn't work with strategy={strategy!r}: the step "
            f"would compute gradients while the net's parameters are gathered. {instead}"
        )
    if not getattr(module, "_updates_all", True):
        raise ConfigurationError(
            f"strategy={strategy!r} trains with one optimizer, or several that step together, but "
            f"there are {len(optimizers)} that take turns. " + instead
        )
    if uses_closure(optimizers[0]):
        raise ConfigurationError(
            f"{type(optimizers[0]).__name__} computes the loss itself, several times per step, and "
            "looks at all parameters at once: they can't be spread over ranks. Write "
            "strategy='ddp', or take another optimizer."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, (torch.optim.Adafactor, torch.optim.SparseAdam)):
            raise ConfigurationError(
                f"{type(optimizer).__name__} can't update parts of parameters, which is all that a "
                f"rank has under strategy={strategy!r}. Write strategy='ddp_sharded', or take "
                "another optimizer."
            )
    _check_modules(module, strategy, compiles=compiles)
    _check_parameters(module, optimizers, strategy)


def _check_modules(module: nn.Module, strategy: str, *, compiles: bool) -> None:
    for name, part in module.named_modules():
        if "_orig_mod" in part._modules:
            raise ConfigurationError(
                f"{name or 'The net'} is what torch.compile returned, whose parts "
                f"strategy={strategy!r} can't spread. Give fitkit the module itself, and write "
                "jit_compile=True."
            )
        if part._compiled_call_impl is not None and not (compiles and name in ("", "net")):
            raise ConfigurationError(
                f"{name or 'The net'} is compiled by torch.compile, which strategy={strategy!r} "
                "doesn't train so: parts of a net, or under DeepSpeed. "
                "Write jit_compile=False, or strategy='ddp'."
            )


def _check_parameters(module: nn.Module, optimizers: list[Optimizer], strategy: str) -> None:
    named = dict(module.named_parameters())
    own = set(named.values())
    if any(parameter not in own for one in optimizers for parameter in held_by(one)):
        raise ConfigurationError(
            f"The optimizer holds parameters outside the net, such as a loss's; under strategy="
            f"{strategy!r} it can't train both. Make them part of the net, or write "
            "strategy='ddp'."
        )
    learning = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    dtypes = {parameter.dtype for parameter in learning.values()}
    if len(dtypes) > 1:
        listing = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigurationError(
            f"The net's parameters have several dtypes ({listing}); strategy={strategy!r} needs "
            "one. Cast the net, or write strategy='ddp_sharded'."
        )
    for name, parameter in named.items():
        if hasattr(parameter, "__tensor_flatten__"):
            raise ConfigurationError(
                f"{name} is quantized ({type(parameter).__name__}): strategy={strategy!r} can't "
                "give each rank a part of it. Write strategy='ddp' or 'ddp_sharded', which keep "
                "the quantized base on every rank."
            )
        if parameter.ndim == 0:
            raise ConfigurationError(
                f"{name} is a parameter of shape (), of which strategy={strategy!r} can give no "
                "rank a part. Give it the shape (1,), or write strategy='ddp_sharded'."
            )
        if not parameter.is_contiguous():
            raise ConfigurationError(
                f"{name}'s memory isn't contiguous, as strategy={strategy!r} needs it. Bring the "
                "net to torch.contiguous_format."
            )


WITHOUT_FORWARD = (
    *UNCALLED,
    nn.modules.linear.NonDynamicallyQuantizableLinear,  # in nn.MultiheadAttention
)
"""What nobody calls, so that nothing could be gathered at its call."""


def check_wrap(wrap: Any) -> None:
    """Refuse what says of no submodule whether it is gathered apart."""
    if wrap is None or isinstance(wrap, str):
        wrap = check_choice("wrap", wrap, ("blocks", None))
    elif are_module_classes(wrap):
        return
    elif isinstance(wrap, (tuple, bool)) or not isinstance(wrap, int):
        raise ArgumentTypeError(
            f"wrap={describe(wrap)} must be 'blocks', a number of parameters, a module class, a "
            "tuple of module classes, or None."
        )
    else:
        wrap = check_count("wrap", wrap)


def blocks_of(module: nn.Module, wrap: Any) -> list[nn.Module]:
    """Return the submodules to shard separately, inner ones first. Other parameters belong to the
    root.

    A submodule that shares a parameter with something outside it (tied weights) isn't among them:
    two groups can't share one.

    Args:
        wrap: `"blocks"` selects the outermost submodules of several parts that have siblings of the
            same class. A number selects the smallest submodules with at least that many parameters
            that aren't in a smaller one. A class or a tuple of classes selects those. None: none.
    """
    candidates = [
        child
        for child in module.modules()
        if child is not module
        and not isinstance(child, WITHOUT_FORWARD)
        and next(child.parameters(), None) is not None
        and not shares_parameters(child, module)
    ]
    if wrap is None:
        return []
    if wrap == "blocks":
        able = set(candidates)
        return repeated(module, lambda child: child in able)
    if isinstance(wrap, int):
        return _of_size(candidates, wrap)
    return [child for child in reversed(candidates) if isinstance(child, wrap)]


def _of_size(candidates: list[nn.Module], least: int) -> list[nn.Module]:
    found: list[nn.Module] = []
    taken: set[int] = set()
    for child in reversed(candidates):  # a module comes before its parts
        free = {id(p): p.numel() for p in child.parameters() if id(p) not in taken}
        if sum(free.values()) >= least:
            found.append(child)
            taken.update(free)
    return found


def shares_parameters(part: nn.Module, module: nn.Module) -> bool:
    """Whether a submodule has a parameter that is somewhere outside it too."""
    inside, own = set(part.modules()), set(part.parameters())
    return any(
        parameter in own
        for other in module.modules()
        if other not in inside
        for parameter in other.parameters(recurse=False)
    )
