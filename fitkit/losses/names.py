"""The losses whose meaning fitkit knows: those that go by a name, and those of `torch.nn`.

Torch's names have torch's meaning, Keras's names Keras's.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import nn

from fitkit.errors import ConfigurationError
from fitkit.losses import formulas
from fitkit.losses.formulas import CountedLabels, LossFunction, Match, SumPerSample
from fitkit.outputs import IGNORED, LossHint
from fitkit.registry import Registry


@dataclasses.dataclass(frozen=True)
class Definition:
    """A loss whose meaning fitkit knows.

    Attributes:
        each: `(prediction, target)`, matched, to values of shape (N, ...).
        match: how the target is brought to the prediction, from `formulas.py`.
        hint: what the loss says about predictions and task.
        mean: `(prediction, target)`, matched, to the mean over the batch; None: that of `each`.
        twin: the loss for a net that gives the other form: of one that takes probabilities, the
            one that takes logits, and the other way round. None where there is none.
        rows_sum_to_one: predictions are probabilities of classes, which must sum to 1.
        shares: targets of the predictions' shape are one-hot, or classes' shares that sum to 1.
        clips: slightly wrong probabilities are clipped, rather than refused by torch.
        signs: labels are -1 and 1.
        zeros: labels may be 0 and 1 instead.
        lists: labels are lists of class indices.
        ignore_index: a label that isn't a class and doesn't count, where the loss has one.
        counted: what the mean over class indices divides by, where that isn't their number.
        joins: whether a sample's value depends on that sample alone, so that several batches may be
            computed as one.
    """

    each: LossFunction
    match: Match
    hint: LossHint
    mean: LossFunction | None = None
    twin: str | None = None
    rows_sum_to_one: bool = False
    shares: bool = False
    clips: bool = False
    signs: bool = False
    zeros: bool = False
    lists: bool = False
    ignore_index: int | None = None
    counted: CountedLabels | None = None
    joins: bool = True


UNKNOWN = LossHint()
REGRESSION = LossHint(task="regression")
# Torch's axis of classes is 1.
TORCH_LOGITS = LossHint("logits", "classes", class_axis=1)
TORCH_LOG_PROBABILITIES = LossHint("log_probabilities", "classes", class_axis=1)
BINARY_LOGITS = LossHint("logits", "binary")
BINARY_PROBABILITIES = LossHint("probabilities", "binary")


NamedLoss: TypeAlias = Definition | Callable[[Any, Any], Any]
"""What a loss's name may stand for: a definition, a function, or a loss of `torch.nn`."""


def _can_have_a_name(entry: Any) -> bool:
    """Whether an entry is a loss that models can share: one without parameters or a mode."""
    if isinstance(entry, nn.Module):
        return type(entry).__module__.startswith("torch.nn.")
    is_function = callable(entry) and not isinstance(entry, type)
    return isinstance(entry, Definition) or is_function


class LossNames(Registry[NamedLoss]):
    """The losses by name. Two names mean others with an underscore between cross and entropy.

    `binary_cross_entropy` is torch's, `binary_crossentropy` Keras's; `cross_entropy` is torch's,
    and a bare `crossentropy` one of Keras's three, which Keras chooses by the data's shape. There
    blanks and hyphens count as underscores; elsewhere none of them matters.
    """

    def add_spelled(self, name: str, entry: NamedLoss) -> None:
        """Register `entry` under a name whose underscores matter."""
        self._entries[name] = entry
        self._spelling[name] = name

    def __contains__(self, name: str) -> bool:
        spelled = _spelled(name)
        return spelled not in _AMBIGUOUS and (
            spelled in self._entries or super().__contains__(name)
        )

    def _found(self, name: str) -> NamedLoss:
        """Return the loss called `name`.

        Raises:
            ConfigurationError: none is, or it may be one of several.
        """
        spelled = _spelled(name)
        if spelled in _AMBIGUOUS:
            choices = ", ".join(repr(choice) for choice in _CROSSENTROPIES)
            raise ConfigurationError(
                f"loss={name!r} may mean several losses. Write one of {choices}. The first takes "
                "logits, the others probabilities."
            )
        return self._entries[spelled] if spelled in self._entries else super()._found(name)


_AMBIGUOUS = ("crossentropy", "ce")
_CROSSENTROPIES = ("cross_entropy", "sparse_categorical_crossentropy", "categorical_crossentropy",
                   "binary_crossentropy")  # fmt: skip


