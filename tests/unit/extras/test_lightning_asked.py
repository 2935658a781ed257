"""What LightningModules of libraries ask of their trainer, loggers, optimizers and schedulers.

`lightning_asked.json` lists it, collected from the sources of the releases that it names.
"""

import json
from pathlib import Path

import pytest
import torch

import fitkit

pytest.importorskip("lightning.pytorch")

from tests.unit.extras.lightning_modules import TRAINER, Net, loader, pl

pytestmark = pytest.mark.filterwarnings("ignore")

ASKED = json.loads(Path(__file__).with_name("lightning_asked.json").read_text())["asked"]

OURS_ALONE = {
    "trainer.log_every_n_steps", "trainer.callbacks", "trainer.max_steps",
    "trainer.default_root_dir", "trainer.log_dir", "logger.log_dir", "trainer.logger.version",
}  # fmt: skip
"""What differs between two trainings that are alike otherwise."""

REFUSED = {
    "trainer.logger.history", "logger.run_id", "logger.log_image()", "logger.log_dir",
    "trainer.logger.version", "trainer.predict_loop", "trainer.accelerator",
    "trainer.accelerator_connector", "trainer._accelerator_connector",
}  # fmt: skip
"""What a library's own logger has, or one of a service; and insides of the Trainer."""

WITH = {
    "log_metrics": ({"a": 1.0},),
    "log_hyperparams": ({"a": 1},),
    "broadcast": (3,),
    "get": ("a",),
}
"""What the methods are called with."""


def answer(module, question, folder):
    """Follow a question such as `trainer.strategy.broadcast()` from a module."""
    found = module
    for name in question.split("."):
        called = name.endswith("()")
        found = getattr(found, name.removesuffix("()"))
        if called:
            arguments = WITH.get(name[:-2], ())
            found = found(*((folder / "asked.h5",) if "save" in name else arguments))
    return found


class Asking(Net):
    """Asks all of it at its third batch."""

    folder = None

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx != 2 or self.current_epoch:
            return
        self.answers, self.refused = {}, {}
        for question in ASKED:
            try:
                self.answers[question] = answer(self, question, self.folder)
            except (AttributeError, fitkit.ConfigurationError) as error:
                self.refused[question] = error


@pytest.fixture
def asked(tmp_path):
    """The module that fitkit trains, and the one that the Trainer does, after their questions."""
    ours, theirs = Asking(), Asking()
    ours.folder = theirs.folder = tmp_path
    log = fitkit.loggers.TensorBoard(tmp_path / "ours")
    model = fitkit.Model(ours)
    model.compile(devices=1, accelerator="cpu")
    model.fit(loader(), validation_data=loader(8, 4), epochs=2, verbose=0, callbacks=log)
    options = {**TRAINER, "logger": pl.loggers.CSVLogger(tmp_path)}
    pl.Trainer(max_epochs=2, **options).fit(theirs, loader(), loader(8, 4))
    return ours, theirs


def test_each_question_is_answered_or_refused_by_name(asked):
    ours, theirs = asked
    assert len(ASKED) > 30
    assert set(ours.refused) <= REFUSED
    for question, error in ours.refused.items():
        name = question.split(".")[-1].removesuffix("()")
        assert f"no {name!r}" in str(error) and "It has" in str(error)
    plain = (bool, int, float, str, type(None))
    compared = 0
    for question in theirs.answers.keys() & ours.answers.keys() - OURS_ALONE:
        expected = theirs.answers[question]
        if isinstance(expected, plain):
            compared += 1
            assert ours.answers[question] == expected, question
    assert compared > 15


class ByTurns(Net):
    """Two optimizers, with what Lightning's wrapper adds to them."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False
        self.learning = []

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second):
            with optimizer.toggle_model():
                self.learning.append([p.requires_grad for p in self.parameters()])
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
        self.learning.append([p.requires_grad for p in self.parameters()])
        assert isinstance(first, torch.optim.SGD) and type(first.optimizer) is torch.optim.SGD
        assert self.optimizers(use_pl_optimizer=False)[1] is second.optimizer
        second.optimizer.param_groups[0]["lr"] *= 0.9
        configs = self.trainer.lr_scheduler_configs
        self.interval = [(c.interval, c.frequency) for c in configs]
        if type(configs[0]).__module__.startswith("fitkit"):
            with pytest.raises(AttributeError, match=r"interval can't be set.*FK084"):
                configs[0].interval = "epoch"
            with pytest.raises(AttributeError, match=r"no 'nothing'.*It has frequency.*FK084"):
                configs[0].nothing  # noqa: B018

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1)
        second = torch.optim.SGD(self.net[3].parameters(), lr=0.1)
        step = torch.optim.lr_scheduler.StepLR(second, 1)
        return [first, second], [{"scheduler": step, "interval": "step", "frequency": 3}]


def trained_by_both(kind, give_ours, give_theirs):
    torch.manual_seed(1)
    ours, theirs = kind(), kind()
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(2)
    pl.Trainer(max_epochs=2, **TRAINER).fit(theirs, **give_theirs())
    model = fitkit.Model(ours)
    model.compile(devices=1, accelerator="cpu")
    torch.manual_seed(2)
    model.fit(**give_ours(), epochs=2, verbose=0)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, expected)
    return model, theirs


def test_optimizers_that_a_module_is_handed_have_what_lightnings_have():
    model, theirs = trained_by_both(
        ByTurns, lambda: {"x": loader()}, lambda: {"train_dataloaders": loader()}
    )
    assert model.net.learning == theirs.learning
    assert model.net.interval == theirs.interval == [("step", 3)]


class Several(Net):
    """Reads two loaders at a time, and validates on two."""

    def __init__(self):
        super().__init__(dropout=0.0)

    def training_step(self, batch, batch_idx):
        parts = batch.values() if isinstance(batch, dict) else batch
        return sum(self.loss(part) for part in parts if part is not None)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log(f"seen_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)


def combined(mode):
    named = {"a": loader(24), "b": loader(16, seed=1)}
    return pl.utilities.CombinedLoader(named, mode)


@pytest.mark.parametrize(
    "train",
    [
        lambda: [loader(24), loader(16, seed=1)],
        lambda: combined("min_size"),
        lambda: combined("max_size_cycle"),
    ],
    ids=["list", "min_size", "max_size_cycle"],
)
def test_several_loaders_are_read_as_the_trainer_reads_them(train):
    def held_out():
        return [loader(8, 4), loader(8, 4, seed=3)]

    model, theirs = trained_by_both(
        Several,
        lambda: {"x": train(), "validation_data": held_out()},
        lambda: {"train_dataloaders": train(), "val_dataloaders": held_out()},
    )
    for name in ("seen_0", "seen_1"):
        expected = theirs.trainer.callback_metrics[name]
        torch.testing.assert_close(model.trainer.callback_metrics[name], expected)
    with pytest.raises(
        fitkit.ConfigurationError, match=r"evaluate got 2 loaders.*evaluate\(x\[0\]"
    ):
        model.evaluate(held_out(), verbose=0)


LOADERS = ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")


class Reading(Net):
    """Notes in each step which loaders its trainer has."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def note(self):
        state = self.trainer.state.fn.value, self.trainer.state.stage.value
        has = [getattr(self.trainer, name) is not None for name in LOADERS]
        self.seen.setdefault(state, has)

    def training_step(self, batch, batch_idx):
        self.note()
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.note()

    test_step = predict_step = validation_step

    def predict_dataloader(self):
        return loader()


