"""torchmetrics objects of the user's, and callables."""

import pytest
import torch
import torchmetrics
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryROC,
    MulticlassAccuracy,
    MulticlassF1Score,
    MultilabelF1Score,
)
from torchmetrics.regression import KLDivergence, MeanSquaredError, R2Score
from torchmetrics.wrappers import ClasswiseWrapper

from fitkit.errors import ConfigurationError
from fitkit.metrics import CompiledMetrics
from fitkit.outputs import LossHint

CLASSES = LossHint("logits", "classes")
BINARY = LossHint("logits", "binary")


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(14)
    return torch.randn(30, 3, generator=generator), torch.randint(3, (30,), generator=generator)


def test_the_users_object_stays_as_it_is_and_starts_from_nothing(measure, batch):
    logits, target = batch
    metric = MulticlassAccuracy(3, average="micro")
    metric.update(torch.eye(3), torch.tensor([1, 2, 0]))  # all wrong
    found = measure(metric, logits, target, hint=CLASSES)
    expected = (logits.argmax(1) == target).float().mean().item()
    assert found["multiclass_accuracy"] == pytest.approx(expected)
    assert metric.compute() == 0
    assert metric.sync_on_compute


def test_calls_can_nest(batch):
    compiled = CompiledMetrics(MulticlassAccuracy(3))
    outer, inner = compiled.begin(), compiled.begin()
    for meters in (outer, inner):
        meters.start(*batch, lambda _: CLASSES)
    outer.update(*batch)
    inner.update(torch.eye(3), torch.arange(3))
    assert inner.results() == {"multiclass_accuracy": 1.0}
    assert outer.results()["multiclass_accuracy"] < 1


@pytest.mark.parametrize(
    "reform",
    [
        lambda p, t: (p, t),
        lambda p, t: (p, t[:, None]),
        lambda p, t: (p, t.float()),
        lambda p, t: (p, t.int()),
        lambda p, t: (p, torch.nn.functional.one_hot(t, 3)),
        lambda p, t: (p, torch.nn.functional.one_hot(t, 3).float()),
    ],
)
def test_multiclass_objects_take_labels_of_any_form(measure, batch, reform):
    metric = MulticlassF1Score(3, average="weighted")
    expected = metric(*batch).item()
    metric.reset()
    found = measure(metric, *reform(*batch), hint=CLASSES)
    assert found == {"multiclass_f1_score": pytest.approx(expected)}


def test_multiclass_objects_take_classes_in_the_last_axis(measure):
    logits, target = torch.randn(14, 5, 3), torch.randint(3, (14, 5))
    expected = MulticlassAccuracy(3)(logits.transpose(1, 2), target).item()
    found = measure(MulticlassAccuracy(3), logits, target, hint=CLASSES)
    assert found["multiclass_accuracy"] == pytest.approx(expected)


def test_predicted_labels_are_left_alone(measure, batch):
    logits, target = batch
    expected = MulticlassAccuracy(3)(logits, target).item()
    found = measure(MulticlassAccuracy(3), logits.argmax(1), target)
    assert found["multiclass_accuracy"] == pytest.approx(expected)
    found = measure(BinaryAccuracy(), (target > 0).int(), target > 0)
    assert found["binary_accuracy"] == 1.0


@pytest.mark.parametrize("form", [(-1,), (-1, 1)])
def test_binary_objects_take_a_column(measure, form):
    logits, target = torch.randn(20), torch.randint(2, (20,))
    expected = BinaryAccuracy()(logits.sigmoid(), target).item()
    found = measure(BinaryAccuracy(), logits.reshape(form), target.float(), hint=BINARY)
    assert found["binary_accuracy"] == pytest.approx(expected)


def test_an_index_to_ignore_reaches_the_object(measure):
    logits, target = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1, 1, -1])
    found = measure(BinaryAccuracy(ignore_index=-1), logits, target, hint=BINARY)
    assert found["binary_accuracy"] == 0.5
    found = measure(BinaryAccuracy(ignore_index=-1), logits, target.float(), hint=BINARY)
    assert found["binary_accuracy"] == 0.5


def test_regression_objects_meet_a_column_and_keep_their_own_meaning(measure):
    prediction, target = torch.rand(2, 20)
    expected = ((prediction - target) ** 2).mean().item()
    assert measure(MeanSquaredError(), prediction[:, None], target) == {
        "mean_squared_error": pytest.approx(expected)
    }
    shares = torch.rand(2, 20, 3).softmax(-1)
    assert measure(KLDivergence(), *shares)["kl_divergence"] == pytest.approx(
        KLDivergence()(*shares).item(), 1e-4
    )
    assert "r2_score" in measure(R2Score(), prediction, target)


def test_a_classwise_wrapper_logs_each_class(measure, batch):
    metric = ClasswiseWrapper(MulticlassAccuracy(3, average=None), labels=["a", "b", "c"])
    expected = MulticlassAccuracy(3, average=None)(*batch).tolist()
    found = measure({"by": metric}, *batch, hint=CLASSES)
    assert list(found) == [f"by_multiclassaccuracy_{c}" for c in "abc"]
    assert list(found.values()) == pytest.approx(expected)
    wrapped = ClasswiseWrapper(MultilabelF1Score(3, average=None))
    logits = torch.full((4, 3), 0.2)  # logits, all above 0
    found = measure(wrapped, logits, torch.ones(4, 3), hint=BINARY)
    assert set(found.values()) == {1.0}


def test_several_numbers_are_an_array_and_curves_a_tuple(measure, batch):
    metric = MulticlassAccuracy(3, average=None)
    found = measure(metric, *batch)["multiclass_accuracy"]
    assert found.tolist() == pytest.approx(MulticlassAccuracy(3, average=None)(*batch).tolist())
    rates = measure(BinaryROC(), torch.rand(9), torch.randint(2, (9,)), hint=BINARY)["binary_roc"]
    assert len(rates) == 3


