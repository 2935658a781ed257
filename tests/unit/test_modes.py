"""One model in several threads, and what stays in evaluation mode while a model trains."""

import copy
import os
import pickle
import threading
import time
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

import fitkit
from fitkit.errors import ConfigurationError
from tests.reference import assert_same_weights, copied_state, plain_loop, slices

torch.manual_seed(0)
X, Y = torch.randn(48, 6), torch.randint(3, (48,))
THREADS, CALLS = 4, 25
WAIT_S = 60


class Slow(nn.Module):
    """Dropout and batch normalisation, with a forward long enough to meet others."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.first(x))
        time.sleep(0.002)
        return self.last(self.drop(x))


class Own(fitkit.Model):
    """Logs a value of the batch's data, and metrics of its own where it is given one."""

    def __init__(self, metric=None):
        super().__init__(Slow())
        self.metric = metric

    def validation_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("first", x[:, 0].mean())
        time.sleep(0.001)
        self.log("second", x[:, 1].mean())
        if self.metric is not None:
            self.metric.update(self(x), y)
            self.log("metric", self.metric)
        return loss


def model_of(net=None, **arguments):
    torch.manual_seed(1)
    model = fitkit.Model(Slow() if net is None else net)
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu", **arguments)
    model.fit(X, Y, verbose=0)
    return model


def in_threads(*acts):
    """What each act gave or raised, all of them begun together in a thread each."""
    start, found = threading.Barrier(len(acts)), [None] * len(acts)

    def run(index, act):
        start.wait(WAIT_S)
        try:
            found[index] = act()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return found


class Pause(fitkit.callbacks.Callback):
    """Holds the call that it is given to at a hook until `go_on` is set."""

    def __init__(self, hook):
        self.there, self.go_on = threading.Event(), threading.Event()
        setattr(self, hook, self.wait)

    def wait(self, *arguments):
        self.there.set()
        assert self.go_on.wait(WAIT_S)


class Held:
    """A call that a thread has begun, and goes on with at `end`."""

    def __init__(self, act, hook):
        self.pause, self.found = Pause(hook), []
        self.thread = threading.Thread(target=self.run, args=(act,))
        self.thread.start()
        assert self.pause.there.wait(WAIT_S)

    def run(self, act):
        self.found.append(act(callbacks=self.pause))

    def end(self):
        self.pause.go_on.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@contextmanager
def meanwhile(act, hook):
    """A thread is held inside a call; yields where what the call gave will be."""
    held = Held(act, hook)
    try:
        yield held.found
    finally:
        held.end()


def predicting(model, x=X):
    return Held(partial(model.predict, x, verbose=0), "on_predict_begin")


def modes_of(model):
    return [module.training for module in model.modules()]


# ---------------------------------------------------------------------- several threads compute

VERBS = {
    "predict": lambda model: model.predict(X, batch_size=7, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, batch_size=7, verbose=0),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
}


@pytest.mark.parametrize("verb", VERBS)
def test_threads_that_compute_with_one_model_get_what_one_thread_gets(verb):
    model, act = model_of(), VERBS[verb]
    assert all(modes_of(model))
    alone, before = act(model), copied_state(model)
    x = X.clone()
    with torch.no_grad():  # by plain PyTorch
        net = copy.deepcopy(model.net).eval()
        rows = [net(part) for part in x.split(7)] if verb == "predict" else [net(x)]
    if verb.startswith("predict"):
        assert np.array_equal(alone, torch.cat(rows).numpy())

    def repeated():
        return [act(model) for _ in range(CALLS)]

    for results in in_threads(*[repeated] * THREADS):
        assert all(np.array_equal(result, alone) for result in results)
    assert_same_weights(before, model)
    assert all(modes_of(model))


def test_all_verbs_beside_each_other_and_flags_come_back_after_errors():
    model = model_of()
    model.net.norm.eval()
    before, modes = copied_state(model), modes_of(model)
    alone = {verb: act(model) for verb, act in VERBS.items()}

    def mixed():
        for _ in range(5):
            for verb, act in VERBS.items():
                assert np.array_equal(act(model), alone[verb])
            with pytest.raises(ConfigurationError):
                model.predict(torch.randn(4, 5), verbose=0)

    assert in_threads(*[mixed] * THREADS) == [None] * THREADS
    assert_same_weights(before, model)
    assert modes_of(model) == modes


def test_models_that_share_layers_compute_beside_each_other():
    backbone = Slow()
    models = [model_of(nn.Sequential(backbone, nn.Dropout())) for _ in range(2)]
    alone = [model.predict(X, verbose=0) for model in models]

    def repeated(index):
        return [models[index].predict(X, verbose=0) for _ in range(CALLS)]

    found = in_threads(*[lambda i=i % 2: repeated(i) for i in range(THREADS)])
    for index, results in enumerate(found):
        assert all(np.array_equal(result, alone[index % 2]) for result in results)
    assert all(modes_of(models[0]) + modes_of(models[1]))


