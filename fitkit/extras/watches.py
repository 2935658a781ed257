"""Callbacks that watch for NaN, infinite values and loss spikes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fitkit import trees
from fitkit.arguments import check_choice, check_count, check_flag, check_number
from fitkit.errors import FitkitError, warn
from fitkit.outputs import EMPTY_MEAN
from fitkit.seams.callbacks import (
    Callback,
    Logs,
    batches_of_call,
    from_all_ranks,
    from_rank_zero,
    is_multiple_in,
    print_on_rank_zero,
    run_of,
)
from fitkit.seams.strategies import norm_of, whole


class NonFiniteError(FitkitError, FloatingPointError):
    """A value that should be a number is NaN or infinite."""


class TerminateOnNaN(Callback):
    """Ends `fit` when the loss is NaN or infinite, on any rank.

    The loss isn't read after every batch. Once a batch's loss is NaN or infinite, so is the running
    mean. It is read every `check_every` batches and at the end of each epoch. With
    `steps_per_execution` it is read, and `fit` ends, at the end of a group of batches.

    Args:
        raise_error: whether to raise an error instead of stopping. Default False.
        check_every: the number of batches between two checks. Default 10.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.TerminateOnNaN()
        ... ])

    Raises:
        NonFiniteError: raised by `fit` if `raise_error` is set. It is a `FloatingPointError`.
    """

    stops_alike = True
    watches_losses = True

    def __init__(self, raise_error: bool = False, check_every: int = 10) -> None:
        raise_error = check_flag("raise_error", raise_error)
        check_every = check_count("check_every", check_every)
        self.raise_error = raise_error
        self.check_every = check_every
        self._stops = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._stops = False

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if is_multiple_in(batches_of_call(self, batch), self.check_every):
            self._check(logs, f"by batch {batch}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._check(logs, "at its end")

    def _check(self, logs: Logs, when: str) -> None:
        loss = logs.get("loss")
        is_lost = loss is not None and loss is not EMPTY_MEAN and not math.isfinite(loss)
        if not any(from_all_ranks(self.model, is_lost)):
            return
        if self.raise_error:
            raise NonFiniteError(
                f"The loss became NaN or infinite in epoch {self.model.current_epoch + 1} "
                f"({when}). Add fitkit.callbacks.DetectNonFinite() to find the module where it "
                "begins."
            )
        self.model.stop_training = self._stops = True

    def state_dict(self) -> dict[str, Any]:
        return {"stops": self._stops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("stops"):  # the weights are lost
            self.model.stop_training = self._stops = True


class BatchLosses:
    """Collects the losses of batches without reading the device for each.

    A batch's logs carry the step's own loss as a tensor (`logs.batch_loss`). Otherwise the loss is
    computed from two running means, which assumes batches of equal size.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, torch.Tensor, float | torch.Tensor]] = []
        self._read: list[tuple[int, float]] = []  # older ones, of a checkpoint
        self._sum = 0.0

    def add(self, batch: int, logs: Logs) -> None:
        """Record a batch's loss."""
        loss = getattr(logs, "batch_loss", None)
        if isinstance(loss, torch.Tensor):
            self._kept.append((batch, loss.detach(), getattr(logs, "batch_count", 1)))
            return
        if "loss" not in logs:
            return
        total = float(logs["loss"]) * (batch + 1)
        self._kept.append((batch, torch.tensor(total - self._sum), 1))
        self._sum = total

    def take(self) -> list[tuple[int, float]]:
        """Return the batches and losses since the last call, with one read from the device.

        A batch in which nothing counts has `EMPTY_MEAN`.
        """
        kept, self._kept = self._kept, []
        before, self._read = self._read, []
        if not kept:
            return before
        on_device = torch.stack([loss.float() for _, loss, _ in kept])
        counts: list[Any] = [count for _, _, count in kept]
        if any(isinstance(count, torch.Tensor) for count in counts):
            device = on_device.device
            whole = torch.stack([torch.as_tensor(count, device=device).float() for count in counts])
            losses, counts = torch.stack([on_device, whole]).tolist()
        else:
            losses = on_device.tolist()
        return before + [
            (batch, loss if count else EMPTY_MEAN)
            for (batch, _, _), loss, count in zip(kept, losses, counts, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """Return the losses since the last call of `take`, as plain data. They stay for the next
        one.
        """
        self._read = self.take()
        losses = [[batch, None if loss is EMPTY_MEAN else loss] for batch, loss in self._read]
        return {"losses": losses, "sum": self._sum}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._read = [
            (int(batch), EMPTY_MEAN if loss is None else float(loss))
            for batch, loss in state["losses"]
        ]
        self._sum = float(state["sum"])


NORMAL = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""

LEAST_SPREAD = 0.01
"""The least spread to assume for losses that hardly vary, as a fraction of their median."""


class NormMonitor(Callback):
    """Adds `grad_norm` and `param_norm` to the epoch's logs.

    `grad_norm` is the norm of the optimizer's gradients before clipping, averaged over the epoch's
    updates. The logs of batches have its running mean. Updates that loss scaling skips don't count.
    `param_norm` is the norm of all parameters at the end of the epoch.

    Args:
        parameters: whether to add `param_norm`. Default True.

    Attributes:
        norms: the gradient norm at each update of the last fit, extended at the end of each epoch.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 3))
        >>> model.compile("adamw", "cross_entropy", gradient_clip_val=1.0)
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> history = model.fit(x, y, verbose=0, callbacks=fitkit.callbacks.NormMonitor())
        >>> sorted(history.history)
        ['grad_norm', 'loss', 'param_norm']
    """

    stops_alike = True
    each_batch = True

    def __init__(self, parameters: bool = True) -> None:
        parameters = check_flag("parameters", parameters)
        self.parameters: bool = parameters
        self.norms: list[float] = []
        self._before: list[float] = []  # of this epoch, before a resume
        self._logged = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.norms, self._before, self._logged = [], [], 0
        state = self.model._fitkit.fit_state
        self.add_cleanup(setattr, state, "grad_norms", state.grad_norms)
        state.grad_norms = []

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        norms = self._taken()
        for norm in norms[self._logged :]:
            self.model.log("grad_norm", norm, prog_bar=False)
        self._logged = len(norms)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        found = self._of_epoch()
        self._taken().clear()
        self._before, self._logged = [], 0
        self.norms += found
        finite = [norm for norm in found if math.isfinite(norm)]
        if found:
            mean = sum(finite) / len(finite) if finite else found[-1]
            logs["grad_norm"] = from_rank_zero(self.model, mean)
        if self.parameters:
            engine = self.model._fitkit.compilation.strategy.engine
            norm = (norm_of if engine is None else engine.norm)(list(self.model.parameters()))
            if norm is not None:
                logs["param_norm"] = from_rank_zero(self.model, float(norm))

    def state_dict(self) -> dict[str, Any]:
        norms = torch.tensor(self.norms, dtype=torch.float64)
        return {"epoch": self._of_epoch(), "norms": norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = [float(norm) for norm in state["epoch"]]
        self.norms = state["norms"].tolist() if "norms" in state else []

    def _of_epoch(self) -> list[float]:
        """Return the norms of the epoch's updates so far, including those before a resume."""
        norms = self._taken()
        return self._before + (torch.stack(norms).tolist() if norms else [])

    def _taken(self) -> list[torch.Tensor]:
        """Return the norms of the updates that this fit has made in this epoch."""
        norms: list[torch.Tensor] | None = self.model._fitkit.fit_state.grad_norms
        return [] if norms is None else norms


class _Detector(Callback):
    """Raises an error, stops the training or warns when something is found."""

    stops_alike = True
    watches_losses = True

    def __init__(self, action: str, check_every: int) -> None:
        action = check_choice("action", action, ("warn", "stop", "raise"))
        check_every = check_count("check_every", check_every)
        self.action = action
        self.check_every = check_every
        self._stops = False

    def _act(self, finding: str, error: type[FitkitError]) -> None:
        if self.action == "raise":
            raise error(finding)
        if self.action == "stop":
            print_on_rank_zero(self.model, f"{finding} Training stops.")
            self.model.stop_training = self._stops = True
        elif self.model.is_global_zero:
            warn(finding)

    def _stop_again(self, state: dict[str, Any]) -> None:
        """End the training if a finding had ended it."""
        if state["stops"] and self.action == "stop":
            self.model.stop_training = self._stops = True


class LossSpikeError(FitkitError, RuntimeError):
    """The loss of a batch is far above the losses before it."""


class DetectLossSpike(_Detector):
    """Detects batches whose loss is far above the median of the batches before.

    A batch is a spike if its loss exceeds the window's median by more than `threshold` times the
    window's spread, or isn't finite. The spread is 1.4826 median absolute deviations, which is the
    standard deviation of normally distributed numbers. Spikes don't enter the window. The device
    is read only every `check_every` batches.

    Args:
        threshold: the number of spreads above the median. Default 10.
        window: the number of batches to compare with. Detection starts at half of them. Default 50.
        patience: the number of spikes in a row before the action. Default 1.
        action: `"warn"` (default; once per fit), `"stop"` or `"raise"`.
        check_every: the number of batches between two checks. Default 10.

    Attributes:
        spikes: a list of (epoch, batch, loss), with epochs and batches from 0.

    Ranks:
        Each rank checks its own batches. All ranks act together.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.DetectLossSpike()
        ... ])

    Raises:
        LossSpikeError, NonFiniteError: raised by `fit` with `action="raise"`.
    """

    each_batch = True

    def __init__(
        self,
        threshold: float = 10.0,
        window: int = 50,
        patience: int = 1,
        action: str = "warn",
        check_every: int = 10,
    ) -> None:
        super().__init__(action, check_every)
        threshold = check_number("threshold", threshold, above=0)
        window = check_count("window", window, minimum=4)
        patience = check_count("patience", patience)
        self.threshold = threshold
        self.window = window
        self.patience = patience
        self._reset()

    def _reset(self) -> None:
        self.spikes: list[tuple[int, int, float]] = []
        self._losses = BatchLosses()
        self._before: deque[float] = deque(maxlen=self.window)
        self._in_a_row = 0
        self._warned = self._stops = self._continues = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if not self._continues:
            self._losses = BatchLosses()
        self._continues = False

    def state_dict(self) -> dict[str, Any]:
        """Every rank's losses, because each looks at its own.

        Ranks:
            Collective.
        """
        own = {
            "spikes": [list(spike) for spike in self.spikes],
            "losses": self._losses.state(),
            "before": list(self._before),
            "in_a_row": self._in_a_row,
        }
        ranks = from_all_ranks(self.model, own)
        return {"ranks": ranks, "warned": self._warned, "stops": self._stops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self._warned = state["warned"]
        self._stop_again(state)
        rank = self.model.global_rank
        if rank >= len(state["ranks"]):  # a rank that is new begins its window
            return
        own = state["ranks"][rank]
        self.spikes = [(int(epoch), int(batch), loss) for epoch, batch, loss in own["spikes"]]
        self._losses.restore(own["losses"])
        self._continues = bool(own["losses"]["losses"])  # within an epoch
        self._before.extend(own["before"])
        self._in_a_row = int(own["in_a_row"])

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._losses.add(batch, logs)
        if (batch + 1) % self.check_every == 0:
            self._check()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self._check()

    def _check(self) -> None:
        found = None
        for batch, loss in self._losses.take():
            if loss is EMPTY_MEAN:
                continue
            if not self._is_spike(loss):
                self._in_a_row = 0
                self._before.append(loss)
                continue
            self.spikes.append((self.model.current_epoch, batch, loss))
            self._in_a_row += 1
            if self._in_a_row >= self.patience and found is None:
                found = batch, loss
        for rank, finding in enumerate(from_all_ranks(self.model, found)):
            if finding is not None:
                self._report(rank, *finding)
                return

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(self._before) < self.window // 2:
            return False
        median = _median(self._before)
        deviation = _median(abs(value - median) for value in self._before)
        spread = max(NORMAL * deviation, LEAST_SPREAD * abs(median))
        return loss - median > self.threshold * spread

    def _report(self, rank: int, batch: int, loss: float) -> None:
        if self.action == "warn" and self._warned:
            return
        self._warned = True
        usual = _median(self._before) if self._before else math.nan
        where = f"epoch {self.model.current_epoch + 1}, batch {batch}, rank {rank}"
        finding = f"The loss jumped to {loss:.4g} ({where}), from about {usual:.4g} before."
        self._act(finding, LossSpikeError if math.isfinite(loss) else NonFiniteError)


def _median(values: Iterable[float]) -> float:
    from statistics import median  # imports decimal and fractions: only where it is used

    return median(values)


class DetectNonFinite(_Detector):
    """Names the first module whose output, or parameter whose gradient, is NaN or infinite.

    Use it for debugging. It checks each module's output in each training batch, which costs one
    operation per tensor. The device is read only every `check_every` batches. The first place in
    the order of computation is named: the input, the modules' outputs, the gradients.

    Args:
        action: `"raise"` (default) a NonFiniteError, `"stop"` the training, or `"warn"` once.
        check_every: the number of batches between two checks. Default 10.
        gradients: whether to check gradients, too. Default True. With `"16-mixed"` precision they
            aren't checked, because its loss scale makes some of them overflow on purpose.

    Attributes:
        found: the finding, in words; None if there is none.

    Ranks:
        Each rank checks its own batches. A finding on any rank counts for all.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.DetectNonFinite()
        ... ])

    Raises:
        NonFiniteError: raised by `fit`. It is a `FloatingPointError`.
    """

    each_batch = True

    def __init__(
        self, action: str = "raise", check_every: int = 10, gradients: bool = True
    ) -> None:
        super().__init__(action, check_every)
        gradients = check_flag("gradients", gradients)
        self.gradients = gradients
        self.found: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._handles: list[Any] = []
        # A batch, a place in words, and a tensor () that is True if a value there isn't finite.
        self._sightings: list[tuple[int, str, torch.Tensor]] = []
        self._epoch = 0
        self._batch = self._pass = 0
        self._sighted: int | None = None  # the batch of the finding
        self._looks = self._stops = False
        self._seen: str | None = None  # on this rank, since the last check before a resume

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_handles": [], "_sightings": []}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reset()
        self.found = None
        self.add_cleanup(self._remove)
        self._looks = True
        for name, parameter in self._net().named_parameters():
            self._look(f"the parameter {name}, before the first batch", parameter)
        self._check()
        self._looks = False
        if self.found is None:
            for handle in self._hooks():
                self._handles.append(handle)

    def _hooks(self) -> Iterator[Any]:
        """Hooks on every module, in the order in which they will run."""
        net = self._net()
        yield net.register_forward_pre_hook(
            lambda module, args, kwargs: self._look("the net's input", (args, kwargs)),
            with_kwargs=True,
        )
        for name, module in net.named_modules():
            kind = type(module).__name__
            label = f"the output of {name} ({kind})" if name else f"the net's output ({kind})"
            yield module.register_forward_hook(
                lambda module, given, output, label=label: self._look(label, output)
            )
        scaled = str(self.model._fitkit.compilation.given.precision).lower() in ("16", "16-mixed")
        if scaled or not self.gradients:
            return
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                label = f"the gradient of {name}"
                yield parameter.register_hook(
                    lambda gradient, label=label: self._look(label, gradient)
                )

    def _net(self) -> torch.nn.Module:
        """Return the module whose names users know."""
        net: torch.nn.Module | None = self.model.net
        return self.model if net is None else net

    @torch.no_grad()
    def _look(self, what: str, tree: Any) -> None:
        """Record, on the device, whether all numbers of a tree are finite."""
        if not self._looks:
            return
        tree = dict(tree) if trees.has_items(tree) else tree
        for leaf in trees.leaves(tree):
            if isinstance(leaf, torch.Tensor) and trees.is_inexact(leaf):
                flag = ~torch.isfinite(leaf.detach()).all()
                self._sightings.append((self._batch, what, flag))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._batch = batch
        self._looks = bool(self._handles)
        if self._looks and (run := run_of(self.model)) is not None:
            self._pass = run.progress.number

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._looks = False
        if (batch + 1) % self.check_every == 0:
            self._check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._check()

    def _check(self) -> None:
        """Read the flags from the device, once. The result is the same on every rank."""
        sightings, self._sightings = self._sightings, []
        if self.found is not None:
            return
        findings = from_all_ranks(self.model, (self._first(sightings), self._sighted))
        for rank, (finding, batch) in enumerate(findings):
            if finding is not None:
                where = f" (rank {rank})" if len(findings) > 1 else ""
                self.found = finding + where + self._samples(rank, batch)
                self._remove()
                self._act(f"{self.found[0].upper()}{self.found[1:]}.", NonFiniteError)
                return

    def _samples(self, rank: int, batch: int | None) -> str:
        """Return the samples of a batch of this epoch, and where they aren't finite.

        Ranks:
            Collective.
        """
        from fitkit.extras.bad_numbers import first_bad_of, indices_of, named_samples

        run: Any = run_of(self.model)
        if batch is None or run is None or run.arguments.steps_per_epoch is not None:
            return ""
        indices = indices_of(run, self._pass, batch * run.progress.shares)
        mine = indices, None if indices is None else first_bad_of(run, indices)
        indices, where = from_all_ranks(self.model, mine)[rank]
        if indices is None:
            return ""
        return f", {named_samples(indices)}" + ("" if where is None else f"; {where}")

    def state_dict(self) -> dict[str, Any]:
        """Return the finding, and what every rank has seen since the last check.

        Ranks:
            Collective.
        """
        seen = from_all_ranks(self.model, self._first(self._sightings) or "")
        return {"found": self.found or "", "seen": seen, "stops": self._stops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        rank = self.model.global_rank
        self._seen = state["seen"][rank] or None if rank < len(state["seen"]) else None
        if state["found"]:
            self.found = state["found"]
            self._remove()
        self._stop_again(state)

    def _first(self, sightings: list[tuple[int, str, torch.Tensor]]) -> str | None:
        if self._seen is not None or not sightings:
            return self._seen
        device = sightings[0][2].device
        flags = torch.stack([whole(flag).to(device) for _, _, flag in sightings]).tolist()
        for is_lost, (batch, what, _) in zip(flags, sightings, strict=True):
            if is_lost:
                when = f"in epoch {self._epoch + 1}, batch {batch}"
                self._sighted = batch if self._handles else None  # before the first, no samples
                return f"{what} is NaN or infinite first, {when}"
        return None

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._sightings = [], []
        self._looks = False
