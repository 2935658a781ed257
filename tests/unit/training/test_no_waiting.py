"""No step reads a number from the device: on a GPU each such look would wait for it.

On the CPU nothing waits, but the operations that would can be counted.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fitkit

LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default,
         torch.ops.aten._unique2.default, torch.ops.aten.equal.default,
         torch.ops.aten.bincount.default, torch.ops.aten.masked_select.default)  # fmt: skip
"""Operations whose result, or its shape, the host must know before it goes on."""


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.looks = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.looks += function in LOOKS or selects_by_mask(function, args)
        return function(*args, **(kwargs or {}))


def selects_by_mask(function, args):
    """Whether an operation's result is as long as a mask has True entries."""
    if function is not torch.ops.aten.index.Tensor:
        return False
    return any(index is not None and index.dtype is torch.bool for index in args[1])


@pytest.fixture(autouse=True)
def the_cpu_stands_for_a_device(monkeypatch):
    monkeypatch.setattr("fitkit.training.running_values.is_at_hand", lambda value: False)
    monkeypatch.setattr("fitkit.metrics.conversions.is_at_hand", lambda tensor: False)


class Own(fitkit.Model):
    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("own", loss, on_step=True, on_epoch=True)
        return loss


def looks_in(steps, verb="fit", kind=fitkit.Model, fit=(), **arguments):
    torch.manual_seed(0)
    x, y = torch.randn(8 * steps, 4), torch.arange(8 * steps) % 3
    model = kind(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    model.compile(
        "adam",
        "cross_entropy",
        accelerator="cpu",
        **{"metrics": ["accuracy", "f1", "auroc"], **arguments},
    )
    data = (x,) if verb == "predict" else (x, y)
    with Counting() as mode:
        getattr(model, verb)(*data, batch_size=8, verbose=0, **dict(fit))
    return mode.looks


def test_the_counter_sees_a_look():
    with Counting() as mode:
        torch.ones(3).sum().item()
        bool(torch.ones(()))
        torch.bincount(torch.ones(3, dtype=torch.int64))
        torch.ones(3)[torch.ones(3) > 0]
    assert mode.looks == 4


def test_batches_that_waited_for_their_metrics_are_counted_without_a_look():
    more_than_a_bundle = [looks_in(steps, metrics=["accuracy"]) for steps in (150, 300)]
    assert more_than_a_bundle[0] == more_than_a_bundle[1]


@pytest.mark.parametrize("arguments", [
    {},
    {"verb": "evaluate"},
    {"verb": "predict"},
    {"kind": Own},
    {"gradient_clip_val": 1.0},
    {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 3},
    {"precision": "bf16-mixed"},
    {"steps_per_execution": 4},
    {"lr_scheduler": {"scheduler": "cosine", "interval": "step"}},
    {"fit": {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}},
    {"memory_format": "channels_last", "matmul_precision": "high"},
], ids=str)  # fmt: skip
def test_more_steps_look_no_more_often_at_the_device(arguments):
    assert looks_in(40, **arguments) == looks_in(20, **arguments)
