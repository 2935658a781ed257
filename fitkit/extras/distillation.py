"""Knowledge distillation: a net learns from the labels, and from a larger net's outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fitkit import trees
from fitkit.accelerators import move
from fitkit.arguments import check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.class_labels import Labels
from fitkit.outputs import IGNORED, SINGLE, named_outputs
from fitkit.seams.losses import (
    Ask,
    Count,
    Loss,
    Untrained,
    full,
    is_labels,
    resolve,
    weighted_mean,
)
from fitkit.seams.steps import is_plain_wrapper
from fitkit.typing import Tree


class Distillation(Loss):
    """A loss for a student that learns from a teacher's outputs beside the labels.

    Both nets return logits z, with the classes in dimension 1. The loss is

    `alpha · hard(z, y) + (1 - alpha) · T² · KL(softmax(z_teacher / T) ‖ softmax(z / T))`

    as Hinton et al. 2015 propose (arXiv:1503.02531). T² keeps the gradients' size as T changes. The
    divergence is summed over classes, and is a mean over the samples or places whose label isn't
    ignored. Of several outputs, each learns from the teacher's of the same name.

    The teacher computes in evaluation mode and without gradients, in the strategy's precision. It
    gets what the student's `forward` gets, in its own floating type. It isn't changed, except that
    it moves to the model's device, as the model does. It isn't a part of the model: optimizers and
    files don't have it. `model.summary` and `fitkit.plan` show its memory. On several devices each
    has a whole teacher.

    Args:
        teacher: a trained net, or a `fitkit.Model`.
        alpha: the weight of the labels, from 0 to 1. The teacher's is `1 - alpha`.
        temperature: T, above 0. Higher ones make the teacher's small probabilities count more.
        hard: the loss for the labels: a name, a `torch.nn` loss, or a function of logits and
            labels.

    Raises:
        ConfigurationError, ArgumentTypeError: an impossible argument, or a loss that takes
            something else than logits of classes.

    Example:
        >>> import torch, fitkit
        >>> teacher = torch.nn.Linear(4, 3)
        >>> model = fitkit.Model(torch.nn.Linear(4, 3))
        >>> loss = fitkit.losses.Distillation(teacher, alpha=0.3, temperature=4.0)
        >>> model.compile("sgd", loss, metrics=["accuracy"], devices=1)
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> history = model.fit(x, y, verbose=0)
    """

    takes_inputs = True

    def __init__(
        self,
        teacher: nn.Module,
        alpha: float = 0.5,
        temperature: float = 2.0,
        hard: str | Callable[..., Any] = "cross_entropy",
    ) -> None:
        alpha = check_number("alpha", alpha, minimum=0, maximum=1)
        temperature = check_number("temperature", temperature, above=0)
        self.alpha: float = float(alpha)
        self.temperature: float = float(temperature)
        self.hard: Loss = resolve(hard)
        hint = self.hard.hint
        if hint.takes not in (None, "logits") or hint.task not in (None, "classes"):
            raise _no_logits(self.hard)
        self.soft: SoftTargets = SoftTargets(Teacher(teacher), self.temperature, self.hard)
        self.name: str = "distillation"
        self.label: str = "loss=Distillation()"
        self.hint = hint

    @property
    def parts(self) -> list[tuple[Loss, float]]:
        """The losses that it is the sum of, each with its factor."""
        return [(self.hard, self.alpha), (self.soft, 1 - self.alpha)]

    def to(self, device: torch.device) -> None:
        """Move the teacher, and what the loss for labels has."""
        for loss, _ in self.parts:
            loss.to(device)

    def may_count(self, targets: list[Any] | None) -> bool:
        """Whether a part's mean may be taken over something else than samples."""
        return any(loss.may_count(targets) for loss, _ in self.parts)

    def __call__(self, prediction: Any, target: Any) -> torch.Tensor:
        """Raise: the teacher needs the batch's inputs."""
        raise _no_inputs()

    def per_sample(self, prediction: Any, target: Any) -> torch.Tensor:
        """Raise: the teacher needs the batch's inputs."""
        raise _no_inputs()

    def check(self, prediction: Any, target: Any) -> None:
        """Do nothing: the parts check a first batch."""

    def __repr__(self) -> str:
        return (
            f"Distillation({type(self.soft.teacher.net).__name__}, alpha={self.alpha:g}, "
            f"temperature={self.temperature:g}, hard={self.hard.name!r})"
        )


