"""A training's settings as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from fitkit.callbacks.rates import optimizers_of, rate_of
from fitkit.plain_settings import plain_settings

if TYPE_CHECKING:
    from fitkit.model import Model


def hyperparameters_of(model: Model, params: dict[str, Any]) -> dict[str, Any]:
    """What a training was asked: strings, numbers and flags by name.

    The model's own `hparams`, where it has them; what `compile` was given, with the optimizer's
    class and rate where it was left out; `epochs`, `batch_size` and `world_size`; the net's name
    and its number of parameters. An argument that is None has no entry.
    """
    own = getattr(model, "hparams", None)
    net = model._weights_module()
    return {
        **plain_settings(own if isinstance(own, dict) else {}),
        **plain_settings(model._fitkit.compilation.given),
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers_of(model)),
        "learning_rate": rate_of(model),
        **plain_settings({name: params.get(name) for name in ("epochs", "batch_size")}),
        "world_size": model.world_size,
        "net": type(net).__name__,
        "parameters": sum(p.numel() for p in net.parameters() if not is_lazy(p)),
    }
