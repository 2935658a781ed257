"""Nothing of a batch is kept for longer than the batch in memory that loader workers share."""

import os

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.callbacks import Callback
from tests.nets import linear

BATCHES = 40


class Files(Callback):
    """Counts the open files of this process. A tensor from a worker has one."""

    def __init__(self):
        self.counts = []

    def count(self):
        self.counts.append(len(os.listdir("/proc/self/fd")))

    def on_train_batch_end(self, batch, logs):
        self.count()

    def on_test_batch_end(self, batch, logs):
        self.count()

    def on_predict_batch_end(self, batch, logs):
        self.count()


class Returning(fitkit.Model):
    """Its steps return parts of the batch, and it logs a number of it."""

    kept = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("first", batch[1][0, 0])
        return {"loss": loss, "target": batch[1]}

    def training_epoch_end(self, outputs):
        self.kept = torch.cat([each["target"] for each in outputs])

    def validation_step(self, batch, batch_idx):
        self.log("largest", batch[1].amax(), reduce_fx="max")
        return batch[1]

    def validation_epoch_end(self, outputs):
        self.kept = torch.cat(outputs)

    def predict_step(self, batch, batch_idx):
        return {"score": self.net(batch[0]), "target": batch[1]}


class PartOnly(fitkit.Model):
    def predict_step(self, batch, batch_idx):
        return batch[1]


TARGETS = torch.arange(float(BATCHES))[:, None] / BATCHES


def data():
    return DataLoader(TensorDataset(torch.ones(BATCHES, 4), TARGETS), 1, num_workers=1)


def fit(model, files):
    model.fit(data(), verbose=0, callbacks=files)
    return model.kept


def evaluate(model, files):
    model.evaluate(data(), verbose=0, callbacks=files)
    return model.kept


def predict(model, files):
    found = model.predict(data(), verbose=0, callbacks=files)
    return found["target"] if isinstance(found, dict) else found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")
@pytest.mark.parametrize(
    ("kind", "verb", "options"),
    [
        (Returning, fit, {}),
        (Returning, fit, {"accumulate_grad_batches": BATCHES}),
        (Returning, evaluate, {}),
        (Returning, predict, {}),
        (PartOnly, predict, {}),
        (fitkit.Model, fit, {"accumulate_grad_batches": BATCHES}),
        (fitkit.Model, fit, {"metrics": ["auc"]}),
        (fitkit.Model, evaluate, {"metrics": [torchmetrics.SpearmanCorrCoef(), "r2"]}),
    ],
)
def test_the_number_of_open_files_does_not_grow_with_the_batches(kind, verb, options):
    files, model = Files(), kind(linear(4, 1))
    model.kept = None
    model.compile("sgd", "mse", accelerator="cpu", devices=1, **options)
    found = verb(model, files)
    assert len(files.counts) == BATCHES
    # Fewer may be open meanwhile: the garbage collector closes those that other tests left.
    assert max(files.counts[3:]) - files.counts[3] < 20
    if kind is not fitkit.Model:
        assert torch.equal(torch.as_tensor(found), TARGETS)
