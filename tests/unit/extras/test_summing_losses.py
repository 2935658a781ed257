"""Losses that sum, give values or give a mean: each is weighed as what it is."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fitkit
from fitkit.errors import ConfigurationError
from fitkit.extras.summing_losses import sums
from fitkit.random_states import set_seed
from tests import nets

X, Y = nets.regression(12, 3)


class SumLoss(nn.Module):
    reduction = "sum"

    def forward(self, prediction, target):
        return (prediction - target).square().sum()


class PlainSum:
    """No module, and no word about it."""

    def __call__(self, prediction, target):
        return (prediction - target).square().sum()


class DroppingSum(nn.Module):
    """A sum that draws random numbers."""

    def forward(self, prediction, target):
        return F.dropout((prediction - target).square(), 0.2).sum()


def beside(prediction, target):
    """A sum, and a number that each batch has once."""
    return (prediction - target).square().sum() + 3.0


def by_batch_size(prediction, target):
    """Divided by what the user takes for the batch's size."""
    return (prediction - target).square().sum() / 4


def mean(prediction, target):
    return (prediction - target).square().mean()


def dropping_mean(prediction, target):
    return F.dropout((prediction - target).square(), 0.5).mean()


def python_noise(prediction, target):
    return (prediction - target).square().mean() * random.uniform(0.5, 1.5) * np.random.rand()


def contrastive(prediction, target):
    scores = prediction @ prediction.T
    return F.cross_entropy(scores, torch.arange(len(prediction)))


def raising_on_parts(prediction, target):
    return (prediction - target[:4]).square().mean() if len(target) == 4 else 1 / 0


SUMS = [PlainSum(), DroppingSum(), beside, by_batch_size, PlainSum().__call__]
MEANS = [mean, dropping_mean, python_noise, contrastive, raising_on_parts]


def trained(loss, **options):
    torch.manual_seed(5)
    model = fitkit.Model(nets.linear(3, 1))
    model.compile(torch.optim.SGD, loss, learning_rate=0.01, **options)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("loss", [SumLoss(), nn.CosineEmbeddingLoss(reduction="sum")])
def test_a_module_that_says_that_it_sums_is_refused_by_compile(loss):
    with pytest.raises(ConfigurationError, match=r"reduction='sum'.*means over samples"):
        fitkit.Model(nets.linear(3, 1)).compile("sgd", loss)


@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}])
def test_a_sum_is_refused_where_a_batch_is_a_part(loss, options):
    if options and loss is not SUMS[0]:
        pytest.skip("one of them is enough")
    with pytest.raises(ConfigurationError, match="sums over the samples of a batch.*FK061"):
        trained(loss, accumulate_grad_batches=2, **options)


@pytest.mark.parametrize("loss", MEANS)
def test_what_is_no_sum_trains(loss):
    trained(loss, accumulate_grad_batches=3)


def noisy_sum(prediction, target):
    return (prediction + 0.3 * torch.randn_like(prediction) - target).square().sum()


@pytest.mark.parametrize("rows", [2, 5, 64])
@pytest.mark.parametrize("loss", [*MEANS, PlainSum(), DroppingSum(), noisy_sum])
def test_random_numbers_make_no_sum_of_a_mean_and_no_mean_of_a_sum(loss, rows):
    for seed in range(12):
        set_seed(seed)
        batch = torch.randn(rows, 1), torch.randn(rows, 1)
        assert sums(loss, *batch) is (loss not in MEANS)


def test_a_sum_trains_as_written_where_each_batch_is_an_update():
    net = nets.linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x, y in zip(X.split(4), Y.split(4), strict=True):
        optimizer.zero_grad()
        (net(x) - y).square().sum().backward()
        optimizer.step()
    assert torch.equal(trained(PlainSum()).net.weight, net.weight)


