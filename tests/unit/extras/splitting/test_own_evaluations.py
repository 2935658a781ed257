"""compile(out_of_memory="split") with a model's own steps that learn nothing."""

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

import fitkit
from fitkit.errors import OutOfMemoryError
from fitkit.trees import leaves
from tests.unit.extras.splitting.test_splitting import FULL, IGNORED, LABELS, X

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*didn't fit into memory"),
]


class Wide(nn.Linear):
    """A layer that takes at most so many rows in evaluation mode, and counts them."""

    def __init__(self, rows):
        super().__init__(6, 3)
        self.rows = rows
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        if len(x) > self.rows and not self.training:
            raise torch.OutOfMemoryError(FULL)
        return super().forward(x)


class Steps(fitkit.Model):
    """Counts and draws before what may fail, logs, and returns rows and means."""

    def __init__(self, net):
        super().__init__(net)
        self.right, self.ended = torchmetrics.MeanMetric(), []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.right((F.linear(x, self.net.weight).argmax(1) == y).float())
        self.log("right", self.right, on_step=False, on_epoch=True)
        noise = np.random.rand(len(x))
        loss = F.cross_entropy(self.net(x), y, ignore_index=-100)
        self.log("noise", float(noise.mean()))
        self.log("rows", float(len(x)), reduce_fx="sum")
        names = [str(one) for one in y.tolist()]
        count = (y != -100).sum()
        return {"loss": loss, "count": count, "names": names, "mean": x.mean(0), "x": (x, x[:, 0])}

    def validation_epoch_end(self, outputs):
        self.ended.append(outputs)

    def test_step(self, batch, batch_idx):
        loss = super().test_step(batch, batch_idx)  # which the compiled metric counts
        self.net(batch[0])
        self.net(torch.cat([batch[0], batch[0]]))
        return loss

    def predict_step(self, batch, batch_idx):
        return {"p": self.net(batch[0]).softmax(1), "pair": (batch[0].sum(1), batch[0])}


def values(rows, kind=Steps, **option):
    fitkit.set_seed(1)
    model = kind(Wide(rows))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu", devices=1,
                  **option)  # fmt: skip
    data = {"validation_data": (X, IGNORED), "validation_batch_size": 40}
    history = model.fit(X, LABELS, batch_size=20, verbose=0, **data).history
    return (
        history,
        model.evaluate(X, IGNORED, batch_size=20, return_dict=True, verbose=0),
        model.test_on_batch(X[:20], IGNORED[:20], return_dict=True),
        model.predict(X, batch_size=20, verbose=0),
        model.predict_on_batch(X[:20]),
        list(model.predict_batches(X, batch_size=20)),
        model.ended,
        float(model.net.seen),
    )


def assert_alike(one, other):
    mine, theirs = list(leaves(one)), list(leaves(other))
    assert len(mine) == len(theirs)
    for value, expected in zip(mine, theirs, strict=True):
        if isinstance(expected, str):
            assert value == expected
        else:
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [14, 7, 1])
def test_own_steps_that_learn_nothing_are_cut(rows):
    if rows == 1:  # two rows of one are computed at the test step's end

        class Kind(Steps):
            test_step = fitkit.Model.test_step

        assert_alike(values(1, Kind, out_of_memory="split"), values(1000, Kind))
        return
    assert_alike(values(rows, out_of_memory="split"), values(1000))


def returning(returned):
    class Kind(fitkit.Model):
        ended = ()

        def validation_step(self, batch, batch_idx):
            return returned(self.net(batch[0]), batch[1])

        def validation_epoch_end(self, outputs):
            self.ended = outputs

    model = Kind(Wide(8))
    model.compile(accelerator="cpu", devices=1, out_of_memory="split")
    model.evaluate(X, LABELS, batch_size=20, verbose=0)
    return model.ended


def test_what_steps_return_is_of_the_batch_or_refused():
    for wrong in (
        lambda p, y: {"loss": F.cross_entropy(p, y), "right": (p.argmax(1) == y).sum()},
        lambda p, y: {"loss": F.cross_entropy(p, y), "rows": len(y)},
        lambda p, y: {"loss": F.cross_entropy(p, y), "sum": p.sum()},
        lambda p, y: (p[:, None] - p[None]).square().mean(),
        lambda p, y: {"loss": p.mean(), "centered": p - p.mean(0)},
        lambda p, y: {"loss": p.mean(), "object": object()},
    ):
        with pytest.raises(OutOfMemoryError, match="FK068"):
            returning(wrong)
    same = returning(lambda p, y: {"loss": p.mean(), "one": 1, "none": None, "is": True})
    assert [one["one"] for one in same] == [1] * 5
    assert [float(one) for one in returning(lambda p, y: p.new_tensor(2.0))] == [2.0] * 5
    assert returning(lambda p, y: None) == [None] * 5


def test_an_epoch_s_end_gets_one_output_for_each_batch_of_a_training():
    class Kind(fitkit.Model):
        def training_step(self, batch, batch_idx):
            out = self.net(batch[0])
            loss = F.cross_entropy(out, batch[1])
            if len(out) > self.net.rows:
                raise torch.OutOfMemoryError(FULL)
            return {"loss": loss, "out": out} if self.net.bias.requires_grad else loss

        def training_epoch_end(self, outputs):
            self.ended = [(one["loss"], one["out"] if type(one) is dict else 0) for one in outputs]

    def ended(rows, grad, **option):
        torch.manual_seed(0)
        net = Wide(rows)
        net.bias.requires_grad_(grad)
        model = Kind(net)
        model.compile("sgd", accelerator="cpu", devices=1, **option)
        model.fit(X, LABELS, batch_size=20, verbose=0)
        return model.ended

    for grad in (True, False):
        assert_alike(ended(3, grad, out_of_memory="split"), ended(1000, grad))


def test_a_lightning_module_s_hooks_see_what_its_steps_return():
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self, rows):
            super().__init__()
            self.net, self.seen = Wide(rows), []

        def validation_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("own", loss)
            return {"loss": loss, "x": x}

        def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
            self.seen.append((outputs["loss"], outputs["x"], batch[0]))

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    def seen(rows, **option):
        torch.manual_seed(2)
        model = fitkit.Model(Module(rows))
        model.compile(accelerator="cpu", devices=1, **option)
        found = model.evaluate(X, LABELS, batch_size=20, return_dict=True, verbose=0)
        return found, model.net.seen, model.predict(X, batch_size=20, verbose=0)

    assert_alike(seen(3, out_of_memory="split"), seen(1000))


def test_compiled_evaluations_of_pairs_are_refused():
    def pairs(prediction, target):
        return (prediction[:, None] - prediction[None]).square().mean()

    class Mixed(Wide):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    model = fitkit.Model(Wide(5))
    model.compile("sgd", pairs, accelerator="cpu", devices=1, out_of_memory="split")
    with pytest.raises(OutOfMemoryError, match="halves.*FK068"):
        model.evaluate(X, LABELS, verbose=0)
    model = fitkit.Model(Mixed(5))
    model.compile("sgd", "mse", accelerator="cpu", devices=1, out_of_memory="split")
    with pytest.raises(OutOfMemoryError, match="halves.*FK068"):
        model.predict(X, verbose=0)
