"""Intervals of evaluations, against NumPy's and SciPy's arithmetic over the whole set."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fitkit
from fitkit.errors import ConfigurationError
from tests.compiling import TRACED

NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(90, 4)).astype("float32")
LABELS = NUMBERS.integers(0, 3, 90)
TARGETS = NUMBERS.normal(size=(90, 2)).astype("float32")


def model_of(net, loss, metrics=(), **options):
    torch.manual_seed(0)
    model = fitkit.Model(net)
    model.compile(
        loss=loss, metrics=list(metrics), **{"accelerator": "cpu", "devices": 1, **options}
    )
    return model


def evaluated(model, y, **arguments):
    arguments = {"batch_size": 16, "verbose": 0, "return_dict": True, "interval": 0.9, **arguments}
    return model.evaluate(X, y, **arguments)


def around(values):
    """The t interval of a mean."""
    return stats.t.interval(0.9, len(values) - 1, values.mean(), stats.sem(values))


def of_ratio(parts, divisors):
    mean = parts.sum() / divisors.sum()
    error = np.sqrt(len(parts) / (len(parts) - 1) * np.square(parts - mean * divisors).sum())
    reach = stats.t.ppf(0.95, len(parts) - 1) * error / divisors.sum()
    return mean - reach, mean + reach


@pytest.mark.parametrize("options", [{}, {"jit_compile": TRACED}], ids=["eager", "compiled"])
def test_means_over_samples_have_theirs_and_others_say_that_they_have_none(options):
    model = model_of(nn.Linear(4, 3), "cross_entropy", ["accuracy", "f1"], **options)
    found = evaluated(model, LABELS)
    logits = torch.as_tensor(model.predict(X, verbose=0))
    losses = nn.functional.cross_entropy(logits, torch.tensor(LABELS), reduction="none").numpy()
    assert found["loss_interval"] == pytest.approx(around(losses.astype(float)), rel=1e-4)
    right = int((logits.argmax(1).numpy() == LABELS).sum())
    wilson = stats.binomtest(right, 90).proportion_ci(0.9, "wilson")
    assert found["accuracy_interval"] == pytest.approx((wilson.low, wilson.high))
    assert found["f1_interval"] is None
    assert list(found) == [
        "loss", "loss_interval", "accuracy", "accuracy_interval", "f1", "f1_interval",
    ]  # fmt: skip
    assert model.metrics_names == ["loss", "accuracy", "f1"]
    plain = evaluated(model, LABELS, interval=None)
    assert plain == {name: found[name] for name in plain} and len(plain) == 3


@pytest.mark.timeout(120)
def test_two_ranks_find_what_one_process_finds():
    nets = nn.Linear(4, 3), nn.Linear(4, 3)
    nets[1].load_state_dict(nets[0].state_dict())
    one, two = (
        model_of(net, "cross_entropy", ["accuracy"], devices=devices)
        for net, devices in zip(nets, (1, 2), strict=True)
    )
    # The last batch of a rank is short, or there is none.
    found, wanted = evaluated(two, LABELS, batch_size=7), evaluated(one, LABELS, batch_size=90)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-6)


def test_a_sample_of_several_entries_is_one_sample():
    model = model_of(nn.Linear(4, 2), "mse", ["mae", "rmse"])
    found = evaluated(model, TARGETS)
    apart = model.predict(X, verbose=0).astype(float) - TARGETS
    assert found["loss_interval"] == pytest.approx(around(np.square(apart).mean(1)), rel=1e-4)
    assert found["mae_interval"] == pytest.approx(around(np.abs(apart).mean(1)), rel=1e-4)
    assert found["rmse_interval"] is None


def test_weights_count_in_weighted_metrics_and_in_the_loss():
    model = model_of(nn.Linear(4, 2), "mse")
    model.compile(weighted_metrics=["mae"])
    weight = NUMBERS.uniform(0, 2, 90)
    found = evaluated(model, TARGETS, sample_weight=weight)
    apart = model.predict(X, verbose=0).astype(float) - TARGETS
    losses, errors = np.square(apart).mean(1), np.abs(apart).mean(1)
    assert found["loss_interval"] == pytest.approx(around(weight * losses), rel=1e-4)
    assert found["mae_interval"] == pytest.approx(of_ratio(weight * errors, weight), rel=1e-4)


def test_labels_that_are_ignored_do_not_count():
    y = NUMBERS.integers(0, 3, (90, 5))
    y[NUMBERS.random((90, 5)) < 0.3] = -100
    y[3] = -100
    net = nn.Sequential(nn.Linear(4, 15), nn.Unflatten(1, (3, 5)))
    model = model_of(net, "cross_entropy", ["accuracy"])
    found = evaluated(model, y)
    right = (model.predict(X, verbose=0).argmax(1) == y).sum(1)
    counted = (y != -100).sum(1)
    kept = counted > 0
    assert found["accuracy_interval"] == pytest.approx(of_ratio(right[kept], counted[kept]))
    assert found["loss_interval"] is None  # its samples weigh differently


def test_functions_have_one_if_they_give_a_value_for_each_sample():
    def apart(prediction, target):
        return (prediction - target).abs().sum(1)

    def whole(prediction, target):
        return (prediction - target).abs().mean()

    model = model_of(nn.Linear(4, 2), "mse", [apart, whole])
    found = evaluated(model, TARGETS)
    values = np.abs(model.predict(X, verbose=0).astype(float) - TARGETS).sum(1)
    assert found["apart_interval"] == pytest.approx(around(values), rel=1e-4)
    assert found["whole_interval"] is None


def test_several_outputs_and_steps_of_ones_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    model = model_of(Two(), {"a": "mse", "b": "cross_entropy"})
    model.compile(metrics={"b": ["accuracy"]})
    found = evaluated(model, {"a": TARGETS, "b": LABELS})
    right = int((model.predict(X, verbose=0)["b"].argmax(1) == LABELS).sum())
    wilson = stats.binomtest(right, 90).proportion_ci(0.9, "wilson")
    assert found["b_accuracy_interval"] == pytest.approx((wilson.low, wilson.high))
    assert found["loss_interval"] is None

    class Own(fitkit.Model):
        def test_step(self, batch, batch_idx):
            self.log("half", torch.tensor(0.5))

    own = Own(nn.Linear(4, 2))
    own.compile(loss="mse", accelerator="cpu", devices=1)
    assert evaluated(own, TARGETS)["half_interval"] is None


def test_a_level_needs_a_dict():
    model = model_of(nn.Linear(4, 2), "mse")
    for wrong in ({"return_dict": False}, {"interval": 95}):
        with pytest.raises(ConfigurationError):
            evaluated(model, TARGETS, **wrong)
