"""What holds for every callback that ships."""

import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

import fitkit
from fitkit import callbacks
from fitkit.callbacks import Callback
from fitkit.callbacks.base import HOOKS, overrides
from tests import reference
from tests.nets import DropPath, dense, regression

X, Y = regression(20, 2)

ABSTRACT = {"Callback", "CallbackList"}
NEEDED = {
    "BackboneFinetuning": {"backbone": "0", "unfreeze_backbone_at_epoch": 1},
    "BackupAndRestore": {"backup_dir": "backup"},
    "CSVLogger": {"filename": "log.csv"},
    "EvaluateEvery": {"x": X, "y": Y},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "GradualUnfreezing": {"stages": {1: "0"}},
    "JSONLogger": {"filename": "log.jsonl"},
    "LearningRateScheduler": {"schedule": lambda epoch: 0.1 / (epoch + 1)},
    "MetricCallback": {"metrics": ["mae"], "x": X, "y": Y},
    "ModelCheckpoint": {"filepath": "model.h5"},
    "OptunaPruning": {"trial": SimpleNamespace(report=lambda *_: None, should_prune=lambda: False)},
    "Progressive": {"size": {9: 8}},
    "RunFolder": {"folder": "runs/%n"},
    "StochasticWeightAveraging": {"swa_lrs": 0.05},
}
"""Arguments without a default, and those that suit the net here."""

SHIPPED = sorted(set(callbacks.__all__) - ABSTRACT)


def made(name):
    return getattr(callbacks, name)(**NEEDED.get(name, {}))


def compiled():
    net = dense(2, 4, 1).append(DropPath())
    return reference.compiled(net, "sgd", "mse", learning_rate=0.05)


def fit(model, callback, epochs=2, **options):
    return model.fit(
        X, Y, batch_size=5, epochs=epochs, verbose=0, validation_data=(X, Y),
        callbacks=callback, **options,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Ray need not be installed: what RayTrainReport calls of it.
    train = SimpleNamespace(
        report=lambda values, checkpoint=None: None, get_checkpoint=lambda: None,
        Checkpoint=SimpleNamespace(from_directory=str),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "ray.train", train)


@pytest.mark.parametrize("name", SHIPPED)
def test_two_fits_with_one_callback_are_as_two_with_two(name):
    """Nothing that one fit leaves in a callback shows in the next one's numbers."""
    found = []
    for reused in (True, False):
        model, first = compiled(), made(name)
        torch.manual_seed(3)
        fit(model, first)
        history = fit(model, first if reused else made(name), epochs=3).history
        timeless = {k: v for k, v in history.items() if not k.startswith(("cpu", "batches", "sam"))}
        found.append((timeless, [p.tolist() for p in model.parameters()]))
    assert found[0] == found[1]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", SHIPPED)
def test_its_state_is_plain_data_that_another_one_takes(name):
    model, callback, other = compiled(), made(name), made(name)
    states = []

    class Saves(Callback):
        def on_epoch_end(self, epoch, logs):
            states.append(callback.state_dict())

    class Loads(Callback):
        def on_train_begin(self, logs=None):
            other.load_state_dict(states[0])
            same = other.state_dict()
            assert same.keys() == states[0].keys()
            for key in same:
                if key != "time_elapsed_s":
                    assert reference.is_same(same[key], states[0][key])

    fit(model, [callback, Saves()])
    assert_plain(states[0])
    fit(model, [other, Loads()], initial_epoch=1)


def assert_plain(value):
    if isinstance(value, dict):
        for part in value.values():
            assert_plain(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            assert_plain(part)
    else:
        assert value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


@pytest.mark.parametrize("name", SHIPPED)
def test_it_travels_to_other_ranks_after_a_fit_too_without_the_model(name):
    callback = made(name)
    fit(compiled(), callback)
    copy = cloudpickle.loads(cloudpickle.dumps(callback))
    assert "model" not in vars(copy)
    fit(compiled(), copy)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_does_nothing_to_evaluate_and_predict(name):
    model, callback = compiled(), made(name)
    expected = model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0).tolist()
    found = (
        model.evaluate(X, Y, verbose=0, callbacks=callback),
        model.predict(X, verbose=0, callbacks=callback).tolist(),
    )
    assert found == expected


@pytest.mark.parametrize("name", SHIPPED)
def test_one_that_acts_at_batches_says_that_ranks_need_not_ask_each_other(name):
    callback = made(name)
    own = [hook for hook in HOOKS if "batch" in hook and overrides(callback, hook)]
    if own and name != "LambdaCallback":
        assert callback.stops_alike or name in ("ProgressBar", "ProgbarLogger"), own


def test_kerass_and_lightnings_names_are_there():
    for name in (
        "EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler", "CSVLogger",
        "TerminateOnNaN", "ProgbarLogger", "LambdaCallback", "SwapEMAWeights",
        "StochasticWeightAveraging", "Timer", "LearningRateMonitor", "DeviceStatsMonitor",
        "GradientAccumulationScheduler", "ThroughputMonitor", "BackboneFinetuning",
    ):  # fmt: skip
        assert issubclass(getattr(fitkit.callbacks, name), Callback)


TAKES_ANY_NUMBER = {
    "BackupAndRestore": "saves at the ends of groups",
    "ModelCheckpoint": "saves at the ends of groups",
    "ProgressBar": "shows the last batch",
    "TerminateOnNaN": "looks at a mean over all batches",
    "ThroughputMonitor": "reads the number of batches",
    "Timer": "reads a clock",
}
"""The callbacks whose hooks of training batches may be called once for several batches."""


@pytest.mark.parametrize("name", SHIPPED)
def test_it_needs_each_batch_or_takes_any_number(name):
    callback = made(name)
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    acts = any(overrides(callback, hook) for hook in hooks)
    assert not acts or callback.each_batch or type(callback).__name__ in TAKES_ANY_NUMBER
