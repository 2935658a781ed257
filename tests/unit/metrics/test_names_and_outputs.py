"""How metrics are named, and which output gets which."""

import functools

import pytest
import torch
import torchmetrics
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassF1Score

from fitkit.arguments import snake_case
from fitkit.errors import ConfigurationError
from fitkit.losses import CompiledLoss
from fitkit.metrics import CompiledMetrics
from fitkit.outputs import LossHint

A = torch.rand(6, 3)
LABELS = torch.randint(3, (6,))


def started(metrics, prediction, target, weighted=None, hint=None):
    meters = CompiledMetrics(metrics, weighted).begin()
    meters.start(prediction, target, lambda _: hint or LossHint())
    meters.update(prediction, target)
    return list(meters.results())


def brier(prediction, target):
    return prediction.mean()


class MyMetric:
    def __call__(self, prediction, target):
        return 0.5


def test_a_name_is_logged_as_it_was_typed():
    names = ["acc", "Accuracy", "f1-score", "MCC"]
    assert started(names, A, LABELS) == names


def test_functions_partials_objects_and_lambdas_have_sensible_names():
    metrics = [
        brier,
        functools.partial(brier),
        lambda p, t: 0.0,
        MyMetric(),
        torch.nn.CrossEntropyLoss(),
        MulticlassF1Score(3),
        torchmetrics.Accuracy(task="multiclass", num_classes=3),
    ]
    names = ["brier", "brier_1", "lambda", "my_metric", "cross_entropy_loss"]
    assert started(metrics, A, LABELS) == [*names, "multiclass_f1_score", "multiclass_accuracy"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("BinaryAUROC", "binary_auroc"),
        ("R2Score", "r2_score"),
        ("MeanIoU", "mean_iou"),
        ("L1Loss", "l1_loss"),
        ("MatthewsCorrCoef", "matthews_corr_coef"),
    ],
)
def test_class_names_become_snake_case(name, expected):
    assert snake_case(name) == expected


def test_clashes_are_numbered_and_weighted_metrics_say_so():
    compiled = CompiledMetrics(["mae", "mae", "mse"], ["mae", "mae", "rmse"])
    names = ["mae", "mae_1", "mse", "weighted_mae", "weighted_mae_1", "rmse"]
    assert compiled.known_names == names
    assert started(["mae", "mae", "mse"], A, A, weighted=["mae", "mae", "rmse"]) == names


def test_no_metric_takes_the_name_of_the_loss():
    def loss(prediction, target):
        return 0.0

    assert CompiledMetrics(loss).known_names == ["loss_1"]


def test_a_dict_gives_a_single_output_names_of_ones_own():
    metrics = {"top": "accuracy", "brier": brier, "f": MulticlassF1Score(3)}
    assert CompiledMetrics(metrics).known_names == ["top", "brier", "f"]
    assert started(metrics, A, LABELS) == ["top", "brier", "f"]


def test_a_collection_is_expanded_to_its_keys():
    collection = torchmetrics.MetricCollection(
        {"a": MulticlassAccuracy(3), "f": MulticlassF1Score(3)}, prefix="my_"
    )
    assert CompiledMetrics([collection, "acc"]).known_names == ["my_a", "my_f", "acc"]
    assert started([collection, "acc"], A, LABELS) == ["my_a", "my_f", "acc"]
    assert started({"c": collection}, A, LABELS) == ["c_my_a", "c_my_f"]


def test_one_metric_needs_no_list():
    assert CompiledMetrics("accuracy").known_names == ["accuracy"]
    assert CompiledMetrics(brier).known_names == ["brier"]
    assert CompiledMetrics(BinaryF1Score()).known_names == ["binary_f1_score"]
    assert CompiledMetrics(("mae", "mse")).known_names == ["mae", "mse"]


@pytest.mark.parametrize("nothing", [None, [], {}, ()])
def test_no_metrics_are_falsy_and_without_results(nothing):
    compiled = CompiledMetrics(nothing, nothing)
    meters = compiled.begin()
    assert not compiled
    assert not meters
    assert compiled.known_names == []
    meters.start(A, LABELS, lambda _: LossHint())
    meters.update(A, LABELS)
    assert meters.results() == {}
    assert CompiledMetrics("mae") and CompiledMetrics("mae").begin()


# ---- several outputs ----

PAIR = (A, A[:, 0])
TARGETS = (LABELS, A[:, 1])


def test_a_flat_list_is_for_every_output():
    expected = ["output_0_brier", "output_0_brier_1", "output_1_brier", "output_1_brier_1"]
    assert started([brier, brier], PAIR, TARGETS) == expected


def test_lists_in_a_list_are_one_an_output():
    assert started([["acc", "f1"], "mae"], PAIR, TARGETS) == [
        "output_0_acc",
        "output_0_f1",
        "output_1_mae",
    ]
    assert started([["acc"], None], PAIR, TARGETS) == ["output_0_acc"]
    assert started([{"mine": "acc"}, {"other": "mse"}], PAIR, TARGETS) == [
        "output_0_mine",
        "output_1_other",
    ]
    assert started([["acc"]], A, LABELS) == ["acc"]


