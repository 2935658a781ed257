"""What callbacks change is undone, whatever ends the run: its end, an error or Ctrl-C."""

import contextlib
import glob
import os
import shutil
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import fitkit
from fitkit import callbacks, loggers
from fitkit.callbacks import Callback
from fitkit.callbacks.base import HOOKS
from fitkit.errors import ConfigurationError
from tests.nets import DropPath, regression

from .test_all_callbacks import NEEDED, SHIPPED

X, Y = regression(24, 2)

MORE = {
    "BackboneFinetuning later": lambda: callbacks.BackboneFinetuning(9, backbone="0"),
    "GradualUnfreezing of norms": lambda: callbacks.GradualUnfreezing({9: "0"}, train_bn=False),
    "EMA on epoch": lambda: callbacks.EMA(0.5, swap_on_epoch=True),
    "EarlyStopping that restores": lambda: callbacks.EarlyStopping(
        "loss", patience=9, restore_best_weights=True
    ),
    "NormMonitor and Timer": lambda: [callbacks.NormMonitor(), callbacks.Timer("00:01:00:00")],
    "StochasticWeightAveraging early": lambda: callbacks.StochasticWeightAveraging(0.1, 0),
    "a saving thread": lambda: callbacks.ModelCheckpoint("last.h5", save_freq=1, asynchronous=True),
    "a backup by a thread": lambda: callbacks.BackupAndRestore("b", save_freq=1, asynchronous=True),
    "CSV": lambda: loggers.CSV("scalars.csv", update_freq=1),
    "JSONLines": lambda: loggers.JSONLines("scalars.jsonl", update_freq="batch"),
    "TensorBoard": lambda: callbacks.TensorBoard("board"),
    "Profiler that logs": lambda: callbacks.Profiler(0, log=True),
}
"""Callbacks and loggers beside those of the package's list with their defaults."""

KINDS = [*(name for name in SHIPPED if name not in ("TensorBoard", "LambdaCallback")), *MORE]

PLACES = [hook for hook in HOOKS if "predict" not in hook and not hook.startswith("on_batch")]
PLACES.remove("on_exception")
"""The hooks of a fit, each of which is once the place where it ends."""


def made(kind):
    return MORE[kind]() if kind in MORE else getattr(callbacks, kind)(**NEEDED.get(kind, {}))


class Ends(Callback):
    """Ends the run in one of its hooks, at that hook's n-th call."""

    stops_alike = True

    def __init__(self, hook, error, at=1):
        def end(*arguments):
            self.left -= 1
            if self.left == 0:
                raise error

        self.left = at
        setattr(self, hook, end)


class Net(torch.nn.Sequential):
    """Linear, batch normalization, dropout in evaluation mode, linear."""

    def __init__(self):
        super().__init__(
            torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5),
            torch.nn.Linear(3, 1), DropPath(),
        )  # fmt: skip
        self[2].eval()


def compiled(net=None):
    torch.manual_seed(0)
    model = fitkit.Model(net or Net())
    model.compile("sgd", "mse", learning_rate=0.05)
    fit(model)  # makes what the first call of fit makes
    return model


def fit(model, *given, epochs=2):
    return model.fit(
        X, Y, batch_size=6, epochs=epochs, validation_data=(X, Y), validation_freq=0.5,
        callbacks=list(given), verbose=0,
    )  # fmt: skip


HOOKS_OF_MODULES = [name for name in vars(torch.nn.Linear(1, 1)) if "hook" in name]


def open_files():
    """The numbers of this process's open files, but those of libraries (matplotlib's fonts)."""
    found = glob.glob("/proc/self/fd/*")
    return {link for link in found if "site-packages" not in os.path.realpath(link)}


def state_of(model):
    """All of a process and a model that a call of fit must leave as it was, but the weights."""
    modules = list(model.modules())
    record = model._fitkit
    return {
        "hooks": [
            [len(getattr(module, name) or ()) for name in HOOKS_OF_MODULES] for module in modules
        ],
        "hooks of tensors": [len(p._backward_hooks or ()) for p in model.parameters()],
        "hooks after a gradient": [
            len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()
        ],
        "hooks of optimizers": [
            len(hooks)
            for optimizer in record.fit_state.optimizers
            for name, hooks in sorted(vars(optimizer).items())
            if "hooks" in name
        ],
        "modes": [module.training for module in modules],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "gradients": [p.grad is None for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in modules],
        "run": [record.fit_state.run, record.fit_state.grad_norms, record.contexts.by_thread],
        "clean-ups": dict(record.contexts.cleanups_by_thread),
        "accumulate": record.compilation.given.accumulate_grad_batches,
        "metrics": model.metrics_names,
        "threads": sorted(t.name for t in threading.enumerate()),
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        "stdout": [sys.stdout, sys.stderr],
        "modes of torch": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "files": open_files(),
    }


