"""A callback that leaves out updates whose loss or gradient isn't finite, or a spike."""

from __future__ import annotations

import copy
import math
from collections import deque
from statistics import median
from typing import Any, NamedTuple

import torch

from fitkit.arguments import check_choice, check_count, check_number
from fitkit.errors import ConfigurationError, warn
from fitkit.extras.bad_numbers import first_bad, first_bad_of, indices_of, named_samples
from fitkit.extras.watches import LEAST_SPREAD, NORMAL, NonFiniteError
from fitkit.seams.callbacks import Callback, Logs, from_all_ranks, run_of
from fitkit.seams.data import Batch
from fitkit.seams.optimizers import uses_closure

WINDOW = 50
"""Updates whose losses are compared; spikes are found from half of them on."""


class Found(NamedTuple):
    """What is bad: samples, a number of the data, the rank that had them, and how it showed."""

    indices: list[int] | None
    where: str | None
    rank: int | None
    what: str


class SkipBadUpdates(Callback):
    """Leaves out whole updates whose loss or gradient isn't finite, on all ranks alike.

    The weights, their running statistics, the optimizer, the schedule and averages of weights are
    as if the update's batches had not been there. The first is said once, with its samples. A
    batch whose loss isn't finite doesn't count in the epoch's logs (compiled steps count it).

    It reads each batch's loss, and the gradients' norm before each update, so that the host waits
    for the device there, and with several ranks there is an exchange. What the loss scale of
    `"16-mixed"` makes overflow is left out by that, and doesn't count here.

    Args:
        spikes: a loss that exceeds the median of the last 50 updates by more than so many spreads
            (1.4826 median absolute deviations) is a spike, whose update is left out, too. It
            doesn't work with `jit_compile`. Default None: spikes are no fault.
        in_a_row: after so many in a row something is done. Default 3.
        then: `"raise"` (default) a NonFiniteError; `"restore"` the weights and the optimizer of the
            last copy, and if that happens twice without an update between, raise.
        every: so many updates are between two copies for `then="restore"`. Default 100.

    Attributes:
        skipped: for each update that was left out a dict of `epoch` and `batch` (from 0), `rank`,
            and `indices` of the samples, or None where the data don't tell. Where the batch isn't
            known (only a gradient isn't finite, and the data are), `indices` are all of the
            update's, and `rank` is None on several ranks. So has `history.skipped`. The epoch's
            logs have their number as `skipped`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse", accelerator="cpu", devices=1)
        >>> x = torch.randn(64, 4)
        >>> x[20] = float("nan")
        >>> history = model.fit(x, torch.ones(64), batch_size=32, shuffle=False, verbose=0,
        ...                     callbacks="skip_bad_updates")
        >>> history["skipped"], bool(model.net.weight.isfinite().all())
        ([1.0], True)

    Raises:
        NonFiniteError: raised by `fit` after `in_a_row` of them.
        ConfigurationError: raised by `fit` for steps that make their updates themselves, and for
            optimizers and strategies that do.
    """

    stops_alike = True
    each_batch = True
    watches_losses = True

    def __init__(
        self,
        spikes: float | None = None,
        in_a_row: int = 3,
        then: str = "raise",
        every: int = 100,
    ) -> None:
        self.spikes: float | None = (
            None if spikes is None else check_number("spikes", spikes, above=0)
        )
        self.in_a_row: int = check_count("in_a_row", in_a_row)
        self.then: str = check_choice("then", then, ("raise", "restore"))
        self.every: int = check_count("every", every)
        self._reset()

    def _reset(self) -> None:
        self.skipped: list[dict[str, Any]] = []
        self._run: Any = None
        self._noted: dict[int, list[tuple[int, int, Batch, float]]] = {}
        self._places: list[tuple[int, int]] = []  # of the update's batches
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._row = self._in_epoch = 0
        self._copy: tuple[int, list[Any], list[Any]] | None = None
        self._is_restored = self._has_told = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_run": None,
            "_noted": {},
            "_places": [],
            "_buffers": [],
            "_copy": None,
        }

    # ------------------------------------------------------------------ hooks

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()
        model = self.model
        self._check(model)
        self._run = run_of(model)
        state = model._fitkit.fit_state
        self.add_cleanup(setattr, state, "guard", state.guard)
        self.add_cleanup(setattr, self, "_run", None)
        self.add_cleanup(self._noted.clear)
        self.add_cleanup(self._buffers.clear)
        state.guard = self
        model.history.skipped = self.skipped

    def _check(self, model: Any) -> None:
        compilation = model._fitkit.compilation
        optimizers = model._fitkit.fit_state.optimizers
        why = None
        if not model.automatic_optimization:
            why = "training_step makes its updates itself (automatic_optimization = False)"
        elif any(map(uses_closure, optimizers)):
            why = "the optimizer computes the loss itself, several times in an update"
        elif (engine := compilation.strategy.engine) is not None and not engine.may_leave_out:
            why = f"strategy={compilation.strategy.name!r} makes the updates itself"
        elif self.spikes is not None and compilation.given.jit_compile:
            why = (
                "compiled steps don't tell the losses by which spikes are known: spikes=None works"
            )
        if why is not None:
            raise ConfigurationError(f"SkipBadUpdates can't leave out updates here: {why}.")

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._in_epoch = sum(one["epoch"] == epoch for one in self.skipped)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self._run is None:
            return
        if self._run.is_between_updates:
            self._places.clear()
        self._places.append(self._place())
        if not self._run.is_between_updates:
            return
        held = self.model._fitkit.compilation.trained(self.model).modules()
        buffers = {id(b): b for part in held for b in part._buffers.values() if b is not None}
        self._buffers[:] = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
        if self.then == "restore" and self._copy is None:
            self._keep()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs["skipped"] = float(self._in_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {
            "skipped": [dict(one) for one in self.skipped],
            "losses": list(self._losses),
            "row": self._row,
            "told": self._has_told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.skipped[:] = [dict(one) for one in state["skipped"]]
        self._losses.extend(float(loss) for loss in state["losses"])
        self._row, self._has_told = int(state["row"]), bool(state["told"])

    # ------------------------------------------------------------------ as the updates' guard

    def counts(self, optimizer: Any, batch: Batch, outcome: Any) -> bool:
        """Take a batch's loss, before its update; return whether the logs count it."""
        if outcome.loss is None or not batch.samples:
            return True
        loss = float(outcome.loss.detach())
        self._noted.setdefault(id(optimizer), []).append((*self._place(), batch, loss))
        return math.isfinite(loss)

    def _place(self) -> tuple[int, int]:
        """Return the pass, and how many of its batches came before the one of now."""
        progress, run = self._run.progress, self._run
        by_steps = run.arguments.steps_per_epoch is not None  # then the stream counts, ahead
        return progress.number, progress.batches - (progress.shares if by_steps else 0)

    def admits(self, applier: Any) -> bool:
        """Return whether an update is made; all ranks give the same answer.

        Ranks:
            Collective.
        """
        noted = self._noted.pop(id(applier.optimizer), [])
        losses = [loss for *_, loss in noted]
        norm = None
        if applier.checks_gradients:
            gradients = [p.grad for p in applier.parameters if p.grad is not None]
            norm = applier.engine.norm(gradients) if gradients else None
        is_lost = norm is not None and not math.isfinite(norm)
        bad = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), None)
        mean = sum(losses) / len(losses) if losses and bad is None else 0.0
        ranks = self.model._fitkit.compilation.strategy.collectives
        lost, total, count = ranks.sums(
            [float(is_lost or bad is not None), mean, float(bool(losses) and bad is None)]
        )
        loss = total / count if count else math.nan
        if not lost and not self._is_spike(loss):
            self._made(loss)
            return True
        self._leave_out(noted, losses, bad, loss if not lost else math.nan)
        return False

    def _is_spike(self, loss: float) -> bool:
        if self.spikes is None or len(self._losses) < WINDOW // 2 or not math.isfinite(loss):
            return False
        middle = median(self._losses)
        deviation = median(abs(value - middle) for value in self._losses)
        spread = max(NORMAL * deviation, LEAST_SPREAD * abs(middle))
        return loss - middle > self.spikes * spread

    def _made(self, loss: float) -> None:
        self._row, self._is_restored = 0, False
        if math.isfinite(loss):
            self._losses.append(loss)
        if self.then == "restore" and self._copy is not None:
            made = self.model._fitkit.fit_state.updates - self._copy[0]
            if made >= self.every:
                self._keep()  # before this update

    def _leave_out(
        self, noted: list[Any], losses: list[float], bad: int | None, spike: float
    ) -> None:
        """Undo what the update's batches have changed, and say so once."""
        model = self.model
        for parameter in model._fitkit.compilation.trained(model).parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        found = self._found(noted, bad)
        batch = self._run.progress.steps
        entry = {
            "epoch": model.current_epoch,
            "batch": batch,
            "rank": found.rank,
            "indices": found.indices,
        }
        self.skipped.append(entry)
        self._in_epoch += 1
        self._row += 1
        if not self._has_told and model.is_global_zero:
            what = f"its loss jumped to {spike:.4g}" if math.isfinite(spike) else found.what
            data = "" if found.where is None else f" In the data, {found.where}."
            samples = named_samples(found.indices)
            if found.rank is not None:
                samples += f", rank {found.rank}"
            warn(
                f"The update of epoch {model.current_epoch + 1}, batch {batch} was left out: "
                f"{what} ({samples}).{data} Others like it are counted in `skipped`."
            )
        self._has_told = True
        if self._row >= self.in_a_row:
            self._act(found.where)

    def _found(self, noted: list[Any], bad: int | None) -> Found:
        """Return which batch is bad, on the first rank that has one; or else all of the update's.

        Ranks:
            Collective.
        """
        # By places, which all ranks have alike: of what only fills a rank's place nothing is noted.
        # Compiled steps show no batch: what it had is read again.
        held = {(number, place): batch for number, place, batch, _ in noted}
        seen: list[tuple[list[int] | None, str | None]] = []
        for number, place in self._places:
            indices, batch = indices_of(self._run, number, place), held.get((number, place))
            if batch is not None:
                seen.append((indices, first_bad(batch.data, indices)))
            else:
                seen.append((indices, first_bad_of(self._run, indices) if indices else None))
        at = None if bad is None else self._places.index(noted[bad][:2])
        if at is None:
            at = next((n for n, (_, where) in enumerate(seen) if where is not None), None)
        ranks = from_all_ranks(self.model, (seen, at))
        rank = next((rank for rank, (_, at) in enumerate(ranks) if at is not None), None)
        what = "its loss isn't finite" if bad is not None else "its gradient isn't finite"
        if rank is not None:
            batches, at = ranks[rank]
            return Found(*batches[at or 0], rank, what)
        every: list[int] | None = []
        for indices, _ in (one for batches, _ in ranks for one in batches):
            every = None if indices is None or every is None else every + indices
        return Found(every, None, 0 if len(ranks) == 1 else None, what)

    def _act(self, where: str | None) -> None:
        """Raise, or go back to the last copy."""
        model = self.model
        if self.then == "raise" or self._is_restored or self._copy is None:
            data = "" if where is None else f" In the data, {where}."
            raise NonFiniteError(
                f"{self._row} updates in a row were left out, the last one in epoch "
                f"{model.current_epoch + 1}, batch {self._run.progress.steps}.{data} "
                "`skipped` has their samples. fitkit.callbacks.DetectNonFinite() names the module "
                "where it begins."
            )
        _, tensors, states = self._copy
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        for optimizer, state in zip(model._fitkit.fit_state.optimizers, states, strict=True):
            rates = [dict(group) for group in optimizer.param_groups]
            optimizer.load_state_dict(copy.deepcopy(state))
            for group, before in zip(optimizer.param_groups, rates, strict=True):
                group.update({k: v for k, v in before.items() if k != "params"})
        self._row, self._is_restored = 0, True

    def _keep(self) -> None:
        """Copy the weights and the optimizers' states."""
        model = self.model
        trained = model._fitkit.compilation.trained(model)
        tensors = [*trained.parameters(), *(buffer for buffer, _ in self._buffers)]
        kept = {id(buffer): before for buffer, before in self._buffers}
        copies = [(t, kept[id(t)] if id(t) in kept else t.detach().clone()) for t in tensors]
        state = model._fitkit.fit_state
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in state.optimizers]
        self._copy = state.updates, copies, states
