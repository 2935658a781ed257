"""All that fitkit itself keeps on a model, in one typed record."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fitkit.compilation import Compilation
from fitkit.errors import ConfigurationError
from fitkit.fit_state import FitState
from fitkit.optimizer_copies import contents_of, put_contents
from fitkit.optimizers import instances_in
from fitkit.pickling import MadeAnew
from fitkit.samples import Doubts
from fitkit.typing import AnyCallable, BatchData, Outputs, PlainData


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """The options of `self.log` for a name.

    Attributes:
        on_step: whether batches' logs have the latest value.
        on_epoch: whether the epoch's logs have the reduced one.
        prog_bar: whether the progress bar shows it.
        reduce_fx: one of `REDUCTIONS`.
        sync_dist: whether all ranks must log it, and batches' values are the ranks' together.
        rank_zero_only: whether rank 0's value stands for all.
    """

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    reduce_fx: str
    sync_dist: bool
    rank_zero_only: bool

    def names(self, name: str) -> tuple[str, str]:
        """Return the names of the step's and of the epoch's value."""
        if self.on_step and self.on_epoch:
            return f"{name}_step", f"{name}_epoch"
        return name, name


class Context(Protocol):
    """A pass over data, as far as a model's hooks ask it.

    Attributes:
        record: the pass's values (`training/log.py`).
        backward: computes a loss's gradients and averages them over the ranks; training only.
    """

    @property
    def record(self) -> object: ...

    @property
    def backward(self) -> AnyCallable | None: ...

    def moved(self, own: AnyCallable, batch: BatchData, device: torch.device) -> BatchData:
        """Return a batch moved by the data's own way, or else by a model's hook."""

    def transferred(self, batch: BatchData) -> BatchData:
        """Return a batch moved to the device in fitkit's way."""

    def compiled_loss(self, model: torch.nn.Module, batch: BatchData) -> torch.Tensor:
        """Return the compiled loss of a batch that is on the device; compiled metrics count it."""

    def compiled_outputs(self, model: torch.nn.Module, batch: BatchData) -> Outputs:
        """Return the net's outputs for a batch that is on the device."""

    def log(self, name: str, value: object, options: LogOptions, samples: int | None) -> None:
        """Record a value that a hook logs."""


Cleanups = tuple[contextlib.ExitStack, contextlib.ExitStack]


class StepContexts(MadeAnew):
    """The contexts of the calls that run on a model, one per thread. A copy of a model has none.

    Attributes:
        by_thread: the contexts, by thread number.
        cleanups_by_thread: the clean-ups of the innermost run in each thread: those that come
            last, and those of callbacks with `swaps_weights`, which come first.
        placing: a lock held while a thread moves the model to its device.
    """

    def __init__(self) -> None:
        self.by_thread: dict[int, Context] = {}
        self.cleanups_by_thread: dict[int, Cleanups] = {}
        self.placing: AbstractContextManager[object] = threading.RLock()

    @property
    def cleanups(self) -> Cleanups | None:
        """What this thread's innermost run on the model undoes at its end; None without a run."""
        return self.cleanups_by_thread.get(threading.get_ident())

    def put_cleanups(self, cleanups: Cleanups | None) -> None:
        """Set what `cleanups` gives in this thread."""
        if cleanups is None:
            self.cleanups_by_thread.pop(threading.get_ident(), None)
        else:
            self.cleanups_by_thread[threading.get_ident()] = cleanups

    @property
    def current(self) -> Context | None:
        """This thread's context. A helper thread (of a replica or autograd) gets the context of the
        thread that it helps, if only one is possible."""
        found = self.by_thread.get(threading.get_ident())
        if found is None and len(contexts := list(self.by_thread.values())) == 1:
            return contexts[0]
        return found


class KeptSteps(Protocol):
    """The steps that the verbs of single batches keep. A copy has none."""

    def drop(self) -> None:
        """Let the next calls build them again."""


@dataclasses.dataclass
class Record:
    """All that fitkit itself keeps on a model, under one name: every other name is the user's.

    Attributes:
        compilation: the arguments of `compile`, and what they resolved to.
        fit_state: optimizers, schedulers and counters, kept over several calls of `fit`.
        contexts: the calls that run on the model now, by thread.
        batch_size: the batch size of the last `fit`; None before.
        kept_steps: the steps that `train_on_batch` and its siblings have built.
        log_names: the names of the values that the last pass returned; None before.
        hidden_names: names logged with `prog_bar=False`, which the progress bar leaves out.
        compiler: what computes otherwise than as written; see `training/compiler.py`.
        needs_gradients: whether the net was seen to compute gradients in its forward.
        doubts: say once that batches' entries disagree on their samples.
    """

    compilation: Compilation
    fit_state: FitState
    contexts: StepContexts
    kept_steps: KeptSteps
    batch_size: int | None = None
    log_names: list[str] | None = None
    hidden_names: set[str] = dataclasses.field(default_factory=set)
    compiler: object | None = None
    needs_gradients: bool = False
    doubts: Doubts = dataclasses.field(default_factory=Doubts)

    def __getstate__(self) -> PlainData:
        """Return what copies, pickles and workers get: also what optimizers leave out of theirs."""
        optimizers = instances_in(self.compilation.given.optimizer) + self.fit_state.optimizers
        return {**vars(self), "optimizer_contents": contents_of(optimizers)}

    def __setstate__(self, state: PlainData) -> None:
        contents = state.pop("optimizer_contents")
        vars(self).update(state)
        put_contents(contents)

    def __copy__(self) -> Record:
        """Return a record for another model of the same net, which uses the same optimizers."""
        return Record(
            copy.copy(self.compilation),
            copy.copy(self.fit_state),
            StepContexts(),
            copy.copy(self.kept_steps),
            batch_size=self.batch_size,
            log_names=self.log_names,
            hidden_names=set(self.hidden_names),
            compiler=copy.copy(self.compiler),
        )

    def check_copy(self) -> None:
        """Refuse to copy a model whose weights, or optimizer's state, the ranks hold in parts.

        Raises:
            ConfigurationError: with what to write instead.
        """
        strategy = vars(self.compilation).get("strategy")
        if strategy is not None and strategy.engine is not None and strategy.engine.in_place:
            raise ConfigurationError(
                f"A model can't be copied or pickled while fit trains it under strategy="
                f"{strategy.name!r}: each rank has a part of it. Copy it after fit, or write "
                "model.save(path) on every rank.",
                code="FK070",
            )
