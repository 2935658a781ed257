"""Batches of unusual kinds on two ranks: each update is that of all samples."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fitkit


class Graphs:
    def __init__(self, rows):
        self.nodes, self.sizes = torch.cat([torch.empty(0, 3), *rows]), [len(row) for row in rows]
        self.num_graphs = len(rows)

    def to(self, device):
        self.nodes = self.nodes.to(device)
        return self


def rows():
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(4 if i % 3 else 1, 3, generator=generator) for i in range(11)]


def means(some):
    return torch.stack([row.mean(0) for row in some])


def detection(some):
    return list(some), [{"boxes": torch.zeros(len(row), 4)} for row in some]


def leaves_out(some):
    """Leave out the samples of one row: every third."""
    return means([row for row in some if len(row) > 1])


KINDS = {
    "detection": (detection, lambda batch: means(batch[0])),
    "graphs": (Graphs, lambda batch: means(batch.nodes.split(batch.sizes))),
    "leaves_out": (leaves_out, lambda batch: batch),
}


class Squares(fitkit.Model):
    def __init__(self, kind):
        super().__init__(nn.Linear(3, 1, bias=False))
        nn.init.ones_(self.net.weight)
        self.kind = kind

    def training_step(self, batch, batch_idx):
        loss = (self.net(KINDS[self.kind][1](batch)) ** 2).mean()
        self.log("logged", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss


def plain_updates(samples, size):
    weight, losses = torch.ones(3, dtype=torch.float64, requires_grad=True), []
    for start in range(0, len(samples), size):
        some = samples[start : start + size]
        some = means([row for row in some if row is not None]).double()
        values = (some @ weight) ** 2
        losses += values.tolist()
        (gradient,) = torch.autograd.grad(values.mean(), weight)
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    return weight.detach(), sum(losses) / len(losses)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_make_the_updates_of_all_samples(kind):
    model = Squares(kind)
    model.compile("sgd", learning_rate=0.1, accelerator="cpu", devices=2, strategy="ddp_spawn")
    loader = DataLoader(rows(), 3, collate_fn=KINDS[kind][0])
    history = model.fit(loader, verbose=0)
    kept = [row if kind != "leaves_out" or len(row) > 1 else None for row in rows()]
    weight, loss = plain_updates(kept, 6)
    torch.testing.assert_close(model.net.weight[0].double(), weight, rtol=1e-5, atol=1e-6)
    assert history["loss"][-1] == pytest.approx(loss, rel=1e-5)
    assert history["logged"][-1] == pytest.approx(loss, rel=1e-5)


def graphs_left_out(some):
    return Graphs([row for row in some if len(row) > 1])


class Graph:
    def __init__(self, nodes):
        self.nodes = nodes


def graphs_in_a_list(some):
    return [Graph(row) for row in some if len(row) > 1]


class Objects(Squares):
    """Takes graphs, joined into one or in a list."""

    def training_step(self, batch, batch_idx):
        several = batch if isinstance(batch, (list, tuple)) else [batch]
        nodes = torch.cat([graphs.nodes for graphs in several])
        return (self.net(means(nodes.split(4))) ** 2).mean()


# Batches of 3 of which 2, 1, 3, 0 and 2 graphs are kept; on two ranks, the last one stands alone.
LENGTHS = (4, 1, 4, 1, 4, 1, 4, 4, 4, 1, 1, 1, 4, 4)


@pytest.mark.parametrize("collate", [graphs_left_out, graphs_in_a_list])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_says_its_number_of_samples_is_believed(collate, accumulate):
    generator = torch.Generator().manual_seed(1)
    samples = [torch.rand(length, 3, generator=generator) for length in LENGTHS]
    if collate is graphs_in_a_list:  # an empty list says nothing of a batch
        del samples[9:12]
    model = Objects("")
    model.compile(
        "sgd", learning_rate=0.1, accelerator="cpu", devices=2, strategy="ddp_spawn",
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    history = model.fit(DataLoader(samples, 3, collate_fn=collate), verbose=0)
    kept = [row if len(row) > 1 else None for row in samples]
    weight, loss = plain_updates(kept, 6 * accumulate)
    torch.testing.assert_close(model.net.weight[0].double(), weight, rtol=1e-5, atol=1e-6)
    assert history.history["loss"][-1] == pytest.approx(loss, rel=1e-5)


def pairs_left_out(some):
    kept = leaves_out(some)
    return kept, torch.zeros(len(kept), 1)


def test_a_collate_fn_that_leaves_samples_out_with_a_compiled_loss():
    net = nn.Linear(3, 1, bias=False)
    nn.init.ones_(net.weight)
    model = fitkit.Model(net)
    model.compile(
        "sgd", "mse", learning_rate=0.1, accelerator="cpu", devices=2, strategy="ddp_spawn"
    )
    history = model.fit(DataLoader(rows(), 3, collate_fn=pairs_left_out), verbose=0)
    weight, loss = plain_updates([row if len(row) > 1 else None for row in rows()], 6)
    torch.testing.assert_close(net.weight[0].double(), weight, rtol=1e-5, atol=1e-6)
    assert history["loss"][-1] == pytest.approx(loss, rel=1e-5)
