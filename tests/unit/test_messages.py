"""What goes wrong at first contact, by family: what a message must name, and that its advice works.

A row is a program, the code, and key facts; each is what somebody wrote who had the wheel alone.
"""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.errors import ConfigurationError

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.arange(32) % 3
YES = (X[:, :3] > 0).astype("float32")
CODES = np.arange(64).reshape(32, 2) % 10


def trained(net=None, loss="cross_entropy", x=X, y=Y, **arguments):
    model = fitkit.Model(net or nn.Linear(4, 3))
    model.compile("sgd", loss, accelerator="cpu")
    model.fit(x, y, batch_size=8, verbose=0, **arguments)
    return model


def refused(code, *facts, run):
    with pytest.raises(ConfigurationError) as caught:
        run()
    assert caught.value.code == code and all(fact in str(caught.value) for fact in facts)


# ------------------------------------------------------------------ what loss and net hold


def weights(count, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


class OwnLoss(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, prediction, target):
        return functional.cross_entropy(prediction, target, weight=self.weight)


def bce(count):
    return nn.BCEWithLogitsLoss(pos_weight=weights(count))


@pytest.mark.parametrize(("loss", "y", "code", "facts"), [
    (nn.CrossEntropyLoss(weight=weights(3, torch.float64)), Y, "FK002",
     ("CrossEntropyLoss", "weight", "float64", "torch.float32")),
    (OwnLoss(weights(3, torch.float64)), Y, "FK002", ("weight", "float64")),
    (lambda p, t: functional.cross_entropy(p, t, weights(3, torch.float64)), Y, "FK002",
     ("weight", "float64")),
    (nn.CrossEntropyLoss(weight=weights(2)), Y, "FK091", ("(2,)", "3 columns")),
    (lambda p, t: functional.cross_entropy(p, t, weights(5)), Y, "FK091", ("(5,)", "3 columns")),
    (bce(2), YES, "FK091", ("pos_weight", "(2,)", "3 columns")),
    (nn.BCEWithLogitsLoss(weight=weights(8)), YES, "FK091", ("(8,)", "sample_weight")),
])  # fmt: skip
def test_the_weights_of_a_loss_are_looked_at_before_the_data(loss, y, code, facts):
    refused(code, *facts, run=lambda: trained(loss=loss, y=y))


def test_what_is_advised_for_the_weights_of_a_loss_works():
    weight = np.array([1.0, 2.0, 3.0])  # as scikit-learn computes them
    trained(loss=nn.CrossEntropyLoss(weight=torch.as_tensor(weight, dtype=torch.float32)))
    trained(loss=bce(3), y=YES)
    trained(loss=bce(1), y=YES)
    trained(loss="bce_with_logits", y=YES, sample_weight=np.ones(32))


class Centred(nn.Module):
    """Holds a float64 buffer, or makes float64 numbers on the way."""

    def __init__(self, mean):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", mean) if mean is not None else None

    def forward(self, x):
        return self.layer(x - (self.mean if hasattr(self, "mean") else np.zeros(4)[0].item()))


class Making(nn.Linear):
    def forward(self, x):
        return super().forward(x * torch.ones(4, dtype=torch.float64))


def mixed():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).double())


@pytest.mark.parametrize(("net", "x", "facts"), [
    (mixed, X, ("0.weight is float32", "1.weight is float64", "net.to(torch.float32)")),
    (lambda: Centred(torch.zeros(4, dtype=torch.float64)), X, ("mean is float64",)),
    (lambda: nn.Sequential(Making(4, 3)), X, ("forward makes the other type",)),
    (lambda: nn.Sequential(nn.Linear(4, 3)), X.astype("int64"), ("x has shape (8, 4), int64",)),
    (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(16, 3)), X,
     ("x has shape (8, 4), float32", "astype('int64')")),
])  # fmt: skip
def test_the_types_in_a_net_are_looked_at_before_the_data(net, x, facts):
    refused("FK002", *facts, run=lambda: trained(net(), x=x))
    if net is mixed:
        trained(net().to(torch.float32))


# ------------------------------------------------------------------ embeddings


def table(size=10, kind=nn.Embedding):
    if kind is nn.EmbeddingBag:
        return nn.Sequential(kind(size, 4), nn.Linear(4, 3))
    return nn.Sequential(kind(size, 4), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize("verb", ["fit", "predict"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(("index", "advice"), [
    (-1, "x + 1 with num_embeddings=11"), (10, "num_embeddings=11"), (41, "num_embeddings=42"),
])  # fmt: skip
def test_an_index_that_an_embedding_lacks_is_named_with_layer_and_size(verb, kind, index, advice):
    codes = CODES.copy()
    codes[5, 1] = index
    model = fitkit.Model(table(kind=kind))
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    run = model.predict if verb == "predict" else lambda x: model.fit(x, Y, verbose=0)
    facts = ("layer '0'", f"{kind.__name__}(10, 4", "from 0 to 9", f"got {index}.", advice)
    refused("FK012", *facts, run=lambda: run(codes))
    moved = 1 if index < 0 else 0
    trained(table(max(11, index + 1), kind), x=codes + moved)  # what is advised works


# ------------------------------------------------------------------ numbers that aren't finite


def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return " ".join(str(one.message) for one in caught)


def with_nan():
    x = X.copy()
    x[20, 2] = np.nan
    return x


def evaluated(x, y=Y):
    model = fitkit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    model.evaluate(x, y, verbose=0)


def as_loader(x):
    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(Y)), 8)


@pytest.mark.parametrize("run", [
    lambda x: trained(x=x), evaluated, lambda x: evaluated(as_loader(x), None),
])  # fmt: skip
def test_the_row_and_column_of_a_number_that_is_not_finite_are_named(run):
    message = said(lambda: run(with_nan()))
    assert "x of sample 20 is nan at column 2" in message
    assert ("DetectNonFinite" in message) == ("In epoch" in message)  # evaluate has no fit


@pytest.mark.parametrize("run", [lambda x: trained(x=x), evaluated])
def test_a_column_of_a_data_frame_is_named(run):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(with_nan(), columns=["a", "b", "age", "d"])
    assert "x of sample 20 is nan at column 'age'" in said(lambda: run(frame))


def test_weights_that_a_training_spoiled_are_named_by_evaluate():
    model = fitkit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    with torch.no_grad():
        model.net.weight[0, 0] = torch.nan
    assert "weight isn't finite" in said(lambda: model.evaluate(X, Y, verbose=0))


@pytest.mark.parametrize(("net", "loss"), [
    (lambda: nn.Linear(4, 3), "cross_entropy"), (lambda: nn.Linear(4, 1), "bce_with_logits"),
])  # fmt: skip
def test_labels_that_are_nan_are_missing_labels(net, loss):
    y = (Y % 2).astype("float32")
    y[3] = np.nan
    refused("FK092", "1 that are nan", "numpy.isfinite(y)", run=lambda: trained(net(), loss, y=y))
    keep = np.isfinite(y)
    trained(net(), loss, x=X[keep], y=y[keep])
    weight = keep.astype("float32")
    trained(net(), loss, y=np.where(keep, y, 0), sample_weight=weight)
