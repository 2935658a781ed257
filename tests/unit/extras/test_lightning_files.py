"""Checkpoints that Lightning's trainer writes: their weights, hyperparameters and dangers."""

import argparse
import re

import pytest
import torch

import fitkit
from fitkit.__main__ import main

pl = pytest.importorskip("lightning.pytorch")


class Net(pl.LightningModule):
    def __init__(self, width=4, rate=0.1, options=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.rate)


@pytest.fixture
def written(tmp_path):
    """Returns a function of a module, which trains it by Lightning's trainer and saves it."""

    def write(module):
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rows = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return tmp_path / "last.ckpt"

    return write


def test_the_net_inside_a_module_gets_a_files_weights(written):
    trained = Net(6)
    path = written(trained)
    model = fitkit.Model(Net(6).net)
    model.load_weights(path)
    assert torch.equal(model.net[1].weight, trained.net[1].weight)


def test_inspect_shows_the_hyperparameters(written, capsys):
    path = written(Net(6, rate=0.25))
    assert main(["inspect", str(path)]) in (0, None)
    shown = capsys.readouterr().out
    for name, value in {"hparams.width": "6", "hparams.rate": "0.25", "global_step": "4"}.items():
        assert re.search(rf"{re.escape(name)}\s+{re.escape(value)}\s", shown), name


def test_lightnings_own_rebuilding_makes_a_module_for_fitkit(written):
    trained = Net(6, rate=0.25)
    again = Net.load_from_checkpoint(written(trained), weights_only=True)
    model = fitkit.Model(again)
    assert again.hparams.rate == 0.25
    assert torch.equal(model.net.net[0].weight, trained.net[0].weight)


def test_a_file_that_needs_code_is_refused_and_nothing_changes(written):
    path = written(Net(options=argparse.Namespace(a=1)))
    model = fitkit.Model(Net().net)
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(fitkit.errors.CheckpointError, match=r"argparse.Namespace.*weights_only"):
        model.load_weights(path)
    assert all(map(torch.equal, before, model.parameters()))


def test_the_class_method_says_what_to_write():
    with pytest.raises(AttributeError, match="A LightningModule's class has it"):
        fitkit.Model.load_from_checkpoint("last.ckpt")
