"""Runs of copies of one model on the same batches, cut in several ways, and what they show."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fitkit import trees
from fitkit.accelerators import visible, widest_dtype
from fitkit.errors import ConfigurationError, FitkitError
from fitkit.extras.verification.cutting import SEED, Kept, bounds_of, cut, same_bits, size_of
from fitkit.extras.verification.masks import Masks, Piece, Places, Recorded, places_in
from fitkit.extras.verification.results import Cause, Row, cause_of, digits_of
from fitkit.model import Model
from fitkit.modes import kept_in_evaluation
from fitkit.random_states import set_seed
from fitkit.samples import samples_of
from fitkit.seams.callbacks import Callback
from fitkit.seams.data import unpack_batch
from fitkit.seams.networks import verb_of
from fitkit.seams.optimizers import first_rate, put_rate
from fitkit.tensors import is_dense

Pass = tuple[list[torch.Tensor], list[torch.Tensor]]
"""A module's inputs and outputs in one batch."""
Passes = dict[tuple[str, int], list[Pass]]
"""What a net's modules did in some batches, in the order in which their calls ended. The key is the
module's name and the number of its call in the batch."""


class Notes(Callback):
    """Records what a net's modules get and return, batch by batch.

    Args:
        only: records only that batch. None: all.
        path: where to save a checkpoint before that batch; "" for none.
    """

    stops_alike = True

    def __init__(self, only: int | None = None, path: str = "") -> None:
        self.passes: Passes = {}
        self._only, self._path = only, path
        self._batch = 0
        self._calls: dict[str, int] = {}
        self._inputs: list[list[torch.Tensor]] = []  # of the modules that are being called

    def follow(self, net: nn.Module) -> None:
        """Record what the modules of a net do."""
        for name, module in net.named_modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(functools.partial(self._leave, name))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append(_copies((args, kwargs)))  # before the module may change them in place

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        inputs = self._inputs.pop()
        if self._only in (None, self._batch):
            call = self._calls[name] = self._calls.get(name, -1) + 1
            self.passes.setdefault((name, call), []).append((inputs, _copies(output)))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batch, self._calls = batch, {}
        if self._only is None:
            # Otherwise a layer may by chance draw for two parts what it draws for the whole.
            set_seed(torch.initial_seed() % 2**31 + batch)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.on_train_batch_begin(batch)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self._path and self._only == batch + 1:
            verb_of(self.model, "save")(self._path)


def first_other(one: Passes, other: Passes, limit: float) -> str | None:
    """Return the first module that returns something else for the same inputs; None if there is
    none.

    Args:
        one: the record of one batch.
        other: the record of the same samples, in one batch or in several.
        limit: the largest difference that counts as equal, relative to the largest number.
    """
    for key, passes in one.items():
        others = other.get(key, [])
        if _alike(passes, others, 0, limit) and not _alike(passes, others, 1, limit):
            return key[0]
    return None


def _alike(passes: list[Pass], others: list[Pass], side: int, limit: float) -> bool:
    """Whether the inputs (side 0) or outputs (1), joined over batches, are the same."""
    for place in range(len(passes[0][side])):
        # A module may have returned another structure, which can't be compared.
        if not others or any(len(each[side]) <= place for each in (*passes, *others)):
            break
        whole = _joined([each[side][place] for each in passes], None)
        joined = None
        if whole is not None and whole.numel():
            joined = _joined([each[side][place] for each in others], whole.shape)
        if whole is None or joined is None:
            continue
        reach = limit * float(whole.abs().nan_to_num(0.0, 0.0, 0.0).max())
        if not torch.allclose(whole, joined, rtol=0, atol=reach, equal_nan=True):
            return False
    return True


def _copies(tree: Any) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in trees.tensors(tree)]


