"""Norms and tokens a second over ranks: those of one process."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import NormMonitor, ThroughputMonitor

pytestmark = pytest.mark.timeout(120)

X = torch.randint(20, (64, 6), generator=torch.Generator().manual_seed(0))


def trained(ranks, strategy):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(48, 3)).double()
    model, norms, speed = fitkit.Model(net), NormMonitor(), ThroughputMonitor(tokens=True)
    speed._clock = iter(range(10_000)).__next__  # a step takes a second, on each rank
    model.compile("sgd", "cross_entropy", learning_rate=0.5, gradient_clip_val=0.1)
    model.compile(accelerator="cpu", devices=ranks, strategy=strategy)
    data = {"batch_size": 16 // ranks, "shuffle": False, "verbose": 0}
    history = model.fit(X, X[:, 0] % 3, epochs=2, callbacks=[norms, speed], **data).history
    return norms.norms, history


@pytest.mark.parametrize("strategy", ["ddp_spawn", "fsdp"])
def test_norms_and_tokens_are_those_of_one_process(strategy):
    (norms, one), (found, two) = trained(1, "auto"), trained(2, strategy)
    assert len(norms) == 8
    assert found == pytest.approx(norms, rel=1e-9)
    for name in ("grad_norm", "param_norm", "tokens_per_sec"):
        assert two[name] == pytest.approx(one[name], rel=1e-9)
    assert one["tokens_per_sec"] == [3 * 16 * 6 / 4] * 2
