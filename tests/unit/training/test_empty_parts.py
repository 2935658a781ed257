"""A part of an update in which nothing counts gives gradients of 0, whatever computes its loss."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import fitkit
from fitkit import callbacks
from fitkit.training.empty_parts import without_gradients_of_nothing
from tests.compiling import TRACED
from tests.nets import normal
from tests.reference import assert_same_weights

ROWS, HALF = 12, 6
X, Y = normal(ROWS, 4), torch.arange(ROWS) % 3
COUNTS = torch.cat([torch.zeros(HALF), torch.arange(1.0, HALF + 1)])  # nothing in the first half
IGNORING = torch.where(COUNTS > 0, Y, -100)
ONE = {"accelerator": "cpu", "devices": 1}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def masked_mean(logits, y, w):
    return (F.cross_entropy(logits, y, reduction="none") * w).sum() / w.sum()


def updated(loss_of, make=lambda parameters: torch.optim.SGD(parameters, lr=0.5), kind=net):
    """A net after one update in plain torch, by a loss of the undivided batch."""
    plain = kind()
    optimizer = make(plain.parameters())
    loss_of(plain).backward()
    optimizer.step()
    return plain


WANTED = updated(lambda plain: masked_mean(plain(X), Y, COUNTS))
WANTED_OF_LABELS = updated(lambda plain: F.cross_entropy(plain(X), IGNORING))


class OwnStep(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y, w = batch
        return {"loss": masked_mean(self(x), y, w), "count": w.sum()}


class Scaled(OwnStep):
    """A parameter is the factor of the mean, so its gradient is the mean: NaN."""

    def __init__(self, net):
        super().__init__(net)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def training_step(self, batch, batch_idx):
        found = super().training_step(batch, batch_idx)
        return {**found, "loss": self.factor * found["loss"]}


class ByHand(fitkit.Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y, w = batch
        self.optimizers().zero_grad()
        self.manual_backward(masked_mean(self(x), y, w), count=w.sum())
        self.optimizers().step()


class OwnLoss(nn.Module):
    """Computes its own loss, of the labels that aren't ignored."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels):
        logits, counts = self.net(x), labels != -100
        loss = masked_mean(logits, labels.clamp(min=0), counts.float())
        return {"loss": loss, "logits": logits}


def weighted(kind=OwnStep, optimizer=None, size=HALF, **options):
    model = kind(net())
    made = torch.optim.SGD(model.parameters(), lr=0.5) if optimizer is None else optimizer(model)
    model.compile(made, **ONE, **options)
    data = TensorDataset(X, Y, COUNTS)
    history = model.fit(data, batch_size=size, shuffle=False, verbose=0)
    return model, history


def accumulated(loss, y, *, sample_weight=None, **options):
    model = fitkit.Model(net())
    model.compile("sgd", loss, learning_rate=0.5, accumulate_grad_batches=2, **ONE, **options)
    model.fit(X, y, batch_size=HALF, sample_weight=sample_weight, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    "options", [{}, {"jit_compile": TRACED}, {"gradient_clip_val": 1e3}, {"precision": "16-mixed"}]
)
def test_a_step_of_ones_own_that_divides_by_0(options):
    norms = callbacks.NormMonitor() if "gradient_clip_val" in options else None
    model = OwnStep(net())
    model.compile("sgd", learning_rate=0.5, accumulate_grad_batches=2, **ONE, **options)
    data = TensorDataset(X, Y, COUNTS)
    history = model.fit(
        data, batch_size=HALF, shuffle=False, verbose=0, callbacks=[norms] if norms else None
    )
    atol = 2e-3 if "precision" in options else 1e-6
    assert_same_weights(model.net, WANTED, atol=atol)
    assert model.global_step == 1
    assert all(math.isfinite(value) for values in history.history.values() for value in values)


def test_a_factor_that_is_learned():
    def loss_of(plain):
        return 2.0 * masked_mean(plain(X), Y, COUNTS)

    model, _ = weighted(Scaled, accumulate_grad_batches=2)
    assert_same_weights(model.net, updated(loss_of), atol=1e-6)
    with torch.no_grad():
        mean = masked_mean(net()(X), Y, COUNTS)
    assert model.factor.item() == pytest.approx(2.0 - 0.5 * mean.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (OwnStep, {}),
        (OwnStep, {"precision": "16-mixed"}),
        (OwnStep, {"jit_compile": TRACED}),
        (ByHand, {}),
        (ByHand, {"precision": "16-mixed"}),
    ],
)
def test_an_update_in_which_nothing_counts_has_gradients_of_0(kind, options):
    def with_decay(model):
        return torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)

    plain = net()
    optimizer = with_decay(plain)
    # As torch's own cross_entropy, if all labels are ignored: the weights decay.
    F.cross_entropy(plain(X[:HALF]), IGNORING[:HALF]).backward()
    optimizer.step()
    optimizer.zero_grad()
    masked_mean(plain(X[HALF:]), Y[HALF:], COUNTS[HALF:]).backward()
    optimizer.step()
    model, history = weighted(kind, with_decay, **options)
    assert_same_weights(model.net, plain, atol=2e-3 if "precision" in options else 1e-6)
    assert model.global_step == 2
    assert kind is ByHand or math.isfinite(history.history["loss"][0])


