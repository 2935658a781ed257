"""The seam for what computes a model's steps otherwise than as written, with the same numbers.

`fit` trains by `Updates`. A compiler gives others in place of the eager ones, and takes the place
of a pass's step in `evaluate` and `predict`. The eager ones don't know of it. It is imported when
`compile` is given `jit_compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fitkit.data.batches import Batch
from fitkit.guests import guest_of
from fitkit.module import Module
from fitkit.scopes import Scope
from fitkit.training.log import Logbook
from fitkit.training.step import Outcome
from fitkit.typing import CompilerOptions

IS_ON = True
"""Whether `jit_compile` compiles anything. With False, a test gets the same numbers as written."""

Take = Callable[[Batch, Outcome], None]
"""What receives a batch with its outcome."""


class Updates(Protocol):
    """What `fit` trains by: it learns from one batch after another."""

    @property
    def is_between_updates(self) -> bool:
        """Whether no batch waits for the rest of its group."""

    def __call__(self, batch: Batch, index: int, record: Logbook) -> object:
        """Learn from a batch, by its number in the epoch, and add its values to the record. It may
        be held for a later call.
        """

    def peekable(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return an epoch's batches, in an iterator that can look ahead if that is needed."""

    def flush(self) -> None:
        """Learn from the batches that are held. Code of the user's may run after that."""

    def finish(self) -> None:
        """Make the update of a group that is shorter than others, at the epoch's end."""


class PassSteps(Protocol):
    """What computes a pass's batches in the place of the step, for `evaluate` and `predict`."""

    def first(self, batch: Batch, index: int) -> Outcome:
        """Make the first step, with all checks."""

    def after_first(
        self,
        first: Batch,
        plain: Callable[[Batch, int], Outcome],
        *,
        keeps: bool,
        users_look: bool,
    ) -> Callable[[Batch, int], Outcome | None]:
        """Return the function that makes the steps from the second on.

        What it doesn't return, it gives to the pass's `Take`, at once or later.

        Args:
            first: the first batch.
            plain: makes them as written.
            keeps: whether the batches' memory stays unchanged until the pass ends.
            users_look: whether other code runs between batches.
        """

    def flush(self) -> None:
        """Compute the batches that are held. Code of the user's may run after that."""


class Compiler(Protocol):
    """Computes a model's updates and passes otherwise than as written, and its net.

    It stays with the model until `compile` is called again. A copy has compiled nothing yet.
    """

    def updates(
        self, model: Module, eager: Updates, *, joins_steps: bool, is_announced: bool
    ) -> Updates:
        """Return what makes the updates in the eager ones' place; these, if nothing can.

        Args:
            model: the model to train.
            eager: makes the updates as written.
            joins_steps: whether one call may compute several steps (`steps_per_execution`).
            is_announced: whether to print that something is being compiled.
        """

    def pass_steps(
        self,
        model: Module,
        step: Callable[..., Outcome],
        take: Take,
        record: Logbook,
        scope: Scope,
        *,
        is_announced: bool,
    ) -> PassSteps | None:
        """Return what computes a pass's batches in the step's place; None if nothing can.

        Args:
            model: the model to evaluate.
            step: computes a batch as written.
            take: receives the batches with their outcomes, in their order.
            record: the pass's values, to which an evaluation adds.
            scope: the pass's: what is begun for it ends there.
            is_announced: whether to print that something is being compiled.
        """

    def compiles_updates(self, model: Module) -> bool:
        """Return whether `updates` gives others than the eager ones, if nothing wraps the net."""

    def compile_net(self, model: Module) -> None:
        """Compile how the net is called, unless that is done, or was given up."""


class NetAlone:
    """Compiles the net and the passes as a compiler does, and leaves the updates as written.

    Args:
        compiler: the compiler.
    """

    def __init__(self, compiler: Any) -> None:
        self._compiler = compiler

    def updates(self, model: Module, eager: Updates, **options: bool) -> Updates:
        """Return the eager ones."""
        return eager

    def compiles_updates(self, model: Module) -> bool:
        """Return False."""
        return False

    def pass_steps(
        self,
        model: Module,
        step: Callable[..., Outcome],
        take: Take,
        record: Logbook,
        scope: Scope,
        *,
        is_announced: bool,
    ) -> PassSteps | None:
        """As the compiler's."""
        found: PassSteps | None = self._compiler.pass_steps(
            model, step, take, record, scope, is_announced=is_announced
        )
        return found

    def compile_net(self, model: Module) -> None:
        """As the compiler's."""
        self._compiler.compile_net(model)


def new_compiler(
    model: Module, options: bool | CompilerOptions, *, updates: bool = True
) -> Compiler | None:
    """Begin to compile a model as `compile` was told, or end that.

    Args:
        model: the model.
        options: False to compute all as written; True, or the keyword arguments of
            `torch.compile`, to compile it.
        updates: whether updates may be compiled, too.

    Raises:
        ConfigurationError: torch refuses the arguments. Nothing has changed.
    """
    made: Compiler | None = None
    if (guest := guest_of(model)) is not None:
        guest.compile_calls(options if IS_ON else False)
        return None
    if options is not False and IS_ON:
        from fitkit.extras.jit.compiler import TorchCompiler

        made = TorchCompiler(options)
    net = model if model.net is None else model.net
    net._compiled_call_impl = None
    if made is not None:
        made.compile_net(model)
    return made if updates or made is None else NetAlone(made)


def compiler_of(model: Module) -> Compiler | None:
    """Return what compiles a model; None if all is computed as written."""
    return model._fitkit.compiler  # type: ignore[return-value]  # below, nothing knows its type
