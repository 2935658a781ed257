"""Nets with a state dict of their own, wherever weights are put back."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit import callbacks


class Own(nn.Module):
    """Its state dict has its weight transposed, a name of its own, and what it counted."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.part = Counting()
        self.loads = 0

    def forward(self, x):
        return self.part(self.layer(x))

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        state[f"{prefix}kernel"] = state.pop(f"{prefix}layer.weight").T
        state[f"{prefix}settings"] = {"sizes": (3, 2)}
        return state

    def load_state_dict(self, state_dict, strict=True, assign=False):
        self.loads += 1
        state = dict(state_dict)
        assert state.pop("settings") == {"sizes": (3, 2)}
        state["layer.weight"] = state.pop("kernel").T
        return super().load_state_dict(state, strict=strict, assign=assign)


class Counting(nn.Module):
    count = 0

    def forward(self, x):
        self.count += self.training
        return x

    def get_extra_state(self):
        return {"count": (self.count,)}

    def set_extra_state(self, state):
        (self.count,) = state["count"]


X, Y = torch.randn(12, 3), torch.randn(12, 2)


def trained(net=None, **options):
    model = fitkit.Model(Own() if net is None else net)
    model.compile(torch.optim.SGD(model.parameters(), 0.1), "mse", accelerator="cpu", devices=1)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **options)
    return model


def facts(model):
    net = model.net
    return [p.detach().clone() for p in net.parameters()], net.part.count


def same(one, other):
    assert one[1] == other[1]
    for left, right in zip(one[0], other[0], strict=True):
        assert torch.equal(left, right)


class Worse(fitkit.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        logs["v"] = float(epoch)
        if epoch == 0:
            self.kept = facts(self.model)


def test_early_stopping():
    worse = Worse()
    best = callbacks.EarlyStopping("v", mode="min", patience=9, restore_best_weights=True)
    model = trained(epochs=3, callbacks=[worse, best])
    same(facts(model), worse.kept)
    assert model.net.loads == 1


@pytest.mark.parametrize("name", ["w.h5", "w.safetensors", "w.pt", "w.dcp"])
def test_files_of_weights(tmp_path, name):
    model = trained()
    model.save_weights(tmp_path / name)
    twin = fitkit.Model(Own())
    twin.load_weights(tmp_path / name)
    same(facts(twin), facts(model))
    assert twin.net.loads == 1


@pytest.mark.parametrize("name", ["c.h5", "c.dcp"])
def test_a_resumed_run(tmp_path, name):
    model = trained()
    model.save(tmp_path / name)
    twin = trained(epochs=2, resume_from=tmp_path / name)
    model.fit(X, Y, batch_size=4, epochs=2, initial_epoch=1, shuffle=False, verbose=0)
    same(facts(twin), facts(model))
    assert twin.net.loads == 1


def test_a_search_leaves_the_net_as_it_was():
    model = trained()
    before = facts(model)
    fitkit.tune.learning_rate(model, X, Y, batch_size=4, num_training=10)
    same(facts(model), before)


def test_averages_are_of_the_weights_and_leave_the_rest():
    plain, average = trained(epochs=2, net=copy_of(1)), callbacks.EMA(0.0)
    model = trained(epochs=2, net=copy_of(1), callbacks=[average])
    same(facts(model), facts(plain))


def copy_of(seed):
    torch.manual_seed(seed)
    return Own()
