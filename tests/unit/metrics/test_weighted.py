"""weighted_metrics: the mean of per-sample values by weight, divided by the sum of weights."""

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from fitkit.errors import ConfigurationError
from fitkit.metrics import CompiledMetrics
from fitkit.metrics.named import weightable_names
from fitkit.outputs import LossHint

CLASSES = LossHint("logits", "classes")


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(10)
    return (
        torch.randn(60, 4, generator=generator),
        torch.randint(4, (60,), generator=generator),
        torch.rand(60, generator=generator) * 3,
    )


def test_weighted_accuracy_is_divided_by_the_sum_of_weights(measure, batch):
    logits, target, weight = batch
    found = measure("accuracy", logits, target, hint=CLASSES, weighted="accuracy", weight=weight)
    right = (logits.argmax(1) == target).numpy()
    assert found == {
        "accuracy": pytest.approx(right.mean()),
        "weighted_accuracy": pytest.approx(np.average(right, weights=weight)),
    }


@pytest.mark.parametrize("name", ["mse", "mae", "mape", "msle", "log_cosh"])
@pytest.mark.parametrize("columns", [None, 3])
def test_weighted_errors_are_weighted_means_of_samples(measure, name, columns):
    generator = torch.Generator().manual_seed(11)
    shape = (40,) if columns is None else (40, columns)
    prediction, target = torch.rand(2, *shape, generator=generator) + 0.1
    weight = torch.rand(40, generator=generator)
    each = [measure(name, p[None], t[None])[name] for p, t in zip(prediction, target, strict=True)]
    found = measure(None, prediction, target, weighted=name, weight=weight)
    assert found[name] == pytest.approx(np.average(each, weights=weight), 1e-5)
    found = measure(None, prediction, target, weighted=name, weight=weight[:, None])
    assert found[name] == pytest.approx(np.average(each, weights=weight), 1e-5)


def test_weighted_rmse_is_the_root_of_the_weighted_mean(measure):
    prediction, target, weight = torch.rand(3, 40)
    found = measure(None, prediction, target, weighted=["mse", "rmse"], weight=weight)
    assert found["rmse"] == pytest.approx(found["mse"] ** 0.5)


def test_weights_of_whole_numbers_are_as_repeated_samples(measure, batch):
    logits, target, _ = batch
    weight = torch.arange(60) % 3
    names = weightable_names()
    positive = logits.abs() + 0.1
    one_hot = torch.nn.functional.one_hot(target, 4).float()
    index = torch.repeat_interleave(torch.arange(60), weight)
    hint = LossHint(task="classes")
    found = measure(None, positive, one_hot, hint=hint, weighted=names, weight=weight)
    repeated = measure(names, positive[index], one_hot[index], hint=hint)
    assert found == pytest.approx(repeated, 1e-5)


def test_without_weights_each_sample_counts_once(measure, batch):
    logits, target, _ = batch
    weighted = measure(None, logits, target, hint=CLASSES, weighted=["accuracy", "cross_entropy"])
    assert weighted == pytest.approx(
        measure(["accuracy", "cross_entropy"], logits, target, hint=CLASSES)
    )


def test_batches_with_and_without_weights_can_mix(batch):
    logits, target, weight = batch
    meters = CompiledMetrics(weighted_metrics="accuracy").begin()
    meters.start(logits, target, lambda _: CLASSES)
    meters.update(logits[:20], target[:20], weight[:20])
    meters.update(logits[20:40], target[20:40])
    meters.update(logits[40:], target[40:], weight[40:])
    weight = weight.clone()
    weight[20:40] = 1
    right = logits.argmax(1) == target
    assert meters.results()["accuracy"] == pytest.approx(np.average(right, weights=weight))


def test_a_samples_weight_counts_for_all_of_its_entries(measure):
    logits, target = torch.randn(12, 3, 5), torch.randint(3, (12, 5))
    target[:, 0] = -100
    weight = torch.rand(12)
    found = measure(None, logits, target, hint=CLASSES, weighted="accuracy", weight=weight)
    right = (logits.argmax(1) == target)[:, 1:]
    weights = weight[:, None].expand(12, 4)
    assert found["accuracy"] == pytest.approx(np.average(right, weights=weights))
    found = measure(
        None, logits[..., 1:], target[:, 1:], hint=CLASSES, weighted="accuracy", weight=weights
    )
    assert found["accuracy"] == pytest.approx(np.average(right, weights=weights))


def test_weights_that_are_all_0_give_nan(measure, batch):
    logits, target, _ = batch
    found = measure(None, logits, target, weighted="accuracy", weight=torch.zeros(60))
    assert np.isnan(found["accuracy"])


def test_a_callable_is_weighted_where_it_gives_a_value_a_sample(measure, batch):
    logits, target, weight = batch

    def first_column(prediction, target):
        return prediction[:, 0]

    found = measure(None, logits, target, weighted=[first_column], weight=weight)
    assert found["first_column"] == pytest.approx(np.average(logits[:, 0], weights=weight), 1e-5)
    with pytest.raises(ConfigurationError, match=r"'mean'.*one value per sample, shape \(7,\)"):
        measure(None, logits, target, weighted={"mean": lambda p, t: p.mean()}, weight=weight)


@pytest.mark.parametrize("metric", ["f1", "auc", "r2", MulticlassAccuracy(4)])
def test_metrics_that_are_no_means_over_samples_are_refused_with_those_that_are(metric):
    with pytest.raises(ConfigurationError, match="accuracy.*mse.*one value per sample"):
        CompiledMetrics(weighted_metrics=[metric])


def test_weights_of_another_length_are_refused(measure, batch):
    logits, target, _ = batch
    with pytest.raises(ConfigurationError, match=r"\(3,\).*\(60,\)"):
        measure(None, logits, target, weighted="accuracy", weight=torch.ones(3), batch=60)
