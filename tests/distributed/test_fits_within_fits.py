"""A callback that trains the model of the fit that runs, on two ranks: one training for all."""

import pytest
import torch

import fitkit
from fitkit.callbacks import LambdaCallback
from fitkit.distributed.collectives import Solo
from fitkit.strategies import BaguaStrategy, FSDPStrategy
from tests.nets import dense, regression
from tests.reference import assert_same_weights, plain_loop, slices

pytestmark = pytest.mark.timeout(120)

X, Y = regression(16, 4)
STRATEGIES = {
    **{name: name for name in ("ddp_spawn", "ddp_sharded", "fsdp", "bagua")},
    "post_local_sgd": BaguaStrategy("post_local_sgd", period=1, warmup_steps=1),
}


def compiled(strategy, net=None):
    model = fitkit.Model(dense(4, 3, 1) if net is None else net)
    model.compile("sgd", "mse", learning_rate=0.05, accelerator="cpu", devices=2, strategy=strategy)
    return model


def fit(model, **options):
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **options)


def plainly(epochs, net=None, learning=None):
    net = dense(4, 3, 1) if net is None else net
    optimizer = torch.optim.SGD(list(net.parameters()) if learning is None else learning, 0.05)
    plain_loop(net, optimizer, slices(X, Y, 8), epochs, loss=torch.nn.functional.mse_loss)
    return net


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_trains_as_a_further_epoch_would_and_the_outer_fit_goes_on(strategy):
    model = compiled(STRATEGIES[strategy])
    once = LambdaCallback(on_epoch_end=lambda epoch, logs: None if epoch else fit(model))
    fit(model, epochs=2, callbacks=once)
    assert_same_weights(model.net, plainly(3), atol=1e-6)
    assert type(model.net[0].weight.data) is torch.Tensor
    fit(model)
    assert_same_weights(model.net, plainly(4), atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_sharded"])
def test_one_that_fails_leaves_the_outer_one_its_wrapper_and_engine(strategy):
    model = compiled(strategy)

    def fail(batch, logs):
        raise ArithmeticError("on purpose")

    def inside(epoch, logs):
        with pytest.raises(ArithmeticError):
            fit(model, callbacks=LambdaCallback(on_train_batch_begin=fail))

    fit(model, epochs=2, callbacks=LambdaCallback(on_epoch_end=inside))
    assert_same_weights(model.net, plainly(2), atol=1e-6)
    assert model._fitkit.compilation.strategy.engine is None


CONTEXT = FSDPStrategy(context_parallel=2)


def settings_of(strategy):
    assert type(strategy.collectives) is Solo
    return {name: value for name, value in vars(strategy).items() if name != "collectives"}


@pytest.mark.parametrize("strategy", [*STRATEGIES, "context_parallel"])
def test_between_calls_a_strategy_has_nothing_of_them(strategy):
    model = compiled({**STRATEGIES, "context_parallel": CONTEXT}[strategy])
    own = model._fitkit.compilation.strategy
    before = settings_of(own)

    def fail(batch, logs):
        raise ArithmeticError("on purpose")

    if strategy != "context_parallel":  # which refuses a net without tokens
        fit(model)
        assert settings_of(own) == before
    if strategy in ("ddp_sharded", "context_parallel"):  # each error costs new workers
        with pytest.raises((ArithmeticError, fitkit.ConfigurationError)):
            fit(model, callbacks=LambdaCallback(on_train_batch_end=fail))
        assert settings_of(own) == before


def single_updates(model):
    part = slice(5) if model.global_rank == 0 else slice(5, 8)
    for x, y in slices(X, Y, 8):
        model.train_on_batch(x[part], y[part])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_single_updates_are_those_of_the_ranks_batches_together(strategy):
    model = compiled(STRATEGIES[strategy])
    fit(model, callbacks=LambdaCallback(on_epoch_end=lambda epoch, logs: single_updates(model)))
    assert_same_weights(model.net, plainly(2), atol=1e-6)


@pytest.mark.parametrize("train", [fit, single_updates])
@pytest.mark.parametrize("strategy", ["ddp_spawn", "bagua"])
def test_it_averages_what_a_callback_has_freed_before_it(strategy, train):
    net = dense(4, 3, 1)
    net[0].weight.requires_grad_(False)
    model = compiled(strategy, net)
    model.compile(optimizer=torch.optim.SGD(net.parameters(), 0.05))

    def inside(epoch, logs):
        if not epoch:
            model.net[0].weight.requires_grad_(True)
            train(model)

    fit(model, epochs=2, callbacks=LambdaCallback(on_epoch_end=inside))
    expected = dense(4, 3, 1)
    plainly(1, expected, [p for p in expected.parameters() if p is not expected[0].weight])
    assert_same_weights(model.net, plainly(2, expected), atol=1e-6)
