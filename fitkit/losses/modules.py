"""The losses of `torch.nn`: what is known of each, and its values before the mean."""

from __future__ import annotations

import copy
import dataclasses

from torch import nn

from fitkit.errors import ConfigurationError
from fitkit.losses.functions import CountedLabels, MeanOf, SumPerSample
from fitkit.losses.names import LOSSES, Definition

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
    """What is known of `module`; None for one that isn't torch's, or has a `forward` of its own.

    The mean is `module` itself, bit for bit; with `reduction="none"` the mean of its values.

    Raises:
        ConfigurationError: it sums. A sum grows with the batch, and fitkit's losses, their logs and
            their averages over devices are means over samples.
    """
    name = _loss_name(module)
    if name is None:
        return None
    reduction = getattr(module, "reduction", "mean")
    if reduction == "sum":
        raise ConfigurationError(
            f"loss={module!r} has reduction='sum', but fitkit's losses are means over samples: a "
            "sum depends on the batch size and on the number of devices. Write "
            "reduction='mean', or a callable such as "
            "lambda prediction, target: module(prediction, target) / len(target)."
        )
    each = unreduced(module)
    known = LOSSES[name]
    counted = None
    if isinstance(module, (nn.CrossEntropyLoss, nn.NLLLoss)) and reduction != "none":
        counted = CountedLabels(module.ignore_index, module)
    return dataclasses.replace(
        known,
        mean=MeanOf(each) if reduction == "none" else module,
        each=SumPerSample(each) if reduction == "batchmean" else each,
        ignore_index=getattr(module, "ignore_index", known.ignore_index),
        counted=counted,
    )


def unreduced(module: nn.Module) -> nn.Module:
    """A shallow copy with `reduction="none"`; it shares buffers, so both move together."""
    twin = copy.copy(module)
    twin.reduction = "none"  # type: ignore[assignment]
    return twin


def _loss_name(module: nn.Module) -> str | None:
    for ancestor in type(module).__mro__:
        if ancestor in KNOWN:
            return KNOWN[ancestor] if type(module).forward is ancestor.forward else None
    return None
