"""evaluate and predict: a callback ends a pass, as in Keras."""

import itertools

import pytest
import torch

import fitkit
from fitkit.callbacks import Callback

X = torch.arange(12.0).reshape(12, 1)


class Stops(Callback):
    """Ends a pass after its third batch."""

    def __init__(self):
        self.seen = []

    def on_test_batch_end(self, batch, logs):
        self.seen.append(batch)
        self.model.stop_evaluating = batch == 2

    def on_predict_batch_end(self, batch, logs):
        self.seen.append(batch)
        self.model.stop_predicting = batch == 2


def identity(**arguments):
    model = fitkit.Model(torch.nn.Identity())
    model.compile(loss="mse", **arguments)
    return model


def test_model_stop_evaluating_ends_the_pass_after_the_batch():
    stops, model = Stops(), identity()
    loss = model.evaluate(X, torch.zeros_like(X), batch_size=2, verbose=0, callbacks=stops)
    assert stops.seen == [0, 1, 2]
    assert loss == pytest.approx((X[:6] ** 2).mean().item())
    assert model.evaluate(X, X, batch_size=2, verbose=0) == 0  # the next one is whole
    assert model.stop_evaluating is False


def test_model_stop_evaluating_ends_an_endless_generator():
    batches = ((X[:2], X[:2]) for _ in itertools.count())
    stops = Stops()
    assert identity().evaluate(batches, verbose=0, callbacks=stops, steps=None) == 0
    assert stops.seen == [0, 1, 2]


def test_model_stop_predicting_gives_the_outputs_so_far():
    stops = Stops()
    outputs = identity().predict(X, batch_size=2, verbose=0, callbacks=stops)
    assert outputs.tolist() == X[:6].tolist()
    assert stops.seen == [0, 1, 2]


def test_stop_evaluating_in_fit_cuts_that_validation_only():
    stops = Stops()
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse", learning_rate=0.0)
    history = model.fit(X, X, batch_size=2, epochs=2, verbose=0, callbacks=stops,
                        validation_data=(X, X), validation_batch_size=2)  # fmt: skip
    assert stops.seen == [0, 1, 2, 0, 1, 2]
    assert len(history["val_loss"]) == 2


def test_stop_evaluating_ends_a_pass_of_grouped_steps():
    stops = Stops()
    identity(steps_per_execution=3).evaluate(X, X, batch_size=2, verbose=0, callbacks=stops)
    assert stops.seen == [2]
