# pyright: strict
"""A loss, a list, or values by name."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import fitkit

x: NDArray[np.float32] = np.ones((64, 4), "float32")
y: NDArray[np.int64] = np.zeros(64, "int64")
model = fitkit.Model(torch.nn.Linear(4, 3))
model.compile("adam", "cross_entropy", metrics=["accuracy"])
values = model.evaluate(x, y, return_dict=True)
assert_type(values, dict[str, Any])
print(sorted(values), values["loss"])
loss, accuracy = model.evaluate(x, y)
print(loss, accuracy)
model.compile(metrics=[])
alone: float = model.evaluate(x, y)
print(f"{alone:.3f}", round(model.evaluate(x, y, verbose=0), 3) < 0.5)
by_batch = model.test_on_batch(x, y, return_dict=True)
assert_type(by_batch, dict[str, Any])


def either(as_dict: bool) -> Any:
    return model.evaluate(x, y, return_dict=as_dict)
