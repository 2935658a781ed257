"""What torch asks of a step before it repeats it as a CUDA graph: nothing here captures one."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import fitkit

X, Y = torch.randn(64, 8), torch.randint(0, 3, (64,))


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        "adam",
        "adamw",
        "adagrad",
        {"name": "sgd", "momentum": 0.9},
        {"name": "rmsprop", "capturable": True},
        functools.partial(torch.optim.Adam, capturable=True),
        functools.partial(torch.optim.NAdam, capturable=True),
    ],
    ids=str,
)
def test_all_that_a_step_changes_stays_where_it_is_on_the_device(monkeypatch, optimizer):
    steps = []

    def seen(graph, inputs):
        facts = torch._guards.TracingContext.try_get().fw_metadata
        changed = {i for i, one in enumerate(facts.input_info) if one.mutates_data}
        steps.append((len(changed), changed - {*facts.static_input_indices}))
        assert not any(isinstance(one, torch.Tensor) and one.is_cpu for one in inputs)
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx",
        lambda graph, inputs, *rest, **options: aot_autograd(fw_compiler=seen)(graph, inputs),
    )
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    model = fitkit.Model(net)
    model.compile(
        optimizer, "cross_entropy", metrics=["accuracy"], devices=1, accelerator="gpu",
        jit_compile={"mode": "reduce-overhead"},
    )  # fmt: skip
    model.fit(X, Y, batch_size=16, verbose=0)
    assert steps and all(not moving for _, moving in steps)
    assert max(count for count, _ in steps) >= 9  # weights, running statistics
