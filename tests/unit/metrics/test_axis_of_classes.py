"""Where the classes are, if a target's shape fits two dimensions of the prediction."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit

C = 3


def by_last_axis(prediction, target):
    return F.cross_entropy(prediction.flatten(0, 1), target.flatten())


class Bilinear(nn.Module):
    """A last layer that says nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, C))

    def forward(self, x):
        return x @ self.weight


def batches(axis, lengths):
    generator = torch.Generator().manual_seed(2)
    for length in lengths:
        x = torch.randn(12, length, 4, generator=generator)
        yield x if axis == -1 else x.mT, torch.randint(C, (12, length), generator=generator)


NETS = {
    "linear": (lambda: nn.Linear(4, C), by_last_axis, -1),
    "linear, then a layer without weights": (
        lambda: nn.Sequential(nn.Linear(4, C), nn.Dropout(0)),
        by_last_axis,
        -1,
    ),
    "Keras's loss by name": (
        lambda: nn.Sequential(nn.Linear(4, C), nn.Softmax(-1)),
        "sparse_categorical_crossentropy",
        -1,
    ),
    "convolution": (lambda: nn.Conv1d(4, C, 1), lambda p, t: F.cross_entropy(p, t), 1),
    "torch's loss by name": (lambda: nn.Conv1d(4, C, 1), "cross_entropy", 1),
}


@pytest.mark.parametrize("lengths", [(C,), (C, 5), (5, C), (C, C, 2)], ids=str)
@pytest.mark.parametrize("name", ["accuracy", "crossentropy"])
@pytest.mark.parametrize("case", NETS)
def test_the_loss_or_the_last_layer_says_where_classes_are(case, name, lengths):
    net, loss, axis = NETS[case]
    torch.manual_seed(0)
    model = fitkit.Model(net())
    model.compile("sgd", loss, metrics=[name], accelerator="cpu", devices=1)
    data = list(batches(axis, lengths))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.evaluate(data, verbose=0, return_dict=True)[name]
    right, count = 0.0, 0
    with torch.no_grad():
        for x, y in data:
            scores = model.net(x).movedim(axis, 1)
            if name == "accuracy":
                right += (scores.argmax(1) == y).sum().item()
            elif case.startswith("Keras"):
                right += F.nll_loss(scores.log(), y, reduction="sum").item()
            else:
                right += F.cross_entropy(scores, y, reduction="sum").item()
            count += y.numel()
    assert found == pytest.approx(right / count, rel=1e-4)


def test_what_nothing_decides_is_said_once_and_a_later_batch_decides_for_itself():
    model = fitkit.Model(Bilinear())
    model.compile("sgd", by_last_axis, metrics=["accuracy"], accelerator="cpu", devices=1)
    with pytest.warns(UserWarning, match="may be in axis 1") as told:
        model.evaluate(list(batches(-1, (C, 5, C))), verbose=0)
    assert len([one for one in told.list if "axis 1" in str(one.message)]) == 1
