"""torchmetrics' metrics: joined batches give what one update a batch gives, for every class."""

import inspect

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics import classification, regression

from fitkit.extras import torchmetrics_objects as adapter
from fitkit.extras.torchmetrics_objects import update_owner
from fitkit.metrics import CompiledMetrics
from fitkit.metrics import group as waiting
from fitkit.outputs import LossHint

CLASSES, LABELS = LossHint("probabilities", "classes"), LossHint("probabilities", "binary")
NUMBERS = LossHint("values", "regression")
SIZES = [7, 7, 7, 7, 7, 7, 3]
NEED_GROUPS = {"BinaryFairness", "BinaryGroupStatRates"}
FACTORIES = set(dir(classification)) & {
    name.removeprefix("Binary") for name in classification.__all__ if name.startswith("Binary")
} | {"ExactMatch"}
"""`Accuracy(task=…)` and the like make objects of the other classes."""


def classes_of(package):
    found = [
        name for name in package.__all__ if issubclass(getattr(package, name), torchmetrics.Metric)
    ]
    return [name for name in found if name not in NEED_GROUPS | FACTORIES]


REGRESSION = classes_of(regression)
CLASSIFICATION = classes_of(classification)
ARGUMENTS = {
    "beta": 0.5,
    "min_recall": 0.3,
    "min_precision": 0.3,
    "min_sensitivity": 0.3,
    "min_specificity": 0.3,
    "num_classes": 3,
    "num_labels": 3,
    "p": 3,
    "threshold": 0.5,
}


def built(name, **options):
    """A metric with the arguments that it can't do without."""
    maker = getattr(classification, name, None) or getattr(regression, name)
    for argument, what in inspect.signature(maker).parameters.items():
        if argument in ARGUMENTS and (what.default is what.empty or argument == "num_classes"):
            options.setdefault(argument, ARGUMENTS[argument])
    return maker(**options)


def data_for(name, *, length=None):
    """Predictions and targets of 45 samples, and what a loss would tell of them."""
    generator = torch.Generator().manual_seed(31)
    count, more = sum(SIZES), () if length is None else (length,)
    if name.startswith("Binary"):
        target = torch.randint(2, (count, *more), generator=generator)
        return torch.rand(count, *more, generator=generator), target, LABELS
    if name.startswith("Multiclass"):
        prediction = torch.randn(count, 3, *more, generator=generator).softmax(1)
        return prediction, torch.randint(3, (count, *more), generator=generator), CLASSES
    if name.startswith("Multilabel"):
        target = torch.randint(2, (count, 3, *more), generator=generator)
        return torch.rand(count, 3, *more, generator=generator), target, LABELS
    if name in ("KLDivergence", "JensenShannonDivergence", "CosineSimilarity"):
        pair = torch.randn(2, count, 4, generator=generator).softmax(-1)
        return *pair, NUMBERS
    if name == "ContinuousRankedProbabilityScore":
        ensemble = torch.randn(count, 4, generator=generator)
        return ensemble, torch.randn(count, generator=generator), NUMBERS
    pair = torch.rand(2, count, *more, generator=generator)
    return *pair, NUMBERS


def summed(metric, prediction, target, hint):
    """The value over all batches, joined."""
    meters = CompiledMetrics({"it": metric}).begin()
    for p, t in zip(prediction.split(SIZES), target.split(SIZES), strict=True):
        meters.start(p, t, lambda _: hint)
        meters.update(p, t)
    return meters.results()["it"], meters.only.sums["it"]


