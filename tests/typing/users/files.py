# pyright: strict
"""Saving, loading and going on."""

from pathlib import Path

import torch
from typing_extensions import assert_type

import fitkit

folder = Path("runs")
model = fitkit.Model(torch.nn.Linear(4, 1))
model.compile("adam", "mse", accumulate_grad_batches=2, gradient_clip_val=1.0)
model.fit(torch.rand(64, 4), torch.rand(64, 1), resume_from="last")
model.save(folder / "model.h5")
model.save_weights(folder / "model.safetensors")
again = fitkit.load_model(folder / "model.h5", torch.nn.Linear(4, 1))
assert_type(again, fitkit.Model)
again.load_weights(folder / "model.safetensors")
print(again.count_params(), again.is_global_zero, again.summary(torch.rand(1, 4)))
try:
    model.load("nowhere.h5")
except fitkit.FitkitError as error:
    print(error.code, error)
