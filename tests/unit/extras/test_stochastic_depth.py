"""`StochasticDepth` sets the rates of blocks by depth and epoch, and gives them back."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import Callback, StochasticDepth
from tests.compiling import TRACED
from tests.nets import classification
from tests.reference import assert_same_weights

X, Y = classification(24, 5)


class DropPath(nn.Module):
    """Scales by the rate, without chance, so that the weights show which rate was used."""

    def __init__(self):
        super().__init__()
        self.drop_prob = 0.05

    def forward(self, x):
        return x * (1 - self.drop_prob) if self.training else x


class TheirStochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = 0.05

    def forward(self, x):
        return x * (1 - self.p) if self.training else x


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        self.path1, self.path2 = kind(), kind()

    def forward(self, x):
        x = x + self.path1(self.one(x))
        return x + self.path2(self.other(x))


def net(kind=DropPath):
    torch.manual_seed(0)
    return nn.Sequential(Block(kind), Block(kind), Block(kind), nn.Linear(5, 3)).double()


class Notes(Callback):
    def __init__(self, name):
        self.name, self.rates = name, []

    def on_train_batch_end(self, batch, logs):
        blocks = [*self.model.net][:3]
        paths = [path for block in blocks for path in (block.path1, block.path2)]
        self.rates.append([getattr(path, self.name) for path in paths])


def fitted(callbacks, made=None, **more):
    model = fitkit.Model(net() if made is None else made)
    hardware = {"devices": 1, "accelerator": "cpu", "jit_compile": more.pop("jit", False)}
    model.compile("sgd", "cross_entropy", learning_rate=0.1, **hardware)
    options = {"batch_size": 12, "epochs": 3, "verbose": 0, "shuffle": False, **more}
    model.fit(X.double(), Y, callbacks=callbacks, **options)
    return model


@pytest.mark.parametrize(("kind", "name"), [(DropPath, "drop_prob"), (TheirStochasticDepth, "p")])
def test_the_rates_rise_with_depth_and_epochs_and_are_given_back(kind, name):
    notes = Notes(name)
    made = net(kind)
    fitted([StochasticDepth(0.4, ramp_epochs=2), notes], made)
    half, full = [0, 0, 0.1, 0.1, 0.2, 0.2], [0, 0, 0.2, 0.2, 0.4, 0.4]
    for found, expected in zip(notes.rates, [half] * 2 + [full] * 4, strict=True):
        assert found == pytest.approx(expected)
    assert getattr(made[0].path1, name) == getattr(made[2].path2, name) == 0.05


def by_hand(epochs=3):
    made = net()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for epoch in range(epochs):
        for depth, block in enumerate([*made][:3]):
            block.path1.drop_prob = block.path2.drop_prob = 0.2 * depth * min(1, (epoch + 1) / 2)
        for x, y in zip(X.double().split(12), Y.split(12), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(made(x), y).backward()
            optimizer.step()
    return made


@pytest.mark.parametrize("jit", [False, TRACED])
def test_the_weights_are_those_of_a_loop_written_by_hand(jit):
    model = fitted(StochasticDepth(0.4, ramp_epochs=2), jit=jit)
    assert_same_weights(model.net, by_hand(), atol=1e-12)


def test_a_cut_training_goes_on_exactly(tmp_path):
    first = fitted(StochasticDepth(0.4, ramp_epochs=2), epochs=1)
    first.save(tmp_path / "cut.h5")
    again = fitted(StochasticDepth(0.4, ramp_epochs=2), resume_from=tmp_path / "cut.h5")
    assert_same_weights(again.net, fitted(StochasticDepth(0.4, ramp_epochs=2)).net)


def test_a_net_without_such_modules_and_impossible_rates_are_refused():
    with pytest.raises(fitkit.ConfigurationError):
        fitted(StochasticDepth(0.1), nn.Linear(5, 3).double())
    for arguments in ({"rate": 1.0}, {"rate": -0.1}, {"ramp_epochs": 0}):
        with pytest.raises(fitkit.ConfigurationError):
            StochasticDepth(**arguments)
