"""`fsdp` with parts that change when they compute, or that outer ones fill."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.strategies import FSDPStrategy
from tests.nets import dense, normal
from tests.reference import assert_same_weights, plain_loop, slices

pytestmark = pytest.mark.timeout(150)

X = normal(32, 4, seed=1).double()
Y = torch.zeros(32, 2).double()


class Block(nn.Module):
    def __init__(self, kind=nn.BatchNorm1d):
        super().__init__()
        self.first, self.norm = nn.utils.spectral_norm(nn.Linear(4, 4)), kind(4)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.first(x)))


def test_recomputed_blocks_count_a_batch_once_in_their_running_statistics():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block(), nn.Linear(4, 2)).double()

    model, reference = fitkit.Model(net()), net()
    model.compile(
        torch.optim.SGD(model.parameters(), 0.0),
        "mse",
        accelerator="cpu",
        devices=2,
        strategy=FSDPStrategy(activation_checkpointing=True),
    )
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for first in range(0, len(X), 8):
        reference(X[first : first + 4])  # rank 0's half
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(model.net.get_buffer(name), buffer, rtol=0, atol=1e-12)


def squared(predictions, targets):
    predictions -= targets
    return predictions.square().mean()


def test_a_loss_may_work_in_place_on_predictions_that_are_a_view():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0)).double()

    model, reference, targets = fitkit.Model(net()), net(), Y[:, 0] + 1
    model.compile(
        torch.optim.SGD(model.parameters(), 0.1),
        squared,
        accelerator="cpu",
        devices=2,
        strategy="fsdp",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, targets, batch_size=4, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    plain_loop(reference, optimizer, slices(X, targets, 8), loss=squared)
    assert_same_weights(model.net, reference, atol=1e-12)


class Scaled(nn.Module):
    """Has a parameter of its own, and fills its parts in its own way."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.empty(4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)
        )
        self.out = nn.Linear(4, 2)
        self.reset_parameters()

    def reset_parameters(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.01)

    def forward(self, x):
        x = x + self.place
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_a_net_that_fills_its_own_parts_gets_the_same_numbers_on_any_ranks():
    def trained(ranks):
        torch.manual_seed(0)
        with torch.device("meta"):
            net = Scaled()
        model = fitkit.Model(net)
        options = {"strategy": "fsdp"} if ranks > 1 else {}
        model.compile(
            torch.optim.SGD(model.parameters(), 0.0),
            "mse",
            accelerator="cpu",
            devices=ranks,
            **options,
        )
        model.fit(X.float(), Y.float(), batch_size=8, verbose=0)
        return net.state_dict()

    alone, spread = trained(1), trained(2)
    assert_same_weights(alone, spread)
    assert all(value.abs().max() < 0.05 for value in alone.values())


class OffloadedToItself(FSDPStrategy):
    """Main memory stands for a device's: the exchanges, copies and updates are the same."""

    def _check_offload(self):
        pass


def test_parameters_kept_in_main_memory_learn_the_same():
    model, reference = fitkit.Model(dense(4, 8, 2).double()), dense(4, 8, 2).double()
    model.compile(
        torch.optim.Adam(model.parameters(), 0.1),
        "mse",
        accelerator="cpu",
        devices=2,
        gradient_clip_val=0.01,
        strategy=OffloadedToItself(nn.Linear, cpu_offload=True),
    )
    optimizer = torch.optim.Adam(reference.parameters(), 0.1)
    for _ in range(2):  # the state goes back and forth
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        plain_loop(reference, optimizer, slices(X, Y, 8), loss=F.mse_loss, clip=0.01)
    assert_same_weights(model.net, reference, atol=1e-9)


def test_cpus_have_nothing_to_bring_to_main_memory():
    model = fitkit.Model(nn.Linear(4, 2))
    with pytest.raises(fitkit.ConfigurationError, match="Leave it out"):
        model.compile(accelerator="cpu", devices=2, strategy=FSDPStrategy(cpu_offload=True))
