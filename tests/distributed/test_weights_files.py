"""Files of weights that callbacks write while ranks hold different ones."""

import copy

import pytest
import torch

import fitkit
from fitkit.callbacks import ModelCheckpoint
from fitkit.checkpoint import load_weights
from fitkit.strategies import BaguaStrategy

pytestmark = pytest.mark.timeout(100)


def test_weights_saved_within_an_epoch_are_the_mean_of_what_the_ranks_have(tmp_path):
    torch.manual_seed(0)
    x, y, net = torch.randn(32, 4).double(), torch.randn(32, 2).double(), torch.nn.Linear(4, 2)
    replicas = [copy.deepcopy(net.double()) for _ in range(2)]
    model = fitkit.Model(net)
    # Nothing is exchanged before the fifth step.
    strategy = BaguaStrategy("decentralized", communication_interval=5)
    model.compile(
        torch.optim.SGD(net.parameters(), 0.1),
        "mse",
        accelerator="cpu",
        devices=2,
        strategy=strategy,
    )
    model.fit(
        x,
        y,
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=[
            ModelCheckpoint(tmp_path / f"{{batch}}{suffix}", save_weights_only=True, save_freq=3)
            for suffix in (".safetensors", ".dcp")
        ],
    )
    for rank, replica in enumerate(replicas):
        optimizer = torch.optim.SGD(replica.parameters(), 0.1)
        for step in range(3):
            rows = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
            optimizer.zero_grad()
            (replica(x[rows]) - y[rows]).square().mean().backward()
            optimizer.step()
    for suffix in (".safetensors", ".dcp"):
        load_weights(tmp_path / f"3{suffix}", net)
        for found, one, other in zip(
            net.parameters(), *(r.parameters() for r in replicas), strict=True
        ):
            torch.testing.assert_close(found, (one + other) / 2, rtol=0, atol=1e-12)
