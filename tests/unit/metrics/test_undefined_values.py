"""A metric that can't be computed of what was counted is nan, under its name in a warning."""

import math

import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from tests.nets import normal

SCORES = normal(8, 1)
TABLE = normal(8, 3)
SOME = torch.tensor([0.0, 1.0] * 4)[:, None]
NO = torch.zeros(8, 1)
ONE = torch.ones(8, 1)


class Plain(nn.Module):
    """Gives its inputs."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + 0 * self.nothing


def model_of(loss, metrics, devices=1):
    model = fitkit.Model(Plain())
    model.compile("sgd", loss, metrics=metrics, accelerator="cpu", devices=devices)
    return model


def evaluated(loss, metric, x, y, devices=1):
    model = model_of(loss, [metric], devices)
    return model.evaluate(x, y, batch_size=2, verbose=0, return_dict=True)[metric]


UNDEFINED = [
    ("bce_with_logits", "auroc", SCORES, NO),
    ("bce_with_logits", "auroc", SCORES, ONE),
    ("bce_with_logits", "average_precision", SCORES, NO),
    ("bce_with_logits", "auroc", TABLE, torch.zeros(8, 3)),
    ("cross_entropy", "auroc", TABLE, torch.zeros(8, dtype=torch.long)),
    ("cross_entropy", "cohen_kappa", torch.eye(3)[[1] * 8], torch.ones(8, dtype=torch.long)),
    ("mse", "pearson", SCORES, ONE),
    ("mse", "spearman", SCORES, ONE),
    ("mse", "spearman", ONE, SCORES),
    ("mse", "concordance", ONE, ONE),
    ("mse", "relative_squared_error", SCORES, 0.1 * ONE),
    ("mse", "r2", SCORES[:1], SCORES[:1]),
    ("mse", "pearson", SCORES[:1], SCORES[:1]),
]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("loss", "metric", "x", "y"), UNDEFINED)
def test_what_cannot_be_computed_is_nan_and_said(loss, metric, x, y, devices):
    with pytest.warns(UserWarning, match=f"nothing counts for {metric}:"):
        assert math.isnan(evaluated(loss, metric, x, y, devices))


def ranked(scores, positive):
    """The share of pairs (positive, other) in which the positive has the higher score."""
    pairs = scores[positive][:, None] - scores[~positive][None]
    return ((pairs > 0).double() + 0.5 * (pairs == 0)).mean().item()


@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_a_mean_over_classes_is_over_those_that_have_a_value(kind):
    labels = torch.arange(8) % 2  # none of class 2
    if kind == "classes":
        found = evaluated("cross_entropy", "auroc", TABLE, labels)
        scores = TABLE.softmax(1)
    else:
        y = torch.nn.functional.one_hot(labels, 3).float()
        found = evaluated("bce_with_logits", "auroc", TABLE, y)
        scores = TABLE
    wanted = sum(ranked(scores[:, one], labels == one) for one in (0, 1)) / 2
    assert found == pytest.approx(wanted, rel=1e-6)


def test_conventions_for_what_others_define_stay():
    """scikit-learn's: 0 for precision without positives, 1 for the r² of a perfect constant."""
    assert evaluated("bce_with_logits", "precision", -10 * ONE, SOME) == 0.0
    assert evaluated("mse", "r2", ONE, ONE) == 1.0
    assert evaluated("mse", "r2", SCORES, ONE) == 0.0


def test_nans_of_predictions_are_no_lack_of_samples():
    x = SCORES.clone()
    x[3] = torch.nan
    with pytest.warns(UserWarning, match=".*") as caught:
        assert math.isnan(evaluated("mse", "pearson", x, SCORES))
    assert not any("nothing counts" in str(one.message) for one in caught)


def test_callbacks_take_it_for_no_value(tmp_path):
    stop = EarlyStopping("val_auroc", mode="max", patience=5, restore_best_weights=True)
    saves = ModelCheckpoint(tmp_path / "best.h5", "val_auroc", mode="max", save_best_only=True)
    slower = ReduceLROnPlateau("val_auroc", mode="max", patience=5)
    model = model_of("bce_with_logits", ["auroc"])
    with pytest.warns(UserWarning, match="val_auroc"):
        model.fit(
            SCORES, SOME, validation_data=(SCORES, NO), epochs=3, verbose=0,
            callbacks=[stop, saves, slower],
        )  # fmt: skip
    assert math.isinf(stop.best)
    assert not list(tmp_path.iterdir())
