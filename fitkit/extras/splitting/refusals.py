"""What can't be computed in parts: each said with its reason, before it would be wrong."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from fitkit.errors import ConfigurationError, with_code
from fitkit.model import Model
from fitkit.seams.optimizers import uses_closure

CODE = "FK068"
SPLIT = "out_of_memory='split'"


def check_model(model: Model, optimizers: list[Optimizer]) -> None:
    """Refuse a training whose updates can't be computed in parts.

    Raises:
        ConfigurationError: manual updates, an optimizer that computes the loss itself, or batch
            normalisation over the batch.
    """
    if not model.automatic_optimization:
        raise ConfigurationError(
            f"{SPLIT} computes a batch in parts and makes one update of them, but a training_step "
            "with automatic_optimization = False makes its updates itself. Leave the option out, "
            "and cut the batch in training_step.",
            code=CODE,
        )
    for optimizer in optimizers:
        if uses_closure(optimizer):
            raise ConfigurationError(
                f"{SPLIT} can't cut the batches of {type(optimizer).__name__}, which computes the "
                "loss again by itself. Use another optimizer, or smaller batches.",
                code=CODE,
            )
    for name, part in model._weights_module().named_modules():
        if isinstance(part, _BatchNorm) and part.training:
            raise ConfigurationError(
                f"{SPLIT} would give {name or type(part).__name__} ({type(part).__name__}) parts "
                "of batches, whose means and variances aren't the batch's. Freeze it by .eval(), "
                "use nn.GroupNorm in its place, or leave the option out and train with smaller "
                "batches.",
                code=CODE,
            )


def over_pairs(apart: float) -> str:
    """Return why an out-of-memory error stays one, for a loss over pairs of samples."""
    return with_code(
        f"{SPLIT} can't compute this batch in parts: the loss of the whole batch's outputs isn't "
        f"the mean of the parts' losses ({apart:.1e} apart). It compares the batch's samples with "
        "one another, or isn't a mean. Use smaller batches.",
        CODE,
    )
