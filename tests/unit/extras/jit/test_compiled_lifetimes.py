"""What `jit_compile` has compiled of a model ends with it: nothing of the process keeps either."""

import gc
import os
import weakref

import pytest
import torch
from torch import nn

import fitkit
from tests.compiling import TRACED, Branching

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, :3].sum(1) > 0).long()


class OwnStep(fitkit.Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def trained(kind, net, options):
    """Weak references to a model, its net and a parameter, after a use of all verbs."""
    model = kind(net)
    settings = {"accelerator": "cpu", "devices": 1, "jit_compile": TRACED, **options}
    model.compile("adam", "cross_entropy", metrics=["accuracy"], **settings)
    model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y))
    model.evaluate(X, Y, batch_size=8, verbose=0)
    model.predict(X, batch_size=8, verbose=0)
    model(X)
    return [weakref.ref(one) for one in (model, net, next(net.parameters()))]


@pytest.mark.filterwarnings("ignore:jit_compile compiles the net alone")
@pytest.mark.parametrize(
    ("kind", "net", "options"),
    [
        (fitkit.Model, normed, {}),
        (OwnStep, normed, {}),
        (fitkit.Model, Branching, {}),  # given up
    ],
)
def test_a_compiled_model_is_freed_as_any_other(kind, net, options):
    model, net, weight = trained(kind, net(), options)
    gc.collect()
    assert model() is None and net() is None
    gc.collect()  # what torch had compiled was told of their end by the first one
    assert weight() is None


@pytest.mark.filterwarnings("ignore:jit_compile compiles the net alone")
@pytest.mark.slow
def test_a_compiled_keras_net_is_freed_too():
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")

    def net():
        layers = keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()
        return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])

    model, net, weight = trained(fitkit.Model, net(), {})
    gc.collect()
    assert model() is None and net() is None
    gc.collect()
    assert weight() is None