def assert_left_alone(model, before, *where):
    """Asserts that `state_of(model)` is as it was. Files may have been closed meanwhile: those that
    other tests left, by the garbage collector."""
    after = state_of(model)
    assert after.pop("files") <= before["files"], where
    assert after == {name: value for name, value in before.items() if name != "files"}, where


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = SimpleNamespace(
        report=lambda values, checkpoint=None: None, get_checkpoint=lambda: None,
        Checkpoint=SimpleNamespace(from_directory=str),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "ray.train", train)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_that_ends_anywhere_leaves_what_one_that_ended_leaves(kind):
    model = compiled()
    before = state_of(model)
    fit(model, made(kind))
    assert_left_alone(model, before)
    # At each hook one of the errors, at the next one and for the next kind the other.
    for number, hook in enumerate(PLACES, KINDS.index(kind)):
        error = (ValueError("planned"), KeyboardInterrupt())[number % 2]
        for folder in ("backup", "b"):  # a training that was cut would go on
            shutil.rmtree(folder, ignore_errors=True)
        # Early stopping may end the training before the second epoch.
        ends = Ends(hook, error, at=2 if "epoch" in hook and kind != "EarlyStopping" else 1)
        callback = made(kind)
        order = [ends, callback] if isinstance(error, ValueError) else [callback, ends]
        with pytest.raises(type(error)) as raised:
            fit(model, *order)
        assert raised.value is error
        assert_left_alone(model, before, hook, error)


def test_a_fit_that_ends_before_its_first_update_leaves_the_optimizers_groups():
    model = compiled()
    fit(model)
    whole = [id(parameter) for parameter in model.optimizer.param_groups[0]["params"]]
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as raised:
        fit(
            model,
            callbacks.BackboneFinetuning(1, backbone="0"),  # gives the backbone its own group
            Ends("on_train_batch_begin", error),
        )
    assert raised.value is error
    assert [[id(p) for p in group["params"]] for group in model.optimizer.param_groups] == [whole]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_so_does_an_evaluation_or_a_prediction(kind, verb):
    model = compiled()
    getattr(model, verb)(X, verbose=0) if verb == "predict" else model.evaluate(X, Y, verbose=0)
    before = state_of(model)
    given = (X,) if verb == "predict" else (X, Y)
    for hook in [hook for hook in HOOKS if ("predict" if verb == "predict" else "test") in hook]:
        error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            getattr(model, verb)(*given, verbose=0, callbacks=[made(kind), Ends(hook, error)])
        assert_left_alone(model, before, hook)


class Notes(Callback):
    """Undoes several things at the end, and notes in which order."""

    def __init__(self, notes, fails=()):
        self.notes, self.fails = notes, fails

    def undo(self, what):
        self.notes.append(what)
        if what in self.fails:
            raise OSError(what)

    def on_train_begin(self, logs=None):
        for what in ("first", "second"):
            self.add_cleanup(self.undo, what)

    def on_train_end(self, logs=None):
        self.notes.append("end")

    def on_exception(self, error):
        self.notes.append("error")


def test_clean_ups_come_after_the_last_hook_in_reverse_order():
    notes = []
    fit(compiled(), Notes(notes))
    assert notes == ["end", "second", "first"]


def test_all_are_called_though_some_fail_and_the_first_failure_is_raised():
    notes = []
    warned = pytest.warns(match="clean-up of Notes failed: OSError: first")
    with warned, pytest.raises(OSError, match="second"):
        fit(compiled(), Notes(notes, fails=("first", "second")))
    assert notes == ["end", "second", "first"]


def test_a_failing_one_does_not_hide_the_error_of_the_run():
    notes, error = [], KeyboardInterrupt()
    warned = pytest.warns(match="clean-up of Notes failed: OSError: second")
    with warned, pytest.raises(KeyboardInterrupt) as raised:
        fit(compiled(), Notes(notes, fails=("second",)), Ends("on_epoch_end", error))
    assert raised.value is error
    assert notes == ["error", "second", "first"]


def test_a_context_lasts_until_the_end_and_does_not_swallow_the_error():
    class Enters(Callback):
        def on_train_begin(self, logs=None):
            self.enter_context(contextlib.suppress(ValueError))

    with pytest.raises(ValueError, match="planned"):
        fit(compiled(), Enters(), Ends("on_train_batch_end", ValueError("planned")))


