"""`class_weight` against plain arithmetic: what numbers are classes is known by loss and values."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.errors import ConfigurationError
from fitkit.extras.class_weights import WeightTable

N, C, T = 12, 3, 5
TABLE = torch.tensor([1.5, 5.0, 0.25])
WEIGHTS = dict(enumerate(TABLE.tolist()))
GENERATOR = torch.Generator().manual_seed(4)


def normal(*shape):
    return torch.randn(shape, generator=GENERATOR)


def numbers(*shape, most=C):
    return torch.randint(most, shape, generator=GENERATOR)


def one_hot(labels, axis):
    return F.one_hot(labels, C).float().movedim(-1, axis)


ROWS, TEXTS, IMAGES = normal(N, 4), normal(N, 4, T), normal(N, 4, 3, 3)
OF_ROWS, OF_TEXTS, OF_IMAGES = numbers(N), numbers(N, T), numbers(N, 3, 3)
SOFT = torch.softmax(3 * normal(N, C), 1)
YES = numbers(N, most=2)
SQUARE = numbers(N, C)  # as many positions as classes


def tokens(prediction, target):
    return F.cross_entropy(prediction, target, reduction="none")


def focal(prediction, target):
    return F.binary_cross_entropy_with_logits(prediction, target.float(), reduction="none")


def keras(probabilities, labels):
    return F.nll_loss(probabilities.log().movedim(-1, 1), labels, reduction="none")


def linear(out=C):
    return nn.Linear(4, out)


def conv():
    return nn.Conv1d(4, C, 1)


class ByToken(nn.Module):
    """Probabilities of classes in the last axis."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, C)

    def forward(self, x):
        return self.layer(x).softmax(-1)


CASES = {
    "numbers": (linear, "cross_entropy", ROWS, OF_ROWS, tokens, OF_ROWS),
    "a column of numbers": (
        linear,
        "cross_entropy",
        ROWS,
        OF_ROWS[:, None],
        lambda p, t: tokens(p, t[:, 0]),
        OF_ROWS,
    ),
    "numbers as floats": (
        linear,
        "cross_entropy",
        ROWS,
        OF_ROWS.float(),
        lambda p, t: tokens(p, t.long()),
        OF_ROWS,
    ),
    "one-hot": (linear, "cross_entropy", ROWS, one_hot(OF_ROWS, 1), tokens, OF_ROWS),
    "one-hot integers": (
        linear,
        "cross_entropy",
        ROWS,
        one_hot(OF_ROWS, 1).long(),
        lambda p, t: tokens(p, t.float()),
        OF_ROWS,
    ),
    "soft": (linear, nn.CrossEntropyLoss(), ROWS, SOFT, tokens, SOFT.argmax(1)),
    "texts": (conv, "cross_entropy", TEXTS, OF_TEXTS, tokens, OF_TEXTS),
    "texts as long as there are classes": (
        conv,
        "cross_entropy",
        TEXTS[..., :C],
        SQUARE,
        tokens,
        SQUARE,
    ),
    "texts, one-hot": (conv, "cross_entropy", TEXTS, one_hot(OF_TEXTS, 1), tokens, OF_TEXTS),
    "texts, a function": (conv, tokens, TEXTS, OF_TEXTS, tokens, OF_TEXTS),
    "images": (
        lambda: nn.Conv2d(4, C, 1),
        nn.CrossEntropyLoss(),
        IMAGES,
        OF_IMAGES,
        tokens,
        OF_IMAGES,
    ),
    "a channel of labels": (
        lambda: nn.Conv2d(4, C, 1),
        "cross_entropy",
        IMAGES,
        OF_IMAGES[:, None],
        lambda p, t: tokens(p, t[:, 0]),
        OF_IMAGES,
    ),
    "Keras's numbers": (ByToken, "sparse_categorical_crossentropy", ROWS, OF_ROWS, keras, OF_ROWS),
    "Keras's positions": (
        ByToken,
        "sparse_categorical_crossentropy",
        TEXTS.mT,
        OF_TEXTS,
        keras,
        OF_TEXTS,
    ),
    "Keras's column of positions": (
        ByToken,
        "sparse_categorical_crossentropy",
        TEXTS.mT,
        OF_TEXTS[..., None],
        lambda p, t: keras(p, t[..., 0]),
        OF_TEXTS,
    ),
    "Keras's one-hot": (
        ByToken,
        "categorical_crossentropy",
        TEXTS.mT,
        one_hot(OF_TEXTS, -1),
        lambda p, t: -(t * p.log()).sum(-1),
        OF_TEXTS,
    ),
    "yes or no": (
        lambda: linear(1),
        "bce_with_logits",
        ROWS,
        YES.float()[:, None],
        lambda p, t: focal(p, t)[:, 0],
        YES,
    ),
    "yes or no, a function": (
        lambda: linear(1),
        focal,
        ROWS,
        YES[:, None],
        lambda p, t: focal(p, t)[:, 0],
        YES,
    ),
    "one-hot, squared errors": (
        linear,
        "mse",
        ROWS,
        one_hot(OF_ROWS, 1),
        lambda p, t: (p - t).square().mean(1),
        OF_ROWS,
    ),
    "one-hot, a function": (
        linear,
        focal,
        ROWS,
        one_hot(OF_ROWS, 1),
        lambda p, t: focal(p, t).mean(1),
        OF_ROWS,
    ),
    "numbers, squared errors": (
        lambda: linear(1),
        "mse",
        ROWS,
        OF_ROWS.float()[:, None],
        lambda p, t: (p - t).square()[:, 0],
        OF_ROWS,
    ),
}


