"""Copies of a model that trains on two ranks: made before, between and within its trainings."""

import copy
import pickle

import cloudpickle
import pytest
import torch

import fitkit
from fitkit.callbacks import LambdaCallback
from tests.nets import dense, regression
from tests.reference import assert_same_weights, plain_loop, slices

pytestmark = pytest.mark.timeout(120)

X, Y = regression(16, 4)
STRATEGIES = ("ddp_spawn", "ddp_sharded", "fsdp", "bagua")


def compiled(strategy):
    model = fitkit.Model(dense(4, 3, 1))
    model.compile(
        "adam", "mse", learning_rate=0.05, accelerator="cpu", devices=2, strategy=strategy
    )
    return model


def fit(model, **options):
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **options)


def plainly(epochs):
    net = dense(4, 3, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    plain_loop(net, optimizer, slices(X, Y, 8), epochs, loss=torch.nn.functional.mse_loss)
    return net


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_copy_of_a_copy_of_a_copy_trains_on_both_ranks(strategy):
    model = copy.deepcopy(compiled(strategy))
    fit(model)
    for way in (copy.copy, lambda m: pickle.loads(pickle.dumps(m)),
                lambda m: cloudpickle.loads(cloudpickle.dumps(m)), copy.deepcopy):  # fmt: skip
        model = way(model)
        fit(model)
        assert model.world_size == 2
    assert model.global_step == 10
    assert_same_weights(model.net, plainly(5), atol=1e-5)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_a_copy_made_within_fit_evaluates_there_and_trains_afterwards(way):
    model, found, values = compiled("ddp_spawn"), [], []

    def inside(epoch, logs):
        made = way(model)
        values.append((made.evaluate(X, Y, verbose=0), model.evaluate(X, Y, verbose=0)))
        found.append(made)

    fit(model, callbacks=LambdaCallback(on_epoch_end=inside))
    assert values[0][0] == values[0][1]
    fit(found[0])
    assert found[0].world_size == 2 and found[0].global_step == 4
    assert_same_weights(found[0].net, plainly(2), atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp_sharded", "fsdp"])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_that_the_ranks_hold_in_parts_isnt_copied(way, strategy):
    model, seen = compiled(strategy), []

    def inside(epoch, logs):
        with pytest.raises(fitkit.ConfigurationError, match="FK070"):
            way(model)
        seen.append(epoch)

    fit(model, callbacks=LambdaCallback(on_epoch_end=inside))
    assert seen == [0]
    assert_same_weights(model.net, plainly(1), atol=1e-6)


def test_one_strategy_object_trains_two_models_in_turn():
    class Own(fitkit.strategies.DDPSpawnStrategy):
        def init_dist_connection(self, store=None):
            assert self.world.size == 2
            return super().init_dist_connection(store)

    shared = Own()
    models = [compiled(shared), compiled(shared)]
    for model in (*models, *models):
        fit(model)
    for model in models:
        assert_same_weights(model.net, plainly(2), atol=1e-6)


def test_an_estimator_that_was_pickled_learns_on_both_ranks():
    sklearn = pytest.importorskip("fitkit.extras.sklearn")
    given = {"accelerator": "cpu", "devices": 2}
    made = sklearn.Regressor(dense(4, 1), random_state=0, verbose=0, epochs=1, batch_size=4)
    made.set_params(compile_options=given)
    made.fit(X.numpy(), Y.numpy().ravel())
    other = pickle.loads(pickle.dumps(made))
    other.partial_fit(X.numpy(), Y.numpy().ravel())
    assert other.model_.world_size == 2 and other.model_.global_step == 4
