"""Meters over their life, and what compile refuses."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.metrics import CompiledMetrics
from fitkit.metrics.named import NAMES
from fitkit.outputs import LossHint

CLASSES = LossHint("logits", "classes")
LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [2.0, 0.0, 1.0]])
LABELS = torch.tensor([0, 2, 1, 1])


def test_neither_import_nor_the_commonest_metrics_import_torchmetrics():
    code = (
        "import sys, torch; from fitkit.metrics import CompiledMetrics;"
        "from fitkit.outputs import LossHint;"
        "m = CompiledMetrics(['accuracy', lambda p, t: 0.0], 'mae').begin();"
        "p = torch.eye(2); m.start(p, p, lambda _: LossHint('logits', 'classes'));"
        "m.update(p, p); assert m.results()['accuracy'] == 1.0;"
        "assert 'torchmetrics' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_before_start_there_is_nothing():
    meters = CompiledMetrics("accuracy").begin()
    assert isinstance(meters, CompiledMetrics)
    assert meters.results() == {}
    meters.reset()
    with pytest.raises(RuntimeError, match="start"):
        meters.update(LOGITS, LABELS)


def test_a_started_metric_without_updates_is_left_out_without_a_warning():
    meters = CompiledMetrics(["accuracy", "f1", lambda p, t: 0.0]).begin()
    meters.start(LOGITS, LABELS, lambda _: CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert meters.results() == {}


def test_starting_again_changes_nothing():
    meters = CompiledMetrics("accuracy").begin()
    meters.start(LOGITS, LABELS, lambda _: CLASSES)
    meters.update(LOGITS, LABELS)
    meters.start(torch.zeros(2), torch.zeros(2), lambda _: LossHint())
    assert meters.results() == {"accuracy": 0.75}


def test_results_are_python_floats_in_order():
    meters = CompiledMetrics(["f1", "accuracy", lambda p, t: p[:, 0] > 0, "auc"]).begin()
    meters.start(LOGITS, LABELS, lambda _: CLASSES)
    meters.update(LOGITS, LABELS)
    found = meters.results()
    assert list(found) == ["f1", "accuracy", "lambda", "auc"]
    assert all(type(value) is float for value in found.values())


def test_states_made_in_inference_mode_work_outside_it_and_back():
    composed = MulticlassAccuracy(3) + 0  # one that sees each batch
    meters = CompiledMetrics(["accuracy", "f1", "auc", lambda p, t: p.mean(), composed]).begin()
    with torch.inference_mode():
        prediction = LOGITS * 1
        meters.start(prediction, LABELS, lambda _: CLASSES)
        meters.update(prediction, LABELS)
    inside = meters.results()
    meters.update(LOGITS, LABELS)
    with torch.inference_mode():
        meters.update(LOGITS * 1, LABELS)
        assert meters.results() == pytest.approx(inside)
        meters.reset()
    meters.update(LOGITS, LABELS)
    assert meters.results() == pytest.approx(inside)


def test_the_states_of_two_ranks_merge_to_the_value_over_both():
    names = ["accuracy", "rmse", "f1", "recall", "auc", "r2", "pearson", "spearman"]
    whole, one, two = (CompiledMetrics(names).begin() for _ in range(3))
    prediction, target = torch.rand(10), torch.tensor([0, 1] * 5).float()
    for meters, part in ((whole, slice(None)), (one, slice(0, 3)), (two, slice(3, None))):
        meters.start(prediction, target, lambda _: LossHint("probabilities", "binary"))
        meters.update(prediction[part], target[part])
    one.merge([one.state(), two.state()])
    assert one.results() == pytest.approx(whole.results())
    one.reset()
    one.update(prediction, target)
    assert one.results() == pytest.approx(whole.results())


@pytest.mark.parametrize("name", list(NAMES))
def test_every_name_works_on_some_output_over_two_passes(name):
    meters = CompiledMetrics(name).begin()
    ways = [
        (torch.rand(8), torch.tensor([0, 1] * 4), LossHint("probabilities", "binary")),
        (torch.randn(8, 3), torch.tensor([0, 1, 2, 0] * 2), CLASSES),
        (torch.rand(8, 3), torch.rand(8, 3), LossHint(task="regression")),
    ]
    for prediction, target, hint in ways:
        try:
            meters.start(prediction, target, lambda _: hint)  # noqa: B023
            meters.update(prediction, target)
            break
        except ConfigurationError:
            meters = CompiledMetrics(name).begin()
    first = meters.results()
    assert list(first) == [name]
    meters.reset()
    meters.update(prediction, target)
    second = meters.results()
    assert (torch.as_tensor(second[name]) == torch.as_tensor(first[name])).all()


# ---- what compile refuses ----


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigurationError, match="metric='acuracy'.*Did you mean 'accuracy'"):
        CompiledMetrics(["acuracy"])
    with pytest.raises(ConfigurationError, match="presicion.*precision"):
        CompiledMetrics({"a": ["presicion"]})


@pytest.mark.parametrize("metric", [MulticlassAccuracy, torch.nn.L1Loss])
def test_a_class_is_refused_with_what_to_write(metric):
    with pytest.raises(ArgumentTypeError, match=rf"class {metric.__name__}: add \(\)"):
        CompiledMetrics([metric])


@pytest.mark.parametrize("metric", [3, 0.5, torch.ones(2), b"acc"])
def test_what_is_no_metric_is_refused(metric):
    with pytest.raises(ArgumentTypeError, match="weighted_metrics has .*a metric is a name"):
        CompiledMetrics(weighted_metrics=[metric])


@pytest.mark.parametrize("metrics", [{None: "accuracy"}, {"": "accuracy"}, {"a": {0: "accuracy"}}])
def test_keys_must_be_names(metrics):
    with pytest.raises(ArgumentTypeError, match="has the key (None|''|0)"):
        CompiledMetrics(metrics)


def test_a_function_of_other_arguments_is_refused():
    def alone(prediction):
        return prediction

    with pytest.raises(ConfigurationError, match=r"alone takes .*\(prediction, target\)"):
        CompiledMetrics([alone])


def test_functions_that_take_the_target_first_are_refused():
    with pytest.raises(ConfigurationError, match=r"accuracy_score takes \(y_true, y_pred.*swap"):
        CompiledMetrics([pytest.importorskip("sklearn.metrics").accuracy_score])


def test_aggregations_are_refused_because_they_know_no_targets():
    with pytest.raises(ConfigurationError, match=r"MeanMetric.*self\.log"):
        CompiledMetrics([torchmetrics.MeanMetric()])


# ---- what the first batch refuses ----


def first_batch(metrics, prediction, target, hint=CLASSES):
    meters = CompiledMetrics(metrics).begin()
    meters.start(prediction, target, lambda _: hint)
    meters.update(prediction, target)
    return meters


def test_what_torchmetrics_refuses_names_the_metric_and_keeps_the_cause():
    with pytest.raises(ConfigurationError, match="'multiclass_accuracy'") as caught:
        first_batch(MulticlassAccuracy(5), LOGITS, LABELS)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_binary_object_on_two_columns_is_refused_with_both_shapes():
    with pytest.raises(ConfigurationError, match=r"'binary_accuracy'.*\(4, 3\).*\(4,\)"):
        first_batch(BinaryAccuracy(), LOGITS, LABELS)


def test_a_callable_that_fails_names_itself():
    def broken(prediction, target):
        raise KeyError("missing")

    with pytest.raises(ConfigurationError, match="'broken'.*KeyError.*missing") as caught:
        first_batch(broken, LOGITS, LABELS)
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_of_later_batches_stay_what_they_are():
    calls = []

    def broken(prediction, target):
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("missing")
        return 0.0

    meters = first_batch(broken, LOGITS, LABELS)
    with pytest.raises(KeyError):
        meters.update(LOGITS, LABELS)


def test_a_later_batch_that_would_broadcast_is_refused():
    meters = first_batch("mse", torch.rand(4, 1), torch.rand(4), LossHint())
    meters.update(torch.rand(4, 1), torch.rand(4, 4))
    with pytest.raises(ConfigurationError, match=r"\(4, 1\).*\(4, 4\)"):
        meters.results()


@pytest.mark.parametrize("metric", ["accuracy", "mse", "r2", MulticlassAccuracy(3)])
def test_a_named_metric_without_target_tensors_says_so(metric):
    with pytest.raises(ConfigurationError, match="target must be a tensor, but is None"):
        first_batch(metric, LOGITS, None)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_predictions_meet_targets_and_weights_in_float32(half):
    prediction, target = torch.zeros(2, 1, dtype=half), torch.tensor([257.0, 1.0])
    meters = CompiledMetrics(["mse", "mae"], ["mae"]).begin()
    meters.start(prediction, target, lambda _: LossHint(task="regression"))
    meters.update(prediction, target, torch.tensor([1.0, 1.001]))
    expected = {"mse": 66050 / 2, "mae": 129.0, "weighted_mae": (257 + 1.001) / 2.001}
    assert meters.results() == pytest.approx(expected, 1e-6)


@pytest.mark.parametrize("name", list(NAMES))
def test_every_name_takes_half_precision_predictions_as_the_same_numbers_in_float32(name):
    generator = torch.Generator().manual_seed(15)
    logits = torch.randn(12, 3, generator=generator).bfloat16()
    ways = [
        (logits[:, 0].sigmoid(), torch.tensor([0, 1] * 6), LossHint("probabilities", "binary")),
        (logits, torch.tensor([0, 1, 2, 0] * 3), CLASSES),
        (logits, torch.rand(12, 3, generator=generator), LossHint(task="regression")),
    ]
    for prediction, target, hint in ways:
        found = []
        for given in (prediction, prediction.float()):
            meters = CompiledMetrics(name).begin()
            try:
                meters.start(given, target, lambda _: hint)  # noqa: B023
                meters.update(given, target)
            except ConfigurationError as error:
                found.append(type(error).__name__)
            else:
                found.append(meters.results()[name])
        np.testing.assert_equal(*found)
