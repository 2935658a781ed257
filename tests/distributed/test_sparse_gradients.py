"""Embeddings with sparse gradients that some ranks' batches don't use, against plain torch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.strategies import DDPSpawnStrategy
from tests.reference import assert_same_weights, slices

pytestmark = pytest.mark.timeout(90)

X = torch.randint(1, 8, (16, 3), generator=torch.Generator().manual_seed(0))
X[[0, 1, 4, 6, 9, 11], 1] = 0  # some batches of a rank have none, one batch of both has none
X[12:, 1] = 0
Y = X.sum(1, keepdim=True) / 8


class Tables(nn.Module):
    """Looks up a row in the second table only for samples that have one."""

    def __init__(self, reads_whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.EmbeddingBag(8, 1, sparse=True, mode="sum")
        self.seldom = nn.Embedding(8, 1, sparse=True)
        self.reads_whole = reads_whole

    def forward(self, x):
        found = self.always(x[:, :1])
        there = x[:, 1] > 0
        if there.any():
            found = found.index_add(0, there.nonzero()[:, 0], self.seldom(x[there, 1]))
            if self.reads_whole:
                found = found + there[:, None] * self.seldom.weight.mean()
        return found


class WithLayer(Tables):
    def __init__(self, reads_whole=False):
        super().__init__(reads_whole)
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(super().forward(x))


class Manual(fitkit.Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
        self.optimizers().step()


def sparse_adam(net):
    tables = [net.always.weight, net.seldom.weight]
    return [torch.optim.SparseAdam(tables, 0.1), torch.optim.SGD(net.layer.parameters(), 0.1)]


def sgd(net):
    return [torch.optim.SGD(net.parameters(), 0.1)]


@pytest.mark.parametrize(
    ("net", "optimizers", "kind", "options"),
    [
        (Tables(), sgd, fitkit.Model, {}),
        (WithLayer(), sparse_adam, fitkit.Model, {}),
        (WithLayer(reads_whole=True), sgd, fitkit.Model, {"accumulate_grad_batches": 2}),
        (
            WithLayer(), sgd, fitkit.Model,
            {"strategy": DDPSpawnStrategy(find_unused_parameters=True)},
        ),
        (WithLayer(), sgd, Manual, {}),
    ],
    ids=["tables only", "SparseAdam", "dense, too, accumulated", "find_unused", "manual"],
)  # fmt: skip
def test_two_ranks_train_them_as_one_process(net, optimizers, kind, options):
    plain = copy.deepcopy(net)
    own = optimizers(plain)
    for _ in range(2):
        for x, y in slices(X, Y, 4 * options.get("accumulate_grad_batches", 1)):
            plain.zero_grad()
            F.mse_loss(plain(x), y).backward()
            for optimizer in own:
                optimizer.step()
    net = copy.deepcopy(net)
    model = kind(net)
    given = optimizers(net)
    model.compile(
        given if len(given) > 1 else given[0], None if kind is Manual else "mse",
        accelerator="cpu", devices=2, **options,
    )  # fmt: skip
    model.fit(X, Y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(net, plain, atol=1e-6)
