"""One rank ends a training: all end after the same batch, or the call ends with a sentence."""

import pytest
import torch
from torch import nn

import fitkit
from tests.nets import classification

pl = pytest.importorskip("lightning.pytorch")

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

X, Y = classification(48, 4, seed=1)
TWO = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_spawn"}
STOPS_AT = 1
"""The batch, of three in an epoch, in which rank 1 ends the training."""
UNREAD, UNREAD_OF_TRAINER = "stop_training", "should_stop"
"""Names that no code below has."""


def ends(rank, batch):
    return rank == 1 and batch == STOPS_AT


class InStep(fitkit.Model):
    def training_step(self, batch, batch_idx):
        if ends(self.global_rank, batch_idx):
            self.stop_training = True
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Lazy:
    """Stands for a module until its first use, as Keras's tensorflow does."""

    def __getattr__(self, name):
        raise ImportError(name)


LAZY = Lazy()


def stop(model):
    model.stop_training = True


class ByHelper(fitkit.Model):
    def training_step(self, batch, batch_idx):
        if batch is not LAZY and ends(self.global_rank, batch_idx):
            stop(self)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class AtEpochsEnd(fitkit.Model):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_epoch_end(self, outputs):
        setattr(self, UNREAD, self.global_rank == 1)


class Unread(fitkit.Model):
    def training_step(self, batch, batch_idx):
        if ends(self.global_rank, batch_idx):
            setattr(self, UNREAD, True)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class AtEpochsBegin(fitkit.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = self.model.global_rank == 1


class AtBatch(fitkit.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        if ends(self.model.global_rank, batch):
            self.model.stop_training = True


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class ShouldStop(Module):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = ends(self.global_rank, batch_idx)
        return super().training_step(batch, batch_idx)


class ShouldStopAfter(Module):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = ends(self.global_rank, batch_idx)


class ShouldStopAtEpoch(Module):
    def on_train_epoch_end(self):
        setattr(self.trainer, UNREAD_OF_TRAINER, self.global_rank == 1)


class Skips(Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if ends(self.global_rank, batch_idx) else None


class StopsByCallback(Module):
    class Brought(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = ends(pl_module.global_rank, batch_idx)

    def configure_callbacks(self):
        return self.Brought()


CASES = {
    "a step": (InStep, None, 2),
    "a function that a step calls": (ByHelper, None, 2),
    "an epoch's end": (AtEpochsEnd, None, 3),
    "an epoch's begin": (None, AtEpochsBegin, 1),
    "a callback": (None, AtBatch, 2),
    "a LightningModule's step": (ShouldStop, None, 2),
    "a LightningModule's hook at a batch": (ShouldStopAfter, None, 2),
    "a LightningModule's hook at an epoch": (ShouldStopAtEpoch, None, 3),
    "a callback that a LightningModule brings": (StopsByCallback, None, 2),
    "-1": (Skips, None, 2),  # 1 in each of two epochs
}


def model_of(kind):
    torch.manual_seed(0)
    if kind is not None and issubclass(kind, pl.LightningModule):
        model = fitkit.Model(kind())
        model.compile(**TWO)
    else:
        model = (kind or fitkit.Model)(nn.Linear(4, 3))
        model.compile(lambda weights: torch.optim.SGD(weights, 0.1), "cross_entropy", **TWO)
    return model


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_after_the_batch_in_which_one_does(case):
    kind, callback, updates = CASES[case]
    model = model_of(kind)
    own = [] if callback is None else [callback()]
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=own)
    assert model.global_step == updates

    net = nn.Linear(4, 3)
    torch.manual_seed(0)
    net.reset_parameters()
    batches = [0, 0] if case == "-1" else range(updates)
    for number in batches:  # those of both ranks, one below the other
        rows = slice(16 * number, 16 * number + 16)
        net.zero_grad()
        nn.functional.cross_entropy(net(X[rows]), Y[rows]).backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 0.1 * weight.grad
    theirs = [*net.parameters()]
    for mine, expected in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_a_stop_that_nobody_could_see_coming_ends_the_call():
    model = model_of(Unread)
    with pytest.raises((fitkit.ConfigurationError, fitkit.WorkerError), match="rank 1 in batch 1"):
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