def test_a_dict_is_by_output_and_may_leave_out_some():
    prediction, target = {"a": A, "b": A[:, 0]}, {"a": LABELS, "b": A[:, 1]}
    metrics = {"b": ["mae", "mse"], "a": "acc"}
    assert started(metrics, prediction, target) == ["a_acc", "b_mae", "b_mse"]
    assert started({"b": "mae"}, prediction, target) == ["b_mae"]
    assert started({"b": {"x": "mae"}}, prediction, target) == ["b_x"]
    assert started({"b": "mae"}, prediction, target, weighted={"b": "mae", "a": "acc"}) == [
        "a_acc",
        "b_mae",
        "b_weighted_mae",
    ]


def test_each_output_has_its_own_values():
    meters = CompiledMetrics({"a": "acc", "b": "mae"}, {"b": "mae"}).begin()
    prediction = {"a": torch.eye(3), "b": torch.zeros(3)}
    target = {"a": torch.tensor([0, 1, 0]), "b": torch.tensor([1.0, 2.0, 3.0])}
    weight = {"b": torch.tensor([1.0, 0.0, 0.0])}
    meters.start(prediction, target, lambda _: LossHint())
    meters.update(prediction, target, weight)
    expected = {"a_acc": 2 / 3, "b_mae": 2.0, "b_weighted_mae": 1.0}
    assert meters.results() == pytest.approx(expected)


def test_the_hint_is_asked_by_output():
    asked = []
    meters = CompiledMetrics("mae").begin()
    meters.start({"a": A, "b": A}, {"a": A, "b": A}, lambda o: asked.append(o) or LossHint())
    assert asked == ["a", "b"]


def test_outputs_without_targets_are_left_out_of_metrics_for_all():
    prediction, target = {"a": A, "b": A[:, 0]}, {"b": A[:, 1]}
    assert started(["mae"], prediction, target) == ["b_mae"]
    weighted = {"b": "mae"}
    assert started(["mse"], prediction, target, weighted=weighted) == ["b_mse", "b_mae"]
    with pytest.raises(ConfigurationError, match=r"output 'a'.*\['b'\]"):
        started({"a": "mae"}, prediction, target)


def test_a_net_with_one_named_output_takes_either_form():
    assert started("acc", {"a": A}, {"a": LABELS}) == ["a_acc"]
    assert started({"a": "acc"}, {"a": A}, LABELS) == ["a_acc"]
    assert started({"mine": "acc"}, {"a": A}, LABELS) == ["a_mine"]


def test_an_object_with_logits_is_a_single_output():
    class Output:
        logits = A

    assert started("acc", Output(), LABELS) == ["acc"]
    assert started("acc", [A], [LABELS]) == ["acc"]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"c": "mae"}, r"\['c'\].*\['a', 'b'\]"),
        ([["mae"], ["mae"], ["mae"]], r"3 lists.*2 outputs"),
        ([["mae"]], r"1 lists.*2 outputs"),
    ],
)
def test_metrics_for_other_outputs_are_refused(metrics, message):
    with pytest.raises(ConfigurationError, match=message):
        started(metrics, {"a": A, "b": A}, {"a": A, "b": A})


def test_outputs_may_have_names_that_are_no_strings():
    prediction, target = {0: A, 1: A[:, 0]}, {0: LABELS, 1: A[:, 1]}
    assert started({0: "acc", 1: ["mae", "mse"]}, prediction, target) == ["0_acc", "1_mae", "1_mse"]
    assert started(["mae"], {0: A, 1: A}, {0: A, 1: A}) == ["0_mae", "1_mae"]
    with pytest.raises(ConfigurationError, match=r"\[2\].*\[0, 1\]"):
        started({2: "mae"}, prediction, target)


def test_a_dict_of_loss_and_logits_is_a_single_output():
    for prediction in ({"logits": A}, {"loss": None, "logits": A}, {"loss": A.mean(), "logits": A}):
        assert started("acc", prediction, LABELS) == ["acc"]
        assert started({"logits": ["acc"]}, prediction, LABELS) == ["acc"]
    assert started("mae", {"logits": A, "b": A}, {"logits": A, "b": A}) == ["logits_mae", "b_mae"]


def test_loss_and_accuracy_read_the_same_axis_of_classes_where_both_would_fit():
    generator = torch.Generator().manual_seed(16)
    target = torch.randint(4, (3, 4), generator=generator)
    shares = torch.nn.functional.one_hot(target, 4) * 0.9 + 0.025  # right along the last axis
    one_hot = torch.eye(4)[target]
    for name, right, labels in (
        ("sparse_categorical_crossentropy", shares, target),
        ("categorical_crossentropy", shares, one_hot),
        ("cross_entropy", shares.movedim(-1, 1) * 9, target),
    ):
        loss = CompiledLoss(name)
        loss.check(right, labels)
        metrics = ["accuracy", "cross_entropy", MulticlassAccuracy(4, average="micro")]
        meters = CompiledMetrics(metrics).begin()
        meters.start(right, labels, loss.hint)
        meters.update(right, labels)
        found = meters.results()
        assert found["accuracy"] == found["multiclass_accuracy"] == 1.0
        assert found["cross_entropy"] == pytest.approx(loss(right, labels)[0].item(), 1e-5)
