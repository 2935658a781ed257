"""What trains together is one thing on two ranks, too: losses, optimizers with all they hold."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import fitkit
from tests.nets import dense
from tests.reference import assert_same_weights, slices
from tests.unit.test_closures import CUTS, SAM, USING, X, Y, net, plainly
from tests.unit.test_optimizer_copies import Lookahead, hooked
from tests.unit.test_trained import Both, Teaching

pytestmark = pytest.mark.timeout(120)

TWO = {"accelerator": "cpu", "devices": 2}


def fit(model, size=6, **options):
    model.fit(X, Y, batch_size=size, shuffle=False, verbose=0, **options)
    return model.history.history


class Shrinking(optim.SGD):
    factor = 1.0

    def __init__(self, params, factor=0.25):
        super().__init__(params, lr=0.1)
        self.factor = factor

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(self.factor)
        return super().step(closure)


def test_ranks_share_the_buffers_of_a_loss_as_those_of_the_net():
    """As in DDP, rank 0's hold at the beginning of each update."""
    reference, theirs = net(), Both().double()
    centre = theirs.parts[0]
    held = [*reference.parameters(), *theirs.parameters()]
    optimizer = optim.SGD(held, 0.1)
    for x, y in slices(X, Y, 12):
        optimizer.zero_grad()
        before = centre.centre
        first = theirs(reference(x[:6]), y[:6])
        after, centre.centre = centre.centre, before
        second = theirs(reference(x[6:]), y[6:])
        centre.centre = after
        ((first + second) / 2).backward()
        optimizer.step()
    model, loss = fitkit.Model(net()), Both().double()
    model.compile("sgd", [loss], learning_rate=0.1, **TWO)
    logs = fit(model, validation_data=(X[:20], Y[:20]))
    assert_same_weights(model.net, reference, atol=1e-12)
    assert_same_weights(loss, theirs, atol=1e-12)
    with torch.no_grad():
        expected = theirs.eval()(reference(X[:20]), Y[:20]).item()
    assert logs["val_loss"] == [pytest.approx(expected, abs=1e-9)]
    assert model.evaluate(X[:20], Y[:20], verbose=0) == pytest.approx(expected, abs=1e-9)


def test_a_loss_begins_with_rank_zeros_buffers_in_double_precision():
    model, loss = fitkit.Model(dense(6, 2)), Teaching()
    loss.centre.fill_(0.5)
    model.compile("sgd", [loss], learning_rate=0.1, precision="64-true", **TWO)
    alone, its = copy.deepcopy(model), None
    fit(model, epochs=1)
    alone.compile(devices=1)
    its = alone._fitkit.compilation.given.loss[0]
    assert its.centre.dtype is torch.float32
    alone.fit(X[:6], Y[:6], verbose=0)
    assert its.centre.dtype is loss.centre.dtype is torch.float64


class Scaled(nn.Module):
    """A loss that is another one in each process that gets it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def __setstate__(self, state):
        super().__setstate__(state)
        self.scale.data = self.scale.data * 3

    def forward(self, prediction, target):
        return F.cross_entropy(prediction * self.scale, target)


def test_ranks_begin_with_rank_zeros_loss():
    reference, theirs = net(), Scaled()
    optimizer = optim.SGD([*reference.parameters(), *theirs.parameters()], 0.1)
    for x, y in slices(X, Y, 12):
        optimizer.zero_grad()
        theirs(reference(x), y).backward()
        optimizer.step()
    model, loss = fitkit.Model(net()), Scaled()
    model.compile("sgd", [loss], learning_rate=0.1, **TWO)
    fit(model)
    assert_same_weights(model.net, reference, atol=1e-12)
    assert_same_weights(loss, theirs, atol=1e-12)


OPTIMIZERS = {"attribute": Shrinking, "inside": Lookahead, "hook": hooked}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_instance_arrives_with_all_that_it_holds(kind):
    reference = net()
    optimizer = OPTIMIZERS[kind](reference.parameters())
    model = fitkit.Model(net())
    given = OPTIMIZERS[kind](model.parameters())
    model.compile(given, "cross_entropy", **TWO)
    for _ in range(2):  # the second call sends its state, too
        fit(model)
        for x, y in slices(X, Y, 12):
            optimizer.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            optimizer.step()
    assert_same_weights(model.net, reference, atol=1e-12)


@pytest.mark.parametrize("name", USING)
def test_an_optimizer_with_a_closure_trains_as_in_a_plain_loop(name):
    for cut, given in (("whole", {}), ("whole", {"accumulate_grad_batches": 2})):
        size, _, _ = CUTS[cut]
        model = fitkit.Model(net())
        model.compile(USING[name](model.parameters()), "cross_entropy", **TWO, **given)
        fit(model, size // 2 // given.get("accumulate_grad_batches", 1))
        assert_same_weights(model.net, plainly(USING[name], size, None), atol=1e-9)


@pytest.mark.parametrize(
    ("strategy", "kind", "words"),
    [("ddp_sharded", Lookahead, "another optimizer"), ("fsdp", SAM, "computes the loss itself")],
)
def test_what_cant_be_spread_is_refused(strategy, kind, words):
    reference = net()
    optimizer = Shrinking(reference.parameters())
    for x, y in slices(X, Y, 12):
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
    model = fitkit.Model(net())
    model.compile(Shrinking(model.parameters()), "cross_entropy", strategy=strategy, **TWO)
    fit(model)
    assert_same_weights(model.net, reference, atol=1e-12)
    model.compile(kind(model.parameters()))
    with pytest.raises(fitkit.ConfigurationError, match=words):
        fit(model)


class Own(fitkit.Model):
    def __init__(self):
        super().__init__(net())
        self.losses = [nn.Linear(2, 2).double()]
        nn.init.eye_(self.losses[0].weight)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.losses[0](self(batch[0])), batch[1])

    def configure_optimizers(self):
        return optim.SGD([*self.net.parameters(), self.losses[0].weight], 0.1)


def test_ranks_average_gradients_of_what_a_step_keeps_in_a_list():
    made = [Own(), Own()]
    for model, given in zip(made, ({"devices": 1}, {"devices": 2}), strict=True):
        model.losses[0].bias.data.zero_()
        model.compile(accelerator="cpu", **given)
        fit(model, 12 // given["devices"])
    assert_same_weights(*made, atol=1e-12)
    assert_same_weights(made[0].losses[0], made[1].losses[0], atol=1e-12)
    assert not torch.equal(made[0].losses[0].weight, torch.eye(2))
