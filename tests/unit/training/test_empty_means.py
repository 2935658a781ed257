"""A mean over nothing (no label counts) is nan under its name, and is said once."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit import callbacks
from tests.compiling import TRACED
from tests.nets import linear, normal

X = normal(12, 4)
LABELS = torch.arange(12) % 3
NONE = torch.full((12,), -100)
FIRST = torch.zeros(12, dtype=torch.long)


class LogProbabilities(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(4, 3)

    def forward(self, x):
        return self.layer(x).log_softmax(1)


class OwnStep(fitkit.Model):
    """Says what its losses are the means over."""

    def _loss(self, batch):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return {"loss": loss, "count": int((batch[1] != -100).sum())}

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        return self._loss(batch)


class Carries(nn.Module):
    """Computes its own loss, as language models do."""

    def __init__(self):
        super().__init__()
        self.layer = linear(4, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def smoothed(prediction, target):
    return F.cross_entropy(prediction, target, label_smoothing=0.1)


LOSSES = {
    "cross_entropy": ("cross_entropy", NONE),
    "nn.CrossEntropyLoss": (nn.CrossEntropyLoss(), NONE),
    "nn.CrossEntropyLoss, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), NONE),
    "F.cross_entropy": (F.cross_entropy, NONE),
    "nn.NLLLoss": (nn.NLLLoss(), NONE),
    "classes that weigh 0": (nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 1.0])), FIRST),
    "another label": (nn.CrossEntropyLoss(ignore_index=0), FIRST),
}
METRICS = ["accuracy", "top_2_accuracy", "exact_match", "perplexity", "f1", "auc"]


def compiled(loss="cross_entropy", metrics=None, net=None, **options):
    net = net or (LogProbabilities() if isinstance(loss, nn.NLLLoss) else linear(4, 3))
    model = fitkit.Model(net)
    model.compile("sgd", loss, metrics=metrics, accelerator="cpu", devices=1, **options)
    return model


def values(verb, model, y):
    """What a verb gives: everything by name, at each time."""
    if verb == "evaluate":
        found = model.evaluate(X, y, batch_size=5, verbose=0, return_dict=True)
        listed = model.evaluate(X, y, batch_size=5, verbose=0)
        assert len(listed if isinstance(listed, list) else [listed]) == len(found)
        return [found]
    if verb in ("test_on_batch", "train_on_batch"):
        on_batch = getattr(model, verb)
        return [on_batch(X, y, return_dict=True) for _ in range(3)]  # the third by a shorter way
    options = {"batch_size": 5, "verbose": 0, "epochs": 2}
    if verb == "fit":
        history = model.fit(X, y, **options).history
    else:
        history = model.fit(X, LABELS, validation_data=(X, y), **options).history
        history = {name: each for name, each in history.items() if name.startswith("val_")}
    assert all(len(each) == 2 for each in history.values())
    return [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]


def is_nan(value):
    return bool(torch.as_tensor(value, dtype=torch.float64).isnan().all())


def check(verb, model, y, names):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        rows = values(verb, model, y)
    prefix = "val_" if verb == "validation" else ""
    assert rows
    for row in rows:
        assert list(row) == [prefix + name for name in names]
        assert all(map(is_nan, row.values())), row
    said = [str(one.message) for one in caught if "nothing counts" in str(one.message)]
    assert said
    assert len(set(said)) == 1
    assert verb == "evaluate" or len(said) == 1
    assert not any("DetectNonFinite" in str(one.message) for one in caught)


verbs = pytest.mark.parametrize(
    "verb", ["fit", "validation", "evaluate", "test_on_batch", "train_on_batch"]
)


@verbs
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name, verb):
    loss, y = LOSSES[name]
    check(verb, compiled(loss), y, ["loss"])


@verbs
@pytest.mark.parametrize("metric", METRICS)
def test_a_metric(metric, verb):
    check(verb, compiled(metrics=[metric]), NONE, ["loss", metric])


@verbs
def test_a_metric_of_torchmetrics(verb):
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.MulticlassF1Score(3, ignore_index=-100)
    check(verb, compiled(metrics={"own": metric}), NONE, ["loss", "own"])


@verbs
@pytest.mark.parametrize("steps", [1, 2])
def test_compiled_steps(verb, steps):
    model = compiled(metrics=["accuracy"], jit_compile=TRACED, steps_per_execution=steps)
    check(verb, model, NONE, ["loss", "accuracy"])


@pytest.mark.parametrize("verb", ["fit", "validation", "evaluate"])
def test_a_step_of_ones_own(verb):
    model = OwnStep(linear(4, 3))
    model.compile("sgd", accelerator="cpu", devices=1)
    check(verb, model, NONE, ["loss"])


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_a_net_that_computes_its_own_loss(verb):
    model = fitkit.Model(Carries())
    model.compile("sgd", accelerator="cpu", devices=1)
    rows = [{"x": x, "labels": y} for x, y in zip(X.split(4), NONE.split(4), strict=True)]
    with pytest.warns(UserWarning, match="nothing counts for loss"):
        found = getattr(model, verb)(rows, verbose=0)
    assert math.isnan(found if verb == "evaluate" else found.history["loss"][0])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(4, 3), linear(4, 3, seed=1)

    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x)}


@pytest.mark.filterwarnings("ignore:.*nothing counts")
@pytest.mark.parametrize("verb", ["fit", "validation", "evaluate"])
def test_one_output_of_two(verb):
    model = compiled({"a": "cross_entropy", "b": "cross_entropy"}, net=Two())
    prefix = "val_" if verb == "validation" else ""
    if verb == "evaluate":
        rows = [model.evaluate(X, {"a": LABELS, "b": NONE}, verbose=0, return_dict=True)]
    else:
        some = {"a": LABELS, "b": NONE}
        y, held_out = (some, None) if verb == "fit" else ({"a": LABELS, "b": LABELS}, (X, some))
        history = model.fit(X, y, validation_data=held_out, verbose=0).history
        rows = [{name: each[0] for name, each in history.items()}]
    for row in rows:
        assert math.isnan(row[prefix + "b_loss"])
        assert math.isnan(row[prefix + "loss"])
        assert math.isfinite(row[prefix + "a_loss"])


def test_counts_of_nothing_are_0():
    with pytest.warns(UserWarning, match="nothing counts for loss:"):
        found = compiled(metrics=["confusion_matrix"]).test_on_batch(X, NONE, return_dict=True)
    assert not found["confusion_matrix"].any()


def test_batches_without_labels_count_for_nothing_beside_others():
    y = torch.cat([NONE[:8], LABELS[8:]])
    model = compiled(metrics=["accuracy"])
    found = model.evaluate(X, y, batch_size=4, verbose=0, return_dict=True)
    with torch.no_grad():
        logits = model.net(X[8:])
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, y[8:]).item(), rel=1e-6)
    assert found["accuracy"] == (logits.argmax(1) == y[8:]).double().mean().item()


@pytest.mark.filterwarnings("ignore:.*nothing counts")
def test_what_watches_values_takes_it_for_no_value(tmp_path):
    stop = callbacks.EarlyStopping(patience=9, restore_best_weights=True)
    saves = callbacks.ModelCheckpoint(tmp_path / "best.h5", "val_loss", save_best_only=True)
    slower = callbacks.ReduceLROnPlateau(patience=1)
    model = compiled()
    history = model.fit(
        X, LABELS, validation_data=(X, NONE), epochs=3, verbose=0,
        callbacks=[stop, saves, slower, callbacks.TerminateOnNaN()],
    )  # fmt: skip
    assert len(history.epoch) == 3
    assert not list(tmp_path.iterdir())
    assert math.isinf(stop.best)


@pytest.mark.filterwarnings("ignore:.*nothing counts")
def test_a_batch_without_labels_is_neither_a_nan_nor_a_spike():
    y = torch.cat([NONE[:4], LABELS[4:8], NONE[8:]])
    spikes = callbacks.DetectLossSpike(window=4, check_every=1)
    ends = callbacks.TerminateOnNaN(check_every=1)
    model = compiled()
    model.fit(X, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[spikes, ends])
    assert spikes.spikes == []
    assert model.global_step == 6


@pytest.mark.filterwarnings("ignore:.*nothing counts")
def test_two_ranks_say_the_same():
    model = fitkit.Model(linear(4, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu", devices=2)
    history = model.fit(X, NONE, batch_size=3, verbose=0, validation_data=(X, NONE)).history
    assert list(history) == ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert all(math.isnan(value) for each in history.values() for value in each)
