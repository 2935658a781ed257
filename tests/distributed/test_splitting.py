"""compile(out_of_memory="split") on several ranks: each is cut by itself, and nothing changes."""

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import fitkit
from tests.nets import classification

pytestmark = pytest.mark.timeout(120)

X, LABELS = classification(90, 6, seed=1)
IGNORED = torch.where(torch.arange(90) % 7 == 0, -100, LABELS)


class Narrow(nn.Module):
    """A net that takes at most so many rows at a time, by the rank; two outputs where asked."""

    def __init__(self, rows, heads):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(heads))
        self.rows = rows

    def fail(self, gradient=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward(self, x):
        hidden = self.body(x).relu()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if len(x) > self.rows[rank]:
            if rank == 0 or not self.training:
                self.fail()
            if hidden.requires_grad:
                hidden.register_hook(self.fail)
        outputs = [head(hidden) for head in self.heads]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def trained(rows, heads, every, devices, **option):
    fitkit.set_seed(1)
    model = fitkit.Model(Narrow(rows, heads))
    losses, y = (
        ("cross_entropy", IGNORED) if heads == 1 else (["cross_entropy"] * 2, (IGNORED, LABELS))
    )
    model.compile("adam", losses, accelerator="cpu", devices=devices, strategy="ddp_spawn",
                  accumulate_grad_batches=every, **option)  # fmt: skip
    history = model.fit(X, y, batch_size=20, epochs=2, verbose=0)
    return model, history


CASES = [
    (1, 1, (1000, 3)), (2, 1, (2, 1000)), (1, 3, (2, 5)),
    pytest.param(2, 2, (1000, 3, 7), marks=pytest.mark.slow),
    pytest.param(1, 3, (2, 1000, 4), marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*didn't fit into memory")
@pytest.mark.parametrize(("heads", "every", "rows"), CASES)
def test_ranks_that_are_cut_by_themselves_give_the_uncut_numbers(heads, every, rows):
    ranks = len(rows)
    uncut, expected = trained((1000,) * ranks, heads, every, ranks)
    cut, found = trained(rows, heads, every, ranks, out_of_memory="split")
    for name, value in uncut.net.state_dict().items():
        torch.testing.assert_close(cut.net.state_dict()[name], value, rtol=1e-6, atol=1e-6)
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-6)
    cut_ranks = {name.split(":")[0] for name in found.params["parts"]}
    assert cut_ranks == {f"rank {rank}" for rank, most in enumerate(rows) if most < 20}


class Steps(fitkit.Model):
    """Evaluates and predicts by steps of its own; ranks take unlike numbers of rows."""

    def __init__(self, net):
        super().__init__(net)
        self.right = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.right((self.net.heads[0](self.net.body(x).relu()).argmax(1) == y).float())
        self.log("right", self.right, on_step=False, on_epoch=True)
        loss = F.cross_entropy(self.net(x), y, ignore_index=-100)
        self.log("own", loss.detach(), sync_dist=True)
        return {"loss": loss, "count": (y != -100).sum()}

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).softmax(1)


@pytest.mark.filterwarnings("ignore:.*didn't fit into memory")
def test_own_evaluations_of_ranks_are_cut():
    def values(rows, **option):
        fitkit.set_seed(1)
        model = Steps(Narrow(rows, 1))
        model.compile("adam", accelerator="cpu", devices=2, strategy="ddp_spawn", **option)
        data = {"validation_data": (X, LABELS), "validation_batch_size": 20}
        history = model.fit(X, LABELS, batch_size=20, verbose=0, **data).history
        return {**history, "predicted": model.predict(X, batch_size=20, verbose=0)}

    uncut, cut = values((1000, 1000)), values((3, 8), out_of_memory="split")
    for name, expected in uncut.items():
        np.testing.assert_allclose(cut[name], expected, rtol=1e-6, atol=1e-6)
