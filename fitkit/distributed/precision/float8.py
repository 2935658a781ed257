"""Products of large layers in 8-bit floats."""

from __future__ import annotations

import torch
from torch import nn

from fitkit.arguments import check_flag
from fitkit.distributed.precision import float8_layers
from fitkit.distributed.precision.base import FLOAT8, check_pair
from fitkit.distributed.precision.mixed import BFloat16Mixed
from fitkit.distributed.precision.own_dtypes import give_back

EMULATES = ("cpu", "cuda")


class Float8Mixed(BFloat16Mixed):
    """`"fp8-mixed"`: linear layers multiply 8-bit floats, the rest is as in `"bf16-mixed"`.

    Inputs and weights are rounded to E4M3 and gradients to E5M2, each tensor with a scale of its
    own that is found anew at each step (torchao's tensorwise recipe). The weights themselves stay
    in float32 under their names, so files go from and to any other precision.

    A layer takes part if it is torch's `nn.Linear`, both its sizes are multiples of 16, and it is
    neither the first nor the last one of the net: the first rounds the data themselves, the last
    what the loss is computed from. Compiled to another precision the layers are ordinary ones
    again with the next run.

    Args:
        emulate: whether products are made in float32 of numbers rounded to 8 bits: any CPU or CUDA
            device then shows what a training would learn, slowly. Default False: the device
            multiplies them itself, which takes compute capability 8.9 (RTX 40, L4, H100).
        every_layer: whether the first and the last layer take part, too. Default False.

    Raises:
        ArgumentTypeError: something else than a bool.

    Reference: Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433.
    """

    name = FLOAT8

    def __init__(self, *, emulate: bool = False, every_layer: bool = False) -> None:
        check_flag("emulate", emulate)
        check_flag("every_layer", every_layer)
        super().__init__()
        self.emulate = emulate
        self.every_layer = every_layer

    def check(self, device: torch.device) -> None:
        if not self.emulate or device.type not in EMULATES:
            check_pair(self.name, self.half, device)
        float8_layers.check_installed()

    def convert(self, module: nn.Module) -> None:
        give_back(module)
        config = float8_layers.settings(emulate=self.emulate)
        float8_layers.make_float8(module, config, every_layer=self.every_layer)
