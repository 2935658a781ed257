"""What a precision decides."""

from __future__ import annotations

import torch


class Precision:
    """In which number types a module keeps its parameters and computes.

    Attributes:
        name: as users write it.
    """

    name = ""

    def input_dtype(self, module: torch.nn.Module) -> torch.dtype:
        """The dtype that floating inputs and targets get before a step."""
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
        return torch.get_default_dtype()
