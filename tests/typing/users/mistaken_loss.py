# pyright: strict
"""A loss of one argument."""

import torch

import fitkit

model = fitkit.Model(torch.nn.Linear(4, 1))
model.compile("adam", lambda prediction: prediction.mean())  # error: reportArgumentType
