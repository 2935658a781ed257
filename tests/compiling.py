"""What the tests of `jit_compile` share."""

import shutil

import pytest
import torch
from torch import nn

# Traced and differentiated as for torch's own compiler, but computed operation by operation.
TRACED = {"backend": "aot_eager"}

HAS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler"
)


def every_second(cases):
    """The cases of a test, of which every second is among the slow ones."""
    return [
        case if number % 2 == 0 else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def compiled_anew():
    """How many graphs torch has compiled since this was called before."""
    found = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    torch._dynamo.utils.counters.clear()
    return found


class Branching(nn.Module):
    """A net that no graph can hold: it branches on its data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        if float(x.sum()) > 1e6:
            x = x + 1
        return self.layer(x)
