"""What each rank computes from its own data moves all ranks alike."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fitkit
from tests.nets import regression

pl = pytest.importorskip("lightning.pytorch")

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

X, Y = regression(48, 4, seed=1)
TWO = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_spawn"}


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)


class Module(pl.LightningModule):
    """Its schedule watches a value of each rank's own, which a hook at the epoch's end logs."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.options, self.last = options, 0.0

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.last = loss.detach()
        return loss

    def on_train_epoch_end(self):
        self.log("last", self.last, **self.options)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        rate = {"scheduler": plateau(optimizer), "monitor": "last"}
        return {"optimizer": optimizer, "lr_scheduler": rate}


class Look(fitkit.callbacks.Callback):
    """Notes what each rank has at the ends of epochs."""

    def __init__(self):
        self.ranks = []

    def on_epoch_end(self, epoch, logs):
        rate = self.model.optimizer.param_groups[0]["lr"]
        mine = torch.tensor([logs["last"], rate, *self.model.net.net.weight.flatten()])
        self.ranks.append(self.model.all_gather(mine).view(2, -1))


def trained(**options):
    model, look = fitkit.Model(Module(**options)), Look()
    model.compile(**TWO)
    model.fit(X, Y, batch_size=8, epochs=5, shuffle=False, verbose=0, callbacks=look)
    for first, second in look.ranks:
        assert torch.equal(first, second)
    return [rows[0] for rows in look.ranks]


@pytest.mark.parametrize("options", [{}, {"sync_dist": True}], ids=["alone", "synchronized"])
def test_a_value_that_a_hook_logs_at_an_epochs_end_moves_all_ranks_rates_alike(options):
    found = trained(**options)
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    rate = plateau(optimizer)
    rates = set()
    for row in found:
        for number in range(3):  # the rows of both ranks at once
            part = slice(16 * number, 16 * number + 16)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(X[part]), Y[part])
            loss.backward()
            optimizer.step()
        rate.step(loss.detach())
        moved = optimizer.param_groups[0]["lr"]
        assert row[:2].tolist() == pytest.approx([loss.item(), moved], rel=1e-4)
        torch.testing.assert_close(row[2:], net.weight.flatten(), rtol=0, atol=1e-5)
        rates.add(moved)
    assert len(rates) > 1


class Validated(Module):
    """Its schedule watches what its validation logs, of which one rank may have no batch."""

    def validation_step(self, batch, batch_idx):
        self.log("far", nn.functional.l1_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        rate = {"scheduler": plateau(optimizer), "monitor": "far", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": rate}


def test_a_rank_without_a_batch_of_the_validation_follows_its_value():
    model, look = fitkit.Model(Validated()), Look()
    model.compile(**TWO)
    held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[:5], Y[:5]), 8)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 8)
    model.fit(data, validation_data=held_out, epochs=5, verbose=0, callbacks=look)
    for first, second in look.ranks:
        assert torch.equal(first, second)
    assert look.ranks[-1][0, 1] < 0.1  # the rate has moved
    assert "val_far" not in model.history.history


class Own(fitkit.Model):
    """Decides by the loss of its rank's batch."""

    what = "rate"

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        decides = loss.item() if self.what != "nothing" else self.all_gather(loss.detach()).max()
        if decides > 1:
            self.optimizers().param_groups[0]["lr"] *= 0.9
        return loss


class Skips(fitkit.Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        if self.global_rank == 0 or batch_idx:
            self.optimizers().step()


class Noise(fitkit.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        with torch.no_grad():
            self.model.net.bias.add_(float(self.model.global_rank))


class Alike(Own):
    what = "nothing"


@pytest.mark.parametrize(
    ("kind", "callback", "said"),
    [
        (Own, None, "epoch 1: the learning rate of group 0"),
        (Skips, None, "epoch 1: global_step"),
        (fitkit.Model, Noise, "the weights net.bias"),
        (Alike, None, None),
    ],
)
@pytest.mark.filterwarnings("default")
def test_ranks_that_a_users_code_drives_apart_are_said_once(kind, callback, said):
    torch.manual_seed(0)
    model = kind(nn.Linear(4, 1))
    model.compile(lambda weights: torch.optim.SGD(weights, 0.1), "mse", **TWO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = [] if callback is None else [callback()]
        model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=own)
    about = [str(one.message) for one in caught if "ranks differ" in str(one.message)]
    assert len(about) == (said is not None)
    assert said is None or said in about[0]
