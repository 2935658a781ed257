"""A strategy has an engine while its model trains, and nothing of a training afterwards."""

import contextlib

import pytest
import torch

import fitkit
from fitkit.callbacks import LambdaCallback
from fitkit.distributed.strategies import STRATEGIES
from fitkit.errors import MissingPackageError
from fitkit.strategies import Engine, SingleDeviceStrategy
from tests.nets import dense, regression
from tests.reference import assert_same_weights, plain_loop, slices

X, Y = regression(8, 4)


class Noting(Engine):
    """Notes which of its ends it came to."""

    def __init__(self, calls):
        self.calls = calls

    def end(self, *, wanted):
        self.calls.append("end")

    def abandon(self):
        self.calls.append("abandon")


class WithEngine(SingleDeviceStrategy):
    name = "with_engine"
    has_engine = True

    def __init__(self):
        super().__init__()
        self.calls = []

    def engine_for(self, module, optimizers):
        self.calls.append("begin")
        return Noting(self.calls)

    def finish(self):
        super().finish()
        self.calls.append("finish")


def compiled(strategy, devices=1):
    model = fitkit.Model(dense(4, 3, 1))
    model.compile(
        "sgd", "mse", learning_rate=0.05, accelerator="cpu", devices=devices, strategy=strategy
    )
    return model, model._fitkit.compilation.strategy


def fit(model, **options):
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **options)


def plainly(epochs):
    net = dense(4, 3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    plain_loop(net, optimizer, slices(X, Y, 4), epochs, loss=torch.nn.functional.mse_loss)
    return net


def fail(*arguments):
    raise ArithmeticError("on purpose")


def test_fits_and_updates_by_callbacks_use_the_engine_of_the_outer_fit():
    model, strategy = compiled(WithEngine())
    engines = []

    def inside(epoch, logs):
        engines.append(strategy.engine)
        fit(model)
        engines.append(strategy.engine)
        for batch in slices(X, Y, 4):
            model.train_on_batch(*batch)
        engines.append(strategy.engine)

    fit(model, callbacks=LambdaCallback(on_epoch_end=inside))
    assert strategy.calls == ["begin", "end", "finish"]
    assert len(set(map(id, engines))) == 1 and isinstance(engines[0], Noting)
    assert strategy.engine is None
    assert_same_weights(model.net, plainly(3), atol=1e-6)


def test_a_fit_that_fails_within_another_doesnt_end_its_engine():
    model, strategy = compiled(WithEngine())

    def inside(epoch, logs):
        with pytest.raises(ArithmeticError):
            fit(model, callbacks=LambdaCallback(on_train_begin=fail))

    fit(model, callbacks=LambdaCallback(on_epoch_begin=inside))
    assert strategy.calls == ["begin", "end", "finish"]
    assert_same_weights(model.net, plainly(1), atol=1e-6)


HOOKS = ("on_train_begin", "on_epoch_begin", "on_train_batch_end", "on_epoch_end", "on_train_end")


@pytest.mark.parametrize("hook", [None, *HOOKS])
def test_a_fit_leaves_nothing_in_the_strategy_however_it_ends(hook):
    model, strategy = compiled(WithEngine())
    before = dict(vars(strategy))
    failing = None if hook is None else LambdaCallback(**{hook: fail})
    for _ in range(2):
        with contextlib.suppress(ArithmeticError):
            fit(model, callbacks=failing)
        assert vars(strategy) == before
    ends = ["begin", "abandon" if hook else "end", "finish"]
    assert strategy.calls == 2 * ends
    strategy.calls.clear()
    fit(model)
    assert strategy.calls == ["begin", "end", "finish"]


@pytest.mark.parametrize("name", ["with_engine", *sorted({*STRATEGIES} - {"tpu", "xla"})])
def test_an_object_of_the_users_stays_as_it_was(name):
    given = WithEngine() if name == "with_engine" else STRATEGIES[name]()
    before = dict(vars(given))
    try:
        models = [compiled(given)[0], compiled(given)[0]]
    except MissingPackageError as error:
        pytest.skip(str(error))
    for model in models:
        fit(model)
        with pytest.raises(ArithmeticError):
            fit(model, callbacks=LambdaCallback(on_epoch_end=fail))
    assert vars(given) == before
    for model in models:
        assert model._fitkit.compilation.strategy is not given
