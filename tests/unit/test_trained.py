"""What trains together is one thing: each verb takes a loss, wherever it is, as a part of the net.

A loss has a parameter (class centres), a buffer (DINO's centre) or both. Plain PyTorch says what is
right.
"""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit import callbacks
from fitkit.checkpoint import open_checkpoint
from tests.nets import dense, normal
from tests.reference import assert_same_weights, slices

X, OTHERS = normal(48, 6), normal(20, 6, seed=5)
Y, THEIRS = ((x[:, :3].sum(1) > 0).long() for x in (X, OTHERS))
VALUES = [3.0, 1.0, 2.0]  # monitored: the second epoch is the best


class Teaching(nn.Module):
    """Its centre is replaced in each batch, as DINO's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, prediction, target):
        loss = F.cross_entropy(prediction - self.centre, target)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * prediction.detach().mean(0)
        return loss


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.full((2, 2), 0.1))

    def forward(self, prediction, target):
        apart = (prediction - self.centres[target]).square().mean()
        return F.cross_entropy(prediction, target) + 0.1 * apart


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Teaching(), Centres()])

    def forward(self, prediction, target):
        return sum(part(prediction, target) for part in self.parts)


class Holder:
    """A loss that is no module, and has one."""

    def __init__(self, loss):
        self.losses = {"only": [loss]}

    def __call__(self, prediction, target):
        return self.losses["only"][0](prediction, target)


class Projector(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def compute(self, prediction, target):
        return self.loss(prediction, target)


def called(loss, prediction, target):
    return loss(prediction, target)


WAYS = {
    "itself": lambda loss: loss,
    "list": lambda loss: [loss],
    "partial": lambda loss: functools.partial(called, loss),
    "attribute": Holder,
    "method": lambda loss: Projector(loss).compute,
    "hard": lambda loss: fitkit.losses.Distillation(dense(6, 2, seed=9), alpha=1.0, hard=loss),
}
every_loss = pytest.mark.parametrize("kind", [Teaching, Centres, Both])
every_way = pytest.mark.parametrize("way", WAYS)


def compiled(kind, way="itself", **given):
    model, loss = fitkit.Model(dense(6, 8, 2, seed=1)), kind()
    settings = {"learning_rate": 0.1, "accelerator": "cpu", "devices": 1, **given}
    model.compile({"name": "sgd", "momentum": 0.9}, WAYS[way](loss), **settings)
    return model, loss


def fit(model, epochs, **options):
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


def by_epoch(kind, epochs, dtype=torch.float32):
    """The net and its loss after each epoch of a plain loop, and the averages of its weights."""
    net, loss = dense(6, 8, 2, seed=1).to(dtype), kind().to(dtype)
    held = [*net.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(held, 0.1, momentum=0.9)
    average, found = [p.detach().clone() for p in held], []
    for _ in range(epochs):
        for x, y in slices(X.to(dtype), Y, 8):
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
            for mean, p in zip(average, held, strict=True):
                mean.mul_(0.5).add_(p.detach(), alpha=0.5)
        found.append(copy.deepcopy((net, loss)))
    return found, average


def assert_same(model, loss, expected, **tolerance):
    for mine, theirs in zip((model.net, loss), expected, strict=True):
        assert_same_weights(mine, theirs, **tolerance)


@every_way
@every_loss
def test_it_trains_saves_resumes_and_is_copied_with_the_net(tmp_path, kind, way):
    (*_, first, last), _ = by_epoch(kind, 2)
    model, loss = compiled(kind, way)
    fit(model, 1)
    assert_same(model, loss, first)
    model.save(tmp_path / "c.h5")
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    again, its_loss = compiled(kind, way)
    again.load(tmp_path / "c.h5")
    assert_same(again, its_loss, first)
    resumed, its_loss = compiled(kind, way)
    fit(resumed, 2, resume_from=tmp_path / "c.h5")
    assert_same(resumed, its_loss, last)
    for made in (*copies, again):
        fit(made, 1)
        assert_same_weights(made.net, last[0])
    assert_same(model, loss, first)


@every_way
@every_loss
def test_it_is_converted_and_its_best_is_restored_with_the_net(kind, way):
    class Noting(callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logs["noted"] = VALUES[epoch]

    found, _ = by_epoch(kind, 3, torch.float64)
    model, loss = compiled(kind, way, precision="64-true")
    stop = callbacks.EarlyStopping("noted", 0, 5, mode="min", restore_best_weights=True)
    fit(model, 3, callbacks=[Noting(), stop])
    assert_same(model, loss, found[1])
    net, its_loss = found[1]
    with torch.no_grad():
        expected = its_loss.eval()(net(OTHERS.double()), THEIRS).item()
    assert model.evaluate(OTHERS, THEIRS, verbose=0) == pytest.approx(expected, abs=1e-12)


@every_way
@every_loss
def test_averages_have_its_parameters_and_leave_its_buffers(kind, way):
    found, average = by_epoch(kind, 3)
    model, loss = compiled(kind, way)
    fit(model, 3, callbacks=callbacks.EMA(0.5))
    mine = [*model.net.parameters(), *loss.parameters()]
    for one, other in zip(mine, average, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-6)
    assert_same_weights(dict(loss.named_buffers()), dict(found[-1][1].named_buffers()))
    swa = callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=0, annealing_epochs=0)
    model, loss = compiled(kind, way)
    fit(model, 3, callbacks=swa)
    for number, one in enumerate([*model.net.parameters(), *loss.parameters()]):
        each = [[*net.parameters(), *its.parameters()][number].detach() for net, its in found]
        torch.testing.assert_close(one.detach(), torch.stack(each).mean(0), rtol=0, atol=1e-6)


def test_a_failed_call_leaves_it_as_it_was():
    model, loss = compiled(Both)

    class Failing(callbacks.Callback):
        def on_train_batch_begin(self, batch, logs):
            model.net[0].register_forward_hook(lambda *_: 1 / 0)

        def on_test_batch_begin(self, batch, logs):
            raise AssertionError

    before = copy.deepcopy(loss)
    with pytest.raises(ZeroDivisionError):
        fit(model, 1, callbacks=Failing())
    assert_same_weights(loss, before)


def test_a_file_that_has_only_losses_with_parameters_is_read(tmp_path):
    model, loss = compiled(Centres)
    fit(model, 1)
    model.save(tmp_path / "c.h5")
    again, its = fitkit.Model(dense(6, 8, 2, seed=1)), Centres()
    losses = [Teaching(), its]
    again.compile({"name": "sgd", "momentum": 0.9}, losses, learning_rate=0.1)
    again.load(tmp_path / "c.h5")
    assert torch.equal(its.centres, loss.centres)


class Own(fitkit.Model):
    """Keeps modules in plain lists and dicts, which learn by the optimizer that holds them."""

    def __init__(self, **given):
        super().__init__(dense(6, 8, 2, seed=1))
        self.losses = [Centres()]
        self.more = {"teaching": Teaching(), "teacher": dense(6, 2)}
        held = [*self.net.parameters(), *self.losses[0].parameters()]
        self.compile(torch.optim.SGD(held, 0.1, momentum=0.9), accelerator="cpu", **given)

    def training_step(self, batch, batch_idx):
        prediction = self(batch[0])
        return sum(loss(prediction, batch[1]) for loss in (self.more["teaching"], self.losses[0]))

    def parts(self):
        return nn.ModuleList([self.more["teaching"], self.losses[0]])


def test_what_a_step_keeps_in_plain_lists_comes_along(tmp_path):
    (first, last), _ = by_epoch(Both, 2)
    model = Own(devices=1)
    fit(model, 1)
    assert_same(model, model.parts(), (first[0], first[1].parts))
    model.save(tmp_path / "c.h5")
    with open_checkpoint(tmp_path / "c.h5") as found:  # not the teacher, which doesn't change
        assert len(found.state["training"]["buffers"]) == 2
    resumed = Own(devices=1)
    fit(resumed, 2, resume_from=tmp_path / "c.h5")
    assert_same(resumed, resumed.parts(), (last[0], last[1].parts))
    double = Own(devices=1, precision="64-true")
    fit(double, 1)
    assert {tensor.dtype for tensor in double.parts().state_dict().values()} == {torch.float64}


def test_a_metric_that_remembers_epochs_remembers_them_after_a_resume(tmp_path):
    class Most(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, prediction, target):
            self.largest.copy_(torch.maximum(self.largest, prediction.detach().max()))
            return self.largest.expand(len(target))

    def made():
        model = fitkit.Model(dense(6, 8, 2, seed=1))
        model.compile("sgd", "cross_entropy", metrics=[Most()], learning_rate=0.1)
        return model

    whole, cut, resumed = made(), made(), made()
    fit(whole, 3), fit(cut, 1)
    cut.save(tmp_path / "c.h5")
    fit(resumed, 3, resume_from=tmp_path / "c.h5")
    assert resumed.history.history == whole.history.history


def test_a_teacher_is_no_part_of_it():
    teacher = dense(6, 2, seed=9)
    before = copy.deepcopy(teacher)
    model = fitkit.Model(dense(6, 8, 2, seed=1))
    model.compile("sgd", fitkit.losses.Distillation(teacher), learning_rate=0.1)
    fit(model, 1)
    assert_same_weights(teacher, before)
    held = {id(p) for group in model.optimizer.param_groups for p in group["params"]}
    assert held == set(map(id, model.parameters()))
