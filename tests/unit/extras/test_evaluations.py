"""Further data sets and metrics at epochs' ends, against evaluate and torchmetrics themselves."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fitkit.callbacks import EMA, EvaluateEvery, MetricCallback
from fitkit.errors import ArgumentTypeError, ConfigurationError
from tests.nets import classification, linear
from tests.reference import compiled

X, Y = classification(50, 4)


def classifier():
    return compiled(linear(4, 3), metrics=["accuracy"])


@pytest.mark.parametrize("kind", ["arrays", "loader", "dataset", "batches"])
def test_further_data_are_evaluated_in_their_epochs(kind):
    data = {
        "arrays": (X, Y),
        "loader": (DataLoader(TensorDataset(X, Y), batch_size=7),),
        "dataset": (TensorDataset(X, Y),),
        "batches": ([(X[:20], Y[:20]), (X[20:], Y[20:])],),
    }[kind]
    model = classifier()
    callback = EvaluateEvery(*data, every=2, name="far")
    history = model.fit(X, Y, epochs=4, verbose=0, callbacks=callback).history
    values = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert len(history["far_loss"]) == 2 and len(history["loss"]) == 4
    assert history["far_loss"][-1] == pytest.approx(values["loss"], abs=1e-6)
    assert history["far_accuracy"][-1] == values["accuracy"]


def test_weights_and_steps_count():
    model = classifier()
    weight = torch.arange(50.0)
    callback = EvaluateEvery(X, Y, sample_weight=weight, batch_size=10, steps=2)
    history = model.fit(X, Y, verbose=0, callbacks=callback).history
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model.net(X), Y, reduction="none")
    assert history["extra_loss"] == [pytest.approx((losses * weight)[:20].mean().item(), abs=1e-5)]


def test_other_metrics_are_those_of_torchmetrics_over_the_whole_set():
    from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix

    model = classifier()
    metrics = {"auc": MulticlassAUROC(3), "matrix": MulticlassConfusionMatrix(3)}
    callback = MetricCallback(metrics, X, Y, batch_size=7)
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback, EMA(0.0)]).history
    with torch.no_grad():
        logits = model.net(X)
    auc = MulticlassAUROC(3)(logits.softmax(1), Y).item()
    matrix = MulticlassConfusionMatrix(3)(logits, Y)
    assert history["val_auc"][-1] == pytest.approx(auc, abs=1e-6)
    assert torch.equal(torch.as_tensor(history["val_matrix"][-1]).long(), matrix)
    assert set(history) == {"loss", "accuracy", "val_auc", "val_matrix"}
    # The compiled metrics are as they were.
    assert model.metrics_names == ["loss", "accuracy"]
    assert set(model.evaluate(X, Y, verbose=0, return_dict=True)) == {"loss", "accuracy"}


def test_names_and_functions_are_metrics_too():
    model = classifier()
    callback = MetricCallback(["auroc", lambda p, t: (p.argmax(1) == t).float()], X, Y, name="all")
    history = model.fit(X, Y, verbose=0, callbacks=callback).history
    assert "all_auroc" in history and len(history) == 4


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: EvaluateEvery(iter([(X, Y)])), ConfigurationError, "only once"),
        (lambda: EvaluateEvery(None), ArgumentTypeError, "no data"),
        (lambda: EvaluateEvery(X, Y, every=0), ConfigurationError, "every"),
        (lambda: EvaluateEvery(X, Y, name=""), ArgumentTypeError, "name"),
        (lambda: MetricCallback(["auroccc"], X, Y), ConfigurationError, "auroc"),
        (lambda: MetricCallback([], X, Y), ConfigurationError, "no metric"),
    ],
)
def test_wrong_arguments_fail_at_construction(make, error, text):
    with pytest.raises(error, match=text):
        make()
