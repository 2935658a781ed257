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


# ---------------------------------------------------------------------- checkpoint hooks


class Growing(pl.LightningModule):
    """Grows a layer an epoch. Its files say how many there are, and leave out what is frozen."""

    strict_loading = False

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        torch.nn.init.eye_(self.frozen.weight)
        self.layers = torch.nn.ModuleList()
        self.grow(1)

    def grow(self, count):
        while len(self.layers) < count:
            self.layers.append(torch.nn.Linear(3, 3))

    def setup(self, stage):
        if stage == "fit":
            self.grow(2)

    def training_step(self, batch, batch_idx):
        x = self.frozen(batch[0])
        for layer in self.layers:
            x = layer(x).tanh()
        return (x.sum(1, keepdim=True) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.layers.parameters(), lr=0.05)

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        learned = {name: value for name, value in state.items() if "frozen" not in name}
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in learned.items()}
        checkpoint["n"] = len(self.layers)

    def on_load_checkpoint(self, checkpoint):
        self.grow(checkpoint["n"])
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.startswith("old.")]:
            state[name.removeprefix("old.")] = state.pop(name)


def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=4)


def trainer_of(**options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(accelerator="cpu", devices=1, **{**quiet, **options})


def model_of(module):
    model = fitkit.Model(module)
    model.compile(devices=1, accelerator="cpu")
    return model


def seeded():
    torch.manual_seed(3)
    return Growing()


def by_resume(model, path):
    model.fit(rows(), epochs=2, verbose=0, resume_from=path)


DOORS = {
    "resume_from": by_resume,
    "load": lambda model, path: model.load(path),
    "load_weights": lambda model, path: model.load_weights(path),
}
SAVERS = {
    "save": lambda folder: None,
    "ModelCheckpoint": lambda folder: fitkit.callbacks.ModelCheckpoint(
        folder / "made.h5", monitor=None
    ),
    "RunFolder": lambda folder: fitkit.callbacks.RunFolder(folder / "run"),
}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("door", DOORS)
def test_checkpoint_hooks_are_a_door_in_both_directions(door, saver, tmp_path):
    first = seeded()
    model = model_of(first)
    model.fit(rows(), epochs=2, verbose=0, callbacks=SAVERS[saver](tmp_path))
    if saver == "save":
        model.save(tmp_path / "made.h5")
    (path,) = sorted(tmp_path.rglob("resume.h5")) or [tmp_path / "made.h5"]
    with fitkit.checkpoint.open_checkpoint(path) as file:
        assert not [name for name in file.weights.describe() if "frozen" in name]
    again = Growing()  # with one layer, and other numbers
    DOORS[door](model_of(again), path)
    assert len(again.layers) == 2
    for mine, theirs in zip(again.layers.parameters(), first.layers.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_resume_that_builds_layers_goes_on_as_the_trainers(tmp_path):
    theirs = seeded()
    trainer_of(max_epochs=2, enable_checkpointing=False).fit(theirs, rows())
    trainer = trainer_of(max_epochs=2, enable_checkpointing=False)
    trainer.fit(seeded(), rows())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = Growing()
    longer = trainer_of(max_epochs=4, enable_checkpointing=False)
    longer.fit(resumed, rows(), ckpt_path=tmp_path / "two.ckpt")

    model = model_of(seeded())
    model.fit(rows(), epochs=2, verbose=0)
    model.save(tmp_path / "two.h5")
    again = Growing()
    model_of(again).fit(rows(), epochs=4, verbose=0, resume_from=tmp_path / "two.h5")
    for mine, expected in zip(again.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, expected)

    loaded = Growing()
    model_of(loaded).load_weights(tmp_path / "two.ckpt")
    rebuilt = Growing.load_from_checkpoint(tmp_path / "two.ckpt", weights_only=True)
    pairs = zip(loaded.layers.parameters(), rebuilt.layers.parameters(), strict=True)
    assert all(torch.equal(mine, expected) for mine, expected in pairs)


class Unplain(Growing):
    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["options"] = argparse.Namespace(a=1)


def test_weights_that_a_hook_renames_load_where_its_other_objects_are_left_out(tmp_path):
    first, again = Unplain(), Unplain()
    with pytest.warns(UserWarning, match=r"Unplain.on_save_checkpoint.*leave all of it out"):
        model_of(first).save(tmp_path / "made.h5")
    model_of(again).load(tmp_path / "made.h5")  # without on_load_checkpoint
    assert all(map(torch.equal, again.parameters(), first.parameters()))


class Asking(Growing):
    asked = "optimizer_states"

    def on_load_checkpoint(self, checkpoint):
        checkpoint[self.asked]


@pytest.mark.parametrize("name", ["optimizer_states", "m"])
def test_what_a_checkpoint_doesnt_have_is_said_in_a_sentence(name, tmp_path):
    model_of(seeded()).save(tmp_path / "made.h5")
    module = Asking()
    module.asked = name
    with pytest.raises(fitkit.errors.CheckpointError, match=rf"no '{name}'.*It has 'epoch'"):
        model_of(module).load(tmp_path / "made.h5")


# ---------------------------------------------------------------------- going on


class Watching(pl.LightningModule):
    """Has a schedule that watches a value, and weighs its loss by the last epoch's values."""

    def __init__(self, interval):
        super().__init__()
        self.net, self.interval, self.weight = torch.nn.Linear(3, 1), interval, 1.0

    def on_train_epoch_start(self):
        self.weight = float(self.trainer.callback_metrics.get("seen", 1.0))

    def training_step(self, batch, batch_idx):
        loss = self.weight * (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss_now", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("seen", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        monitor = "loss_now" if self.interval == "step" else "seen"
        schedule = {"scheduler": plateau, "interval": self.interval, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("place", ["1-2", "1-4", "2-3", "1"])
def test_a_schedule_that_watches_a_value_goes_on(interval, place, tmp_path):
    """Cut before a validation within the epoch, at its last batch, after a validation, and between
    two epochs."""

    def fitted(model, **options):
        options.update(epochs=3, validation_data=rows(), validation_freq={"batches": 2}, verbose=0)
        history = model.fit(rows(), **options)
        return history.history, model.optimizer.param_groups[0]["lr"], model.net.net.weight

    torch.manual_seed(0)
    saver = fitkit.callbacks.ModelCheckpoint(tmp_path / "{epoch}.h5")
    if "-" in place:
        saver = fitkit.callbacks.ModelCheckpoint(tmp_path / "{epoch}-{batch}.h5", save_freq=1)
    expected = fitted(model_of(Watching(interval)), callbacks=saver)
    found = fitted(model_of(Watching(interval)), resume_from=tmp_path / f"{place}.h5")
    assert found[:2] == expected[:2] and torch.equal(found[2], expected[2])


class Counting(Net):
    def on_train_start(self):
        self.began = self.current_epoch, self.global_step


@pytest.mark.parametrize("epochs", [2, 3])  # one of which has nothing left to do
def test_a_resume_has_the_trainers_counters(epochs, written, tmp_path):
    theirs, ours = Counting(), Counting()
    path = written(Counting())  # of two epochs
    trainer_of(max_epochs=epochs, enable_checkpointing=False).fit(theirs, rows(), ckpt_path=path)
    model = model_of(Counting())
    model.fit(rows(), epochs=2, verbose=0)
    model.save(tmp_path / "two.h5")
    model_of(ours).fit(rows(), epochs=epochs, verbose=0, resume_from=tmp_path / "two.h5")
    assert ours.began == (2, 8)
    assert (ours.current_epoch, ours.global_step) == (epochs, 4 * epochs)
    assert theirs.current_epoch == epochs


TWO = {"devices": 2, "accelerator": "cpu", "strategy": "ddp_spawn"}


class Noting(Watching):
    """Notes what its schedule gets."""

    def __init__(self):
        super().__init__("step")
        self.seen = []

    def lr_scheduler_step(self, scheduler, metric):
        self.seen.append(float(metric))
        scheduler.step(metric)


def test_a_schedule_goes_on_with_each_ranks_value_of_the_last_step(tmp_path):
    """Cut just before a validation, behind which the schedule moves."""

    def fitted(**options):
        torch.manual_seed(0)
        model = fitkit.Model(Noting())
        model.compile(**TWO)
        options.update(epochs=2, validation_data=rows(), validation_freq=1, verbose=0)
        model.fit(rows(), **options)
        return model.net.seen, model.net.net.weight

    saver = fitkit.callbacks.ModelCheckpoint(tmp_path / "{epoch}-{batch}.h5", save_freq=1)
    expected = fitted(callbacks=saver)
    found = fitted(resume_from=tmp_path / "1-2.h5")
    assert found[0] == expected[0][-3:] and torch.equal(found[1], expected[1])


# ---------------------------------------------------------------------- callbacks of the module


class Brought(pl.Callback):
    """Counts batches in its state, and adds to files."""

    batches, state_key = 0, "brought"

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches, "row": torch.full((2,), float(self.batches))}

    def load_state_dict(self, state):
        self.batches = state["batches"]

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["beside"] = self.batches


class Bringing(Net):
    def configure_callbacks(self):
        return [Brought()]  # others for each verb

    def validation_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()


class BringingAndAdding(Bringing):
    learned = 0

    def training_step(self, batch, batch_idx):
        self.learned += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["learned"] = self.learned

    def on_load_checkpoint(self, checkpoint):
        self.learned = checkpoint["learned"]


def entries_of(path):
    """Return what a file has beside its weights, in plain lists."""

    def plain(value):
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, (list, tuple)) else listed(value)

    with fitkit.checkpoint.open_checkpoint(path) as file:
        return plain(file.state)


def listed(value):
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("kind", [Bringing, BringingAndAdding])
def test_what_brought_callbacks_have_in_files_stays_without_a_fit(kind, tmp_path):
    model = model_of(kind())
    model.fit(rows(), epochs=2, verbose=0)
    model.save(tmp_path / "made.h5")
    expected = entries_of(tmp_path / "made.h5")
    assert expected["added"]["callbacks"]["brought"] == {"batches": 8, "row": [8.0, 8.0]}
    assert expected["added"]["beside"] == 8
    model.evaluate(rows(), verbose=0)
    model.save(tmp_path / "evaluated.h5")
    assert entries_of(tmp_path / "evaluated.h5") == expected
    model.fit(rows(), epochs=1, verbose=0)  # its callbacks have counted other batches
    for name, one in {"other": model_of(kind()), "same": model}.items():
        one.load(tmp_path / "made.h5")
        one.evaluate(rows(), verbose=0)
        one.save(tmp_path / f"{name}.h5")
        assert entries_of(tmp_path / f"{name}.h5") == expected
    one.fit(rows(), epochs=1, verbose=0)
    one.save(tmp_path / "anew.h5")
    assert entries_of(tmp_path / "anew.h5")["added"]["beside"] == 4


class Refusing(Brought):
    def load_state_dict(self, state):
        self.batches = 99
        raise KeyError("mine")


class DataThatCounts(pl.LightningDataModule):
    """Refuses its state, if it is told so."""

    def __init__(self, refuses):
        super().__init__()
        self.refuses, self.served = refuses, []

    def train_dataloader(self):
        self.served.append(len(self.served))
        return rows()

    def state_dict(self):
        return {"served": len(self.served)}

    def load_state_dict(self, state):
        self.served.append("resumed")
        if self.refuses:
            raise KeyError("mine")


@pytest.mark.parametrize("refuses", ["callback", "data", "optimizer"])
def test_nothing_changes_where_a_resume_is_refused(refuses, tmp_path):
    first = model_of(BringingAndAdding())
    first.fit(DataThatCounts(False), epochs=2, verbose=0)
    first.save(tmp_path / "made.h5")

    module, data = BringingAndAdding(), DataThatCounts(refuses == "data")
    brought = Refusing() if refuses == "callback" else Brought()
    module.configure_callbacks = lambda: [brought]
    if refuses == "optimizer":
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    model = model_of(module)
    before = [one.clone() for one in module.parameters()]
    with pytest.raises(fitkit.errors.CheckpointError, match="mine|compiled with SGD"):
        model.fit(data, epochs=3, verbose=0, resume_from=tmp_path / "made.h5")
    assert all(map(torch.equal, module.parameters(), before))
    assert (module.learned, brought.batches, model.global_step) == (0, 0, 0)
    assert "resumed" not in data.served
    module.configure_callbacks = lambda: []
    model.save(tmp_path / "after.h5")
    assert entries_of(tmp_path / "after.h5")["progress"] is None
