"""Complex parameters are averaged, watched and compared as floating-point ones are."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit import callbacks
from fitkit.checkpoint.frozen import Frozen
from fitkit.distributed.precision import match_state
from fitkit.distributed.precision.base import own_dtype
from fitkit.extras.export.exporting import _difference
from fitkit.extras.summary import number_type
from tests.nets import normal

X = normal(16, 4)
Y = X.sum(1, keepdim=True)


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 1, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.complex64))
        self.register_buffer("running_mean", torch.zeros((), dtype=torch.complex64))

    def forward(self, x):
        if self.training:
            self.seen += 1j
            self.running_mean = 0.5 * self.running_mean + 0.5j
        return (x.to(torch.complex64) @ self.w).abs()


def widened(net):
    net.w.data = net.w.data.to(torch.complex128)


class Noted(callbacks.Callback):
    each_batch = True

    def __init__(self):
        self.weights, self.ends = [], []

    def on_train_batch_end(self, batch, logs):
        self.weights.append(self.model.net.w.detach().clone())

    def on_epoch_end(self, epoch, logs):
        self.ends.append(self.model.net.w.detach().clone())


def trained(*watching, **options):
    model = fitkit.Model(Wave())
    model.compile("sgd", "mse", learning_rate=0.05, accelerator="cpu", devices=1, **options)
    model.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=list(watching))
    return model


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 3}])
def test_a_moving_average_has_them(options):
    noted = Noted()
    model = trained(noted, callbacks.EMA(0.5), **options)
    mean = torch.ones(4, 1, dtype=torch.complex64)
    for weights in noted.weights:
        mean = 0.5 * mean + 0.5 * weights
    torch.testing.assert_close(model.net.w.detach(), mean)
    assert not torch.equal(model.net.w, noted.weights[-1])
    assert model.net.seen == 12j  # of the last step, as it is no running statistic
    assert 0 < model.net.running_mean.imag < 1 - 0.5**12


def test_a_plain_average_of_epochs_has_them():
    noted = Noted()
    model = trained(noted, callbacks.StochasticWeightAveraging(0.05, 1))
    torch.testing.assert_close(model.net.w.detach(), (noted.ends[1] + noted.ends[2]) / 2)


def test_a_nan_in_them_is_found():
    net = Wave()
    with torch.no_grad():
        net.w[0] = complex(0.0, float("nan"))
    model = fitkit.Model(net)
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    with pytest.raises(FloatingPointError, match="parameter w"):
        model.fit(X, Y, verbose=0, callbacks=callbacks.DetectNonFinite())


@pytest.mark.parametrize("read", [own_dtype, number_type])
def test_inputs_are_as_precise_as_they_are(read):
    assert read(Wave()) is torch.float32
    assert read(Wave().apply(widened)) is torch.float64


def test_an_optimizers_state_follows_them():
    net = Wave().apply(widened)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    optimizer.state[net.w]["momentum_buffer"] = torch.ones(4, 1, dtype=torch.complex64)
    match_state(optimizer)
    assert optimizer.state[net.w]["momentum_buffer"].dtype is torch.complex128


def test_wider_frozen_ones_are_rounded_before_they_are_compared():
    w = normal(3) + 1j * normal(3, seed=1)
    assert not Frozen.of({"w": w}).differs({"w": w.to(torch.complex128)})
    assert Frozen.of({"w": w}).differs({"w": w + 1})


def test_an_exported_nets_outputs_may_be_rounded():
    wanted = [normal(3) + 1j * normal(3, seed=1)]
    assert _difference([wanted[0] * (1 + 1e-6)], wanted) is None
    assert "0.5" in _difference([wanted[0] + 0.5j], wanted)


def test_two_ranks_learn_as_one():
    found = []
    for ranks in (1, 2):
        model = fitkit.Model(Wave())
        model.compile("sgd", "mse", learning_rate=0.05, accelerator="cpu", devices=ranks)
        model.fit(X, Y, batch_size=4 // ranks, epochs=3, verbose=0, shuffle=False)
        found.append(model.net.w.detach())
    torch.testing.assert_close(*found)


def test_gradients_are_clipped_by_their_whole_norm():
    model = trained(gradient_clip_val=0.01)
    farthest = 12 * 0.05 * 0.01  # updates, rate, norm
    assert 0 < (model.net.w - Wave().w).norm() <= farthest * 1.001
