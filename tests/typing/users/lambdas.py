# pyright: strict
"""Losses, metrics, schedules and transforms in a line."""

import functools

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import fitkit

model = fitkit.Model(torch.nn.Linear(4, 1))
model.compile(
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    loss=lambda prediction, target: (prediction - target).abs().mean(),
    metrics=["mae", lambda prediction, target: (prediction - target).square().mean()],
    lr_scheduler=lambda optimizer: StepLR(optimizer, 2),
    batch_transforms=[lambda x: x * 2, lambda x, y: (x, y)],
)
model.compile(
    torch.optim.AdamW,
    loss={"a": lambda p, t: (p - t).abs().mean(), "b": torch.nn.functional.mse_loss},
    lr_scheduler=CosineAnnealingLR,
)
model.compile(
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    functools.partial(torch.nn.functional.cross_entropy, label_smoothing=0.1),
    lr_scheduler={"scheduler": functools.partial(StepLR, step_size=2), "interval": "step"},
)