def _joined(tensors: list[torch.Tensor], shape: torch.Size | None) -> torch.Tensor | None:
    """Tensors of several batches joined to that shape; None if they don't fit.

    Not all layers have the batch in dimension 0.
    """
    if not tensors or not is_dense(tensors[0]) or not trees.is_inexact(tensors[0]):
        return None
    if len(tensors) == 1:
        return tensors[0] if shape in (None, tensors[0].shape) else None
    for dimension in range(tensors[0].ndim):
        with contextlib.suppress(RuntimeError):  # other sizes in other dimensions
            joined = torch.cat(tensors, dimension)
            if joined.shape == shape:
                return joined
    return None


ALONE: dict[str, Any] = {
    "devices": 1, "strategy": "auto", "num_nodes": 1, "auto_select_gpus": False,
    "accumulate_grad_batches": 1, "effective_batch_size": None, "scale_lr": None,
    "sync_batchnorm": False, "jit_compile": False, "steps_per_execution": 1,
    "log_gpu_memory": None,
}  # fmt: skip
"""What every run is compiled with, but for what it tries: one process, whole batches."""

STEADY: dict[str, Any] = {"lr_scheduler": None, "warmup_epochs": None}
"""Rates that stay. In parts there are more batches, by which some schedules count."""

LIMITS = {"64-true": (1e-6, 1e-9), "32-true": (1e-2, 1e-4)}
"""Up to which difference weights count as equal, as a part of what the updates changed; and layers'
outputs, as a part of the largest. Rounding is far below that in float64, and near in float32."""


BY_ROWS = "What the net draws is drawn by rows here. In a training each part draws its own."

Numbers = dict[str, torch.Tensor]
Found = tuple[bool, float, str, tuple[Cause, ...]]
"""What a comparison gives: whether both sides are equal, digits, the first that differs, causes."""