def teachers_of(loss: Tree) -> list[nn.Module]:
    """Return the teachers of compiled losses, each once."""
    found = [one.soft.teacher.net for one in trees.leaves(loss) if isinstance(one, Distillation)]
    return list(dict.fromkeys(found))


class Teacher(Untrained):
    """A net that is asked and never changed. Callable like the net.

    Args:
        net: the net.

    Attributes:
        net: as given; a wrapping `Model`'s own net.
    """

    def __init__(self, net: nn.Module) -> None:
        if not isinstance(net, nn.Module):
            raise ArgumentTypeError(
                f"teacher={describe(net)} must be a torch.nn.Module or a fitkit.Model."
            )
        inner = getattr(net, "net", None)
        self.net: nn.Module = (
            inner if isinstance(inner, nn.Module) and is_plain_wrapper(net) else net
        )
        if any(tensor.is_meta for tensor in _tensors(self.net)):
            raise ConfigurationError(
                "The teacher has weights on the meta device, which hold no numbers. Load its "
                "weights first.",
                code="FK065",
            )
        self._twin: nn.Module | None = None
        self._elsewhere: dict[torch.device, nn.Module] = {}
        self._held: list[torch.Tensor] = []
        self._dtype: torch.dtype | None = None

    def to(self, device: torch.device) -> None:
        """Move the net, and look at it again."""
        move(self.net, device)
        self._elsewhere = {}
        tensors = _tensors(self.net)
        if self._twin is not None and [*map(id, tensors)] == [*map(id, self._held)]:
            return
        # Another object with the same tensors: only its modes are its own.
        self._twin = copy.deepcopy(self.net, {id(tensor): tensor for tensor in tensors}).eval()
        self._held = tensors
        floating = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
        self._dtype = next(floating, None)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the net's outputs."""
        with torch.no_grad():
            twin = self._on(next(iter(trees.tensors((given, named))), None))
            return twin(*self._as_own(given), **self._as_own(named))

    def _on(self, inputs: torch.Tensor | None) -> nn.Module:
        """Return the net where inputs are: a replica's step may be on another device (dp)."""
        assert self._twin is not None
        if inputs is None or not self._held or inputs.device == self._held[0].device:
            return self._twin
        if inputs.device not in self._elsewhere:
            self._elsewhere[inputs.device] = copy.deepcopy(self._twin).to(inputs.device)
        return self._elsewhere[inputs.device]

    def _as_own(self, inputs: Any) -> Any:
        """Return inputs in the net's floating type: a "-true" precision has cast the student."""
        dtype = self._dtype
        if dtype is None:
            return inputs

        def cast(leaf: Any) -> Any:
            casts = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if casts else leaf

        return trees.map_leaves(cast, inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_twin": None, "_elsewhere": {}, "_held": []}


class SoftTargets(Loss):
    """The divergence of a student's classes from a teacher's.

    Args:
        teacher: the net that is asked.
        temperature: what divides the logits.
        hard: the loss for the labels, which says what labels mean.
        logits: the teacher's for the current batch; None between batches.
    """

    takes_inputs = True

    def __init__(
        self,
        teacher: Teacher,
        temperature: float,
        hard: Loss,
        logits: torch.Tensor | None = None,
    ) -> None:
        self.teacher: Teacher = teacher
        self.temperature: float = temperature
        self.hard: Loss = hard
        self.name: str = "soft_targets"
        self.label: str = "loss=Distillation()"
        self.hint = hard.hint
        self.ignored = hard.ignored if isinstance(hard.ignored, int) else IGNORED
        self._logits = logits

    def asking(self, ask: Ask, output: Hashable) -> SoftTargets:
        """Return this loss for one batch, with the teacher's outputs."""
        answered = ask(self.teacher)
        found = named_outputs(answered)
        logits = found.get(output)
        if not isinstance(logits, torch.Tensor):
            names = [name for name in found if name is not None]
            its = "one output" if output == SINGLE else f"the output {output!r}"
            raise ConfigurationError(
                f"The student has {its}, but the teacher has {names}. Give a teacher that returns "
                "the outputs that learn from it.",
                code="FK065",
            )
        return SoftTargets(self.teacher, self.temperature, self.hard, logits)

    def __call__(self, prediction: torch.Tensor, target: Any) -> torch.Tensor:
        values = self.per_sample(prediction, target)
        count = self._counted(values, target)
        return values.mean() if count is None else values.sum() / count.clamp(min=1)

    def per_sample(self, prediction: torch.Tensor, target: Any) -> torch.Tensor:
        """Return the divergences (N, ...) of predictions (N, C, ...); 0 for ignored labels."""
        if self._logits is None:
            raise _no_inputs()
        student = (full(prediction) / self.temperature).log_softmax(1)
        teacher = (full(self._logits).to(student.dtype) / self.temperature).log_softmax(1)
        divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
        values = divergence * self.temperature**2
        if not _labels(values, target):
            return values
        return torch.where(target.reshape(values.shape) == self.ignored, 0.0, values)

    def weighted(self, prediction: Any, target: Any, weight: torch.Tensor) -> torch.Tensor:
        values = self.per_sample(prediction, target)
        count = self._counted(values, target)
        return weighted_mean(values, weight, None if count is None else count.clamp(min=1))

    def may_count(self, targets: list[Any] | None) -> bool:
        return self.hard.may_count(targets)

    def count_classes(self, prediction: Any, target: Any) -> int | None:
        is_by_index = _labels(prediction[:, 0], target)
        return prediction.shape[1] if is_by_index else None

    def count(self, prediction: Any, target: Any, classes: int | None = None) -> Count:
        if classes is None:
            return None
        return (torch.as_tensor(target) != self.ignored).sum()

    def labels(self, prediction: Any, target: Any) -> Labels:
        return self.hard.labels(prediction, target)

    def check(self, prediction: Any, target: Any) -> None:
        """Refuse a teacher whose outputs aren't like the student's."""
        shapes = [tuple(one.shape) for one in (self._logits, prediction) if one is not None]
        if len(set(shapes)) > 1 or prediction.ndim < 2 or prediction.shape[1] < 2:
            raise ConfigurationError(
                f"The teacher returned logits of shape {shapes[0]}, the student of shape "
                f"{shapes[-1]}. Both must be (N, C) or (N, C, ...), with the same C classes.",
                code="FK065",
            )

    def to(self, device: torch.device) -> None:
        self.teacher.to(device)

    def _counted(self, values: torch.Tensor, target: Any) -> torch.Tensor | None:
        """How many labels count; None where targets are no labels."""
        return (target != self.ignored).sum() if _labels(values, target) else None


def _labels(values: torch.Tensor, target: Any) -> bool:
    """Whether a target has a class number for each value."""
    return is_labels(target) and target.numel() == values.numel()


def _tensors(net: nn.Module) -> list[torch.Tensor]:
    return [*net.parameters(), *net.buffers()]


def _no_logits(hard: Loss) -> ConfigurationError:
    return ConfigurationError(
        f"hard={hard.name!r} doesn't take logits of classes, which the teacher's are compared "
        "with. Write hard='cross_entropy', and let both nets return logits.",
        code="FK065",
    )


def _no_inputs() -> ConfigurationError:
    return ConfigurationError(
        "Distillation needs the batch's inputs for its teacher, so it can't be called with outputs "
        "and targets. Give it to compile; in a step of your own, call super().training_step.",
        code="FK065",
    )
