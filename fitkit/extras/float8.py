"""8-bit floats: large layers multiply in them, the rest computes in bfloat16.

torchao replaces layers by new ones, without their hooks and training flags, and can't replace a
layer that is the whole net. Here a layer gets the new one's class and settings instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fitkit.arguments import check_flag
from fitkit.errors import ConfigurationError, require
from fitkit.seams.precisions import (
    FLOAT8,
    BFloat16Mixed,
    change_layer,
    changed_layers,
    check_pair,
    restore_dtypes,
    restore_layer,
)

EMULATES = ("cpu", "cuda")

MULTIPLE = 16
"""Both sizes of a layer must be multiples of this, for GPUs that multiply 8-bit floats."""

NAMED = 6
"""The most layers that a message names."""


class Float8Mixed(BFloat16Mixed):
    """`"fp8-mixed"`: linear layers multiply 8-bit floats, the rest is as in `"bf16-mixed"`.

    Inputs and weights are rounded to E4M3 and gradients to E5M2. Each tensor has its own scale,
    which is computed at each step (torchao's tensorwise recipe). The weights themselves stay in
    float32 under their names, so files work with any other precision.

    A layer takes part if it is torch's `nn.Linear`, both its sizes are multiples of 16, and it is
    neither the first nor the last one of the net. The first layer would round the data, and the
    last one the input of the loss. If you compile another precision, the layers are ordinary ones
    again from the next run on.

    Args:
        emulate: whether to compute products in float32 from numbers rounded to 8 bits. This works
            slowly on any CPU or CUDA device and shows what a training would learn. Default False:
            the device multiplies them itself, which needs compute capability 8.9 (RTX 40, L4,
            H100).
        every_layer: whether the first and the last layer take part, too. Default False.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(16, 16))
        >>> model.compile("adam", "mse", precision=fitkit.precisions.Float8Mixed(emulate=True))

    Raises:
        ArgumentTypeError: an argument isn't a bool.

    Reference: Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433.
    """

    name = FLOAT8

    def __init__(self, *, emulate: bool = False, every_layer: bool = False) -> None:
        emulate = check_flag("emulate", emulate)
        every_layer = check_flag("every_layer", every_layer)
        self.emulate = emulate
        self.every_layer = every_layer

    def check(self, device: torch.device) -> None:
        if not self.emulate or device.type not in EMULATES:
            check_pair(self.name, self.compute_dtype, device)
        require("torchao", "fp8", "precision='fp8-mixed'")

    def convert(self, module: nn.Module) -> None:
        # It takes seconds to import.
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        restore_dtypes(module)
        if any(isinstance(layer, nn.LazyLinear) for layer in module.modules()):
            raise ConfigurationError(
                "precision='fp8-mixed' chooses layers by their sizes, but the net has lazy ones, "
                "which a first batch settles. Call the net with one first: net(x[:2])."
            )
        layers = [layer for _, layer in _linear_layers(module)]
        chosen = [layer for layer in (layers if self.every_layer else layers[1:-1]) if _fits(layer)]
        if not chosen:
            raise ConfigurationError(_none_fits(module, every_layer=self.every_layer))
        # Gradients of weights are sums over the samples: a batch of 13 would have no kernel.
        config = Float8LinearConfig(emulate=self.emulate, pad_inner_dim=True)
        # Layers that are already right stay: a compiled net needn't be compiled again.
        right = {layer for layer in changed_layers(module) if layer.config == config}
        for layer in changed_layers(module):
            if layer not in right.intersection(chosen):
                restore_layer(layer)
        for layer in chosen:
            if layer not in right:
                change_layer(layer, convert_to_float8_training(layer, config=config))


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """torch's own linear layers. A subclass has its own forward, and stays as it is."""
    changed = set(changed_layers(module))
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear or (layer in changed and isinstance(layer, nn.Linear)):
            yield name, layer


def _fits(layer: nn.Linear) -> bool:
    weight = layer._parameters.get("weight")  # with torch's weight_norm it is computed
    return (
        weight is not None
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.shape[0] % MULTIPLE == 0
        and weight.shape[1] % MULTIPLE == 0
    )


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
