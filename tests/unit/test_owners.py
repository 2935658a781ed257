"""One object given to two models serves both with the numbers of an own one, or is refused."""

import copy
import functools
import threading

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torchmetrics.regression import MeanAbsoluteError

import fitkit
from fitkit import callbacks, strategies
from fitkit.distributed import precision as precisions
from tests.nets import dense, regression
from tests.reference import assert_same_weights

X, Y = regression(16, 4)


def compiled(seed, **given):
    model = fitkit.Model(dense(4, 3, 1, seed=seed))
    settings = {"optimizer": "sgd", "loss": "mse", "learning_rate": 0.05, **given}
    model.compile(**{"accelerator": "cpu", "devices": 1, **settings})
    return model


def fit(model, **options):
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, validation_data=(X, Y), **options)
    return model.history.history


def in_turn(one, other, **options):
    return [fit(one, **options), fit(other, **options), fit(one, **options)]


def within(one, other, **options):
    """The second model trains in an epoch of the first one."""
    found = []
    inside = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append(fit(other)) if batch == 1 else None
    )
    return [fit(one, callbacks=inside), *found, fit(one, **options)]


def by_batches(one, other, **options):
    """Batches of the first and of the second model alternate."""
    found = []
    for x, y in zip(X.split(4), Y.split(4), strict=True):
        for model in (one, other):
            found.append(model.train_on_batch(x, y, return_dict=True))
            found.append(model.test_on_batch(x, y, return_dict=True))
    return found


KINDS = {
    "single_device": lambda: {"strategy": strategies.SingleDeviceStrategy()},
    "dp": lambda: {"strategy": strategies.DPStrategy(), "devices": 2},
    "ddp_spawn": lambda: {"strategy": strategies.DDPSpawnStrategy()},
    "bagua": lambda: {"strategy": strategies.BaguaStrategy("bytegrad")},
    "fsdp": lambda: {"strategy": strategies.FSDPStrategy()},
    "precision": lambda: {"precision": precisions.BFloat16Mixed()},
    "scaling precision": lambda: {"precision": precisions.HalfMixed()},
    "true precision": lambda: {"precision": precisions.DoublePrecision()},
    "loss": lambda: {"loss": torch.nn.HuberLoss(delta=0.5)},
    "loss with a buffer": lambda: {"loss": WithBuffer()},
    "metric": lambda: {"metrics": [MeanAbsoluteError()]},
    "list of metrics": lambda: {"metrics": ["mae", MeanAbsoluteError()], "weighted_metrics": []},
    "optimizer's dict": lambda: {"optimizer": {"name": "adam", "eps": 1e-5}},
    "partial": lambda: {"optimizer": functools.partial(torch.optim.SGD, momentum=0.9)},
    "scheduler's dict": lambda: {
        "lr_scheduler": {"scheduler": functools.partial(StepLR, step_size=1), "interval": "step"}
    },
}
"""By kind: makes the arguments of `compile` with the object."""


class WithBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor(2.0))

    def forward(self, prediction, target):
        return self.weight * (prediction - target).square().mean()


@pytest.mark.parametrize("order", [in_turn, within, by_batches])
@pytest.mark.parametrize("kind", KINDS)
def test_both_models_have_the_numbers_of_an_own_object(kind, order):
    shared = KINDS[kind]()
    found = order(compiled(0, **shared), compiled(1, **shared))
    own = order(compiled(0, **KINDS[kind]()), compiled(1, **KINDS[kind]()))
    assert found == own


@pytest.mark.parametrize("kind", KINDS)
def test_what_compile_was_given_stays_as_it_was(kind):
    shared = KINDS[kind]()
    before = {
        name: copy.deepcopy(value) if isinstance(value, (list, dict)) else dict(vars(value))
        for name, value in shared.items()
        if hasattr(value, "__dict__") or isinstance(value, (list, dict))
    }
    one = compiled(0, **shared)
    fit(one)
    for name, value in before.items():
        now = shared[name]
        if isinstance(now, torch.nn.Module):
            assert_same_weights(now.state_dict(), value["_buffers"] | value["_parameters"])
        elif isinstance(now, (list, dict)):
            assert repr(now) == repr(value)
        else:
            assert vars(now) == value
    assert all(
        getattr(one._fitkit.compilation.given, name) is value for name, value in shared.items()
    )


