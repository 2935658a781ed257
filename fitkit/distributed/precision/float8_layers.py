"""Linear layers that multiply 8-bit floats, and back.

torchao puts new layers in the old ones' places, without their hooks and training flags, and cannot
where a net is itself one layer. Here a layer gets the new one's class and settings and stays the
object that it is, with its parameters: optimizers, hooks and names go on with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fitkit.errors import ConfigurationError, missing_package

MULTIPLE = 16
"""Of which both sizes of a layer must be multiples, for GPUs that multiply 8-bit floats."""

RECORD = "_added_for_float8"
"""The layer's attribute: the names of those that make it multiply 8-bit floats."""

NAMED = 6
"""Layers that a message names."""


def check_installed() -> None:
    """Refuse to begin without torchao.

    Raises:
        MissingPackageError: naming the extra that brings it.
    """
    if importlib.util.find_spec("torchao") is None:
        raise missing_package("torchao", "fp8", "precision='fp8-mixed'")


def settings(*, emulate: bool) -> Any:
    """torchao's `Float8LinearConfig`: one scale a tensor, found anew at each step.

    Args:
        emulate: whether products are made in float32, of numbers rounded to 8 bits.
    """
    # It takes seconds to import.
    from torchao.float8 import Float8LinearConfig

    # Gradients of weights are sums over the samples: a batch of 13 would have no kernel.
    return Float8LinearConfig(emulate=emulate, pad_inner_dim=True)


def make_float8(module: nn.Module, config: Any, *, every_layer: bool) -> None:
    """Let a module's linear layers multiply 8-bit floats, in place; those that do already stay.

    Args:
        config: as of `settings`.
        every_layer: whether the first and the last one do, too.

    Raises:
        ConfigurationError: no layer can, or the sizes aren't known yet.
    """
    if any(isinstance(layer, nn.LazyLinear) for layer in module.modules()):
        raise ConfigurationError(
            "precision='fp8-mixed' chooses layers by their sizes, but the net has lazy ones, which "
            "a first batch settles. Call the net with one first: net(x[:2])."
        )
    chosen = chosen_layers(module, every_layer=every_layer)
    if not chosen:
        raise ConfigurationError(_none_fits(module, every_layer=every_layer))
    wanted = set(chosen)
    for layer in _float8_layers(module):
        if layer not in wanted or layer.config != config:
            _make_plain(layer)
    for layer in chosen:
        if RECORD not in vars(layer):
            _make_float8(layer, config)


def make_plain(module: nn.Module) -> None:
    """Undo `make_float8`, where it was called."""
    for layer in _float8_layers(module):
        _make_plain(layer)


@contextlib.contextmanager
def plain_layers(module: nn.Module) -> Iterator[None]:
    """Have a module's layers ordinary ones meanwhile: for a file that runs without torchao."""
    layers = _float8_layers(module)
    before = [(type(layer), dict(vars(layer))) for layer in layers]
    make_plain(module)
    try:
        yield
    finally:
        for layer, (kind, attributes) in zip(layers, before, strict=True):
            added = {name: attributes[name] for name in (*attributes[RECORD], RECORD)}
            vars(layer).update(added)
            layer.__class__ = kind


def chosen_layers(module: nn.Module, *, every_layer: bool) -> list[nn.Linear]:
    """The linear layers that can multiply 8-bit floats, but for the module's first and last.

    Layers of a class of their own stay as they are: their forward is theirs.

    Args:
        every_layer: whether the first and the last are among them.
    """
    layers = [layer for _, layer in _linear_layers(module)]
    return [layer for layer in (layers if every_layer else layers[1:-1]) if _fits(layer)]


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear or (RECORD in vars(layer) and isinstance(layer, nn.Linear)):
            yield name, layer


def _fits(layer: nn.Linear) -> bool:
    weight = layer._parameters.get("weight")  # with torch's weight_norm it is computed
    return (
        weight is not None
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.shape[0] % MULTIPLE == 0
        and weight.shape[1] % MULTIPLE == 0
    )


def _float8_layers(module: nn.Module) -> list[Any]:
    return [layer for layer in module.modules() if RECORD in vars(layer)]


def _make_float8(layer: nn.Linear, config: Any) -> None:
    from torchao.float8 import convert_to_float8_training

    made = convert_to_float8_training(layer, config=config)
    added = {name: value for name, value in vars(made).items() if name not in vars(layer)}
    vars(layer).update(added, **{RECORD: tuple(added)})
    layer.__class__ = type(made)


def _make_plain(layer: Any) -> None:
    for name in (*vars(layer)[RECORD], RECORD):
        del vars(layer)[name]
    layer.__class__ = nn.Linear


def _none_fits(module: nn.Module, *, every_layer: bool) -> str:
    sizes = [
        f"{name or 'itself'} ({layer.in_features} to {layer.out_features})"
        for name, layer in _linear_layers(module)
    ]
    more = f" and {len(sizes) - NAMED} more" if len(sizes) > NAMED else ""
    has = ", ".join(sizes[:NAMED]) + more if sizes else "none"
    which = or_all = ""
    if not every_layer:
        which = ", all but the first and the last one of a net"
        or_all = ", or Float8Mixed(every_layer=True) of fitkit.precisions"
    return (
        "precision='fp8-mixed' finds no layer to compute in 8 bits. It takes those of torch's "
        f"nn.Linear whose sizes are both multiples of {MULTIPLE}{which}. Here there are: {has}. "
        f"Write precision='bf16-mixed'{or_all}."
    )
