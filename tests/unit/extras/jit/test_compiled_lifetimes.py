"""What `jit_compile` has compiled of a model ends with it: nothing of the process keeps either."""

import gc
import os
import weakref

import pytest
import torch
from torch import nn

import fitkit
from tests.compiling import HAS_COMPILER, TRACED, Branching

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
        pytest.param(OwnStep, normed, {}, marks=pytest.mark.slow),
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


def kept_by_torch():
    """How much torch keeps of all compiled functions, by what it is."""
    from torch._dynamo import eval_frame, pgo, utils
    from torch._dynamo.guards import CheckFunctionManager
    from torch._inductor.codecache import PyCodeCache
    from torch.fx import graph_module

    gc.collect()
    gc.collect()
    finalizers = [
        info
        for info in weakref.finalize._registry.values()
        if isinstance(getattr(getattr(info.func, "func", 0), "__self__", 0), CheckFunctionManager)
    ]
    kinds = [type(one) for one in gc.get_objects()]
    return {
        "finalizers": len(finalizers),
        "checks": kinds.count(CheckFunctionManager),
        "graphs": kinds.count(torch.fx.Graph),
        "fake tensors": kinds.count(torch._subclasses.FakeTensor),
        "backends": len(eval_frame.cached_backends),
        "sources": len(graph_module._loader.eval_cache),
        "sizes": len(pgo._CODE_STATE),
        "modules": len(PyCodeCache.modules),
        "tracebacks": len(utils.get_metrics_context()._edits),
    }


def check_that_nothing_stays(jit_compile, optimizer, *but):
    def train():
        model = fitkit.Model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
        settings = {"accelerator": "cpu", "devices": 1, "jit_compile": jit_compile}
        model.compile(optimizer, "cross_entropy", **settings)
        model.fit(X, Y, batch_size=8, verbose=0)
        assert model._fitkit.compiler.of_updates.stopped is None
        return kept_by_torch()

    during = train()
    before = kept_by_torch()
    assert during["finalizers"] > before["finalizers"], "torch keeps them elsewhere now"
    for _ in range(2):
        train()
    after = kept_by_torch()
    grown = [name for name in after if after[name] > before[name] and name not in but]
    assert not grown, (before, after)


def test_torch_keeps_nothing_of_a_compiled_model_that_is_gone():
    # This backend writes a graph's text at its first call, which is after the trace.
    check_that_nothing_stays(TRACED, "adam", "sources")


@HAS_COMPILER
def test_torch_keeps_nothing_of_the_code_that_it_wrote_either():
    check_that_nothing_stays(True, "sgd", "fake tensors")  # inductor has tables of them
