"""Predictions are read alike in every batch, wherever their values happen to lie."""

import inspect

import pytest
import torch
from torch import nn
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryPrecisionRecallCurve,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MultilabelAccuracy,
    MultilabelAUROC,
)

from fitkit.outputs import LossHint

BINARY = LossHint("logits", "binary")
CLASSES = LossHint("logits", "classes")
LOGITS = torch.tensor([0.2, 0.3, 0.9])
ONES = torch.ones(3, dtype=torch.long)


@pytest.mark.parametrize("metric", ["accuracy", "recall", "binary_accuracy", BinaryAccuracy()])
@pytest.mark.parametrize("last", [0.9, 1.9])
def test_logits_within_0_and_1_are_still_logits(measure, metric, last):
    logits = torch.tensor([0.2, 0.3, last])
    assert list(measure(metric, logits, ONES, hint=BINARY).values()) == [1.0]
    assert list(measure(metric, logits, ONES.float()[:, None], hint=BINARY).values()) == [1.0]


def test_torchmetrics_alone_would_take_those_logits_for_probabilities():
    assert BinaryAccuracy()(LOGITS, ONES) == pytest.approx(1 / 3)


@pytest.mark.parametrize("metric", ["accuracy", BinaryAccuracy()])
def test_probabilities_and_their_logarithms_have_their_own_threshold(measure, metric):
    shares = torch.tensor([0.2, 0.3, 0.9])
    for takes, given in (("probabilities", shares), ("log_probabilities", shares.log())):
        found = measure(metric, given, ONES, hint=LossHint(takes, "binary"))
        assert list(found.values()) == [pytest.approx(1 / 3)]


@pytest.mark.parametrize("metric", ["accuracy", BinaryAccuracy()])
def test_a_probability_a_little_above_1_does_not_make_its_batch_logits(measure, metric):
    shares = torch.tensor([0.2, 0.3, 1.0000001])
    found = measure(metric, shares, ONES, hint=LossHint("probabilities", "binary"))
    assert list(found.values()) == [pytest.approx(1 / 3)]


@pytest.mark.parametrize("metric", ["accuracy", BinaryAccuracy()])
def test_where_the_loss_tells_nothing_the_first_batch_decides_for_all(measure, metric):
    logits = torch.tensor([-1.5, 0.3, 2.0, 0.2, 0.3, 0.9])
    assert list(measure(metric, logits, torch.tensor([0, 1, 1, 1, 1, 1]), batch=3).values()) == [
        1.0
    ]
    shares = torch.tensor([0.1, 0.6, 0.9, 0.2, 0.3, 1.2])
    found = measure(metric, shares, torch.tensor([0, 1, 1, 0, 0, 1]), batch=3)
    assert list(found.values()) == [1.0]


@pytest.mark.parametrize("metric", ["accuracy", BinaryAccuracy()])
@pytest.mark.parametrize("highest", [0.9, 1.4])
def test_a_net_trained_on_squared_errors_says_yes_from_one_half(measure, metric, highest):
    values = torch.tensor([0.2, 0.4, 0.6, highest])
    target = torch.tensor([0.0, 0.0, 1.0, 1.0])
    found = measure(metric, values, target, hint=LossHint(task="regression"))
    assert list(found.values()) == [1.0]


def curve_batches():
    """Logits whose first batch lies within [0, 1] and whose second doesn't."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.cat(
        [torch.rand(20, 3, generator=generator), 4 * torch.randn(20, 3, generator=generator)]
    )
    return logits, torch.randint(2, (40, 3), generator=generator)


def only(found):
    (value,) = found.values()
    return value


def test_curves_rank_all_batches_on_one_scale(measure):
    logits, target = curve_batches()
    for column in (0, 1):
        expected = BinaryAUROC()(logits[:, column].sigmoid(), target[:, column])
        for metric in ("auc", BinaryAUROC()):
            found = measure(metric, logits[:, column], target[:, column], hint=BINARY, batch=20)
            assert only(found) == pytest.approx(expected.item())
    expected = MultilabelAUROC(3)(logits.sigmoid(), target)
    for metric in ("auc", MultilabelAUROC(3)):
        found = measure(metric, logits, target, hint=BINARY, batch=20)
        assert only(found) == pytest.approx(expected.item())
    labels = target.argmax(1)
    expected = MulticlassAUROC(3)(logits.softmax(1), labels)
    for metric in ("auc", MulticlassAUROC(3)):
        found = measure(metric, logits, labels, hint=CLASSES, batch=20)
        assert only(found) == pytest.approx(expected.item())


def test_other_objects_that_want_probabilities_get_them(measure):
    logits, target = curve_batches()
    labels = target.argmax(1)
    expected = MulticlassCalibrationError(3)(logits.softmax(1), labels).item()
    found = measure(MulticlassCalibrationError(3), logits, labels, hint=CLASSES, batch=20)
    assert only(found) == pytest.approx(expected)
    expected = MultilabelAccuracy(3, threshold=0.7)(logits.sigmoid(), target).item()
    found = measure(MultilabelAccuracy(3, threshold=0.7), logits, target, hint=BINARY, batch=20)
    assert only(found) == pytest.approx(expected)


@pytest.mark.skipif(
    "normalization" not in inspect.signature(BinaryPrecisionRecallCurve).parameters,
    reason="this torchmetrics can't be asked",
)
def test_an_object_that_asks_for_raw_predictions_gets_them(measure):
    metric = BinaryPrecisionRecallCurve(normalization=None)
    _, _, thresholds = only(measure(metric, LOGITS * 4, ONES, hint=BINARY))
    assert thresholds.tolist() == pytest.approx((LOGITS * 4).tolist())


def test_the_order_of_predictions_beyond_0_and_1_counts_for_curves(measure):
    values = torch.tensor([1.2, 1.4, 1.6, 0.1])
    target = torch.tensor([0, 1, 1, 0])
    assert measure("auc", values, target, hint=LossHint(task="regression"))["auc"] == 1.0


def test_half_precision_logits_keep_their_order(measure):
    logits = torch.tensor([6.0, 6.25, 6.5, 6.75], dtype=torch.bfloat16)
    assert len(set(logits.sigmoid().tolist())) < 4  # sigmoid in bfloat16 would make ties
    found = measure("auc", logits, torch.tensor([0, 0, 1, 1]), hint=BINARY)
    assert found["auc"] == 1.0


@pytest.mark.parametrize("metric", [nn.BCEWithLogitsLoss(), lambda p, t: (p > 0).eq(t == 1)])
def test_callables_get_predictions_as_the_net_gave_them(measure, metric):
    expected = metric(LOGITS, ONES.float()).float().mean()
    assert only(measure(metric, LOGITS, ONES.float(), hint=BINARY)) == pytest.approx(
        expected.item()
    )
