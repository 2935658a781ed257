# pyright: strict
"""An argument of another type than the subclass takes."""

import torch

import fitkit


class Own(fitkit.Model):
    def __init__(self, width: int) -> None:
        super().__init__(torch.nn.Linear(width, 1))


Own("wide")  # error: reportArgumentType
