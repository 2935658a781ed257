"""Finding a rate or a batch size: the answers, and that the model is left as it was."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit import tune
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.tune import RateRange, search

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])


def compiled(optimizer="sgd", net=None, **arguments):
    torch.manual_seed(0)
    net = net or torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
    )
    model = fitkit.Model(net)
    model.compile(optimizer, "mse", **arguments)
    return model


def fingerprint(model):
    """All that a training changes."""
    optimizers = model._fitkit.fit_state.optimizers
    return copy.deepcopy(
        {
            "weights": {k: v.tolist() for k, v in model.state_dict().items()},
            "optimizers": [id(o) for o in optimizers],
            "state": [
                [{k: torch.as_tensor(v).tolist() for k, v in o.state[p].items()} for p in o.state]
                for o in optimizers
            ],
            "groups": [
                [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
                for o in optimizers
            ],
            "schedulers": [
                plan.scheduler.state_dict() for plan in model._fitkit.fit_state.schedulers
            ],
            "updates": model._fitkit.fit_state.updates,
            "history": model.history and model.history.history,
            "names": model.metrics_names,
            "training": [module.training for module in model.modules()],
            "compiled": id(model._fitkit.compilation),
            "random": [torch.get_rng_state().tolist(), random.random(), np.random.rand()],
        }
    )


def tried(model, act):
    """The results of acting, with the fingerprints before and after from the same seeds."""
    prints, results = [], []
    for acts in (False, True):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        results.append(act() if acts else None)
        prints.append(fingerprint(model))
    return results[1], prints


@pytest.mark.parametrize("fitted", [False, True])
def test_the_model_is_left_as_it_was(fitted):
    model = compiled("adam", lr_scheduler="cosine", warmup_epochs=1)
    if fitted:
        model.fit(X, Y, epochs=2, verbose=0)
    _, (before, after) = tried(model, lambda: tune.learning_rate(model, X, Y, num_training=20))
    assert before == after
    _, (before, after) = tried(model, lambda: tune.batch_size(model, X, Y, max_val=8))
    assert before == after
    assert model.effective_batch_size == (32 if fitted else None)
    history = model.fit(X, Y, epochs=3, initial_epoch=0, verbose=0)
    assert len(history.epoch) == 3


def test_an_error_in_the_trial_leaves_it_as_it_was_too():
    model = compiled()
    model.fit(X, Y, verbose=0)
    with pytest.raises(ConfigurationError):
        tune.learning_rate(model, X[:, :2], Y)
    _, (before, after) = tried(model, lambda: None)
    assert before == after


def test_each_update_has_its_rate_and_the_loss_before_it():
    net = torch.nn.Linear(3, 1)
    model = compiled(net=net)
    reference = copy.deepcopy(net)
    found = tune.learning_rate(model, X, Y, batch_size=64, min_lr=1e-3, max_lr=0.1, num_training=9)
    expected = []
    for rate in np.geomspace(1e-3, 0.1, 9):
        loss = torch.nn.functional.mse_loss(reference(X), Y)
        expected.append(loss.item())
        for parameter, gradient in zip(
            reference.parameters(), torch.autograd.grad(loss, list(reference.parameters())),
            strict=True,
        ):  # fmt: skip
            parameter.data -= rate * gradient
    assert found.rates == pytest.approx(list(np.geomspace(1e-3, 0.1, 9)))
    assert found.losses == pytest.approx(expected, rel=1e-4)
    linear = tune.learning_rate(model, X, Y, mode="linear", max_lr=0.8, num_training=9)
    assert np.diff(linear.rates) == pytest.approx([0.1] * 8, rel=1e-3)


def test_accumulated_batches_are_one_update():
    model = compiled(net=torch.nn.Linear(3, 1), accumulate_grad_batches=4)
    whole = compiled(net=copy.deepcopy(model.net))
    options = {"min_lr": 1e-3, "max_lr": 0.1, "num_training": 9}
    parts = tune.learning_rate(model, X, Y, batch_size=16, **options)
    once = tune.learning_rate(whole, X, Y, batch_size=64, **options)
    assert parts.losses == pytest.approx(once.losses, rel=1e-3)


def test_a_loss_that_explodes_ends_the_trial():
    model = compiled(net=torch.nn.Linear(3, 1))
    found = tune.learning_rate(model, X, Y, max_lr=1e4)
    assert 20 < len(found.rates) == len(found.losses) < 100
    assert 1e-3 < found.suggestion < 1.0  # the loss of this net is stable below 2 / 3 or so
    model.compile(learning_rate=found.suggestion)
    losses = model.fit(X, Y, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.1 * losses[0]


def test_the_suggestion_is_the_steepest_fall_of_the_smoothed_losses():
    rates = [10.0**power for power in range(-12, 8)]
    losses = [1.0] * 10 + [0.5] * 7 + [3.0] * 3
    found = RateRange(rates, losses)
    # Weights 1 2 3 2 1 by 9: around the fall between places 9 and 10.
    assert found.smoothed[8:12] == pytest.approx([8.5 / 9, 7.5 / 9, 6 / 9, 5 / 9])
    assert found.smoothed[0] == 1.0 and found.smoothed[-1] == 3.0
    # (6 - 8.5) / 9 at place 9 and (5 - 7.5) / 9 at place 10: the first of the two.
    assert found.suggestion == rates[9]
    assert RateRange(rates, [float(place) for place in range(20)]).suggestion is None
    assert RateRange([1.0], [2.0]).suggestion is None
    assert "suggestion" in repr(found)


def test_the_picture_has_both_curves_and_a_log_axis(tmp_path):
    pytest.importorskip("matplotlib")
    rates = [10.0**power for power in range(-12, 8)]
    found = RateRange(rates, [1.0] * 10 + [0.5] * 9 + [math.inf])
    figure = found.plot(path=tmp_path / "rates.png")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and axes.get_ylim()[1] < 2
    assert len(axes.lines) == 3
    assert (tmp_path / "rates.png").read_bytes()[1:4] == b"PNG"
    other = figure.add_subplot()
    assert found.plot(axes=other) is figure and len(other.lines) == 3
    with pytest.raises(ArgumentTypeError, match="path="):
        found.plot(path=3)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"min_lr": 0}, ConfigurationError), ({"max_lr": 1e-9}, ConfigurationError),
     ({"num_training": 3}, ConfigurationError), ({"mode": "log"}, ConfigurationError),
     ({"early_stop_threshold": "4"}, ArgumentTypeError)],
)  # fmt: skip
def test_wrong_arguments_are_refused(options, error):
    with pytest.raises(error):
        tune.learning_rate(compiled(), X, Y, **options)
    with pytest.raises(ConfigurationError, match="only once"):
        tune.learning_rate(compiled(), iter([(X, Y)]))


# ------------------------------------------------------------------ batch size


class Bounded(torch.nn.Module):
    """Runs out of memory above so many rows."""

    def __init__(self, rows, error=torch.OutOfMemoryError):
        super().__init__()
        self.layer, self.rows, self.error = torch.nn.Linear(3, 1), rows, error
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.rows:
            raise self.error("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return self.layer(x)


@pytest.mark.parametrize(
    ("rows", "mode", "expected"),
    [(20, "power", 16), pytest.param(20, "binsearch", 20, marks=pytest.mark.slow),
     pytest.param(64, "power", 64, marks=pytest.mark.slow), (1000, "power", 64),
     pytest.param(1000, "binsearch", 64, marks=pytest.mark.slow), (2, "binsearch", 2),
     pytest.param(63, "binsearch", 63, marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_largest_batch_that_fits_is_found(rows, mode, expected):
    model = compiled(net=Bounded(rows))
    assert tune.batch_size(model, X, Y, mode=mode) == expected


@pytest.mark.slow
def test_the_same_holds_for_data_sets_and_other_errors_of_memory():
    model = compiled(net=Bounded(20, RuntimeError))
    assert tune.batch_size(model, TensorDataset(X, Y)) == 16
    assert tune.batch_size(model, X, Y, init_val=5, mode="binsearch", max_val=18) == 18
    with pytest.raises(RuntimeError, match="another"):
        tune.batch_size(compiled(net=Bounded(20, lambda text: RuntimeError("another"))), X, Y)


def test_too_little_memory_and_data_that_make_their_own_batches_are_said():
    with pytest.raises(ConfigurationError, match="Even batch_size=4"):
        tune.batch_size(compiled(net=Bounded(3)), X, Y, init_val=4)
    with pytest.raises(ConfigurationError, match="DataLoader"):
        tune.batch_size(compiled(), DataLoader(TensorDataset(X, Y)))
    with pytest.raises(ConfigurationError, match="65 .* 64"):
        tune.batch_size(compiled(), X, Y, init_val=65)


def test_the_search_ends_after_so_many_trials():
    asked = []
    assert search(lambda size: not asked.append(size), "power", 2, 10**9, 5) == 32
    assert asked == [2, 4, 8, 16, 32]
    assert search(lambda size: size <= 777, "binsearch", 2, 10**6, 50) == 777