def test_an_evaluation_of_several_batches_says_that_a_sum_depends_on_their_size():
    model = trained(PlainSum())
    whole = (model.net(X) - Y).square().sum().item()
    with pytest.warns(UserWarning, match="sums over the samples"):
        joined = model.evaluate(X, Y, batch_size=4, verbose=0)
    assert joined == pytest.approx(whole / (len(X) / 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.evaluate(X, Y, batch_size=len(X), verbose=0) == pytest.approx(whole)
        assert model.test_on_batch(X, Y) == pytest.approx(whole)


def test_a_step_of_the_models_own_that_asks_for_the_loss_is_no_way_around():
    class Own(fitkit.Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)

    model = Own(nets.linear(3, 1))
    model.compile("sgd", PlainSum(), accumulate_grad_batches=2)
    with pytest.raises(ConfigurationError, match="FK061"):
        model.fit(X, Y, batch_size=4, verbose=0)


class Counting(nn.Module):
    """Keeps a running scale, a number of calls, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0

    def forward(self, prediction, target):
        self.calls += 1
        self.scale.mul_(0.9)
        noise = torch.rand(()) + random.random() + np.random.rand()
        return (prediction - target).square().mean() * self.scale + 0 * noise


def test_the_question_changes_nothing():
    loss = Counting()
    fitkit.set_seed(3)
    trained(loss, accumulate_grad_batches=3)
    assert loss.calls == 3
    assert loss.scale.item() == pytest.approx(0.9**3)
    drawn = torch.rand(()), random.random(), np.random.rand()
    fitkit.set_seed(3)
    torch.manual_seed(5)
    nets.linear(3, 1)
    copy.deepcopy(loss)
    for _ in range(3):
        torch.rand(()), random.random(), np.random.rand()
    assert drawn[1:] == (random.random(), np.random.rand())


def test_the_question_comes_before_the_step_is_compiled(recwarn):
    trained(mean, accumulate_grad_batches=3, jit_compile={"backend": "aot_eager"})
    assert not [w for w in recwarn if "jit_compile" in str(w.message)]


class Calls:
    def __init__(self):
        self.rows = []

    def __call__(self, prediction, target):
        self.rows.append(len(prediction))
        return (prediction - target).square().mean()


ASKED = []
"""A global variable, which no look puts back."""


def test_the_question_is_asked_once_and_only_where_a_batch_is_a_part():
    loss, rows = Calls(), ASKED
    rows.clear()

    def function(prediction, target):
        ASKED.append(len(prediction))
        return loss(prediction, target)

    trained(function)
    assert rows == [4, 4, 4]
    rows.clear()
    model = trained(function, accumulate_grad_batches=3)
    assert len(rows) > 3
    rows.clear()
    model.fit(X, Y, batch_size=4, verbose=0)
    assert rows == [4, 4, 4]


# ---------------------------------------------------------------------- labels that are ignored

LABELS = torch.tensor([0, -100, 2, -100, -100, 1, 2, -100])
INPUTS = nets.normal(8, 3)
MODULES = [
    nn.CrossEntropyLoss(reduction="none"),
    nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
    nn.CrossEntropyLoss(reduction="none", ignore_index=2),
    lambda p, t: F.cross_entropy(p, t, reduction="none"),
    lambda p, t: F.cross_entropy(p, t.flatten(), reduction="none"),
]


@pytest.mark.parametrize("loss", MODULES)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_values_of_ignored_labels_dont_count(loss, batch_size):
    ignored = getattr(loss, "ignore_index", -100)
    labels = torch.where(LABELS < 0, ignored, LABELS)
    net = nets.linear(3, 3)
    expected = (loss(net(INPUTS), labels).sum() / (labels != ignored).sum()).item()
    model = fitkit.Model(net)
    model.compile(torch.optim.SGD, loss, learning_rate=0.1, accumulate_grad_batches=8)
    found = model.evaluate(INPUTS, labels, batch_size=batch_size, verbose=0)
    assert found == pytest.approx(expected, rel=1e-6)
    ones = torch.ones(8)
    found = model.evaluate(INPUTS, labels, batch_size=batch_size, sample_weight=ones, verbose=0)
    assert found == pytest.approx(expected, rel=1e-6)
    plain = copy.deepcopy(net)
    (loss(plain(INPUTS), labels).sum() / (labels != ignored).sum()).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    model.fit(INPUTS, labels, batch_size=batch_size, shuffle=False, verbose=0)
    torch.testing.assert_close(model.net.weight, plain.weight)


def test_whole_numbers_as_targets_of_a_regression_all_count():
    target = torch.tensor([-100, 3, -100, 5])[:, None]
    net = nets.linear(3, 1)
    model = fitkit.Model(net)
    model.compile("sgd", lambda p, t: (p - t).square())
    expected = (net(INPUTS[:4]) - target).square().mean().item()
    found = model.evaluate(INPUTS[:4], target, batch_size=3, verbose=0)
    assert found == pytest.approx(expected, rel=1e-6)