def plain(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    return np.asarray(value)


def assert_same(found, expected, tolerance):
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for part, other in zip(found, expected, strict=True):
            assert_same(part, other, tolerance)
    else:
        np.testing.assert_allclose(found.reshape(expected.shape), expected, tolerance, tolerance)


def check(name, **options):
    length = 5 if "multidim_average" in options or "keep_sequence_dim" in options else None
    prediction, target, hint = data_for(name, length=length)
    alone = built(name, **options)
    for p, t in zip(prediction.split(SIZES), target.split(SIZES), strict=True):
        alone.update(p, t)
    found, one = summed(built(name, **options), prediction, target, hint)
    exact = one.is_exact or not one.joins
    assert_same(plain(found), plain(alone.compute()), 0 if exact else 1e-5)
    return one


@pytest.mark.filterwarnings("ignore")  # of classes without samples, and of kept samples
@pytest.mark.parametrize("name", [*CLASSIFICATION, *REGRESSION])
def test_every_class_gives_the_value_of_one_update_a_batch(name):
    assert check(name).joins


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            (f"{kind}{name}", {"thresholds": 5})
            for kind in ("Binary", "Multiclass", "Multilabel")
            for name in ("AUROC", "AveragePrecision", "ROC")
        ),
        *(
            (f"{kind}{name}", options)
            for kind in ("Multiclass", "Multilabel")
            for name in ("Accuracy", "F1Score", "Precision")
            for options in (
                {"average": None},
                {"average": "micro"},
                {"average": "weighted", "ignore_index": 0},
                {"multidim_average": "samplewise"},
            )
        ),
        ("BinaryAccuracy", {"multidim_average": "samplewise"}),
        ("MulticlassAccuracy", {"top_k": 2}),
        ("MulticlassExactMatch", {"multidim_average": "samplewise"}),
        ("MultilabelExactMatch", {"multidim_average": "samplewise"}),
        ("MultilabelAUROC", {"average": None, "ignore_index": 0}),
        ("MulticlassConfusionMatrix", {"normalize": "true"}),
        ("MulticlassHingeLoss", {"multiclass_mode": "one-vs-all", "squared": True}),
        ("MulticlassCalibrationError", {"norm": "max", "n_bins": 4}),
        ("CosineSimilarity", {"reduction": "none"}),
        ("KLDivergence", {"reduction": "none"}),
        ("NormalizedRootMeanSquaredError", {"normalization": "std"}),
        ("NormalizedRootMeanSquaredError", {"normalization": "range"}),
        ("ExplainedVariance", {"multioutput": "raw_values"}),
        ("MeanSquaredError", {"squared": False}),
        ("TweedieDevianceScore", {"power": 1.5}),
        ("KendallRankCorrCoef", {"variant": "a"}),
    ],
)
def test_options_change_nothing_of_that(name, options):
    assert check(name, **options).joins


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Binary", "Multiclass", "Multilabel"])
def test_metrics_together_give_the_values_of_separate_ones(kind):
    names = [name for name in CLASSIFICATION if name.startswith(kind)]
    curves = [f"{kind}AUROC", f"{kind}AveragePrecision"]
    metrics = {name: built(name) for name in names}
    metrics |= {f"{name} at thresholds": built(name, thresholds=5) for name in curves}
    prediction, target, hint = data_for(kind)
    meters = CompiledMetrics(metrics).begin()
    for p, t in zip(prediction.split(SIZES), target.split(SIZES), strict=True):
        meters.start(p, t, lambda _: hint)
        meters.update(p, t)
    alone = {name: metric(prediction, target) for name, metric in metrics.items()}
    values = meters.results()
    for name, one in meters.only.sums.items():
        assert_same(plain(values[name]), plain(alone[name]), 0 if one.is_exact else 1e-5)


def test_a_metric_that_keeps_a_row_a_batch_sees_each_by_itself():
    one = check("CriticalSuccessIndex", keep_sequence_dim=1)
    assert len(one.metric.hits_list) == len(SIZES)


def test_every_update_of_both_packages_was_looked_at():
    names = [*CLASSIFICATION, *REGRESSION]
    owners = {update_owner(built(name)).__name__ for name in names}
    assert owners == adapter.JOINABLE


