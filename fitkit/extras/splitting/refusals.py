"""What can't be computed in parts: each said with its reason, before it would be wrong."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError, with_code
from fitkit.model import Model
from fitkit.seams.networks import guest_of
from fitkit.seams.optimizers import uses_closure

CODE = "FK068"
SPLIT = "out_of_memory='split'"


def check_updates(model: Model, optimizer: Optimizer) -> None:
    """Refuse updates that compute their batches by themselves.

    Raises:
        ConfigurationError: manual updates, or an optimizer that computes the loss itself.
    """
    if not model.automatic_optimization:
        raise ConfigurationError(
            f"{SPLIT} computes a batch in parts and makes one update of them, but a training_step "
            "with automatic_optimization = False makes its updates itself. Leave the option out, "
            "and cut the batch in training_step.",
            code=CODE,
        )
    if uses_closure(optimizer):
        raise ConfigurationError(
            f"{SPLIT} can't cut the batches of {type(optimizer).__name__}, which computes the "
            "loss again by itself. Use another optimizer, or smaller batches.",
            code=CODE,
        )


def check_layers(model: Model) -> None:
    """Refuse layers in training mode that a batch's parts would change otherwise than the batch.

    Raises:
        ConfigurationError: batch normalisation over the batch, statistics that move with each
            forward, or weights that do.
    """
    found = dict(model._weights_module().named_modules())
    layers = getattr(getattr(guest_of(model), "given", None), "_flatten_layers", None)
    if layers is not None:  # Keras's
        found |= {layer.name: layer for layer in layers()}
    for name, part in found.items():
        if (why := _changed_by_parts(part)) is None:
            continue
        kind = type(part).__name__
        raise ConfigurationError(
            f"{SPLIT} would give {name or kind} ({kind}) parts of batches, {why}, or leave the "
            "option out and train with smaller batches.",
            code=CODE,
        )


def _changed_by_parts(layer: nn.Module) -> str | None:
    """Return why a layer can't have parts of batches, and what to do; None if it can."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(layer, keras.layers.BatchNormalization):
        frozen = "layer.trainable = False"
        is_frozen = not layer.trainable
        return None if is_frozen else BATCH_NORM.format(other="GroupNormalization", frozen=frozen)
    if not layer.training:
        return None
    if isinstance(layer, _BatchNorm):
        return BATCH_NORM.format(other="nn.GroupNorm", frozen=".eval()")
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return "each of which moves its running statistics. Give it track_running_stats=False"
    hooks = layer._forward_pre_hooks.values()
    if isinstance(layer, _SpectralNorm) or any(isinstance(one, SpectralNorm) for one in hooks):
        return "each of which moves its spectral norm's estimate. Freeze it by .eval()"
    return None


BATCH_NORM = (
    "whose means and variances aren't the batch's. Freeze it by {frozen}, use {other} in its place"
)


def not_a_mean(apart: float, *, is_own: bool) -> str:
    """Return why an out-of-memory error stays one, for a step whose parts aren't the batch.

    Args:
        is_own: whether the step is the user's.
    """
    instead = " Or return {'loss': loss, 'count': what it is the mean over}." if is_own else ""
    return with_code(
        f"Memory ran out, and {SPLIT} can't compute this batch in parts: the loss of some of its "
        f"rows isn't the mean of their halves' losses ({apart:.1e} apart). It compares rows with "
        f"one another, or is a mean over something else than rows.{instead} Use smaller batches.",
        CODE,
    )


def not_its_halves(apart: float) -> str:
    """Return why an out-of-memory error stays one, for a step that learns nothing."""
    return with_code(
        f"Memory ran out, and {SPLIT} can't compute this batch in parts: what some of its rows "
        f"give isn't what their halves give ({apart:.1e} apart). It compares rows with one "
        "another, or has sums or means over something else than rows. Return rows, their means, "
        "or {'loss': loss, 'count': what it is the mean over}. Or use smaller batches.",
        CODE,
    )


def without_rows(why: str) -> str:
    """Return why an out-of-memory error stays one, for a batch without rows to cut.

    Args:
        why: a sentence of it.
    """
    return with_code(
        f"Memory ran out, and {SPLIT} can't compute this batch in parts. {why} Use smaller "
        "batches.",
        CODE,
    )


def unjoinable(error: Exception) -> str:
    """Return why an out-of-memory error stays one, for parts that give what can't be joined."""
    return without_rows(f"What its parts give can't be joined: {error}. Return rows or means.")


def over_pairs(apart: float) -> str:
    """Return why an out-of-memory error stays one, for a loss over pairs of samples."""
    return with_code(
        f"{SPLIT} can't compute this batch in parts: the loss of the whole batch's outputs isn't "
        f"the mean of the parts' losses ({apart:.1e} apart). It compares the batch's samples with "
        "one another, or isn't a mean. Use smaller batches.",
        CODE,
    )
