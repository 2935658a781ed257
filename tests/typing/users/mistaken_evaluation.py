# pyright: strict
"""Values by name, taken for a number."""

import torch

import fitkit

model = fitkit.Model(torch.nn.Linear(4, 1))
loss: float = model.evaluate(  # error: reportAssignmentType
    torch.rand(8, 4), torch.rand(8, 1), return_dict=True
)
