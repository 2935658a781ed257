"""Weights made under `torch.inference_mode()`, which torch never changes, are refused by name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from tests.nets import normal

X, Y = normal(12, 4), torch.arange(12) % 3
CPU = {"accelerator": "cpu", "devices": 1}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.body(self.norm(x))


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.ones(3))

    def forward(self, prediction, target):
        return F.cross_entropy(prediction + self.points, target)


def made_for_inference(make):
    with torch.inference_mode():
        return make()


def only_the_norm():
    net = Net()
    net.norm = made_for_inference(lambda: nn.BatchNorm1d(4, affine=False))
    return net


def compiled(net, loss="cross_entropy", optimizer="sgd", **more):
    model = fitkit.Model(net)
    model.compile(optimizer, loss, learning_rate=0.1, **CPU, **more)
    return model


def lightning(net):
    base = pytest.importorskip("lightning.pytorch").LightningModule

    class Guest(base):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, number):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    model = fitkit.Model(Guest())
    model.compile(**CPU)
    return model


MODELS = {
    "a net": (lambda: made_for_inference(Net), compiled, "norm.weight"),
    "a fused optimizer": (
        lambda: made_for_inference(Net), lambda net: compiled(net, optimizer="adam"),
        "norm.weight",
    ),
    "statistics": (only_the_norm, compiled, "norm.running_mean"),
    "a LightningModule": (lambda: made_for_inference(Net), lightning, "net.norm.weight"),
    "a loss": (
        lambda: made_for_inference(Centres), lambda loss: compiled(Net(), loss), "points",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("verb", ["fit", "train_on_batch"])
def test_they_are_refused_by_name_and_a_copy_trains(kind, verb):
    make, model_of, name = MODELS[kind]
    part = make()

    def train(part):
        model = model_of(part)
        if verb == "fit":
            model.fit(X, Y, batch_size=6, verbose=0)
        else:
            model.train_on_batch(X, Y)

    before = {key: value.clone() for key, value in part.state_dict().items()}
    with pytest.raises(fitkit.ConfigurationError, match=rf"{name} of .*copy\.deepcopy\(net\)"):
        train(part)
    assert all(torch.equal(value, before[key]) for key, value in part.state_dict().items())
    mine = copy.deepcopy(part)
    train(mine)
    same = [key for key, value in mine.state_dict().items() if torch.equal(value, before[key])]
    assert not same


def test_frozen_ones_and_such_evaluations_are_allowed():
    net = made_for_inference(Net)
    model = compiled(net)
    right = F.cross_entropy(copy.deepcopy(net).eval()(X), Y)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(right.item())
    assert model.predict(X, verbose=0).shape == (12, 3)
    whole = nn.Sequential(net.requires_grad_(False).eval(), nn.Linear(3, 3))
    model = compiled(whole)
    model.fit(X, Y, verbose=0)
    assert not any(value.requires_grad for value in net.parameters())
