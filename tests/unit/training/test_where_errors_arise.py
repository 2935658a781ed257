"""Errors of torch are explained by where they arose: in the net's call, in the net, in the loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.errors import ConfigurationError, FitkitError

X, Y = torch.randn(8, 3), torch.randint(2, (8,))
WORDS = r"The net|The first dimension|An Embedding layer|Batch normalisation|This CPU"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, sample, time):
        return self.layer(sample) + time[:, None]


class Around(nn.Module):
    """A net whose own code raises."""

    def __init__(self, raises):
        super().__init__()
        self.layer, self.raises = nn.Linear(3, 2), raises

    def forward(self, sample, time=None):
        return self.layer(sample) + self.raises(sample)


RAISED = {
    "attribute": lambda x: [x].mean(),
    "type": lambda x: F.linear([x], torch.ones(2, 3)),
    "call": lambda x: nn.Linear(2, 2)(x, x),
    "index": lambda x: F.embedding(torch.tensor([9]), torch.ones(2, 2)),
    "device": lambda x: (_ for _ in ()).throw(RuntimeError("Expected all tensors on same device")),
    "one sample": lambda x: nn.BatchNorm1d(x.shape[1])(x[:1]),
    "no meaning": lambda x: torch.linalg.cholesky(-torch.eye(2)),
}
"""What user's code may raise that fitkit has a sentence for, if a batch led to it."""

BATCHES = {
    "tensor": (X, Y),
    "by place": ((X, X[:, 0]), Y),
    "by name": ({"sample": X, "time": X[:, 0]}, Y),
}


def fit(net, loss, batch, **arguments):
    model = fitkit.Model(net)
    model.compile("sgd", loss, accelerator="cpu", **arguments)
    model.fit([batch], verbose=0)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("raised", RAISED)
def test_what_a_loss_raises_is_not_blamed_on_the_net_or_its_inputs(raised, batch):
    def loss(prediction, target):
        return F.cross_entropy(prediction, target) + RAISED[raised](prediction).sum()

    net = nn.Linear(3, 2) if batch == "tensor" else Two()
    with pytest.raises(Exception) as caught:
        fit(net, loss, BATCHES[batch])
    assert not isinstance(caught.value, FitkitError)
    with pytest.raises(type(caught.value)) as plain:
        RAISED[raised](torch.randn(8, 2))
    assert str(caught.value) == str(plain.value)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("raised", ["attribute", "type", "call", "no meaning"])
def test_what_a_nets_own_code_raises_is_not_blamed_on_its_inputs(raised, batch):
    with pytest.raises(Exception) as caught:
        fit(Around(RAISED[raised]), "cross_entropy", BATCHES[batch])
    assert not isinstance(caught.value, FitkitError)


@pytest.mark.parametrize("raised", RAISED)
def test_what_a_metric_or_a_callback_raises_is_its_own(raised):
    def metric(prediction, target):
        return RAISED[raised](prediction).sum()

    class Fails(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            RAISED[raised](torch.randn(8, 2))

    for arguments, callbacks in (({"metrics": [metric]}, []), ({}, [Fails()])):
        model = fitkit.Model(nn.Linear(3, 2))
        model.compile("sgd", "cross_entropy", accelerator="cpu", **arguments)
        with pytest.raises(Exception) as caught:
            model.fit([(X, Y)], verbose=0, callbacks=callbacks)
        assert not isinstance(caught.value, FitkitError) or "metric" in str(caught.value)


@pytest.mark.parametrize(
    ("net", "batch", "said"),
    [
        (Two, (X, Y), r"forward\(sample, time\) can't be called with this batch"),
        (lambda: nn.Linear(3, 2), ({"a": X, "b": X}, Y), "takes a single input, so it got the"),
        (lambda: nn.Linear(4, 2), (X, Y), r"The net can't take this batch in its layer"),
        (lambda: nn.Linear(3, 2), (X.long(), Y), "of a type that the net or loss can't take"),
        (lambda: nn.Embedding(2, 2), (Y + 5, Y), "an index that it doesn't have"),
        (lambda: nn.BatchNorm1d(3), (X[:1], Y[:1]), "can't train on one sample"),
        (
            lambda: nn.Conv2d(3, 2, 1),
            {"image": torch.randn(8, 3, 1, 1), "label": Y[:, None, None]},
            r"got the dict whole.*compile\(target='label'\)",
        ),
    ],
    ids=["call", "whole", "shape", "dtype", "index", "one sample", "label inside"],
)
def test_what_a_batch_leads_to_in_the_net_is_said_of_both(net, batch, said):
    with pytest.raises(ConfigurationError, match=said):
        fit(net(), "cross_entropy", batch)


def test_a_dict_with_a_label_trains_as_the_sentence_says():
    batch = {"image": torch.randn(8, 3, 1, 1), "label": Y[:, None, None]}
    fit(nn.Conv2d(3, 2, 1), "cross_entropy", batch, target="label")


def test_targets_of_a_detector_are_told_of_a_step():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, images, targets=None):
            found = [self.layer(image) for image in images]
            if not self.training:
                return found
            pairs = zip(found, targets, strict=True)
            return {"box": sum((one - at["box"]).square().mean() for one, at in pairs)}

    class Trained(fitkit.Model):
        def training_step(self, batch, batch_idx):
            images, targets = batch
            return sum(self.net(images, targets).values())

    batch = ([torch.randn(3), torch.randn(3)], [{"box": torch.randn(4)} for _ in range(2)])
    with pytest.raises(ConfigurationError, match="(?s)as detectors take them.*Write a tr"):
        fit(Detector(), None, batch)
    model = Trained(Detector())
    model.compile("sgd", accelerator="cpu")
    model.fit([batch], verbose=0)
