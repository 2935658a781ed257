"""Replicas on a GPU: torch's threads with the caller's modes, and errors as they were raised.

Several replicas share one GPU here; on several, torch's `replicate` makes them
(tests/unit/distributed/test_replicas.py has that, for two GPUs).
"""

import copy
import threading
import traceback

import pytest
import torch
from torch import nn

from fitkit.extras.dp import Replicas

DEVICES = (torch.device("cuda", 0),) * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)

    def modes(self, batch):
        return {
            "thread": [threading.get_ident()], "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "half": self.layer(batch).dtype == torch.bfloat16,
        }  # fmt: skip

    def fail(self, batch):
        if batch[0, 0] == 1:
            raise KeyError("mine")
        return batch


def test_gradients_are_those_of_the_whole_batch():
    net = Net().to(DEVICES[0])
    plain = copy.deepcopy(net)
    x = torch.randn(5, 3, device=DEVICES[0])
    Replicas(net, DEVICES)("", x).pow(2).mean().backward()
    plain(x).pow(2).mean().backward()
    torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)


def test_replicas_run_in_threads_of_their_own_in_the_callers_modes():
    door = Replicas(Net().to(DEVICES[0]), DEVICES)
    x = torch.randn(2, 3, device=DEVICES[0])
    found = door("modes", x)
    assert threading.get_ident() not in found["thread"][0].tolist()
    assert found["grad"].all() and not found["half"].any() and not found["inference"].any()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        found = door("modes", x)
    assert found["half"].all() and not found["grad"].any()
    with torch.inference_mode():
        assert door("modes", x)["inference"].all()


def test_a_replicas_error_comes_as_it_was_raised_and_says_which_replica():
    x = torch.zeros(5, 3, device=DEVICES[0])
    x[3:] = 1
    with pytest.raises(KeyError, match="mine") as caught:
        Replicas(Net().to(DEVICES[0]), DEVICES)("fail", x)
    assert caught.value.args == ("mine",)
    assert "in fail" in "".join(traceback.format_exception(caught.value))