OWN_HARDWARE = [
    ({"devices": 2, "strategy": "shared"}, {"devices": 3, "strategy": "shared"}),
    ({"strategy": "shared", "precision": "bf16-mixed"}, {"strategy": "shared"}),
]


@pytest.mark.parametrize("kind", ["DPStrategy", "DDPSpawnStrategy", "FSDPStrategy"])
@pytest.mark.parametrize("pair", OWN_HARDWARE)
def test_one_strategy_may_have_other_hardware_in_each_model(pair, kind):
    shared = getattr(strategies, kind)()
    first, second = (compiled(0, **{**given, "strategy": shared}) for given in pair)
    for model, given in zip((first, second), pair, strict=True):
        mine = model._fitkit.compilation.strategy
        assert len(mine.devices) == given.get("devices", 1)
        assert mine.precision.name == given.get("precision", "32-true")
        if kind != "DPStrategy":
            assert model.world_size == given.get("devices", 1)


def test_a_second_model_in_full_precision_leaves_the_first_in_bf16():
    shared = strategies.SingleDeviceStrategy()
    one, alone = (compiled(0, precision="bf16-mixed", strategy=s) for s in (shared, "auto"))
    compiled(1, strategy=shared)
    assert fit(one) == fit(alone)


def test_own_strategies_are_asked_as_before_also_with_what_cant_be_copied():
    class Own(strategies.DDPSpawnStrategy):
        def __init__(self):
            super().__init__()
            self.lock, self.joined = threading.Lock(), []

        def init_dist_connection(self, store=None):
            self.joined.append(self.world.size)
            return super().init_dist_connection(store)

    shared = Own()
    one, other = compiled(0, strategy=shared), compiled(1, strategy=shared)
    fit(one), fit(other)
    assert one._fitkit.compilation.given.strategy is shared
    assert one._fitkit.compilation.strategy.lock is shared.lock


def test_two_models_of_one_net_train_the_same_weights_each_with_its_optimizer():
    net, plain = dense(4, 1), dense(4, 1)
    one, other = fitkit.Model(net), fitkit.Model(net)
    for model, rate in ((one, 0.1), (other, 0.01)):
        model.compile(
            functools.partial(torch.optim.SGD, momentum=0.9), "mse", learning_rate=rate,
            accelerator="cpu", devices=1,
        )  # fmt: skip
    optimizers = [torch.optim.SGD(plain.parameters(), r, momentum=0.9) for r in (0.1, 0.01)]
    for x, y in zip(X.split(4), Y.split(4), strict=True):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            model.train_on_batch(x, y)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(plain(x), y).backward()
            optimizer.step()
    assert_same_weights(net, plain, atol=1e-7)


def others_optimizer(other):
    return torch.optim.SGD(other.parameters(), 0.1)


def always(made):
    """A factory that gives what was made before."""
    return lambda _: made


REFUSED = {
    "instance": lambda other: {"optimizer": others_optimizer(other)},
    "list": lambda other: {"optimizer": [others_optimizer(other)]},
    "factory": lambda other: {"optimizer": always(others_optimizer(other))},
    "scheduler": lambda other: {"lr_scheduler": StepLR(others_optimizer(other), 1)},
    "scheduler's dict": lambda other: {
        "lr_scheduler": {"scheduler": StepLR(others_optimizer(other), 1)}
    },
    "scheduler's factory": lambda other: {
        "lr_scheduler": always(StepLR(others_optimizer(other), 1))
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_moves_another_models_weights_is_refused_and_that_model_trains_on(kind):
    other, alone = compiled(1), compiled(1)
    given = {"learning_rate": None, **REFUSED[kind](other)}
    if "scheduler" in kind:
        given["learning_rate"] = 0.1
    with pytest.raises(fitkit.ConfigurationError, match=r"FK024|belongs to another optimizer"):
        fit(compiled(0, **given))
    assert fit(other) == fit(alone)


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_a_callback_of_a_running_fit_is_refused_elsewhere_and_trains_on(verb):
    one, other = compiled(0), compiled(1)
    data = (X,) if verb == "predict" else (X, Y)

    class Twice(callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs):
            self.seen += 1
            if batch == 1:
                with pytest.raises(fitkit.ConfigurationError, match="FK071"):
                    getattr(other, verb)(*data, verbose=0, callbacks=self)
            assert self.model is one

    both = Twice()
    fit(one, callbacks=both)
    assert both.seen == 4
    fit(other)