def test_a_call_that_ends_leaves_the_modes_to_those_that_go_on():
    model = model_of()
    calls = [predicting(model) for _ in range(3)]
    for call in calls:
        assert not any(modes_of(model))
        call.end()
    assert all(modes_of(model))


def test_steps_log_to_their_own_threads_call():
    model = Own()
    model.compile("sgd", accelerator="cpu")
    parts = X.split(12)
    expected = [(float(part[:, 0].mean()), float(part[:, 1].mean())) for part in parts]

    def repeated(part):
        return [
            model.evaluate(part, torch.zeros(12, dtype=torch.long), verbose=0, return_dict=True)
            for _ in range(CALLS)
        ]

    for found, wanted in zip(
        in_threads(*[lambda part=part: repeated(part) for part in parts]), expected, strict=True
    ):
        for result in found:
            assert (result["first"], result["second"]) == pytest.approx(wanted, abs=1e-6)


def test_metrics_that_are_part_of_a_model_count_for_one_thread_at_a_time():
    metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    model = Own(metric)
    model.compile("sgd", accelerator="cpu")
    with (
        meanwhile(lambda **options: model.evaluate(X, Y, verbose=0, **options), "on_test_begin"),
        pytest.raises(ConfigurationError, match="evaluate can't start: another thread runs eval"),
    ):
        model.evaluate(X, Y, verbose=0)
    assert model.evaluate(X, Y, verbose=0)


def test_a_layout_by_channels_lasts_until_the_last_call_ends():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu", memory_format="channels_last")
    images, weight = torch.randn(8, 3, 6, 6), net[0].weight
    calls = [predicting(model, images) for _ in range(2)]
    for call in calls:
        assert weight.is_contiguous(memory_format=torch.channels_last)
        call.end()
    assert weight.is_contiguous()


def test_flags_of_torchs_are_as_before_when_overlapping_calls_have_ended():
    def flags():
        return torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()

    before = flags()
    first, second = (
        predicting(model_of(deterministic=True, matmul_precision=word))
        for word in ("high", "medium")
    )
    assert flags() == (True, "medium")
    first.end()
    assert flags() == (True, "medium")
    second.end()
    assert flags() == before


# ---------------------------------------------------------------------- what is refused

BESIDE_A_FIT = {
    **VERBS,
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "summary": lambda model: model.summary(X),
    "export": lambda model: model.export("net.pt2", example=X),
    "load_weights": lambda model: model.load_weights("net.h5"),
}