class Seen(torchmetrics.Metric):
    """Notes the shapes that it was given."""

    def __init__(self):
        super().__init__()
        self.add_state("sizes", default=[], dist_reduce_fx="cat")

    def update(self, preds, target):
        self.sizes.append(torch.tensor([float(len(preds))]))

    def compute(self):
        return torch.cat(self.sizes)


def test_metrics_that_fitkit_does_not_know_see_each_batch_as_it_came(measure, batch):
    assert measure(Seen(), *batch)["seen"].tolist() == [7, 7, 7, 7, 2]


def test_a_subclass_with_an_update_of_its_own_sees_each_batch_as_it_came(measure):
    class Own(BinaryAccuracy):
        def update(self, preds, target):
            assert preds.min() < 0
            super().update(preds.sigmoid(), target.long())

    found = measure(Own(), torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 1.0]), hint=BINARY)
    assert found == {"own": 1.0}


def test_compositions_of_metrics_work(measure):
    metric = MeanSquaredError() ** 0.5
    prediction, target = torch.rand(2, 20)
    expected = ((prediction - target) ** 2).mean().sqrt().item()
    assert list(measure(metric, prediction, target).values()) == [pytest.approx(expected)]


def test_no_metric_waits_for_other_ranks(batch):
    collection = torchmetrics.MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
    wrapped = ClasswiseWrapper(MulticlassAccuracy(3, average=None))
    meters = CompiledMetrics(
        [collection, wrapped, Seen(), MeanSquaredError() + 1, "f1", "auc"]
    ).begin()
    meters.start(*batch, lambda _: CLASSES)
    parts = [part for one in meters.only.sums.values() for part in one.metric.modules()]
    assert len(parts) > 7
    assert not any(
        part._to_sync or part.sync_on_compute for part in parts if hasattr(part, "_to_sync")
    )


# ---- callables ----


def test_a_callables_batch_means_are_weighted_by_samples(measure):
    values = torch.arange(10.0)
    found = measure(lambda p, t: p.mean(), values, values, batch=4)
    assert found == {"lambda": pytest.approx(4.5)}


@pytest.mark.parametrize(
    "function",
    [
        lambda p, t: p[:, 0] > 0,
        lambda p, t: (p[:, 0] > 0).double(),
        lambda p, t: p[:, :1] > 0,
        lambda p, t: (p[:, 0] > 0).float().mean(),
        lambda p, t: (p[:, 0] > 0).float().mean().item(),
        lambda p, t: (p[:, 0] > 0).float().mean().numpy(),
        lambda p, t: (p[:, 0] > 0).float().mean().reshape(1),
    ],
)
def test_callables_give_numbers_or_a_value_a_sample(measure, batch, function):
    expected = (batch[0][:, 0] > 0).float().mean().item()
    assert measure(function, *batch) == {"lambda": pytest.approx(expected)}


def test_callables_see_each_batch_at_once_and_as_it_came(batch):
    seen = []

    def note(prediction, target):
        seen.append((prediction, target))
        return 0.0

    meters = CompiledMetrics([note, "acc"]).begin()
    meters.start(*batch, lambda _: CLASSES)
    assert not seen
    for count in range(1, 4):
        meters.update(*batch)
        assert len(seen) == count
        assert seen[-1][0] is batch[0]
        assert torch.equal(seen[-1][1], batch[1]) and seen[-1][1] is not batch[1]


def test_callables_get_whatever_structure_an_output_has():
    def boxes(prediction, target):
        return prediction["boxes"].mean() - target["boxes"].mean()

    meters = CompiledMetrics({"a": boxes}).begin()
    prediction = {"a": {"boxes": torch.ones(3, 4)}, "b": torch.zeros(3)}
    target = {"a": {"boxes": torch.zeros(3, 4)}, "b": torch.zeros(3)}
    meters.start(prediction, target, lambda _: LossHint())
    meters.update(prediction, target)
    assert meters.results() == {"a_boxes": 1.0}


def test_a_callable_that_keeps_gradients_holds_no_graph():
    weight = torch.ones(3, requires_grad=True)
    meters = CompiledMetrics(lambda p, t: (weight * p).sum()).begin()
    meters.start(torch.ones(3), torch.ones(3), lambda _: LossHint())
    meters.update(torch.ones(3), torch.ones(3))
    assert not meters.only.sums["lambda"].totals.requires_grad
    assert meters.results() == {"lambda": 3.0}


def test_a_callable_of_another_shape_is_refused(measure, batch):
    with pytest.raises(ConfigurationError, match=r"'lambda'.*\(7, 3\)|shape \(3,\) for 7 samples"):
        measure(lambda p, t: p[0], *batch)


@pytest.mark.parametrize(
    "function",
    [torch.nn.L1Loss(), lambda p, t: (p - t).abs(), lambda p, t: (t - p).square().mean()],
)
def test_a_callable_that_pairs_every_prediction_with_every_target_is_refused(measure, function):
    with pytest.raises(ConfigurationError, match=r"the callable broadcasts .* to \(7, 7\)"):
        measure(function, torch.rand(8, 1), torch.rand(8))


def test_a_callable_may_bring_both_to_one_shape_itself(measure):
    prediction, target = torch.rand(8, 1), torch.rand(8)
    found = measure(lambda p, t: (p[:, 0] - t).abs().mean(), prediction, target)
    wanted = (prediction[:, 0] - target).abs().mean().item()
    assert list(found.values()) == pytest.approx([wanted])