def compiled(net, loss, **options):
    torch.manual_seed(1)
    model = fitkit.Model(net())
    model.compile("sgd", loss, learning_rate=0.0, accelerator="cpu", devices=1, **options)
    return model


@pytest.mark.parametrize("form", ["arrays", "loader", "train_on_batch", "super().training_step"])
@pytest.mark.parametrize("case", CASES)
def test_each_value_gets_the_weight_of_its_class(case, form):
    net, loss, x, y, each, labels = CASES[case]
    model = compiled(net, loss)
    with torch.no_grad():
        expected = (each(model.net(x), y) * TABLE[labels]).mean().item()
    if form == "arrays":
        found = model.fit(x, y, batch_size=6, class_weight=WEIGHTS, verbose=0).history["loss"][0]
    elif form == "loader":
        loader = DataLoader(TensorDataset(x, y), 4)
        found = model.fit(loader, class_weight=WEIGHTS, verbose=0).history["loss"][0]
    elif form == "train_on_batch":
        found = model.train_on_batch(x, y, class_weight=WEIGHTS)
    else:

        class Own(fitkit.Model):
            def training_step(self, batch, batch_idx):
                return super().training_step(batch, batch_idx)

        own = Own(model.net)
        own.compile("sgd", loss, learning_rate=0.0, accelerator="cpu", devices=1)
        found = own.fit(x, y, batch_size=6, class_weight=WEIGHTS, verbose=0).history["loss"][0]
    assert found == pytest.approx(expected, rel=1e-5)


MANY = torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 1]]).repeat(3, 1)
REFUSED = {
    "several labels": (linear, "bce_with_logits", ROWS, MANY, "pos_weight"),
    "several labels, integers": (linear, focal, ROWS, MANY.long(), "pos_weight"),
    "several labels, squared errors": (linear, "mse", ROWS, MANY, "pos_weight"),
    "several labels, Keras": (ByToken, "binary_crossentropy", ROWS, MANY, "pos_weight"),
    "several labels, a list": (linear, "multilabel_margin", ROWS, MANY.long(), "pos_weight"),
    "several labels, by chance one-hot at first": (
        linear,
        focal,
        ROWS,
        torch.cat([one_hot(OF_ROWS[:6], 1), MANY[:6]]),
        "one-hot",
    ),
    "regression": (lambda: linear(1), "mse", ROWS, normal(N, 1), "fractions"),
    "regression of vectors": (linear, "mse", ROWS, normal(N, C), "other values"),
    "signs": (lambda: linear(1), "hinge", ROWS, 2.0 * YES[:, None] - 1, "negative"),
    "a mean of positions": (
        conv,
        lambda p, t: tokens(p, t).flatten(),
        TEXTS,
        OF_TEXTS,
        "one value for each",
    ),
    "no labels": (linear, lambda p, t: p.square().mean(1), ROWS, None, "missing"),
}


