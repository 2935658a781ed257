"""Two models on the same data, against SciPy's tests; probabilities, against SciPy's."""

import json

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fitkit
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.trials.distributions import (
    beta_below,
    even_odds,
    share_interval,
    t_beyond,
    t_reach,
)
from fitkit.tune import compare_predictions

NUMBERS = np.random.default_rng(0)


class Known(nn.Module):
    """Gives the predictions of the samples whose numbers it gets."""

    def __init__(self, predictions):
        super().__init__()
        self.register_buffer("predictions", torch.as_tensor(predictions, dtype=torch.float32))

    def forward(self, rows):
        return self.predictions[rows.long().flatten()]


def models(*predictions):
    made = [fitkit.Model(Known(one)) for one in predictions]
    for model in made:
        model.compile(accelerator="cpu", devices=1)
    return made


def test_right_and_wrong_are_told_by_mcnemars_exact_test():
    y = torch.as_tensor(NUMBERS.integers(0, 3, 120))
    a, b = NUMBERS.normal(size=(2, 120, 3))
    a[np.arange(120), y] += 1.0
    b[np.arange(120), y] += 2.5
    found = compare_predictions(*models(a, b), np.arange(120.0)[:, None], y)
    right_a, right_b = a.argmax(1) == y.numpy(), b.argmax(1) == y.numpy()
    only_a, only_b = (right_a & ~right_b).sum(), (right_b & ~right_a).sum()
    exact = stats.binomtest(only_b, only_a + only_b)
    assert (found.only_a, found.only_b) == (only_a, only_b) and found.test == "McNemar"
    assert found.p_value == pytest.approx(exact.pvalue)
    assert found.difference == pytest.approx(right_b.mean() - right_a.mean())
    limits = exact.proportion_ci(0.95, "exact")
    part = (only_a + only_b) / 120
    assert found.interval == pytest.approx(
        ((2 * limits.low - 1) * part, (2 * limits.high - 1) * part)
    )
    assert found.better == "b" and str(found).startswith("b is better")
    assert json.loads(found.to_json())["only_b"] == only_b
    same = compare_predictions(*models(a, a), np.arange(120.0)[:, None], y)
    assert same.better is None and same.p_value == 1.0 and same.interval == (0.0, 0.0)


def test_errors_are_told_by_the_paired_t_test():
    y = NUMBERS.normal(size=(40, 2))
    a, b = y + NUMBERS.normal(size=(40, 2)), y + 0.3 * NUMBERS.normal(size=(40, 2))
    found = compare_predictions(*models(a, b), np.arange(40.0)[:, None], y)
    a32, b32 = (one.astype(np.float32).astype(float) for one in (a, b))
    errors = [((one - y) ** 2).mean(1) for one in (a32, b32)]
    theirs = stats.ttest_rel(errors[1], errors[0])
    limits = theirs.confidence_interval(0.95)
    assert found.better == "b" and found.test == "paired t"
    assert found.p_value == pytest.approx(theirs.pvalue, rel=1e-4)
    assert found.interval == pytest.approx((limits.low, limits.high), rel=1e-4)


def test_values_of_ones_own_and_logits_of_yes_and_no():
    y = NUMBERS.integers(0, 2, 50)
    a, b = NUMBERS.normal(size=(2, 50, 1))
    x = np.arange(50.0)[:, None]
    found = compare_predictions(*models(a, b), x, y)
    gains = ((b > 0)[:, 0] == y).mean() - ((a > 0)[:, 0] == y).mean()
    assert found.difference == pytest.approx(gains)
    own = compare_predictions(
        *models(a, b), x, y, values=lambda p, t: (p[:, 0] - t).abs(), higher_is_better=False
    )
    wanted = np.abs(b[:, 0] - y).mean() - np.abs(a[:, 0] - y).mean()
    assert own.difference == pytest.approx(wanted, rel=1e-5) and own.value == "values"


def test_what_cannot_be_compared_is_refused():
    a, b = models(np.zeros((4, 3)), np.ones((4, 3)))
    x = np.arange(4.0)[:, None]
    with pytest.raises(ArgumentTypeError):
        compare_predictions(a, Known([1.0]), x, np.zeros(4, int))
    with pytest.raises(ConfigurationError):
        compare_predictions(a, b, x, np.zeros((4, 2)))
    with pytest.raises(ConfigurationError):
        compare_predictions(a, b, x, np.zeros(3, int))
    with pytest.raises(ConfigurationError, match="order"):
        compare_predictions(a, b, torch.utils.data.DataLoader(x), np.zeros(4, int))
    with pytest.raises(ConfigurationError, match="for each"):
        compare_predictions(a, b, x, np.zeros(4, int), values=lambda p, t: p.mean())


@pytest.mark.parametrize("a", [0.5, 2, 37, 4000])
@pytest.mark.parametrize("b", [0.5, 3, 800])
def test_the_beta_distribution_is_scipys(a, b):
    for x in (1e-3, 0.2, 0.5, a / (a + b), 0.97):
        assert beta_below(x, a, b) == pytest.approx(stats.beta.cdf(x, a, b), rel=1e-8, abs=1e-12)


def test_what_follows_from_it_is_scipys():
    for freedom in (1, 5, 300):
        assert t_reach(0.95, freedom) == pytest.approx(stats.t.ppf(0.975, freedom))
        assert t_beyond(1.7, freedom) == pytest.approx(2 * stats.t.sf(1.7, freedom))
    for count, total in ((0, 5), (5, 5), (3, 11), (40, 80), (700, 1500)):
        theirs = stats.binomtest(count, total)
        assert even_odds(count, total) == pytest.approx(theirs.pvalue)
        limits = theirs.proportion_ci(0.9, "exact")
        assert share_interval(count, total, 0.9) == pytest.approx((limits.low, limits.high))
