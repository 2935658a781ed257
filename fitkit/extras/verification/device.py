"""Whether an accelerator computes what the CPU does: module by module, forward and backward.

The model makes one update on its device, where each call of a module is recorded. Then the CPU
computes each call again from what the *device* recorded: its inputs, and the gradients that came
back. So a fault shows where it is, and not in the modules after it. What a module does beside the
modules that it calls is compared in the same way: they return what they returned on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.accelerators import widest_dtype
from fitkit.extras.verification.recording import Call, Numbers, Recording
from fitkit.extras.verification.replaying import Replay, Result, Stubs, changed_by, is_in
from fitkit.extras.verification.results import Cause, Row, digits_of
from fitkit.extras.verification.trials import LIMITS, Trials
from fitkit.seams.callbacks import Callback

WHAT = "on the CPU, by module"

LOSS_LIMIT = 1e-6
"""How far the loss may be off, which is logged in float32, as a part of it."""

ADVICE = (
    "Try another version of torch or of the device's driver, or write it with other operations."
)


@dataclasses.dataclass(frozen=True)
class Off:
    """A result that the CPU computes otherwise.

    Attributes:
        name: the module's; None for the step.
        what: which of its results.
        error: the largest difference, as a part of the largest number.
    """

    name: str | None
    what: str
    error: float

    @property
    def key(self) -> tuple[str | None, str]:
        """What it is, whatever the error."""
        return self.name, self.what


def device_row(trials: Trials) -> Row:
    """Compare the model's device with the CPU, in the widest type that both have."""
    kind = trials.model.device.type
    if kind == "cpu":
        return Row("device", WHAT, None, note="Both are the CPU: the model computes on it.")
    precision = trials.precision
    if widest_dtype(trials.model.device) is not torch.float64:
        precision = "32-true"
    net = trials.model._weights_module()
    quiet: frozenset[str] = frozenset()
    comparison = Comparison(trials, kind, precision, quiet)
    drawing = comparison.drawing()
    if drawing:
        quiet = frozenset(drawing)
        comparison = Comparison(trials, kind, precision, quiet)
    offs = comparison.offs
    if offs:
        # What isn't equal when the CPU stands in the device's place can't be told in this way.
        known = {off.key for off in Comparison(trials, "cpu", precision, quiet).offs}
        offs = [off for off in offs if off.key not in known]
    notes = [f"In float{precision[:2]}, {len(comparison.recording.calls)} calls of modules."]
    if quiet:
        names = ", ".join(map(_named(net), sorted(quiet)))
        notes.append(f"Draws numbers, so it was compared in evaluation mode: {names}.")
    notes += comparison.notes
    digits = digits_of(min(comparison.largest, 1.0))
    if not offs:
        return Row("device", WHAT, True, digits, note=" ".join(notes))
    first, others = offs[0], list(dict.fromkeys(off.name for off in offs[1:]))
    others = [name for name in others if name != first.name]
    if others:
        notes.append(f"Also off: {', '.join(map(_named(net), others[:5]))}.")
    size = "not finite where the other is" if math.isinf(first.error) else f"{first.error:.1e} off"
    words = (
        f"has another {first.what} on {kind} than on the CPU, for the same inputs: {size}, "
        "relative to the largest number."
    )
    place = _named(net)(first.name)
    cause = Cause("device", place, words, ADVICE)
    where = f"{first.what} of {first.name or type(net).__name__}"
    if first.name is None:
        where = f"{first.what} of the step"
    return Row("device", WHAT, False, 0.0, where, (cause,), " ".join(notes))


def _named(net: nn.Module) -> Callable[[str | None], str]:
    """Return what names a module in words."""

    def named(name: str | None) -> str:
        if name is None:
            return "The step (the loss, or what it does beside the modules)"
        kind = type(net.get_submodule(name)).__name__
        return f"{kind} {name!r}" if name else f"The net itself ({kind})"

    return named


