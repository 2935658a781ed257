"""Several outputs whose losses are functions of the user's that give values, not a mean."""

import pytest
import torch

import fitkit
from fitkit.errors import ConfigurationError

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


class Two(torch.nn.Module):
    """Two outputs of different widths, of rows or of sequences."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.narrow = torch.nn.Linear(4, 1).double()
        self.wide = torch.nn.Linear(4, 3).double()

    def forward(self, x):
        return self.narrow(x), self.wide(x)


def distance(prediction, target):
    return (prediction - target).abs()


def of_rows(prediction, target):
    return distance(prediction, target).mean(-1)


def by_hand(loss, batches):
    """Updates from whole groups, each output's mean over all of its values in the group."""
    net = Two()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for group in batches:
        found = [[loss(p, t).flatten() for p, t in zip(net(x), y, strict=True)] for x, y in group]
        optimizer.zero_grad()
        sum(torch.cat(column).mean() for column in zip(*found, strict=True)).backward()
        optimizer.step()
    return net


def trained(loss, batches, **options):
    model = fitkit.Model(Two())
    model.compile("sgd", [loss, loss], learning_rate=0.1, **options)
    model.fit(batches, verbose=0)
    return model.net


def same(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("loss", [distance, of_rows])
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (8, 3, 5, 8, 2)])
def test_a_group_is_one_batch_whatever_the_outputs_widths(loss, sizes):
    batches = [(drawn(n, 4), (drawn(n, 1), drawn(n, 3))) for n in sizes]
    groups = [batches[first : first + 2] for first in range(0, len(batches), 2)]
    found = trained(loss, batches, accumulate_grad_batches=2)
    assert same(found, by_hand(loss, groups))


def test_sequences_of_uneven_lengths_weigh_by_their_values():
    batches = [(drawn(2, n, 4), (drawn(2, n, 1), drawn(2, n, 3))) for n in (3, 7, 5, 2, 4)]
    groups = [batches[0:3], batches[3:5]]
    found = trained(distance, batches, accumulate_grad_batches=3)
    assert same(found, by_hand(distance, groups))


def test_values_whose_number_only_the_forward_knows_are_refused():
    def some(prediction, target):
        values = distance(prediction, target).flatten()
        return values[: 3 + 2 * (len(values) > 8)]

    batches = [(drawn(n, 4), (drawn(n, 1), drawn(n, 3))) for n in (2, 8)]
    with pytest.raises(ConfigurationError, match="one value per sample"):
        trained(some, batches, accumulate_grad_batches=2)
    trained(some, batches)  # alone, a batch needs no other's number
