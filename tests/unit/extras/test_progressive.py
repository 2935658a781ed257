"""`Progressive` sets sizes of images and batches by epoch, as a loop written by hand does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.callbacks import Callback, Progressive
from tests.compiling import TRACED, compiled_anew
from tests.nets import normal
from tests.reference import assert_same_weights

X, Y = normal(32, 2, 8, 8).double(), torch.arange(32) % 3
SIZES = {0: 4, 1: (4, 6), 2: None}


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(3, 3)).double()


def by_hand(epochs=3):
    made = net()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    for epoch in range(epochs):
        size = [(4, 4), (4, 6), (8, 8)][epoch]
        for x, y in zip(X.split(16), Y.split(16), strict=True):
            if size != (8, 8):
                x = F.interpolate(x, size, mode="bilinear", antialias=True)
            optimizer.zero_grad()
            F.cross_entropy(made(x), y).backward()
            optimizer.step()
    return made


def compiled(kind=fitkit.Model, **more):
    model = kind(net())
    hardware = {"devices": 1, "accelerator": "cpu", **more}
    model.compile("sgd", "cross_entropy", learning_rate=0.5, **hardware)
    return model


def fitted(model, batch_size=16, **more):
    options = {"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": Progressive(SIZES)}
    model.fit(X, more.pop("y", Y), batch_size=batch_size, **{**options, **more})
    return model


class Own(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kind": Own},
        {"jit_compile": TRACED},
        {"accumulate_grad_batches": 2},
        {"devices": 2, "strategy": "ddp_spawn"},
        {"devices": 2, "strategy": "dp"},
    ],
    ids=str,
)
def test_the_weights_are_those_of_a_loop_written_by_hand(more):
    parts = more.get("accumulate_grad_batches", 1)
    ranks = 2 if more.get("strategy") == "ddp_spawn" else 1
    model = fitted(compiled(**more), 16 // parts // ranks)
    assert_same_weights(model.net, by_hand(), atol=1e-12)


class Shapes(nn.Module):
    """Notes the shapes of its inputs, in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.training_shapes, self.other_shapes = [], []

    def forward(self, x):
        (self.training_shapes if self.training else self.other_shapes).append(tuple(x.shape[2:]))
        return x


def test_validations_see_the_images_as_they_are():
    shapes = Shapes()
    model = fitkit.Model(nn.Sequential(shapes, net()))
    model.compile("sgd", "cross_entropy", devices=1)
    fitted(model, 32, validation_data=(X, Y))
    assert shapes.training_shapes == [(4, 4), (4, 6), (8, 8)]
    assert {*shapes.other_shapes} == {(8, 8)}


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, batch, logs):
        if self.model.global_step == 3:  # within the second epoch
            self.model.save(self.path)


def test_a_cut_training_goes_on_exactly(tmp_path):
    callbacks = [Progressive(SIZES), Saves(tmp_path / "cut.h5")]
    whole = fitted(compiled(), callbacks=callbacks)
    again = fitted(compiled(), resume_from=tmp_path / "cut.h5")
    assert_same_weights(again.net, whole.net)


def test_each_size_is_compiled_once():
    model = compiled(jit_compile=TRACED)
    compiled_anew()
    fitted(model, 4, callbacks=Progressive({0: 4, 1: 6, 2: 4, 3: 6}), epochs=4)
    assert compiled_anew() == 2


def test_compiles_own_transforms_come_after_it():
    seen = []

    def look(x, y):
        seen.append(tuple(x.shape[2:]))
        return x, y

    fitted(compiled(batch_transforms=[look]), 32)
    assert seen == [(4, 4), (4, 6), (8, 8)]


def test_impossible_sizes_and_inputs_are_refused():
    for size in ({}, {0: 0}, {-1: 4}, {0: (4, 4, 4)}, {0: "4"}, 4):
        with pytest.raises(fitkit.ConfigurationError):
            Progressive(size)
    model = fitkit.Model(nn.Linear(8, 3))
    model.compile("sgd", "cross_entropy", devices=1)
    with pytest.raises(fitkit.ConfigurationError):
        model.fit(X[:, 0, 0].float(), Y, verbose=0, callbacks=Progressive({0: 4}))
    with pytest.raises(fitkit.ConfigurationError, match="maps"):
        fitted(compiled(), callbacks=Progressive({0: 4}), epochs=1, y=torch.zeros(32, 8, 8).long())