class Comparison:
    """One update on a device, and what the CPU finds otherwise in it.

    Args:
        kind: of the device.
        precision: of both.
        quiet: names of modules that are in evaluation mode.

    Attributes:
        offs: what is off: in the order of the forward pass, then in that of the backward.
        largest: the largest difference of what isn't off, relative to its largest number.
        notes: what couldn't be compared.
    """

    def __init__(self, trials: Trials, kind: str, precision: str, quiet: frozenset[str]) -> None:
        self._trials, self._precision, self._quiet = trials, precision, quiet
        self._limit = LIMITS[precision][1]
        self.largest: float = 0.0
        self.notes: list[str] = []
        batch = trials.batches[:1]
        copied = self._copied(kind)
        self.recording: Recording = Recording(copied._weights_module())
        trials.fitted(copied, batch, callbacks=self.recording)
        twin = self._copied("cpu")
        self._twin: nn.Module = twin._weights_module()
        for name, parameter in self._twin.named_parameters():
            parameter.data = self.recording.start[name].clone()
        self._sums: dict[str, Result] = {}  # the parameters' gradients, of all calls
        self._unknown: set[str] = set()  # modules with parameters whose gradients aren't all known
        self.offs: list[Off] = self._compared()

    def _copied(self, kind: str) -> Any:
        copied = self._trials.copied(self._quiet, accelerator=kind, precision=self._precision)
        for module in copied.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0  # in evaluation mode cuDNN has no backward pass
        return copied

    def drawing(self) -> list[str]:
        """Return the names of the modules that draw random numbers."""
        return [call.name for call in self.recording.calls if call.draws and call.name is not None]

    def _compared(self) -> list[Off]:
        forward: list[Off] = []
        backward: list[list[Off]] = []  # of each call, and of the step at the end
        last: dict[str | None, int] = {}
        for number, call in enumerate(self.recording.calls):
            last[call.name] = number
            found = self._replayed(call)
            forward += self._off(call.name, found.forward if found else [])
            backward.append(self._off(call.name, found.backward if found else []))
            for one in found.parameters if found else []:
                self._add(one)
        ahead, back = self._of_step()
        forward += self._off(None, ahead)
        backward.append(self._off(None, back))
        for name, gradient in self.recording.gradients.items():
            owner, _, own = name.rpartition(".")
            if not any(is_in(name, unknown) for unknown in self._unknown):
                summed = self._sums.get(name, Result(name, None, None))
                one = summed._replace(name=f"gradient of its {own}", device=gradient)
                backward[last.get(owner, -1)] += self._off(owner, [one])
        return [*forward, *(off for offs in reversed(backward) for off in offs)]

    def _replayed(self, call: Call) -> Replay | None:
        """Return a call as the CPU makes it; None if that can't be compared."""
        place = _named(self._twin)(call.name)
        if call.draws:
            self.notes.append(f"Left out, as it draws numbers: {place}.")
        else:
            try:
                return Replay(self._twin, call, self._limit)
            except Exception as error:  # the CPU may lack what it needs
                self.notes.append(f"Left out: {place} ({_line(error)}).")
        self._unknown.add(call.name or "")
        return None

    def _add(self, own: Result) -> None:
        """Add a call's gradient to those of a parameter."""
        if own.cpu is None:
            return
        known = self._sums.get(own.name)
        if known is not None and known.cpu is not None:
            own = own._replace(cpu=known.cpu + own.cpu, reach=known.reach + own.reach)
        self._sums[own.name] = own

    def _off(self, name: str | None, results: Iterable[Result]) -> list[Off]:
        """Return which results are off."""
        found = []
        for one in results:
            error, is_off = _difference(one, self._limit)
            if is_off:
                found.append(Off(name, one.name, error))
            else:
                self.largest = max(self.largest, error)
        return found

    def _of_step(self) -> tuple[list[Result], list[Result]]:
        """Make the step on the CPU, with modules that return what they returned on the device."""
        step = self.recording.step
        if step.draws:
            self.notes.append("Left out, as it draws numbers: the step itself, with its loss.")
            return [], []
        copied = self._copied("cpu")
        standing = _Standing(copied._weights_module(), step)
        try:
            self._trials.fitted(copied, self._trials.batches[:1], callbacks=standing)
            standing.stubs.check_end()
        except Exception as error:
            self.notes.append(f"Left out: the step itself, with its loss ({_line(error)}).")
            return [], []
        for name, gradient in standing.gradients.items():
            self._add(Result(name, None, gradient))
        own, other = (torch.tensor(loss) for loss in (self.recording.loss, standing.loss))
        loss = Result("loss", own, other, LOSS_LIMIT * float(other.abs()))
        return [*standing.stubs.inputs(), loss], [*standing.stubs.came()]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _difference(result: Result, limit: float) -> tuple[float, bool]:
    """Return how far a result is from the CPU's, as a part of its largest number, and whether it is
    off.
    """
    none = torch.zeros(())  # a gradient that isn't there
    own, other = (none if one is None else one for one in (result.device, result.cpu))
    if none is not own and none is not other and own.shape != other.shape:
        return math.inf, True
    if not trees.is_inexact(own):
        return (0.0, False) if torch.equal(own, other.to(own.dtype)) else (1.0, True)
    if not torch.equal(*torch.broadcast_tensors(own.isfinite(), other.isfinite())):
        return math.inf, True
    apart, size = (_largest(one) for one in (own - other, other))
    if apart > max(result.reach, limit * size):
        return apart / (size or apart), True
    # What cancels out has no digits that could be compared.
    return apart / size if apart <= limit * size and size else 0.0, False


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


class _Standing(Callback):
    """Has a net's modules stand still for one fit: they return what was recorded."""

    stops_alike = True

    def __init__(self, net: nn.Module, step: Call) -> None:
        self._net = net
        self.stubs = Stubs(net, step.calls, changed_by(0.0))
        self.gradients: Numbers = {}
        self.loss: float = math.nan

    def on_train_begin(self, logs: Any = None) -> None:
        for name, parameter in self._net.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self.gradients.__setitem__, name))
        self.add_cleanup(self.stubs.__exit__)
        self.stubs.__enter__()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.loss = float((logs or {}).get("loss", "nan"))