@pytest.mark.parametrize("verb", BESIDE_A_FIT)
def test_what_another_thread_asks_of_a_training_model_is_refused(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, undisturbed = model_of(), model_of()
    model.save_weights("net.h5")
    options = {"batch_size": 8, "epochs": 2, "verbose": 0}
    torch.manual_seed(5)
    training = partial(model.fit, X, Y, **options)
    with meanwhile(training, "on_train_batch_end") as found:
        with pytest.raises(ConfigurationError, match=f"^{verb} can't start: .* runs fit on this"):
            BESIDE_A_FIT[verb](model)
        assert all(modes_of(model))
    torch.manual_seed(5)
    expected = undisturbed.fit(X, Y, **options)
    assert found[0].history == expected.history
    assert_same_weights(model, undisturbed)
    BESIDE_A_FIT[verb](model)  # afterwards it may


@pytest.mark.parametrize("verb", ["fit", "train_on_batch", "summary", "export"])
def test_what_needs_a_model_alone_is_refused_while_another_thread_predicts(verb, tmp_path):
    model = model_of()
    before = copied_state(model)
    with (
        meanwhile(partial(model.predict, X, verbose=0), "on_predict_begin") as found,
        pytest.raises(ConfigurationError, match=f"runs predict .* {verb} needs the model"),
    ):
        BESIDE_A_FIT[verb](model)
    assert np.array_equal(found[0], model.predict(X, verbose=0))
    assert_same_weights(before, model)


def test_two_fits_of_models_that_share_layers_are_refused_and_of_others_not():
    shared = Slow()
    first, second, other = fitkit.Model(shared), fitkit.Model(nn.Sequential(shared)), model_of()
    for model in (first, second):
        model.compile("sgd", "cross_entropy", accelerator="cpu")
    with meanwhile(lambda **options: first.fit(X, Y, verbose=0, **options), "on_epoch_begin"):
        with pytest.raises(ConfigurationError, match="one that shares its layers"):
            second.fit(X, Y, verbose=0)
        other.fit(X, Y, verbose=0)
        second.summary()  # looks at nothing that changes
    second.fit(X, Y, verbose=0)


def test_calls_inside_a_fit_by_its_own_thread_nest_to_any_depth():
    model, plain = model_of(), model_of()
    seen = []

    class Looks(fitkit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            self.model.evaluate(X, Y, verbose=0, callbacks=Deeper())
            seen.append(modes_of(self.model))

    class Deeper(fitkit.callbacks.Callback):
        def on_test_end(self, logs):
            self.model.predict(X, verbose=0)
            self.model.predict_on_batch(X)
            seen.append(modes_of(self.model))

    torch.manual_seed(3)
    got = model.fit(X, Y, epochs=2, validation_split=0.25, verbose=0, callbacks=Looks())
    torch.manual_seed(3)
    assert got.history == plain.fit(X, Y, epochs=2, validation_split=0.25, verbose=0).history
    count = len(modes_of(model))
    assert seen == [[False] * count, [True] * count] * 2

    inner = []
    nested = fitkit.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: inner.append(model.fit(X, Y, verbose=0))
    )
    model.fit(X, Y, epochs=2, verbose=0, callbacks=nested)
    assert len(inner) == 2


def test_a_call_of_several_processes_is_for_one_thread():
    model = model_of(devices=2, strategy="dp")
    with (
        meanwhile(partial(model.predict, X, verbose=0), "on_predict_begin"),
        pytest.raises(ConfigurationError, match="predict needs the model alone"),
    ):
        model.predict(X, verbose=0)


def test_copies_and_pickles_of_a_model_in_use_are_free():
    model = model_of()
    copied = []

    class Copies(fitkit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            copied.extend([copy.deepcopy(self.model), pickle.loads(pickle.dumps(self.model.net))])

    model.fit(X, Y, verbose=0, callbacks=Copies())
    assert copied[0]._fitkit.contexts.current is None
    assert np.array_equal(
        copied[0].predict(X, verbose=0), fitkit.Model(copied[1]).predict(X, verbose=0)
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_has_none_of_the_other_threads_calls():
    model = model_of()
    with meanwhile(lambda **options: model.fit(X, Y, verbose=0, **options), "on_train_batch_begin"):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            try:
                model.predict_on_batch(X[:2])
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---------------------------------------------------------------------- evaluation mode in a fit


def part_frozen():
    torch.manual_seed(2)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    return nn.Sequential(backbone, nn.BatchNorm1d(8), nn.Linear(8, 3))


def plain_training(net, batches, epochs):
    """By plain PyTorch, in the modes that the net has."""
    plain_loop(net, torch.optim.SGD(net.parameters(), lr=0.1), batches, epochs)


@pytest.mark.parametrize("how", ["fit", "train_on_batch"])
def test_what_is_in_evaluation_mode_when_a_training_begins_stays_so(how):
    net, plain = part_frozen(), part_frozen()
    for each in (net, plain):
        each[0].eval()
    batches = slices(X, Y, 16)
    plain_training(plain, batches, 2)
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", learning_rate=0.1, accelerator="cpu")
    modes = modes_of(net)
    if how == "fit":
        options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(X, Y, validation_data=(X, Y), **options)
    else:
        for x, y in batches * 2:
            model.train_on_batch(x, y)
    assert modes_of(net) == modes == [True, *[False] * 4, True, True]
    assert torch.equal(net[0][1].running_mean, torch.zeros(8))
    assert not torch.equal(net[1].running_mean, torch.zeros(8))
    assert_same_weights(net, plain, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("whole", ["net", "model"])
@pytest.mark.parametrize("how", ["fit", "train_on_batch"])
def test_a_net_that_is_in_evaluation_mode_as_a_whole_trains(whole, how):
    net = part_frozen()
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    (net if whole == "net" else model).eval()
    modes = modes_of(model)
    model.fit(X, Y, verbose=0) if how == "fit" else model.train_on_batch(X, Y)
    assert not torch.equal(net[0][1].running_mean, torch.zeros(8))
    assert modes_of(model) == modes


def test_a_layer_that_a_callback_puts_into_training_mode_stays_there():
    net = part_frozen()
    net[0].eval()
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    seen = []

    class Unfreezes(fitkit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                net[0].train()

        def on_epoch_end(self, epoch, logs):
            seen.append(net[0][1].training)

    model.fit(X, Y, epochs=4, verbose=0, callbacks=Unfreezes(), validation_data=(X, Y))
    assert seen == [False, True, True, True]
    assert not net[0][1].training  # as it was when fit began


def test_a_layer_frozen_when_the_training_begins_by_a_callback_stays_so():
    net = part_frozen()
    freezes = fitkit.callbacks.LambdaCallback(on_train_begin=lambda logs: net[0].eval())
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    model.fit(X, Y, epochs=2, verbose=0, callbacks=freezes)
    assert torch.equal(net[0][1].running_mean, torch.zeros(8))
    assert all(modes_of(net))
