"""What the first batch would be refused or warned for shows in later ones, too."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit import ConfigurationError
from fitkit.samples import counted
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


NET = linear(3, 3)
FIRST, SECOND = slice(0, 8), slice(8, 12)
ROWS = F.one_hot(Y, 3)
SOFT = torch.softmax(X, 1)
IGNORED = torch.where(torch.arange(12) % 4 == 0, -100, Y)
KINDS = {
    "indices": Y,
    "columns": Y[:, None],
    "ints": Y.int(),
    "floats": Y.float(),
    "rows": ROWS.float(),
    "whole rows": ROWS,
    "soft": SOFT,
    "ignored": IGNORED,
}


def evaluated(net, batches, loss="cross_entropy", metrics=()):
    return compiled(net, loss=loss, metrics=list(metrics)).evaluate(
        batches, verbose=0, return_dict=True
    )


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", ["indices", "whole rows", "soft", "ignored"])
def test_each_batch_is_read_by_the_kind_of_its_labels(first, second):
    halves = [(FIRST, KINDS[first]), (SECOND, KINDS[second])]
    found = evaluated(NET, [(X[r], y[r]) for r, y in halves], metrics=["accuracy", "f1"])
    losses, right, counted = 0.0, 0.0, 0
    for rows, y in halves:
        y, scores = y[rows], NET(X[rows]).detach()
        is_soft = y.shape == scores.shape
        target = y.float() if is_soft else y.flatten().long()
        losses += F.cross_entropy(scores, target, reduction="sum").item()
        labels = y.argmax(1) if is_soft else target
        right += (scores.argmax(1) == labels).sum().item()
        counted += (labels != -100).sum().item()
    assert found["loss"] == pytest.approx(losses / counted, abs=1e-6)
    assert found["accuracy"] == pytest.approx(right / counted, abs=1e-6)


@pytest.mark.parametrize(("first", "second"), [("soft", "ignored"), ("ignored", "soft")])
def test_parts_of_an_update_are_weighed_by_what_their_own_kind_counts(first, second):
    net, plain = linear(3, 3), linear(3, 3)
    plain.load_state_dict(net.state_dict())
    halves = [(X[FIRST], KINDS[first][FIRST]), (X[SECOND], KINDS[second][SECOND])]
    model = compiled(net, "sgd", "cross_entropy", accumulate_grad_batches=2, learning_rate=0.5)
    model.fit(halves, verbose=0)
    counts = [(y != -100).sum() if y.ndim == 1 else len(y) for _, y in halves]
    parts = [F.cross_entropy(plain(x), y) * n for (x, y), n in zip(halves, counts, strict=True)]
    (sum(parts) / sum(counts)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    torch.testing.assert_close(net.weight, plain.weight)


def squares(prediction, target):
    return ((prediction - target) ** 2).mean()


COLUMN = (torch.arange(12.0) % 2)[:, None]
ONE = linear(3, 1)
WRONG = {
    "fractions": (NET, Y, Y + 0.5, "cross_entropy", ()),
    "a label beyond": (NET, Y, Y + 1, lambda p, t: (p**2).mean(), ("accuracy",)),
    "a label below": (NET, Y, Y - 1, lambda p, t: (p**2).mean(), ("f1",)),
    "neither yes nor no": (ONE, COLUMN, COLUMN * 2, squares, ("binary_accuracy",)),
    "pairs in a loss": (ONE, COLUMN, COLUMN[:, 0], squares, ()),
    "pairs in a metric": (ONE, COLUMN, COLUMN[:, 0], "mse", (squares,)),
    "rows that don't sum to 1": (NET, ROWS.float(), ROWS * 2.0, "cross_entropy", ()),
}


@pytest.mark.parametrize("fault", WRONG)
def test_targets_that_would_count_as_something_else_are_refused_where_they_come(fault):
    net, y, wrong, loss, metrics = WRONG[fault]
    evaluated(net, [(X[FIRST], y[FIRST]), (X[SECOND], y[SECOND])], loss, metrics)
    with pytest.raises(ConfigurationError):
        evaluated(net, [(X[FIRST], y[FIRST]), (X[SECOND], wrong[SECOND])], loss, metrics)


def test_predictions_taken_for_probabilities_that_are_none_are_refused():
    scores = torch.cat([COLUMN[FIRST] * 0.5, COLUMN[SECOND] * 8 - 4])
    batches = [(scores[FIRST], COLUMN[FIRST]), (scores[SECOND], COLUMN[SECOND])]
    with pytest.raises(ConfigurationError, match="taken for probabilities"):
        evaluated(nn.Identity(), batches, squares, ["binary_accuracy"])


class Changing(nn.Module):
    """Gives its outputs in one structure for the first batch, and in another one later."""

    def __init__(self, first, later):
        super().__init__()
        self.head, self.first, self.later, self.calls = linear(3, 3), first, later, 0

    def forward(self, x):
        self.calls += 1
        return (self.first if self.calls == 1 else self.later)(self.head(x))


STRUCTURES = {
    "tensor": lambda o: o,
    "list of one": lambda o: [o],
    "pair": lambda o: (o, o),
    "dict": lambda o: {"a": o, "b": 2 * o},
    "dict in another order": lambda o: {"b": 2 * o, "a": o},
    "dict of three": lambda o: {"a": o, "b": 2 * o, "c": o},
}
TURNS = [(one, one) for one in STRUCTURES]
TURNS += [("tensor", other) for other in ("list of one", "pair", "dict")]
TURNS += [("dict", other) for other in ("tensor", "dict in another order", "dict of three")]
TURNS += [("list of one", "tensor"), ("dict of three", "dict"), ("pair", "dict")]
SAME = [{"tensor", "list of one"}, {"dict", "dict in another order"}]


@pytest.mark.parametrize("metrics", [(), ("accuracy",)])
@pytest.mark.parametrize(("first", "second"), TURNS)
def test_a_net_gives_the_same_outputs_in_each_batch(first, second, metrics):
    def targets(name, rows):
        found = STRUCTURES[name](torch.zeros(1))
        return dict.fromkeys(found, Y[rows]) if isinstance(found, dict) else (Y[rows],) * len(found)

    batches = [(X[rows], targets(name, rows)) for name, rows in ((first, FIRST), (second, SECOND))]
    net = Changing(STRUCTURES[first], STRUCTURES[second])
    if first != second and {first, second} not in SAME:
        with pytest.raises(ConfigurationError):
            evaluated(net, batches, metrics=metrics)
        return
    found = evaluated(net, batches, metrics=metrics)
    scores = net.head(X)
    ways = trees_of(STRUCTURES[first](scores))
    wanted = sum(F.cross_entropy(one, Y).item() for one in ways)
    assert found["loss"] == pytest.approx(wanted, abs=1e-6)


def trees_of(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return list(outputs.values() if isinstance(outputs, dict) else outputs)


def test_outputs_of_unlike_structure_are_not_joined():
    with pytest.raises(ConfigurationError, match="unlike types"):
        fitkit.Model(Changing(STRUCTURES["tensor"], STRUCTURES["pair"])).predict(
            (X[rows] for rows in (FIRST, SECOND)), verbose=0
        )


class Detaches(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss.detach() if batch_idx else loss


def test_a_loss_without_a_gradient_is_refused_where_it_comes():
    model = compiled(linear(3, 3), kind=Detaches)
    with pytest.raises(ConfigurationError, match="has no gradient"):
        run(model, "fit", as_loader, X, Y)


@pytest.mark.parametrize(("first", "second"), [(Y, SOFT), (SOFT, Y)])
def test_class_weights_refuse_labels_of_another_kind(first, second):
    model = compiled(linear(3, 3), loss="cross_entropy")
    with pytest.raises(ConfigurationError, match="class_weight"):
        model.fit(
            [(X[FIRST], first[FIRST]), (X[SECOND], second[SECOND])],
            class_weight={0: 1.0, 1: 2.0, 2: 3.0},
            verbose=0,
        )


class Says:
    """A batch whose number is known only from the second one on."""

    def __init__(self, x, y, batch_size):
        self.x, self.y, self._size = x, y, batch_size

    @property
    def batch_size(self):
        return self._size


def test_a_batch_may_say_its_samples_though_an_earlier_one_did_not():
    assert counted(Says(X[FIRST], Y[FIRST], None)).samples == 8
    assert counted(Says(X[SECOND], Y[SECOND], 3)).samples == 3
