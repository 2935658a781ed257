"""Each shortcut for speed gives the numbers of the longer way, and a switch that shows it."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.callbacks import LambdaCallback
from fitkit.shortcuts import Shortcut
from tests.nets import classification, dense

X, Y = classification(90, 5)
X = X.double()


class Switch:
    """Stands for `is_on`; knows whether it was asked."""

    def __init__(self, is_on):
        self.is_on = is_on
        self.asked = False

    def __bool__(self):
        self.asked = True
        return self.is_on


def trained(data, **options):
    """What a fit, an evaluation, a prediction and single batches give, and the weights."""
    fitkit.set_seed(3)
    model = fitkit.Model(dense(5, 6, 3).double())
    model.compile(
        "adam",
        "cross_entropy",
        metrics=["accuracy", "precision", "recall"],
        learning_rate=0.02,
        accelerator="cpu",
        steps_per_execution=options.pop("steps_per_execution", 1),
    )
    seen = []
    callback = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    held_out = X[:50], Y[:50]
    model.fit(data, epochs=2, validation_data=held_out, verbose=0, callbacks=callback, **options)
    return [
        model.history.history,
        seen,
        model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True),
        model.predict(X, batch_size=8, verbose=0),
        [model.train_on_batch(X[:7], Y[:7]) for _ in range(3)],
        [model.test_on_batch(X[:7], Y[:7]) for _ in range(2)],
        dict(model.state_dict()),
    ]


def numbers():
    arrays = {"y": Y, "batch_size": 8}
    return {
        "arrays": trained(X, steps_per_execution=4, **arrays),
        "arrays in order": trained(X, shuffle=False, **arrays),
        "loader": trained(DataLoader(TensorDataset(X, Y), 8, shuffle=True)),
    }


@pytest.fixture(scope="module")
def expected():
    return numbers()


@pytest.mark.parametrize("shortcut", Shortcut.known, ids=lambda one: one.name)
def test_the_longer_way_gives_the_same_numbers(shortcut, expected, monkeypatch):
    switch = Switch(False)
    monkeypatch.setattr(shortcut, "is_on", switch)
    torch.testing.assert_close(numbers(), expected, rtol=1e-12, atol=1e-12, check_dtype=True)
    assert switch.asked