class Trials:
    """The comparisons of one model on some batches.

    Args:
        model: a compiled model, which stays as it is: copies of it are run.
        batches: of the user's data; each makes an update.
        devices: on how many processes.
        class_weight: as in `fit`.
        kept: the samples of each batch, where they are known.

    Raises:
        Exception: the model can't train on these batches.
    """

    def __init__(
        self,
        model: Model,
        batches: list[Any],
        devices: int,
        class_weight: Any,
        kept: list[Kept | None] | None = None,
    ) -> None:
        self.model: Model = model
        self.devices: int = devices
        self.class_weight: Any = class_weight
        pairs = zip(batches, kept or [None] * len(batches), strict=True)
        self._kept: dict[int, Kept | None] = {id(batch): samples for batch, samples in pairs}
        self.parts = 4 if self.size_of(batches[0]) >= 16 else 2
        # A last batch may be too small to be cut as the others.
        large = [b for b in batches if self.size_of(b) >= 2 * max(self.parts, devices)]
        self.batches: list[Any] = large or batches[:1]
        has_float64 = widest_dtype(model.device) is torch.float64
        self.accelerator: str = model.device.type if has_float64 else "cpu"
        self.start: Numbers = _numbers(model)
        self.precision: str = "64-true"
        self._known: dict[tuple[frozenset[str], bool], Numbers] = {}
        self._places: dict[frozenset[str], Places | None] = {}
        self._repeats: bool | None = None
        try:
            self.reference(masked=False)
        except Exception:
            # A net may make float32 tensors that no cast reaches; else this raises the same again.
            self.precision = "32-true"
            self.reference(masked=False)
        self.limit: float
        self.output_limit: float
        self.limit, self.output_limit = LIMITS[self.precision]
        if all(torch.equal(self.start[name], own) for name, own in self.reference().items()):
            raise ConfigurationError(
                f"{len(self.batches)} updates change no parameter, so there is nothing to compare. "
                "The learning rate is 0, or no gradient reaches the net."
            )
        self._loss_cause: Cause | None = None
        self._drawing: frozenset[str] = (
            frozenset()
        )  # modules that draw numbers, as the last search for causes found

    def size_of(self, batch: Any) -> int:
        """Return the number of a batch's samples; 0 if it can't be told."""
        return size_of(batch, self._kept.get(id(batch)))

    def cut(self, batch: Any, parts: int) -> list[Any]:
        """Cut a batch into parts, as `cut` does."""
        return cut(batch, parts, self._kept.get(id(batch)))

    def rows(self, runs_compiled: bool) -> Iterator[Row]:
        """Make all comparisons.

        Args:
            runs_compiled: whether one is with `torch.compile`.
        """
        repeat = self._row("repeat", "the same updates again", self._repeat)
        self._repeats = repeat.ok
        yield repeat
        processes = f"on {self.devices} process{'es' if self.devices > 1 else ''}"
        for name, what, compare in (
            ("accumulated", f"accumulated, in {self.parts} parts", self._accumulated),
            ("processes", processes, self._on_processes),
            ("evaluation", "evaluated in smaller batches", self._evaluated),
            ("compiled", "compiled by torch.compile", self._compiled),
            ("resumed", "cut, saved and resumed", self._resumed),
            ("precision", f"in precision={self._given('precision')!r}", self._in_precision),
        ):
            if name == "processes" and self.devices == 1:
                row = Row(name, what, None, note="devices=1")
            elif name == "compiled" and not runs_compiled:
                row = Row(name, what, None, note="verify(…, jit_compile=True) runs it.")
            else:
                row = self._row(name, what, compare)
            if name in ("accumulated", "processes") and row.ok is not None and self.draws_by_rows():
                row = dataclasses.replace(row, note=BY_ROWS)
            if row.ok is False and repeat.ok is False:  # nothing else can be told from it
                row = dataclasses.replace(row, causes=repeat.causes)
            yield row

    def _row(self, name: str, what: str, compare: Callable[[], Found]) -> Row:
        """Make a comparison; what can't be made says why."""
        try:
            return Row(name, what, *compare())
        except ConfigurationError as error:
            return Row(name, what, None, note=" ".join(str(error).split()))
        except Exception as error:
            text = f"It ended with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return Row(name, what, False, causes=(Cause("error", "", text, ""),))

    # ------------------------------------------------------------------ runs

    def copied(self, quiet: Iterable[str] = (), **settings: Any) -> Model:
        """Copy the model, and compile the copy otherwise.

        Args:
            quiet: names of modules that are put into evaluation mode.
        """
        copied = copy.deepcopy(self.model)
        for group in copied.optimizer.param_groups:  # an earlier fit's schedule may have ended at 0
            put_rate(group, first_rate(group))
        given = {**ALONE, **STEADY, "precision": self.precision, "accelerator": self.accelerator}
        verb_of(copied, "compile")(**{**given, **settings})
        net = copied._weights_module()
        if not kept_in_evaluation(net):
            copied.train()  # as fit does with a net that is in evaluation mode as a whole
        for name in quiet:
            module = net.get_submodule(name)
            if type(module).__module__.startswith("torch."):
                module.eval()
            else:
                module.training = False
        return copied

    def fitted(self, copied: Model, batches: list[Any], seed: int = SEED, **given: Any) -> Model:
        """Train a copy on batches, in their order."""
        set_seed(seed)
        verb_of(copied, "fit")(batches, class_weight=self.class_weight, verbose=0, **given)
        return copied

    def trained(
        self,
        batches: list[Any],
        quiet: frozenset[str] = frozenset(),
        parts: int = 1,
        *,
        masked: bool = True,
        **settings: Any,
    ) -> Numbers:
        """Return the parameters after an update on each batch.

        Args:
            parts: how many of these batches make one of the data's.
            masked: whether a net that draws does so by rows, where that is possible.
        """
        callbacks = self._masks(quiet, parts) if masked else []
        copied = self.copied(quiet, **settings)
        return _numbers(self.fitted(copied, batches, callbacks=callbacks))

    def reference(self, quiet: frozenset[str] = frozenset(), *, masked: bool = True) -> Numbers:
        """Return the parameters that others are compared with."""
        masked = masked and self.draws_by_rows(quiet)
        if (quiet, masked) not in self._known:
            self._known[quiet, masked] = self.trained(self.batches, quiet, masked=masked)
        return self._known[quiet, masked]

    def accumulated(
        self,
        parts: int,
        quiet: frozenset[str] = frozenset(),
        batches: list[Any] | None = None,
    ) -> Numbers:
        """Return the parameters after the same updates, each accumulated from parts."""
        pieces = self._pieces(parts, batches)
        return self.trained(pieces, quiet, parts, accumulate_grad_batches=parts)

    def on_processes(self, quiet: frozenset[str] = frozenset(), **settings: Any) -> Numbers:
        """Return the parameters after the same updates, a part of each on each process."""
        enough = self.accelerator == "cpu" or visible().get(self.accelerator, 0) >= self.devices
        return self.trained(
            self._pieces(self.devices), quiet, self.devices,
            devices=self.devices, strategy="ddp_spawn",
            accelerator=self.accelerator if enough else "cpu", **settings,
        )  # fmt: skip

    def draws_by_rows(self, quiet: frozenset[str] = frozenset()) -> bool:
        """Whether the net draws, and can draw by the rows of a batch in place of the batch."""
        if quiet not in self._places:
            self._places[quiet] = self._found_places(quiet)
        return self._places[quiet] is not None

    def _found_places(self, quiet: frozenset[str]) -> Places | None:
        """Return where the rows of a batch are in what the net draws for it; None where that can't
        be seen, or nothing is drawn.
        """
        batch = self.batches[0]
        rows = self.size_of(batch)
        if rows < 4:
            return None
        whole = self._calls(batch, quiet)
        if not whole:
            return None
        part = self._calls(self.cut(batch, 2)[0], quiet)
        return places_in(whole, part, rows, bounds_of(rows, 2)[1])

    def _calls(self, batch: Any, quiet: frozenset[str]) -> list[Any]:
        recorded = Recorded()
        self.fitted(self.copied(quiet), [batch], callbacks=recorded)
        return recorded.calls.seen

    def _masks(
        self, quiet: frozenset[str], parts: int, batches: list[Any] | None = None, seed: int = SEED
    ) -> list[Callback]:
        """Return what lets the net draw by rows in batches of which so many parts are made."""
        if not self.draws_by_rows(quiet):
            return []
        places = self._places[quiet]
        assert places is not None
        pieces = [
            Piece(update, start, stop)
            for update, batch in enumerate(batches or self.batches)
            for start, stop in itertools.pairwise(bounds_of(self.size_of(batch), parts))
        ]
        return [Masks(places, pieces, seed)]

    def _pieces(self, parts: int, batches: list[Any] | None = None) -> list[Any]:
        return [piece for batch in batches or self.batches for piece in self.cut(batch, parts)]

    def compared(self, numbers: Numbers, others: Numbers) -> tuple[float, str]:
        """How much differs, as a part of what the updates changed, and the first that does."""
        apart = {name: float((own - others[name]).norm()) for name, own in numbers.items()}
        moved = math.hypot(*(float((own - self.start[n]).norm()) for n, own in numbers.items()))
        total = math.hypot(*apart.values())
        if not math.isfinite(total + moved):
            return math.inf, next((n for n, d in apart.items() if not math.isfinite(d)), "")
        first = next((name for name, size in apart.items() if size > 1e-3 * total), "")
        return (total / moved if moved else math.inf if total else 0.0), first

    # ------------------------------------------------------------------ comparisons

    def _judged(
        self, run: Callable[[frozenset[str]], Numbers], parts: int = 0, *, masked: bool = True
    ) -> Found:
        """Compare a way to make the updates with the reference, and find out why it differs.

        Args:
            run: makes them, with some modules in evaluation mode.
            parts: into how many it cuts the batches; 0 where it doesn't.
            masked: whether a net that draws does so by rows in it.
        """
        difference, first = self.compared(self.reference(masked=masked), run(frozenset()))
        if difference <= self.limit:
            return True, digits_of(difference), "", ()
        return False, digits_of(difference), first, self._causes(run, parts, masked=masked)

    def _repeat(self) -> Found:
        difference, first = self.compared(self.reference(), self.trained(self.batches))
        if not math.isfinite(difference):
            return False, 0.0, first, (cause_of("not_finite", first),)
        if difference == 0.0:
            return True, math.inf, "", ()
        steady = math.inf
        with contextlib.suppress(Exception):  # an operation has no deterministic kernel
            pair = [self.trained(self.batches, deterministic=True) for _ in range(2)]
            steady, _ = self.compared(*pair)
        if steady == 0.0:
            return False, digits_of(difference), first, (cause_of("kernels"),)
        name = self._first_other(*(self._passes(self.batches[:1]) for _ in range(2)))
        why = cause_of("gradients") if name is None else cause_of("unsteady", self._place(name))
        return False, digits_of(difference), first, (why,)

    def _accumulated(self) -> Found:
        return self._judged(functools.partial(self.accumulated, self.parts), self.parts)

    def _on_processes(self) -> Found:
        ok, digits, first, causes = self._judged(self.on_processes, self.devices)
        if causes and causes[-1].kind == "batch_norm":
            together = self.on_processes(self._drawing, sync_batchnorm=True)
            difference, _ = self.compared(self.reference(self._drawing), together)
            if difference <= self.limit:
                count = math.floor(digits_of(difference))
                advice = f"Write compile(sync_batchnorm=True): then equal to {count} digits."
                causes = (*causes[:-1], dataclasses.replace(causes[-1], advice=advice))
        return ok, digits, first, causes

    def _compiled(self) -> Found:
        return self._judged(
            lambda quiet: self.trained(
                self.batches,
                quiet,
                masked=False,  # nothing is compiled below a mode of torch's dispatcher
                jit_compile=self._given("jit_compile") or True,
            ),
            masked=False,
        )

    def _in_precision(self) -> Found:
        """Compare the compiled precision; what it rounds off is no fault until all is."""

        def run(quiet: frozenset[str]) -> Numbers:
            return self.trained(self.batches, quiet, precision=self._given("precision"))

        difference, first = self.compared(self.reference(), run(frozenset()))
        if difference < 1.0:
            return True, digits_of(difference), "", ()
        causes = self._causes(run, 0, limit=1.0)
        if not causes or causes[-1].kind == "kernels":
            causes = (*causes[:-1], cause_of("rounding"))
        return False, digits_of(difference), first, causes

    def _evaluated(self) -> Found:
        """Evaluate whole batches, then their parts."""
        pieces = self._pieces(self.parts)

        def values_of(batches: list[Any]) -> dict[str, float]:
            set_seed(SEED)
            evaluate = verb_of(self.copied(), "evaluate")
            found = evaluate(batches, verbose=0, return_dict=True)
            return {name: float(value) for name, value in found.items()}

        whole, others = values_of(self.batches), values_of(pieces)
        apart = {
            name: abs(value - others[name]) / max(abs(value), 1e-12)
            for name, value in whole.items()
            if value != others[name] and not math.isnan(value)
        }
        wrong = [name for name, size in apart.items() if size > self.output_limit]
        digits = digits_of(max(apart.values(), default=0.0))
        if not wrong:
            return True, digits, "", ()
        layer = self._first_other(*self._passes_by_seed(verb="evaluate"))
        reason = "dropout"
        if layer is None:
            layer, reason = self._first_mixing(frozenset(), self.parts, "evaluate"), "layer"
        if layer is not None:
            is_norm = isinstance(self._module(layer), _NormBase)
            found = cause_of("batch_norm" if is_norm else reason, self._place(layer))
            return False, digits, wrong[0], (found,)
        losses = [name for name in wrong if name == "loss" or name.endswith("_loss")]
        causes = [cause_of("metric", repr(name)) for name in wrong if name not in losses]
        if not self._counts_fit():
            return False, digits, wrong[0], (cause_of("samples", "A batch"),)
        if losses:
            causes.insert(0, self._loss_cause or cause_of("loss", repr(losses[0])))
        return False, digits, wrong[0], tuple(causes)

    def _resumed(self) -> Found:
        """Resume from the middle of a training, in the compiled precision, and compare all bits."""
        middle = len(self.batches) // 2
        if not middle:
            raise ConfigurationError(
                "verify resumes after half of the updates, but there is only one. "
                "Write updates=2 or more, or give more samples."
            )
        names = ("precision", *STEADY)
        settings = {name: self._given(name) for name in names}

        def run(seed: int, *, saves: str = "", resumes: str | None = None) -> tuple[Any, Any]:
            notes = Notes(middle, saves)
            copied = self.copied(**settings)
            notes.follow(copied._weights_module())
            self.fitted(copied, self.batches, seed, callbacks=notes, resume_from=resumes)
            return copied._weights_module().state_dict(), notes.passes

        with tempfile.TemporaryDirectory(prefix="fitkit_verify_") as folder:
            path = os.path.join(folder, "middle.h5")
            (whole, noted), (resumed, noted_then) = (
                run(SEED, saves=path),
                run(SEED + 1, resumes=path),
            )
        wrong = [n for n, value in whole.items() if not same_bits(value, resumed.get(n))]
        if not wrong:
            return True, math.inf, "", ()
        if not self._repeats:
            return False, 0.0, wrong[0], ()
        name = self._first_other(noted, noted_then)
        place = "" if name is None else self._place(name)
        return False, 0.0, wrong[0], (cause_of("forgotten", place or "Something"),)

    # ------------------------------------------------------------------ why

    def _causes(
        self,
        run: Callable[[frozenset[str]], Numbers],
        parts: int,
        limit: float | None = None,
        *,
        masked: bool = True,
    ) -> tuple[Cause, ...]:
        """Put one kind of layer after another into evaluation mode until the numbers are equal."""
        if not self._repeats:
            return ()
        found: list[Cause] = []
        quiet = self._drawing = frozenset[str]()
        modules = dict(self.model._weights_module().named_modules())
        while True:
            name, reason = None, "dropout"
            if not (masked and self.draws_by_rows(quiet)):
                name = self._first_other(*self._passes_by_seed(quiet))
            if name is None and parts:
                name, reason = self._first_mixing(quiet, parts), "layer"
            if name is None:
                return (*found, self._other_cause(quiet, run, parts))
            if name in quiet:  # it does so in evaluation mode, too, and hides what comes after it
                return tuple(found)
            own = modules[name]
            is_norm = isinstance(own, _NormBase)
            found.append(cause_of("batch_norm" if is_norm else reason, self._place(name)))
            quiet |= {name, *(n for n, module in modules.items() if type(module) is type(own))}
            self._drawing = quiet if reason == "dropout" else self._drawing
            difference, _ = self.compared(self.reference(quiet, masked=masked), run(quiet))
            if difference <= (limit or self.limit):
                return tuple(found)

    def _other_cause(
        self, quiet: frozenset[str], run: Callable[[frozenset[str]], Numbers], parts: int
    ) -> Cause:
        """Return the cause where no layer's output is one."""
        if not parts:
            return cause_of("by_kernel")
        difference, _ = self.compared(self.reference(quiet), self.accumulated(parts, quiet))
        if difference <= self.limit:
            return cause_of("by_rank")
        if not self._counts_fit():
            return cause_of("samples", "A batch")
        place = "The loss" if self._given("loss") is not None else "The model's own loss"
        batches = [_with_all_labels(batch) for batch in self.batches]
        if any(one is not other for one, other in zip(batches, self.batches, strict=True)):
            whole, divided = (
                self.trained(batches, quiet),
                self.accumulated(parts, quiet, batches),
            )
            if self.compared(whole, divided)[0] <= self.limit:
                self._loss_cause = cause_of("ignored_labels", place)
                return self._loss_cause
        self._loss_cause = cause_of("loss", place)
        with contextlib.suppress(FitkitError):  # it may have no loss to evaluate
            copied, batch = self.copied(quiet), self.batches[0]
            test_on_batch = verb_of(copied, "test_on_batch")
            total, one, other = (
                test_on_batch(*unpack_batch(part), return_dict=True)["loss"]
                for part in [batch, *self.cut(batch, 2)]
            )
            if math.isclose(total, one + other, rel_tol=self.output_limit):
                self._loss_cause = cause_of("sum", place)
        return self._loss_cause

    def _counts_fit(self) -> bool:
        """Whether the samples that fitkit counts in the parts add up to those of the whole."""
        whole, pieces = (samples_of(batch) for batch in self.batches), self._pieces(self.parts)
        return sum(whole) == sum(map(samples_of, pieces))

    def _passes_by_seed(
        self, quiet: frozenset[str] = frozenset(), verb: str = "fit"
    ) -> tuple[Passes, Passes]:
        """Return what modules do with the first batch under two seeds, which they draw numbers
        from.
        """
        batches = self.batches[:1]
        return (
            self._passes(batches, quiet, verb),
            self._passes(batches, quiet, verb, seed=SEED + 1),
        )

    def _first_mixing(self, quiet: frozenset[str], parts: int, verb: str = "fit") -> str | None:
        """Return the first module that gives a sample another output in a part of its batch."""
        whole, pieces = self.batches[:1], self.cut(self.batches[0], parts)
        masks, others = (
            self._masks(quiet, count, whole) if verb == "fit" else [] for count in (1, parts)
        )
        return self._first_other(
            self._passes(whole, quiet, verb, masks=masks),
            self._passes(pieces, quiet, verb, masks=others),
        )

    def _passes(
        self,
        batches: list[Any],
        quiet: frozenset[str] = frozenset(),
        verb: str = "fit",
        seed: int = SEED,
        masks: Sequence[Callback] = (),
    ) -> Passes:
        """Return what each module does before the first update, of which all these batches are."""
        copied, notes = self.copied(quiet, accumulate_grad_batches=len(batches)), Notes()
        notes.follow(copied._weights_module())
        if verb == "fit":
            self.fitted(copied, batches, seed, callbacks=[notes, *masks])
        else:
            set_seed(seed)
            verb_of(copied, "evaluate")(batches, verbose=0, callbacks=notes)
        return notes.passes

    def _first_other(self, one: Passes, other: Passes) -> str | None:
        return first_other(one, other, self.output_limit)

    def _module(self, name: str) -> nn.Module:
        return self.model._weights_module().get_submodule(name)

    def _place(self, name: str) -> str:
        kind = type(self._module(name)).__name__
        return f"{kind} {name!r}" if name else f"The net itself ({kind})"

    def _given(self, name: str) -> Any:
        """Return what `compile` was given."""
        return getattr(self.model._fitkit.compilation.given, name)


def _numbers(model: Model) -> Numbers:
    """Return the model's parameters in float64 in main memory, by the net's names."""
    named = model._weights_module().named_parameters()
    return {name: own.detach().to("cpu", torch.float64, copy=True) for name, own in named}


def _with_all_labels(batch: Any) -> Any:
    """Return a batch with 0 in place of negative labels, so that all of them count; itself if it
    has none.

    A net that computes its own loss has the labels among its inputs.
    """
    x, y, weight = unpack_batch(batch)
    labels = x if y is None else y
    whole = [t for t in trees.tensors(labels) if not (t.is_floating_point() or t.is_complex())]
    if not any(bool((tensor < 0).any()) for tensor in whole):
        return batch
    kept = {id(tensor) for tensor in whole}
    counted = trees.map_leaves(lambda t: t.clamp(min=0) if id(t) in kept else t, labels)
    if y is None:
        return counted
    return (x, counted) if weight is None else (x, counted, weight)
