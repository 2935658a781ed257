"""Buffers that state dicts leave out are part of a run that resumes."""

import pytest
import torch
from torch import nn

import fitkit
from fitkit.checkpoint import open_checkpoint
from tests.compiling import TRACED

X, Y = torch.randn(16, 4), torch.randn(16, 2)


class Bank(nn.Module):
    """Its outputs depend on what it has seen."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.way = nn.Linear(4, 2), way
        self.register_buffer("bank", torch.zeros(3, 4), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.ones(500, 500), persistent=False)
        self.norm = nn.BatchNorm1d(4)
        self.norm._non_persistent_buffers_set.update(["running_mean", "running_var"])

    def forward(self, x):
        if self.training:
            self.steps += 1
            last = x.detach().mean(0, keepdim=True)
            if self.way == "in place":
                self.bank.copy_(torch.cat([self.bank[1:], last]))
            elif self.way == "replaced":
                self.bank = torch.cat([self.bank[1:], last])
            else:
                self.bank = torch.cat([self.bank, last])
        return self.layer(self.norm(x) + self.bank.mean(0)) * (1 + 0.01 * self.steps)


def trained(way, jit_compile=False, **options):
    model = fitkit.Model(Bank(way))
    model.compile("adam", "mse", accelerator="cpu", devices=1, jit_compile=jit_compile)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **options)
    return model


def same(one, other):
    for left, right in zip(one.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(left, right)
    for (name, left), (_, right) in zip(
        one.net.named_buffers(), other.net.named_buffers(), strict=True
    ):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("name", ["c.h5", "c.dcp"])
@pytest.mark.parametrize("way", ["in place", "replaced", "grows"])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, way, name):
    whole, cut = trained(way, epochs=4), trained(way, epochs=2)
    cut.save(tmp_path / name)
    again = trained(way, epochs=3, resume_from=tmp_path / name)
    again.save(tmp_path / name)
    same(trained(way, epochs=4, resume_from=tmp_path / name), whole)


def test_a_compiled_run_too(tmp_path):
    options = {"way": "in place", "jit_compile": TRACED}
    trained(epochs=2, **options).save(tmp_path / "c.h5")
    same(trained(epochs=3, resume_from=tmp_path / "c.h5", **options), trained(epochs=3, **options))


def test_buffers_that_never_change_are_not_written(tmp_path):
    trained("in place").save(tmp_path / "c.h5")
    with open_checkpoint(tmp_path / "c.h5") as found:
        names = set(found.state["training"]["buffers"])
    parts = ("bank", "steps", "norm.running_mean", "norm.running_var")
    assert names == {f"net.{part}" for part in parts}


@pytest.mark.parametrize("wrong", [[1], {"net.bank": 3}])
def test_other_things_in_their_place_are_refused(tmp_path, monkeypatch, wrong):
    from fitkit.training import unsaved

    monkeypatch.setattr(unsaved, "changed", lambda model: wrong)
    trained("in place").save(tmp_path / "c.h5")
    with pytest.raises(fitkit.CheckpointError, match="its buffers aren't tensors"):
        trained("in place", epochs=2, resume_from=tmp_path / "c.h5")


def test_names_that_the_net_lacks_are_left_out(tmp_path, monkeypatch):
    from fitkit.training import unsaved

    monkeypatch.setattr(unsaved, "changed", lambda model: {"net.layer.weight": torch.ones(9)})
    model = trained("in place")
    model.save(tmp_path / "c.h5")
    twin = fitkit.Model(Bank("in place"))
    twin.compile("adam", "mse", accelerator="cpu", devices=1)
    twin.load(tmp_path / "c.h5")
    assert torch.equal(twin.net.layer.weight, model.net.layer.weight)