def test_the_trainer_has_the_loaders_of_the_verb_that_runs():
    ours, theirs = Reading(), Reading()
    trainer = pl.Trainer(max_epochs=1, **TRAINER)
    trainer.fit(theirs, loader(), loader(8, 4))
    trainer.test(theirs, loader(), verbose=False)
    trainer.predict(theirs, loader(), return_predictions=False)
    model = fitkit.Model(ours)
    model.compile(devices=1, accelerator="cpu")
    model.fit(loader(), validation_data=loader(8, 4), epochs=1, verbose=0)
    model.evaluate(loader(), verbose=0)
    for _ in model.predict_batches():
        pass
    expected = {key: seen for key, seen in theirs.seen.items() if key[1] != "sanity_check"}
    assert ours.seen == expected and len(expected) == 4


def test_what_follows_from_arguments_is_not_set_and_no_name_of_ours_is_listed():
    module = Net()
    model = fitkit.Model(module)
    with pytest.raises(AttributeError, match=r"trainer.max_epochs can't be set.*FK084"):
        module.trainer.max_epochs = 3
    with pytest.raises(AttributeError, match="It has accumulate_grad_batches") as caught:
        module.trainer.nothing_of_this_name  # noqa: B018
    trainer = pl.Trainer(max_epochs=1, **TRAINER)
    listed = str(caught.value).split("It has ")[1].split(". ")[0].split(", ")
    assert [name for name in listed if not hasattr(trainer, name)] == []
    with pytest.raises(AttributeError, match=r"trainer.state has no .*fn, stage, status.*FK084"):
        module.trainer.state.nothing_of_this_name  # noqa: B018
    model.compile(devices=1, accelerator="cpu")
    model.fit(loader(), epochs=1, verbose=0)
    with pytest.raises(AttributeError, match=r"'fit', which has no 'evaluating'.*FK084"):
        module.trainer.state.fn.evaluating  # noqa: B018


class Counting(Net):
    """Asks in each verb how many batches there are, and for callbacks."""

    def on_train_start(self):
        trainer = self.trainer
        self.counts = {"fit": (trainer.num_sanity_val_batches, trainer.num_val_batches)}
        self.callbacks = (
            trainer.checkpoint_callback, trainer.checkpoint_callbacks,
            trainer.early_stopping_callback, trainer.early_stopping_callbacks,
        )  # fmt: skip

    def on_test_start(self):
        self.counts["test"] = self.trainer.num_test_batches

    def test_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_predict_start(self):
        self.counts["predict"] = self.trainer.num_predict_batches

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def test_each_verb_says_how_many_batches_it_reads(tmp_path):
    ours, theirs = Counting(), Counting()
    model = fitkit.Model(ours)
    model.compile(devices=1, accelerator="cpu")
    stopping = fitkit.callbacks.EarlyStopping("loss", patience=9)
    checkpoint = fitkit.callbacks.ModelCheckpoint(tmp_path / "last.h5")
    model.fit(loader(), validation_data=loader(16), verbose=0, callbacks=[stopping, checkpoint])
    model.evaluate(loader(20), verbose=0)
    model.predict(loader(32), steps=3, verbose=0)
    trainer = pl.Trainer(max_epochs=1, limit_predict_batches=3, **TRAINER)
    trainer.fit(theirs, loader(), loader(16))
    trainer.test(theirs, loader(20), verbose=False)
    trainer.predict(theirs, loader(32))
    assert ours.counts == theirs.counts == {"fit": ([0], [2]), "test": [3], "predict": [3]}
    assert ours.callbacks == (checkpoint, [checkpoint], stopping, [stopping])
    assert theirs.callbacks == (None, [], None, [])
