"""Tests that need a CUDA device; elsewhere they are skipped. `make test-gpu` runs them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()