def test_a_callback_of_a_run_within_its_own_run_goes_on_in_the_outer_one():
    stages = []

    class Within(Callback):
        def on_epoch_end(self, epoch, logs):
            self.model.evaluate(X, Y, verbose=0, callbacks=self)
            stages.append(self.params["stage"])
            self.add_cleanup(stages.append, "cleaned")

    fit(compiled(), Within())
    assert stages == ["fit", "fit", "cleaned", "cleaned"]


def test_a_fit_within_a_fit_leaves_the_outer_run(tmp_path):
    class Within(Callback):
        def on_epoch_end(self, epoch, logs):
            fit(self.model, epochs=1)

    fit(compiled(), Within(), callbacks.ModelCheckpoint(tmp_path / "saved.h5"))
    assert (tmp_path / "saved.h5").exists()


def test_a_clean_up_outside_of_a_run_is_refused():
    callback = Callback()
    with pytest.raises(ConfigurationError):
        callback.add_cleanup(print)
    fit(compiled(), callback)
    with pytest.raises(ConfigurationError):
        callback.add_cleanup(print)


class Weighs(Callback):
    """Keeps the weights after each batch, and logs `v`, which is best in the second epoch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, batch, logs):
        self.seen.append(self.model.net[0].weight.detach().clone())

    def on_epoch_end(self, epoch, logs):
        logs["v"] = [1.0, 0.0, 5.0][epoch]


def best():
    return callbacks.EarlyStopping("v", mode="min", patience=9, restore_best_weights=True)


@pytest.mark.parametrize("error", [ValueError("planned"), KeyboardInterrupt()], ids=type)
@pytest.mark.parametrize("kind", ["ema", "mean of epochs", "best", "best beside a mean"])
def test_the_weights_after_an_error_are_those_that_the_callback_promises(kind, error):
    model, weighs = compiled(), Weighs()
    expected = model.net[0].weight.detach().clone()
    given = {
        "ema": [callbacks.EMA(0.5)],
        "mean of epochs": [callbacks.StochasticWeightAveraging(0.05, 0)],
        "best": [best()],
        "best beside a mean": [callbacks.StochasticWeightAveraging(0.05, 0), best()],
    }[kind]
    with pytest.raises(type(error)):
        fit(model, weighs, *given, Ends("on_epoch_begin", error, at=4), epochs=4)
    seen = weighs.seen
    assert len(seen) == 12
    if kind == "ema":
        for weight in seen:
            expected = 0.5 * expected + 0.5 * weight
    else:
        expected = (seen[3] + seen[7] + seen[11]) / 3 if kind == "mean of epochs" else seen[7]
    torch.testing.assert_close(model.net[0].weight.detach(), expected)


class Grows(torch.nn.Linear):
    """Remembers an input of each step, and a running mean that it replaces."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("seen", torch.zeros(0, 2))
        self.register_buffer("running_mean", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, x[:1].detach()])
            self.running_mean = 0.5 * self.running_mean + 0.5 * x.detach().mean(0)
        return super().forward(x)


def test_best_weights_have_the_buffers_of_the_best_epoch_whatever_their_shape():
    class Worse(Callback):
        def on_epoch_end(self, epoch, logs):
            logs["v"] = float(epoch)
            if epoch == 0:
                kept.update({k: v.clone() for k, v in self.model.net.state_dict().items()})

    kept, model = {}, compiled(Grows())
    best = callbacks.EarlyStopping("v", mode="min", patience=9, restore_best_weights=True)
    fit(model, Worse(), best, epochs=3)
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, kept[name]), name


def test_an_average_follows_buffers_that_the_net_replaces():
    means = []

    class Watches(Callback):
        def on_train_batch_end(self, batch, logs):
            means.append(self.model.net.running_mean.clone())

    model = compiled(Grows())
    expected = model.net.running_mean.clone()
    fit(model, Watches(), callbacks.EMA(0.8))
    for mean in means:
        expected = 0.8 * expected + 0.2 * mean
    torch.testing.assert_close(model.net.running_mean, expected)


def test_an_error_before_the_first_update_gives_back_buffers_that_have_grown():
    model = compiled(Grows())
    before = {name: value.clone() for name, value in model.net.state_dict().items()}
    model.compile("sgd", lambda prediction, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(model)
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_search_for_a_rate_gives_back_buffers_that_the_net_replaces():
    model = compiled(Grows())
    before = {name: value.clone() for name, value in model.net.state_dict().items()}
    fitkit.tune.learning_rate(model, X, Y, num_training=8, batch_size=6)
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, before[name]), name