@pytest.mark.parametrize(
    ("name", "hint"), [("BinaryF1Score", LABELS), ("MulticlassAUROC", CLASSES)]
)
def test_a_class_that_a_later_torchmetrics_adds_sees_each_batch_by_itself(monkeypatch, name, hint):
    monkeypatch.setattr(adapter, "JOINABLE", frozenset())
    prediction, target, _ = data_for(name)
    logits = torch.logit(prediction) if hint is LABELS else prediction.log()
    found, one = summed(built(name), logits, target, LossHint("logits", hint.task))
    assert not one.joins
    assert one.metric.update_count == len(SIZES)
    assert found == pytest.approx(built(name)(prediction, target).item())


# ---- who reads when doesn't matter ----

FRACTIONS = ["mae", "spearman", "explained_variance", "pearson"]


def running(metrics, read_at, sizes=(3,) * 150):
    """Meters with 150 small batches of numbers of very different size, read now and then."""
    generator = torch.Generator().manual_seed(32)
    meters = CompiledMetrics(metrics).begin()
    readings = []
    for index, size in enumerate(sizes):
        prediction, target = torch.randn(2, size, generator=generator) * 10.0 ** (index % 9)
        meters.start(prediction, target, lambda _: NUMBERS)
        meters.update(prediction, target)
        if index in read_at:
            readings.append((meters.results(), meters.state()))
    return meters, readings


def test_reading_values_changes_no_bit_of_later_ones():
    metrics = [*FRACTIONS, regression.MeanSquaredError(), lambda p, t: (p - t).abs().mean()]
    unread, _ = running(metrics, [])
    read, readings = running(metrics, [0, 1, 5, 62, 63, 64, 100, 149])
    assert read.results() == unread.results()
    assert readings[-1][0] == unread.results()
    for name, state in unread.state().items():
        assert_same(plain(read.state()[name]), plain(state), 0)


def test_values_read_on_the_way_are_of_all_batches_so_far():
    metrics = [*FRACTIONS, regression.MeanSquaredError()]
    _, readings = running(metrics, [4, 70])
    for (values, _), count in zip(readings, (5, 71), strict=True):
        meters, _ = running(metrics, [], (3,) * count)
        assert values == pytest.approx(meters.results(), rel=1e-6)


def test_a_state_that_was_taken_stays_as_it_was():
    prediction, target, hint = data_for("MulticlassF1Score")
    meters = CompiledMetrics("f1").begin()
    meters.start(prediction, target, lambda _: hint)
    meters.update(prediction, target)
    state = meters.state()["f1"]["states"]["tp"]
    before = state.clone()
    meters.update(prediction, target)
    meters.results()
    assert state.equal(before)
    assert before.any()


def test_a_sum_over_ranks_forgets_what_waited_on_this_one():
    meters, _ = running(["mae"], [])
    states = [meters.state(), meters.state()]
    meters.merge(states)
    alone = running(["mae"], [])[0].results()["mae"]
    assert meters.results()["mae"] == pytest.approx(alone, rel=1e-12)
    assert meters.state()["mae"]["totals"][1] == 2 * 450


def test_large_batches_come_after_those_that_wait(monkeypatch):
    monkeypatch.setattr(waiting, "LARGE", 30)
    buffer = waiting.Buffer()
    small, large = torch.arange(10.0), torch.arange(20.0)
    assert not buffer.add(small, small, None)
    assert not buffer.add(small, small, None)
    assert [batch.samples for batch in buffer.add(large, large, None)] == [20, 20]
    assert not buffer


def test_an_object_that_checks_its_input_still_does_where_it_shares_another_ones_counts():
    careless, careful = built("BinaryAUROC"), built("BinaryAveragePrecision")
    prediction, target, hint = data_for("BinaryAUROC")
    meters = CompiledMetrics([careless, careful]).begin()
    meters.start(prediction, target, lambda _: hint)
    meters.update(prediction, target)
    meters.update(prediction, target + 1)
    with pytest.raises(RuntimeError, match="expected only the following values"):
        meters.results()