def test_lbfgs_makes_no_step_where_nothing_counts():
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)

    plain = net()
    optimizer = lbfgs(plain.parameters())

    def closure():
        optimizer.zero_grad()
        loss = masked_mean(plain(X[HALF:]), Y[HALF:], COUNTS[HALF:])
        loss.backward()
        return loss

    optimizer.step(closure)
    model, _ = weighted(optimizer=lambda model: lbfgs(model.parameters()))
    assert_same_weights(model.net, plain, atol=1e-6)


def values(prediction, target):
    return F.cross_entropy(prediction, target, reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        "cross_entropy",
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="none"),
        F.cross_entropy,
        values,
    ],
)
@pytest.mark.parametrize("sample_weight", [None, torch.ones(ROWS)])
def test_labels_that_are_all_ignored(loss, sample_weight):
    smoothing = getattr(loss, "label_smoothing", 0.0)
    wanted = updated(lambda one: F.cross_entropy(one(X), IGNORING, label_smoothing=smoothing))
    model = accumulated(loss, IGNORING, sample_weight=sample_weight)
    assert_same_weights(model.net, wanted, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_classes_that_weigh_0(accumulate):
    table, y = (
        torch.tensor([0.0, 1.0, 2.0]),
        torch.cat([torch.zeros(HALF), Y[HALF:] % 2 + 1]).long(),
    )
    model = fitkit.Model(net())
    loss = nn.CrossEntropyLoss(table)
    model.compile("sgd", loss, learning_rate=0.5, accumulate_grad_batches=accumulate, **ONE)
    model.fit(X, y, batch_size=HALF, shuffle=False, verbose=0)
    wanted = updated(lambda plain: F.cross_entropy(plain(X[HALF:]), y[HALF:], table))
    assert_same_weights(model.net, wanted, atol=1e-6)


@pytest.mark.parametrize("verb", ["fit", "train_on_batch"])
def test_a_nets_own_loss(verb):
    model = fitkit.Model(OwnLoss())
    accumulate = 2 if verb == "fit" else 1
    model.compile("sgd", learning_rate=0.5, accumulate_grad_batches=accumulate, **ONE)
    parts = [
        {"x": x, "labels": y} for x, y in zip(X.split(HALF), IGNORING.split(HALF), strict=True)
    ]
    if verb == "fit":
        # The first batch shows what the loss is the mean over; then nothing counts.
        model.fit(parts[::-1], shuffle=False, verbose=0)
        assert_same_weights(model.net.net, WANTED_OF_LABELS, atol=1e-6)
        return
    with pytest.warns(UserWarning, match="nothing counts"):
        found = [model.train_on_batch(part) for part in (parts[1], parts[0], parts[0])]
    wanted = updated(lambda plain: F.cross_entropy(plain(X[HALF:]), Y[HALF:]))
    assert_same_weights(model.net.net, wanted, atol=1e-6)
    assert [math.isnan(loss) for loss in found] == [False, True, True]


class Shared(fitkit.Model):
    """Two losses through one graph, of which the first is the mean over nothing."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y, w = batch
        logits = self(x)
        self.optimizers().zero_grad()
        self.manual_backward(masked_mean(logits, y, 0 * w), count=0, retain_graph=True)
        self.manual_backward(F.cross_entropy(logits, y))
        self.optimizers().step()


def test_another_loss_through_the_same_graph_keeps_its_gradients():
    model, _ = weighted(Shared, size=ROWS)
    wanted = updated(lambda plain: F.cross_entropy(plain(X), Y))
    assert_same_weights(model.net, wanted, atol=1e-6)


def recomputed(model, x, y, w):
    return masked_mean(checkpoint(model, x.clone().requires_grad_(), use_reentrant=True), y, w)


def scaled(model, x, y, w):
    return model[0].bias.sum() * masked_mean(model(x), y, w) + (model[2].weight ** 2).sum()


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0.0), torch.tensor(0)])
@pytest.mark.parametrize(
    "loss_of", [lambda model, x, y, w: masked_mean(model(x), y, w), recomputed, scaled]
)
def test_counts_on_a_device_are_not_read(count, loss_of):
    """A tensor stands for a count on a GPU: a condition within the backward."""
    model = net()
    loss = loss_of(model, X, Y, torch.zeros(ROWS))
    with without_gradients_of_nothing(loss, count):
        loss.backward()
    assert not any(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("count", [3, torch.tensor(3.0)])
def test_what_counts_keeps_its_gradients(count):
    model, plain = net(), net()
    loss = masked_mean(model(X), Y, COUNTS)
    with without_gradients_of_nothing(loss, count):
        loss.backward()
    masked_mean(plain(X), Y, COUNTS).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
