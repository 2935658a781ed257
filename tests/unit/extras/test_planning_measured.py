"""What `fitkit.plan` says, against what torch's profiler has measured."""

import pytest
import torch

from benchmarks.model_memory import NETS, measured, planned

pytestmark = pytest.mark.slow  # the profiler takes seconds to begin


@pytest.mark.parametrize("name", ["MLP", "transformer", "LoRA"])
def test_a_plan_comes_within_15_percent(name):
    make, batch = NETS[name]
    torch.manual_seed(0)
    assert planned(make(), batch()) == pytest.approx(measured(make(), batch()), rel=0.15)
