"""Nets whose outputs are gradients of their inputs are evaluated with gradients."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from tests import nets
from tests.compiling import TRACED

X, Y = nets.normal(12, 3), nets.normal(12, 3, seed=1)


class Forces(nn.Module):
    """The gradient of an energy, as atomistic nets compute forces."""

    def __init__(self, make=lambda energy, forces: forces):
        super().__init__()
        self.energy, self.make = nets.dense(3, 8, 1), make

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.energy(x).square()
        return self.make(energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0])


class OwnSteps(fitkit.Model):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("force_error", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)


def compiled(kind=fitkit.Model, net=None, **options):
    model = kind(Forces() if net is None else net)
    model.compile(torch.optim.SGD, "mse", metrics=["mae"], learning_rate=0.01, **options)
    return model


@pytest.mark.parametrize("kind", [fitkit.Model, OwnSteps])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}])
def test_every_verb_that_evaluates(kind, options):
    model = compiled(kind, **options)
    wanted = Forces()(X).detach()
    close = {"rtol": 0.05, "atol": 0.05} if options else {"rtol": 1e-5, "atol": 1e-6}
    expected = nn.functional.mse_loss(wanted, Y).item()
    for _ in range(2):
        found = model.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)
        assert found["loss"] == pytest.approx(expected, rel=0.05 if options else 1e-5)
        loader = [(X[:5], Y[:5]), (X[5:], Y[5:])]
        again = model.evaluate(loader, verbose=0, return_dict=True)
        assert again["loss"] == pytest.approx(found["loss"], rel=1e-4)
        outputs = model.predict(X, batch_size=5, verbose=0, as_numpy=False)
        assert not outputs.requires_grad
        torch.testing.assert_close(outputs.float(), wanted, **close)
    if kind is fitkit.Model:
        values = model.test_on_batch(X, Y, return_dict=True)
        assert values["loss"] == pytest.approx(found["loss"], rel=1e-3)
        assert np.allclose(model.predict_on_batch(X), wanted, **close)


def test_a_batch_alone_decides_as_well():
    model, wanted = compiled(), Forces()(X).detach()
    assert np.allclose(model.predict_on_batch(X), wanted, atol=1e-6)
    expected = nn.functional.mse_loss(wanted, Y).item()
    other = compiled()
    for _ in range(3):
        assert other.test_on_batch(X, Y, return_dict=True)["loss"] == pytest.approx(expected)


@pytest.mark.parametrize("kind", [fitkit.Model, OwnSteps])
@pytest.mark.parametrize("devices", [1, 2])
def test_validation_within_a_training_as_in_a_plain_loop(kind, devices):
    net = Forces()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    losses = []
    for _ in range(2):
        for x, y in zip(X.split(4), Y.split(4), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        losses.append(nn.functional.mse_loss(net(X), Y).item())
    model = compiled(kind, accelerator="cpu", devices=devices)
    history = model.fit(
        X, Y, batch_size=4 // devices, epochs=2, shuffle=False, verbose=0, validation_data=(X, Y)
    ).history
    assert history["val_loss"] == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(model.net.energy[0].weight, net.energy[0].weight)
    assert all(p.grad is None or not p.grad.requires_grad for p in model.net.parameters())


def test_structures_are_detached_and_copies_decide_for_themselves():
    model = compiled(net=Forces(lambda energy, forces: {"energy": energy, "forces": forces}))
    model.compile(loss={"energy": None, "forces": "mse"}, metrics=None)
    model.evaluate(X, {"forces": Y}, verbose=0)
    for one in (model, copy.deepcopy(model)):
        outputs = one.predict(X, verbose=0, as_numpy=False)
        assert set(outputs) == {"energy", "forces"}
        assert not any(value.requires_grad for value in outputs.values())


@pytest.mark.parametrize(
    "jit_compile", [TRACED, pytest.param(True, marks=pytest.mark.slow)], ids=["traced", "inductor"]
)
@pytest.mark.filterwarnings("ignore")
def test_with_compiled_steps(jit_compile):
    model = compiled(jit_compile=jit_compile)
    model.fit(X, Y, batch_size=4, epochs=2, verbose=0, validation_data=(X, Y))
    wanted = nn.functional.mse_loss(model.net(X), Y).item()
    for _ in range(2):
        found = model.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True)["loss"]
        assert found == pytest.approx(wanted, rel=1e-4)


class Counting(nn.Module):
    """Can't do without a graph, whatever is done."""

    def __init__(self):
        super().__init__()
        self.lin, self.calls = nets.linear(3, 3), 0

    def forward(self, x):
        self.calls += 1
        torch.autograd.grad(x.detach().sum(), x)


def test_what_fails_with_gradients_too_is_raised_as_it_is():
    model = compiled(net=Counting())
    with pytest.raises(RuntimeError, match="does not require grad"):
        model.predict(X, verbose=0)
    assert model.net.calls == 2


def test_other_nets_are_evaluated_without_gradients():
    grads = []

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nets.linear(3, 3)

        def forward(self, x):
            grads.append(torch.is_grad_enabled())
            return self.lin(x)

    compiled(net=Asks()).evaluate(X, Y, batch_size=4, verbose=0)
    assert grads == [False] * 3


@pytest.mark.parametrize("strategy", ["fsdp", "dp"])
def test_where_shards_or_replicas_stand_around_the_net(strategy):
    model = compiled(accelerator="cpu", devices=2, strategy=strategy)

    def run():
        model.fit(X, Y, batch_size=4, verbose=0, validation_data=(X, Y))

    with pytest.raises(fitkit.ConfigurationError, match=r"with torch\.enable_grad\(\)"):
        run()


def test_other_errors_of_an_evaluation_stay_as_they_are():
    class Fails(nn.Linear):
        def forward(self, x):
            raise RuntimeError("out of cheese")

    with pytest.raises(RuntimeError, match="out of cheese"):
        compiled(net=Fails(3, 1)).predict(X, verbose=0)
