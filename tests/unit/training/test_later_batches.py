"""What the first batch would be refused or warned for shows in later ones, too."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit import ConfigurationError
from tests.nets import classification, linear
from tests.reference import compiled

X, Y = classification(12, 3)
LATER = slice(5, 8)  # rows of the second batch of four
UNCLEAR = "-100"


def changed(values, value):
    values = values.clone()
    values[LATER] = value
    return values


def as_arrays(x, *parts):
    names = ("y", "sample_weight")[: len(parts)]
    return (x,), {"batch_size": 4, **dict(zip(names, parts, strict=True))}


def as_loader(*parts):
    return (DataLoader(TensorDataset(*parts), batch_size=4),), {}


def as_numpy(*parts):
    return (
        [tuple(part[rows].numpy() for part in parts) for rows in torch.arange(12).split(4)],
    ), {}


FORMS = [as_arrays, as_loader, as_numpy]


def run(model, verb, form, *parts):
    data, options = form(*parts)
    if verb == "fit" and form is as_arrays:
        options["shuffle"] = False
    if verb == "train_on_batch":
        for rows in torch.arange(12).split(4):
            x, y, *weight = (part[rows] for part in parts)
            model.train_on_batch(x, y, sample_weight=weight[0] if weight else None)
        return
    getattr(model, verb)(*data, verbose=0, **options)


def mean(prediction, target):
    return F.cross_entropy(prediction, target)


class WithLoss(nn.Module):
    """Gives its loss and nothing to tell its labels by."""

    def __init__(self):
        super().__init__()
        self.head = linear(3, 3)

    def forward(self, x, labels=None):
        return {"loss": F.cross_entropy(self.head(x), labels)}


class OwnStep(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", ["fit", "evaluate", "train_on_batch"])
def test_labels_that_may_not_count_are_said_once_when_they_come(verb, form):
    model = compiled(linear(3, 3), loss=mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, verb, form, X, Y)
    with pytest.warns(UserWarning, match=UNCLEAR) as found:
        run(model, verb, form, X, changed(Y, -100))
    assert len(found) == 1


def test_labels_of_a_net_that_computes_its_loss_are_said_when_they_come():
    model = compiled(WithLoss(), loss=None)
    batches = [
        {"x": X[rows], "labels": changed(Y, -100)[rows]} for rows in torch.arange(12).split(4)
    ]
    with pytest.warns(UserWarning, match=UNCLEAR) as found:
        model.fit(batches, verbose=0)
    assert len(found) == 1


def test_labels_that_fitkit_can_count_are_left_alone():
    values = compiled(linear(3, 3), loss=lambda p, t: F.cross_entropy(p, t, reduction="none"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = values.evaluate(*as_loader(X, changed(Y, -100))[0], verbose=0)
    wanted = F.cross_entropy(values.net(X), changed(Y, -100)).item()
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("kind", [fitkit.Model, OwnStep])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused_where_it_comes(weight, form, kind):
    model = compiled(linear(3, 3), kind=kind)
    with pytest.raises(ConfigurationError, match="a weight is a finite number from 0"):
        run(model, "fit", form, X, Y, changed(torch.ones(12), weight))


YES_NO = {
    "bce_with_logits": (torch.arange(12.0) % 2, -1.0),
    "soft_margin": (torch.arange(12.0) % 2 * 2 - 1, 0.5),
    "cross_entropy": (F.one_hot(torch.arange(12) % 3).float(), 1.0),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", YES_NO)
def test_targets_that_torch_takes_for_numbers_are_refused_where_they_come(loss, form):
    y, wrong = YES_NO[loss]
    net = linear(3, 3 if y.ndim > 1 else 1)
    y = y if y.ndim > 1 else y[:, None]
    run(compiled(net, loss=loss), "fit", form, X, y)
    with pytest.raises(ConfigurationError, match="takes (targets|labels)"):
        run(compiled(net, loss=loss), "fit", form, X, changed(y, wrong))
