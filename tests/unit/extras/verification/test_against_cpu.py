"""`verify(…, against="cpu")` without an accelerator: tests/simulated_gpu has the faults."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fitkit
from fitkit.extras.verification.device import Comparison
from fitkit.extras.verification.replaying import Replay
from fitkit.extras.verification.trials import Trials
from tests import nets
from tests.reference import compiled


def test_the_cpu_against_itself_is_a_row_that_says_so():
    found = fitkit.verify(
        compiled(nets.dense(8, 3), "adam"), *nets.classification(32, 8),
        devices=1, updates=2, against="cpu", verbose=False,
    )  # fmt: skip
    assert found["device"].ok is None and "Both are the CPU" in found["device"].note
    with pytest.raises(fitkit.ConfigurationError, match="against='gpu'"):
        fitkit.verify(compiled(nets.dense(8, 3)), *nets.classification(8, 8), against="gpu")


class Odd(nn.Module):
    """Writes into inputs, calls a part twice, shares a weight, gives a dict, computes again."""

    def __init__(self):
        super().__init__()
        self.norm, self.cell = nn.BatchNorm1d(8), nn.GRUCell(8, 8)
        self.part = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.scale = nn.Parameter(torch.ones(8))
        self.pair, self.head = Pair(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))

    def forward(self, x):
        hidden = self.cell(self.norm(x) * self.scale)
        hidden = self.part(hidden) + checkpoint(self.part, hidden, use_reentrant=False)
        one, other = self.pair(hidden, shift=hidden)
        tied = nn.functional.linear(hidden, self.part[0].weight)
        return self.head(one + other["square"] + tied)


class Pair(nn.Module):
    def forward(self, x, *, shift):
        x += shift
        return x, {"square": x.square(), "count": len(x), "largest": x.argmax(1)}


def compared(net):
    trials = Trials(compiled(net, "adam"), [nets.classification(32, 8)], 1, None)
    return Comparison(trials, "cpu", "64-true", frozenset())


def test_a_replay_of_each_call_gives_what_was_recorded():
    found = compared(Odd())
    assert (found.offs, found.notes) == ([], [])
    names = [call.name for call in found.recording.calls]
    assert names.count("part") == names.count("part.1") == 2
    assert found.recording.gradients.keys() == dict(Odd().named_parameters()).keys()


@pytest.mark.parametrize("name", ["norm", "cell", "part.0", "pair", "head", ""])
def test_a_call_that_gave_something_else_is_off_alone(name, monkeypatch):
    init = Replay.__init__

    def changed(self, net, call, nudge):
        if call.name == name:
            call.output = fitkit.trees.map_leaves(
                lambda leaf: leaf * (1 + 1e-7) if isinstance(leaf, torch.Tensor) else leaf,
                call.output,
            )
        init(self, net, call, nudge)

    monkeypatch.setattr(Replay, "__init__", changed)
    first = compared(Odd()).offs[0]
    assert (first.name, first.what) == (name, "output")
    assert first.error == pytest.approx(1e-7, rel=0.1)