BATCHES = {0: 12, 1: None, 2: 5}


class Rows(TensorDataset):
    """A data set that fit reads by a loader of its own."""


def trained(model, data=(X, Y), batch_size=4, callbacks=(), batches=BATCHES, **more):
    torch.manual_seed(3)
    sizes = Progressive(batch_size=batches)
    options = {"epochs": 4, "shuffle": False, "verbose": 0, **more}
    model.fit(*data, batch_size=batch_size, callbacks=[sizes, *callbacks], **options)
    return model


@pytest.mark.parametrize("kind", ["arrays", "a data set", "compiled", "two ranks"])
def test_batches_have_the_epochs_size(kind):
    expected = net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for rows in (12, 4, 5, 5) if kind != "two ranks" else (12, 4, 6, 6):
        for x, y in zip(X.split(rows), Y.split(rows), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(expected(x), y).backward()
            optimizer.step()
    if kind == "two ranks":
        model = compiled(devices=2, strategy="ddp_spawn")
        trained(model, batch_size=2, batches={0: 6, 1: None, 2: 3})
    elif kind == "compiled":
        model = compiled(jit_compile=TRACED)
        compiled_anew()
        trained(model)
        assert compiled_anew() == 1  # of 12; the others are too few to be worth it
    else:
        model = trained(compiled(), (X, Y) if kind == "arrays" else (Rows(X, Y),))
    assert_same_weights(model.net, expected, atol=1e-12)


@pytest.mark.parametrize("cut", [2, 5, 13])  # within epochs of three sizes
def test_a_training_that_is_cut_keeps_its_batches(tmp_path, cut):
    class SavesAt(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == cut:
                self.model.save(tmp_path / "cut.h5")

    whole = trained(compiled(), callbacks=[SavesAt()], shuffle=True)
    again = trained(compiled(), shuffle=True, resume_from=tmp_path / "cut.h5")
    assert_same_weights(again.net, whole.net)
    assert again.global_step == whole.global_step == 3 + 8 + 7 + 7


def test_schedules_bars_and_validations_know_an_epochs_length():
    class Steps(Callback):
        def on_train_begin(self, logs=None):
            self.seen = []

        def on_epoch_begin(self, epoch, logs=None):
            self.seen.append((self.params["steps"], self.params["batch_size"]))

    steps, model = Steps(), compiled(lr_scheduler={"scheduler": "cosine", "interval": "step"})
    trained(model, callbacks=[steps], validation_data=(X, Y), validation_freq=0.5)
    assert steps.seen == [(3, 12), (8, 4), (7, 5), (7, 5)]
    assert model.optimizer.learning_rate == pytest.approx(0, abs=1e-9)  # at the last update
    assert [one["batches"] for one in model.history.validations] == [2, 3, 4, 8, 4, 7, 4, 7]


@pytest.mark.parametrize("what", ["a loader", "steps_per_epoch", "effective_batch_size", "size 0"])
def test_batches_that_fit_cannot_cut_are_refused(what):
    hardware = {"effective_batch_size": 8} if what == "effective_batch_size" else {}
    data = (DataLoader(TensorDataset(X, Y), 4),) if what == "a loader" else (X, Y)
    more = {"steps_per_epoch": 3} if what == "steps_per_epoch" else {}
    sizes = {0: 0 if what == "size 0" else 4}
    with pytest.raises(fitkit.ConfigurationError):
        trained(compiled(**hardware), data, batches=sizes, **more)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_cpu_resizes_images_of_half_precision_as_float32(precision):
    model, dtype = compiled(precision=precision), {"b": torch.bfloat16, "1": torch.float16}
    halves = X.to(dtype[precision[0]])
    seen = []
    model.net.register_forward_pre_hook(lambda net, given: seen.append(given[0].clone()))
    model.fit(
        X, Y, batch_size=16, epochs=1, shuffle=False, verbose=0, callbacks=Progressive({0: 4})
    )
    right = F.interpolate(halves.float(), (4, 4), mode="bilinear", antialias=True).to(halves.dtype)
    assert torch.equal(torch.cat(seen), right)
