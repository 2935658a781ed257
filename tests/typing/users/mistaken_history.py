# pyright: strict
"""A list beside a number."""

import torch

import fitkit

model = fitkit.Model(torch.nn.Linear(4, 1))
history = model.fit(torch.rand(8, 4), torch.rand(8, 1))
if history.history["loss"] < 0.1:  # error: reportOperatorIssue
    print("learned")