@pytest.mark.parametrize("form", ["arrays", "loader"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_one_class_is_refused(case, form):
    net, loss, x, y, words = REFUSED[case]
    model = compiled(net, loss)
    data = (x, y)
    if form == "loader" and y is not None:
        data = (DataLoader(TensorDataset(x, y), 6),)
    options = {"batch_size": 6} if len(data) == 2 else {}
    with pytest.raises(ConfigurationError, match=words):
        model.fit(*data, shuffle=False, class_weight=WEIGHTS, verbose=0, **options)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, C), nn.Linear(4, C)

    def forward(self, x):
        return {"one": self.one(x), "other": self.other(x)}


def test_several_outputs_need_sample_weights():
    y = {"one": OF_ROWS.numpy(), "other": OF_ROWS.numpy()}
    with pytest.raises(ConfigurationError, match="sample_weight by output"):
        compiled(Two, "cross_entropy").fit(ROWS, y, class_weight=WEIGHTS, verbose=0)
    with pytest.raises(ConfigurationError, match="sample_weight by output"):
        compiled(Two, "cross_entropy").fit(ROWS, y, class_weight={"one": WEIGHTS}, verbose=0)


def test_the_only_trained_of_several_outputs_gets_them():
    model = compiled(Two, {"one": "cross_entropy"}, weighted_metrics={"one": "accuracy"})
    with torch.no_grad():
        scores = model.net(ROWS)["one"]
        weight = TABLE[OF_ROWS]
        loss = (tokens(scores, OF_ROWS) * weight).mean().item()
        accuracy = ((scores.argmax(1) == OF_ROWS) * weight).sum().item() / weight.sum().item()
    y = {"one": OF_ROWS.numpy()}
    history = model.fit(ROWS, y, batch_size=4, class_weight=WEIGHTS, verbose=0).history
    assert history["loss"][0] == pytest.approx(loss, rel=1e-5)
    assert history["one_accuracy"][0] == pytest.approx(accuracy, rel=1e-5)


def test_ignored_labels_keep_their_weight_of_nothing():
    labels = OF_TEXTS.clone()
    labels[:, 2:] = -100
    model = compiled(conv, "cross_entropy")
    with torch.no_grad():
        each = tokens(model.net(TEXTS), labels)[:, :2] * TABLE[labels[:, :2]]
    loss = model.fit(TEXTS, labels, batch_size=4, class_weight=WEIGHTS, verbose=0).history["loss"]
    assert loss[0] == pytest.approx(each.mean().item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, T)])
def test_sample_weights_of_samples_and_positions_multiply(shape):
    weight = torch.rand(shape, generator=GENERATOR) + 0.5
    model = compiled(conv, "cross_entropy")
    with torch.no_grad():
        each = tokens(model.net(TEXTS), OF_TEXTS) * TABLE[OF_TEXTS]
        expected = (each * (weight[:, None] if weight.ndim == 1 else weight)).mean().item()
    found = model.train_on_batch(TEXTS, OF_TEXTS, weight, WEIGHTS)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_compiled_steps_weigh_alike():
    losses = []
    for jit in (False, True):
        model = compiled(linear, "cross_entropy", jit_compile=jit, steps_per_execution=2)
        model.compile(learning_rate=0.5)
        options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
        losses.append(model.fit(ROWS, OF_ROWS, class_weight=WEIGHTS, **options).history["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("given", [{}, [1.0], {"a": 1.0}, {-1: 1.0}, {0: -1.0}, {True: 1.0}])
def test_class_weights_must_be_weights_by_class(given):
    with pytest.raises(ConfigurationError, match="class_weight"):
        WeightTable(given)


def test_classes_that_have_no_weight_weigh_1():
    labels = np.array([0, 7, 1, 7])
    net = nn.Linear(4, 8)
    model = compiled(lambda: net, "cross_entropy")
    with torch.no_grad():
        each = tokens(net(ROWS[:4]), torch.from_numpy(labels))
    found = model.train_on_batch(ROWS[:4], labels, class_weight={0: 2.0, 1: 0.5})
    expected = (each * torch.tensor([2.0, 1.0, 0.5, 1.0])).mean().item()
    assert found == pytest.approx(expected, rel=1e-5)
