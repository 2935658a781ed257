"""What a precision decides."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from fitkit.distributed.precision.float8_layers import make_plain
from fitkit.distributed.precision.own_dtypes import give_back, own_dtype

NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
"""Surrounds a step and does nothing; shared, so that a step pays for no new object."""


class Precision:
    """In which number types a module keeps its parameters and computes.

    What is here is right for a module that computes in the dtype that it has. A precision of
    your own overrides what it decides otherwise.

    Attributes:
        name: as users write it.
        compute_dtype: of matrix products and convolutions; None for the module's own.
    """

    name = ""
    compute_dtype: torch.dtype | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing surrounds a forward, and outputs stay as they are."""
        kind = type(self)
        return kind.forward is Precision.forward and kind.predictions is Precision.predictions

    def check(self, device: torch.device) -> None:
        """Refuse a device that can't compute in this precision.

        Raises:
            ConfigurationError: with the table of what goes.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose arithmetic breaks down in this precision.

        Raises:
            ConfigurationError: with what to write instead.
        """

    def convert(self, module: torch.nn.Module) -> None:
        """Give the module's parameters and buffers this precision's dtype, in place.

        Here: those that an earlier "-true" precision has cast get their own dtype back (what
        it rounded off stays lost), and layers that multiplied 8-bit floats are ordinary again; all
        others stay as they are.

        Raises:
            ConfigurationError: a module that can't learn in this precision.
        """
        make_plain(module)
        give_back(module)

    def input_dtype(self, module: torch.nn.Module) -> torch.dtype:
        """The dtype that floating inputs get before a step, also before `convert` was called."""
        return own_dtype(module)

    def forward(self, device_type: str) -> AbstractContextManager[Any]:
        """Surrounds the net's forward.

        Args:
            device_type: of the net's device (`"cpu"`, `"cuda"`, …).
        """
        return NOTHING

    def predictions(self, tree: Any) -> Any:
        """A net's outputs in the dtype in which losses and metrics are computed.

        Here and in the precisions that compute in no half type: the very same object.
        """
        return tree

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """What keeps small gradients from vanishing; None where none vanish.

        There is one for all of a training, because its scale adapts from step to step.
        """
        return None
