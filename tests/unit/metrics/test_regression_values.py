"""Named regression metrics equal NumPy's, SciPy's and scikit-learn's on the whole data."""

import math

import numpy as np
import pytest
import torch

from fitkit.errors import ConfigurationError
from fitkit.outputs import LossHint

reference = pytest.importorskip("sklearn.metrics")
stats = pytest.importorskip("scipy.stats")

REGRESSION = LossHint(task="regression")


def data(columns=None, offset=0.0):
    generator = torch.Generator().manual_seed(6)
    shape = (110,) if columns is None else (110, columns)
    target = torch.rand(shape, generator=generator) + 0.1 + offset
    return target + 0.3 * torch.randn(shape, generator=generator), target


def concordance(t, p):
    covariance = ((t - t.mean(0)) * (p - p.mean(0))).mean(0) * len(t) / (len(t) - 1)
    variances = t.var(0, ddof=1) + p.var(0, ddof=1)
    return np.mean(2 * covariance / (variances + (t.mean(0) - p.mean(0)) ** 2))


def correlation(function):
    def over_columns(t, p):
        if t.ndim == 1:
            return function(t, p).statistic
        return np.mean([function(a, b).statistic for a, b in zip(t.T, p.T, strict=True)])

    return over_columns


def positive(function):
    return lambda t, p: function(t, np.maximum(p, 0))


EXPECTED = {
    "mse": reference.mean_squared_error,
    "mean_squared_error": reference.mean_squared_error,
    "rmse": lambda t, p: reference.mean_squared_error(t, p) ** 0.5,
    "mae": reference.mean_absolute_error,
    "mape": lambda t, p: 100 * reference.mean_absolute_percentage_error(t, p),
    "smape": lambda t, p: 200 * np.mean(np.abs(t - p) / (np.abs(t) + np.abs(p))),
    "msle": positive(reference.mean_squared_log_error),
    "log_cosh": lambda t, p: np.mean(np.log(np.cosh(p - t))),
    "huber": lambda t, p: np.mean(np.where(abs(p - t) < 1, (p - t) ** 2 / 2, abs(p - t) - 0.5)),
    "hinge": lambda t, p: np.mean(np.maximum(1 - p, 0)),
    "squared_hinge": lambda t, p: np.mean(np.maximum(1 - p, 0) ** 2),
    "r2": reference.r2_score,
    "r2_score": reference.r2_score,
    "explained_variance": reference.explained_variance_score,
    "pearson": correlation(stats.pearsonr),
    "spearman": correlation(stats.spearmanr),
    "concordance": concordance,
    "relative_squared_error": lambda t, p: np.mean(
        ((t - p) ** 2).sum(0) / ((t - t.mean(0)) ** 2).sum(0)
    ),
}


@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_regression_metric_equals_its_definition(measure, name, columns):
    prediction, target = data(columns)
    expected = EXPECTED[name](target.double().numpy(), prediction.double().numpy())
    found = measure(name, prediction, target, hint=REGRESSION)
    assert found == {name: pytest.approx(expected, 1e-5)}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_column_of_predictions_meets_targets_without_columns(measure, name):
    prediction, target = data()
    expected = measure(name, prediction, target)
    assert measure(name, prediction.unsqueeze(1), target) == pytest.approx(expected)
    assert measure(name, prediction, target.unsqueeze(1)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["r2", "explained_variance", "pearson", "concordance"])
def test_a_mean_far_from_zero_costs_no_digits(measure, name):
    prediction, target = data(offset=5000.0)
    expected = EXPECTED[name](target.double().numpy(), prediction.double().numpy())
    assert measure(name, prediction, target)[name] == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("name", EXPECTED)
def test_shapes_that_would_broadcast_are_refused_with_both(measure, name):
    with pytest.raises(ConfigurationError, match=r"\(7, 1\).*\(7, 2\)"):
        measure(name, torch.rand(9, 1), torch.rand(9, 2))


def test_cosine_similarity_and_divergence_are_means_over_samples(measure):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(40, 5, generator=generator)
    target = torch.randn(40, 5, generator=generator).softmax(1)
    found = measure("cosine_similarity", logits, target)
    cosines = [
        1 - reference.pairwise.cosine_distances(a[None], b[None])[0, 0]
        for a, b in zip(logits, target, strict=True)
    ]
    assert found["cosine_similarity"] == pytest.approx(np.mean(cosines), 1e-5)
    expected = np.mean(stats.entropy(target, logits.softmax(1), axis=1))
    for takes, given in (
        ("logits", logits),
        ("probabilities", logits.softmax(1)),
        ("log_probabilities", logits.log_softmax(1)),
        (None, logits),
    ):
        found = measure("kl_divergence", given, target, hint=LossHint(takes))
        assert found["kl_divergence"] == pytest.approx(expected, 1e-5)
    with pytest.raises(ConfigurationError, match="one number per sample"):
        measure("cosine_similarity", torch.rand(4, 1), torch.rand(4, 1))


def test_poisson_is_keras_loss_of_that_name(measure):
    prediction, target = torch.rand(30) + 0.1, torch.poisson(torch.ones(30))
    expected = (prediction - target * (prediction + 1e-7).log()).mean().item()
    assert measure("poisson", prediction, target)["poisson"] == pytest.approx(expected, 1e-5)


def test_hinge_takes_0_for_minus_1(measure):
    prediction = torch.randn(30)
    target = torch.randint(2, (30,))
    signs = 2.0 * target - 1
    expected = reference.hinge_loss(signs, prediction)
    assert measure("hinge", prediction, target)["hinge"] == pytest.approx(expected, 1e-5)
    assert measure("hinge", prediction, signs)["hinge"] == pytest.approx(expected, 1e-5)


def test_large_errors_do_not_overflow_log_cosh(measure):
    found = measure("log_cosh", torch.tensor([-500.0, 500.0]), torch.zeros(2))
    assert found["log_cosh"] == pytest.approx(500 - np.log(2), 1e-5)


def test_half_precision_predictions_are_summed_in_full(measure):
    prediction = torch.full((300,), 2.0, dtype=torch.bfloat16)
    found = measure(["mse", "mae", "r2"], prediction, torch.arange(300.0))
    values = np.arange(300.0)
    assert found["mae"] == pytest.approx(np.abs(values - 2).mean())
    assert found["r2"] == pytest.approx(reference.r2_score(values, np.full(300, 2.0)))


def test_the_r2_of_one_sample_is_nan(measure):
    found = measure(["mae", "r2"], torch.ones(1), torch.zeros(1))
    assert found["mae"] == 1.0
    assert math.isnan(found["r2"])
