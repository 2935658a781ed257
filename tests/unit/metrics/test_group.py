"""Batches wait and are joined; no value changes by that."""

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

from fitkit.metrics import CompiledMetrics
from fitkit.metrics import group as module
from fitkit.metrics.group import MOST_BATCHES, Buffer
from fitkit.outputs import LossHint

CLASSES = LossHint("logits", "classes")


def batches(count, size=4, classes=3):
    generator = torch.Generator().manual_seed(12)
    return [
        (
            torch.randn(size, classes, generator=generator),
            torch.randint(classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def summed(metrics, data, most_batches=MOST_BATCHES, each_step=None):
    meters = CompiledMetrics(metrics).begin()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_BATCHES", most_batches)
        for prediction, target in data:
            meters.start(prediction, target, lambda _: CLASSES)
            meters.update(prediction, target)
            if each_step is not None:
                each_step(meters)
    return meters.results()


METRICS = ["accuracy", "f1", "auc", "mcc", "cross_entropy", "top_2_accuracy"]


@pytest.mark.parametrize("count", [1, 2, 64, 65, 130])
def test_joined_batches_give_the_values_of_single_ones(count):
    objects = [MulticlassAccuracy(3), MulticlassConfusionMatrix(3, normalize="true")]
    metrics = [*METRICS, objects[0]]
    assert summed(metrics, batches(count)) == pytest.approx(summed(metrics, batches(count), 1))
    joined, single = (
        summed(objects[1], batches(count), k)["multiclass_confusion_matrix"] for k in (64, 1)
    )
    assert (joined == single).all()


@pytest.mark.parametrize(
    "metric", ["r2", "pearson", "spearman", "mae", PearsonCorrCoef(3), SpearmanCorrCoef(3)]
)
def test_joined_regression_batches_give_the_values_of_single_ones(metric):
    data = [(p, p * 0.5 + torch.randn(4, 3)) for p, _ in batches(25)]
    joined, single = (list(summed(metric, data, k).values()) for k in (20, 1))
    assert len(joined) == 1
    assert joined[0] == pytest.approx(single[0], rel=1e-4)


def test_results_at_any_step_are_those_of_all_batches_so_far():
    data = batches(70)
    running = []
    summed(METRICS, data, each_step=lambda meters: running.append(meters.results()))
    for step in (0, 1, 62, 63, 64, 69):
        assert running[step] == pytest.approx(summed(METRICS, data[: step + 1]))


def test_asking_for_results_does_not_change_later_ones():
    data = batches(45)
    asked = summed(METRICS, data, each_step=lambda meters: meters.results())
    assert asked == pytest.approx(summed(METRICS, data))


def test_an_uneven_last_batch_counts_by_its_samples():
    ((logits, target),) = batches(1, size=9)
    right = (logits.argmax(1) == target).float().mean().item()
    parts = [(logits[:8], target[:8]), (logits[8:], target[8:])]
    assert summed("accuracy", parts)["accuracy"] == pytest.approx(right)


def test_sizes_that_change_from_batch_to_batch_are_not_joined():
    generator = torch.Generator().manual_seed(13)
    data = [
        (
            torch.randn(2, 3, size, size, generator=generator),
            torch.randint(3, (2, size, size), generator=generator),
        )
        for size in (4, 4, 5, 4, 6, 6)
    ]
    found = summed(["accuracy", "iou"], data)
    assert found == pytest.approx(summed(["accuracy", "iou"], data, 1))
    right = sum((p.argmax(1) == t).sum().item() for p, t in data)
    assert found["accuracy"] == pytest.approx(right / sum(t.numel() for _, t in data))


def test_so_many_batches_wait_and_no_more(monkeypatch):
    monkeypatch.setattr(module, "MOST_BATCHES", 3)
    buffer = Buffer()
    prediction, target = batches(1)[0]
    assert [len(buffer.add(prediction, target, None)) for _ in range(2)] == [0, 0]
    (batch,) = buffer.add(prediction, target, None)
    assert batch.samples == 12
    assert list(buffer.take()) == []


def test_large_batches_do_not_wait_and_are_not_copied(monkeypatch):
    monkeypatch.setattr(module, "LARGE", 12)
    prediction, target = batches(1)[0]
    (batch,) = Buffer().add(prediction, target, None)
    assert batch.prediction.data_ptr() == prediction.data_ptr()
    assert batch.target.data_ptr() == target.data_ptr()


def refilled(data, way):
    """The batches in buffers that are filled anew for each, as a generator may do."""
    if way == "numpy":
        arrays = [np.empty_like(part.numpy()) for part in data[0]]
        for batch in data:
            for array, part in zip(arrays, batch, strict=True):
                array[...] = part.numpy()
            yield tuple(torch.from_numpy(array) for array in arrays)
    elif way == "numpy of torch's":
        tensors = [part.clone() for part in data[0]]
        arrays = [tensor.numpy() for tensor in tensors]
        for batch in data:
            for array, part in zip(arrays, batch, strict=True):
                array[...] = part.numpy()
            yield tuple(tensors)
    elif way == "two buffers":  # as they were made, at first
        buffers = [tuple(part.clone() for part in batch) for batch in data[:2]]
        yield from buffers
        for index, batch in enumerate(data[2:]):
            for tensor, part in zip(buffers[index % 2], batch, strict=True):
                tensor.copy_(part)
            yield buffers[index % 2]
    else:
        buffer = tuple(torch.empty_like(part) for part in data[0])
        for batch in data:
            for tensor, part in zip(buffer, batch, strict=True):
                (tensor.data if way == "data" else tensor).copy_(part)
            yield tuple(tensor[:] for tensor in buffer) if way == "views" else buffer


class KeepsWhatItSees(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    def update(self, preds, target):
        self.labels.append(target)

    def compute(self):
        return torch.cat(self.labels).float().mean()


@pytest.mark.parametrize(
    "way", ["numpy", "numpy of torch's", "two buffers", "in place", "views", "data"]
)
@pytest.mark.parametrize("limits", [{}, {"LARGE": 12}, {"MOST_ELEMENTS": 30}])
def test_a_generator_may_refill_its_own_buffers(monkeypatch, way, limits):
    # With an identity for a net, predictions are in the generator's memory too.
    metrics = [*METRICS, MulticlassAccuracy(3), KeepsWhatItSees()]
    expected = summed(metrics, batches(23))
    for name, limit in limits.items():
        monkeypatch.setattr(module, name, limit)
    assert summed(metrics, refilled(batches(23), way)) == pytest.approx(expected)
    data = [(prediction[:, 0], target.float()) for prediction, target in batches(23)]
    regression = ["mae", "spearman", SpearmanCorrCoef()]
    assert summed(regression, refilled(data, way)) == pytest.approx(summed(regression, data))


def test_weights_may_be_refilled_too():
    buffer, data = torch.empty(4), batches(23)
    weights = torch.rand(23, 4)
    found, expected = (CompiledMetrics(weighted_metrics="accuracy").begin() for _ in range(2))
    with torch.no_grad():
        for (prediction, target), weight in zip(data, weights, strict=True):
            for meters in (found, expected):
                meters.start(prediction, target, lambda _: CLASSES)
            found.update(prediction, target, buffer.copy_(weight))
            expected.update(prediction, target, weight)
    assert found.results() == expected.results()


def test_what_waits_holds_no_graph():
    buffer = Buffer()
    weight = torch.randn(4, 3, requires_grad=True)
    buffer.add(weight * 2, torch.zeros(4), None)
    assert not buffer.take()[0].prediction.requires_grad


def test_batches_of_other_lengths_are_joined_and_those_of_other_columns_come_after():
    buffer = Buffer()
    long, short, wide = torch.rand(4, 2), torch.rand(3, 2), torch.rand(4, 5)
    for part in (long, long, short, long, short):
        assert not buffer.add(part, part[:, 0], None)
    (batch,) = buffer.add(wide, wide[:, 0], None)
    assert batch.prediction.equal(torch.cat([long, long, short, long, short]))
    assert batch.target.equal(batch.prediction[:, 0])
    (batch,) = buffer.take()
    assert batch.prediction.equal(wide)
    assert not buffer


def test_reset_forgets_what_waits_too():
    data = batches(5)
    meters = CompiledMetrics(METRICS).begin()
    for prediction, target in data:
        meters.start(prediction, target, lambda _: CLASSES)
        meters.update(prediction, target)
    meters.reset()
    assert meters.results() == {}
    meters.update(*data[0])
    assert meters.results() == pytest.approx(summed(METRICS, data[:1]))


def test_metrics_of_other_settings_keep_their_own_state_though_they_start_alike():
    metrics = {
        "low": torchmetrics_precision(0.5),
        "high": torchmetrics_precision(0.9),
        "low_again": torchmetrics_precision(0.5),
    }
    meters = CompiledMetrics(metrics).begin()
    sure, unsure = torch.tensor([0.95, 0.1]), torch.tensor([0.95, 0.6])
    target = torch.tensor([1, 0])
    meters.start(sure, target, lambda _: LossHint("probabilities", "binary"))
    meters.update(sure, target)
    meters.update(unsure, target)
    expected = {"low": 2 / 3, "high": 1.0, "low_again": 2 / 3}
    assert meters.results() == pytest.approx(expected)


def torchmetrics_precision(threshold):
    from torchmetrics.classification import BinaryPrecision

    return BinaryPrecision(threshold=threshold)
