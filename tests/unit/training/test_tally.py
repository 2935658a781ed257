"""Counts summed over the ranks: in an exchange, or as the gradient of one parameter more."""

import pytest
import torch
from torch import nn

from fitkit.training.tally import CarriedTally, Tally


class Ranks:
    """Several ranks of which each other one says the same as this one."""

    def __init__(self, world_size):
        self.world_size, self.asked = world_size, 0

    def sums(self, numbers):
        self.asked += 1
        return [number * self.world_size for number in numbers]


def carried(ranks=3, dtype=torch.float32, by_hand=False):
    parameter = nn.Parameter(torch.zeros((), dtype=dtype))
    return parameter, CarriedTally(Ranks(ranks), parameter, by_hand=by_hand)


def test_an_exchange_sums_what_each_rank_says():
    loss = torch.tensor(2.0)
    ranks = Ranks(3)
    tally = Tally(ranks)
    assert tally.joined(loss, 5) is loss
    assert tally.over_ranks(5) == 15
    assert ranks.asked == 1
    assert not tally.parameters


def test_one_rank_alone_asks_nobody():
    ranks, count = Ranks(1), torch.tensor(5.0)
    assert Tally(ranks).over_ranks(count) is count
    assert ranks.asked == 0


def test_the_estimate_is_asked_for_once():
    ranks = Ranks(2)
    tally = Tally(ranks)
    assert tally.per_sample(12, 8) == 4.0  # 24 of 8 samples: 3 each
    assert tally.per_sample(1000, 8) == 4.0
    assert ranks.asked == 1


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_a_count_is_a_gradient_whatever_the_loss_weighs(kind, by_hand, scale):
    parameter, tally = carried(by_hand=by_hand)
    weight = torch.tensor(2.0, requires_grad=True)
    for count in (7.0, 12.0):
        joined = tally.joined(weight**2 * 0.25 * scale, kind(count))
        assert joined.item() == scale * weight.item() ** 2 / 4
        joined.backward()
    assert parameter.grad.item() == 19.0
    assert weight.grad.item() == 2 * scale
    assert tally.parameters == [parameter]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_whole_numbers_come_back_whole_and_others_as_they_are(ranks):
    parameter, tally = carried(ranks)
    for total in (0, 1, 37, 4099, 2**20 + 1):
        parameter.grad = torch.tensor(total / ranks)  # as the wrapper has averaged it
        assert tally.over_ranks(None) == total
    parameter, tally = carried(ranks, torch.float64)
    parameter.grad = torch.tensor(10.625 / ranks, dtype=torch.float64)
    assert tally.over_ranks(None) == pytest.approx(10.625, 1e-15)
