"""Helpers for the tests of metrics."""

import pytest
import torch

from fitkit.metrics import CompiledMetrics
from fitkit.outputs import LossHint


@pytest.fixture
def measure():
    """Sums metrics up over whole tensors, split into uneven batches, and returns the results."""

    def run(metrics, prediction, target, *, hint=None, weighted=None, weight=None, batch=7):
        hint = hint or LossHint()
        meters = CompiledMetrics(metrics, weighted).begin()
        with torch.no_grad():
            for start in range(0, len(target), batch):
                part = slice(start, start + batch)
                meters.start(prediction[part], target[part], lambda _: hint)
                meters.update(
                    prediction[part], target[part], None if weight is None else weight[part]
                )
        return meters.results()

    return run