def _spelled(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


LOSSES = LossNames(
    "loss",
    "A torch.nn loss and a callable (prediction, target) are losses too.",
    group="fitkit.losses",
    accepts=_can_have_a_name,
    expected="a function (prediction, target), a torch.nn loss, or a Definition (fitkit.seams)",
)

TORCH_FUNCTIONS: dict[object, Definition] = {}
"""What is known of the functions in `torch.nn.functional`."""


def _torch(
    name: str,
    *aliases: str,
    function: LossFunction,
    match: Match = formulas.elements,
    hint: LossHint = REGRESSION,
    ignore_index: int | None = None,
    **options: Any,
) -> Definition:
    definition = Definition(
        partial(function, reduction="none"),
        match,
        hint,
        mean=function,
        shares=match is formulas.classes,
        ignore_index=ignore_index,
        counted=None if ignore_index is None else CountedLabels(ignore_index),
        **options,
    )
    TORCH_FUNCTIONS[function] = definition
    LOSSES.add(name, definition, *aliases)
    return definition


_BCE = _torch(
    "bce", "bce_loss", "binary_cross_entropy_loss",
    function=formulas.torch_binary_cross_entropy,
    hint=BINARY_PROBABILITIES, twin="bce_with_logits",
)  # fmt: skip
LOSSES.add_spelled("binary_cross_entropy", _BCE)
TORCH_FUNCTIONS[F.binary_cross_entropy] = _BCE

_torch(
    "cross_entropy", "cross_entropy_loss",
    function=F.cross_entropy, match=formulas.classes, hint=TORCH_LOGITS,
    twin="sparse_categorical_crossentropy", ignore_index=IGNORED,
)  # fmt: skip
_torch(
    "nll", "nll_loss",
    function=F.nll_loss, match=formulas.indices, hint=TORCH_LOG_PROBABILITIES,
    twin="cross_entropy", ignore_index=IGNORED,
)  # fmt: skip
_torch(
    "bce_with_logits", "bce_with_logits_loss", "binary_cross_entropy_with_logits",
    function=F.binary_cross_entropy_with_logits, hint=BINARY_LOGITS, twin="bce",
)  # fmt: skip
_torch("mse", "mse_loss", "mean_squared_error", function=F.mse_loss)
_torch("l1", "l1_loss", "mae", "mean_absolute_error", function=F.l1_loss)
_torch("huber", "huber_loss", function=F.huber_loss)
_torch("smooth_l1", "smooth_l1_loss", function=F.smooth_l1_loss)
_torch("poisson_nll", "poisson_nll_loss", function=F.poisson_nll_loss)
_torch(
    "soft_margin", "soft_margin_loss",
    function=F.soft_margin_loss, hint=UNKNOWN, signs=True,
)  # fmt: skip
_torch(
    "multi_margin", "multi_margin_loss",
    function=F.multi_margin_loss, match=formulas.indices, hint=TORCH_LOGITS,
)  # fmt: skip
_torch(
    "multilabel_margin", "multilabel_margin_loss",
    function=F.multilabel_margin_loss, match=formulas.index_lists, hint=UNKNOWN, lists=True,
)  # fmt: skip
_torch(
    "multilabel_soft_margin", "multilabel_soft_margin_loss",
    function=F.multilabel_soft_margin_loss, hint=BINARY_LOGITS, twin="bce",
    joins=False,  # predictions of one dimension are one sample to it
)  # fmt: skip
_torch(
    "hinge_embedding", "hinge_embedding_loss",
    function=F.hinge_embedding_loss, hint=UNKNOWN, signs=True,
)  # fmt: skip

# "batchmean" is the divergence itself; torch's default "mean" divides it by the classes too.
LOSSES.add(
    "kl_div",
    Definition(
        SumPerSample(partial(F.kl_div, reduction="none")),
        formulas.vectors,
        LossHint("log_probabilities", "classes"),
        mean=partial(F.kl_div, reduction="batchmean"),
    ),
)

for _name, *_aliases in (
    ("sparse_categorical_crossentropy",),
    ("categorical_crossentropy",),
    ("categorical_focal_crossentropy",),
    ("binary_crossentropy",),
    ("binary_focal_crossentropy",),
    ("mean_absolute_percentage_error", "mape"),
    ("mean_squared_logarithmic_error", "msle"),
    ("log_cosh",),
    ("cosine_similarity",),
    ("kl_divergence", "kld", "kullback_leibler_divergence"),
    ("poisson",),
    ("hinge",),
    ("squared_hinge",),
    ("categorical_hinge",),
):
    LOSSES.promise(f"fitkit.extras.keras_losses:{_name.upper()}", _name, *_aliases)


KNOWN: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll",
    nn.BCELoss: "bce",
    nn.BCEWithLogitsLoss: "bce_with_logits",
    nn.MSELoss: "mse",
    nn.L1Loss: "l1",
    nn.HuberLoss: "huber",
    nn.SmoothL1Loss: "smooth_l1",
    nn.KLDivLoss: "kl_div",
    nn.PoissonNLLLoss: "poisson_nll",
    nn.SoftMarginLoss: "soft_margin",
    nn.MultiMarginLoss: "multi_margin",
    nn.MultiLabelMarginLoss: "multilabel_margin",
    nn.MultiLabelSoftMarginLoss: "multilabel_soft_margin",
    nn.HingeEmbeddingLoss: "hinge_embedding",
}
"""The name of the loss that each class computes."""


def known_module(module: nn.Module) -> Definition | None:
    """Return what is known of `module`; None for one that isn't torch's, or has a `forward` of its
    own.

    The mean is `module` itself, bit for bit; with `reduction="none"` the mean of its values, of
    those whose label counts.
    """
    name = _loss_name(module)
    if name is None:
        return None
    reduction = getattr(module, "reduction", "mean")
    each = unreduced(module)
    known = LOSSES[name]
    assert isinstance(known, Definition)  # fitkit's own names can't be taken
    counted = None
    if isinstance(module, (nn.CrossEntropyLoss, nn.NLLLoss)):
        # Values come with the weights of their classes, so their mean is over their number.
        counted = CountedLabels(module.ignore_index, None if reduction == "none" else module)
    return dataclasses.replace(
        known,
        each=SumPerSample(each) if reduction == "batchmean" else each,
        mean=None if reduction == "none" else module,
        ignore_index=getattr(module, "ignore_index", known.ignore_index),
        counted=counted,
    )


def unreduced(module: nn.Module) -> nn.Module:
    """Return a shallow copy with `reduction="none"`; it shares buffers, so both move together."""
    twin = copy.copy(module)
    twin.reduction = "none"  # type: ignore[assignment]
    return twin


def _loss_name(module: nn.Module) -> str | None:
    for ancestor in type(module).__mro__:
        if ancestor in KNOWN:
            return KNOWN[ancestor] if type(module).forward is ancestor.forward else None
    return None
