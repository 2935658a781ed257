"""Optimizers of many tensors step in one operation of the compiled graph, as eager fused ones."""

import copy
import operator
import uuid
from functools import partial

import pytest
import torch
from torch import nn, optim

import fitkit
from fitkit.extras.jit import fused, loop
from fitkit.extras.jit.programs import traces_gradients
from tests.compiling import HAS_COMPILER, TRACED, every_second

pytestmark = pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients")

torch.manual_seed(0)
X, Y = torch.randn(48, 6), torch.randint(3, (48,))
NET = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)], nn.Tanh(), nn.Linear(6, 3))

OPTIMIZERS = {
    "Adam": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1, maximize=True, fused=True),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, fused=True),
}


FLAGS = {"nesterov": False, "maximize": False}


def trained(optimizer, jit_compile, monkeypatch=None, **more):
    """The weights, and how often the one operation computed a step."""
    calls, model = [], fitkit.Model(copy.deepcopy(NET))
    halves = partial(optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    model.compile(optimizer, "cross_entropy", accelerator="cpu", devices=1, jit_compile=jit_compile,
                  lr_scheduler={"scheduler": halves, "interval": "step"}, **more)  # fmt: skip
    if monkeypatch is not None:

        def noted(gradients):
            calls.append(len(gradients))
            return [gradient.contiguous() for gradient in gradients]

        monkeypatch.setattr(fused, "_contiguous", noted)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return list(model.net.state_dict().values()), calls


def check(optimizer, jit_compile, monkeypatch):
    wanted, _ = trained(optimizer, False)
    found, calls = trained(optimizer, jit_compile, monkeypatch)
    assert len(calls) >= 12 and set(calls) == {10}  # 12 steps, and the comparison's
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_one_operation_is_that_of_the_eager_fused_optimizer(name, monkeypatch):
    check(OPTIMIZERS[name], TRACED, monkeypatch)


@HAS_COMPILER
def test_torchs_own_compiler_calls_it_too(monkeypatch):
    check(OPTIMIZERS["SGD"], True, monkeypatch)


@HAS_COMPILER
@pytest.mark.parametrize("name", every_second(["AdamW", "SGD", "Adam", "Adagrad"]))
def test_in_a_loop_of_steps_too_it_changes_its_inputs(name, monkeypatch):
    targets, change = [], fused.change_inputs

    def noted(graph):
        change(graph)
        targets.extend(str(node.target) for node in graph.nodes if "fitkit" in str(node.target))

    monkeypatch.setattr(loop, "change_inputs", noted)
    wanted, _ = trained(OPTIMIZERS[name], False)
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        found, _ = trained(OPTIMIZERS[name], True, steps_per_execution=6)
    assert targets == [f"fitkit.{name.lower().removesuffix('w')}.default"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_an_operation_whose_results_are_used_elsewhere_makes_new_tensors():
    def graph_of(uses):
        graph = torch.fx.Graph()
        weight, gradient, rate = map(graph.placeholder, ("weight", "gradient", "rate"))
        given = [weight], [gradient], [], rate, [0.0, 0.0, 0.0], [False, False]
        made = graph.call_function(torch.ops.fitkit.sgd_apart.default, given)
        new = graph.call_function(operator.getitem, (made, 0))
        graph.call_function(torch.ops.aten.copy_.default, (weight, new))
        graph.output((new,) if uses else (gradient,))
        fused.change_inputs(graph)
        return torch.fx.GraphModule(nn.Module(), graph)

    fused._library()
    for uses in (False, True):
        module = graph_of(uses)
        called = {str(node.target) for node in module.graph.nodes}
        assert ("fitkit.sgd_apart.default" in called) is uses
        weight = torch.ones(3)
        module(weight, torch.ones(3), torch.tensor(0.5, dtype=torch.float64))
        assert torch.equal(weight, torch.full((3,), 0.5))


def test_few_small_tensors_and_what_the_kernels_cannot_read_stay_traced():
    def asked(kind=optim.SGD, count=8, dtype=torch.float32, **more):
        parameters = [nn.Parameter(torch.zeros(2, 3, dtype=dtype)) for _ in range(count)]
        if more.pop("turned", False):
            parameters[0] = nn.Parameter(torch.zeros(3, 2).T)
        settings = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, **FLAGS, **more}
        return fused.fused(kind, parameters, [[None] * count], settings) is not None

    assert asked()
    assert not asked(count=7)
    assert not asked(kind=optim.RMSprop)
    assert not asked(dtype=torch.bfloat16)
    assert not asked(turned=True)
    assert not asked(weight_decay=torch.zeros((), dtype=torch.float64))
