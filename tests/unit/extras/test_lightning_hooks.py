"""All hooks of a LightningModule, its data module and its callbacks, beside Lightning's Trainer."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch

import fitkit

pytest.importorskip("lightning.pytorch")

from tests.unit.extras.lightning_modules import TRAINER, Net, WithAll, loader, pl
from tests.unit.extras.lightning_record import (
    BEFORE,
    CALLBACK_HOOKS,
    DATA_HOOKS,
    LOADERS,
    MODULE_HOOKS,
    bringing,
    has_body,
    recording,
)

pytestmark = pytest.mark.filterwarnings("ignore")

TOGETHER = [name for name in MODULE_HOOKS if name not in BEFORE]


class Manual(WithAll):
    """Makes its updates itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return loss


class Validated(Net):
    """Has no test_step."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Data(pl.LightningDataModule):
    """Has data for each verb."""

    def train_dataloader(self):
        return loader(32)

    def val_dataloader(self):
        return loader(8, 4)

    test_dataloader = predict_dataloader = val_dataloader


@dataclasses.dataclass
class Run:
    """A verb, by both."""

    theirs: Callable
    ours: Callable
    kind: type = WithAll
    settings: dict = dataclasses.field(default_factory=dict)
    theirs_alone: dict = dataclasses.field(default_factory=dict)


def fit_theirs(trainer, module, data):
    trainer.fit(module, **({"datamodule": data} if data else given()))


def fit_ours(model, data, **options):
    if data:
        return model.fit(data, epochs=2, verbose=0)
    x, held_out = given().values()
    return model.fit(x, validation_data=held_out, epochs=2, verbose=0, **options)


def given():
    return {"train_dataloaders": loader(32), "val_dataloaders": loader(8, 4)}


class TwoSets(WithAll):
    """Validates on two sets."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if dataloader_idx == 0:
            self.log("val_loss", self.loss(batch), add_dataloader_idx=False)


def two_sets():
    return [loader(8, 4), loader(12, 4)]


def fit(kind=WithAll, **settings):
    """Return the run of a fit."""
    return Run(fit_theirs, fit_ours, kind, settings)


def fit_on(train, validation=None, kind=WithAll, **settings):
    """Return the run of a fit on other data, which functions make."""

    def held_out():
        return None if validation is None else validation()

    return Run(
        lambda trainer, module, _: trainer.fit(module, train(), held_out()),
        lambda model, _: model.fit(train(), validation_data=held_out(), epochs=2, verbose=0),
        kind,
        settings,
    )


class Unwatched(WithAll):
    """Has no schedule that watches a value."""

    def configure_optimizers(self):
        optimizers, schedulers = super().configure_optimizers()
        return optimizers, schedulers[:2]


class OfPairs(Unwatched):
    """Learns from two sets. Without dropout: fitkit draws the second one's order earlier."""

    def __init__(self):
        super().__init__(dropout=0.0)

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0]) + self.loss(batch[1])


class Skips(WithAll):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else {"loss": self.loss(batch), "seen": batch[1] * 2}


class Watching(WithAll):
    """Moves its rates by steps that watch the last step's value."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("seen", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        scheduler = {"scheduler": rate, "monitor": "seen", "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Newton(WithAll):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class ManualNewton(Newton):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        return {"batch": batch[0], "predicted": self(batch[0])}


class Stops(WithAll):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop = batch_idx == 1


class StopsLater(WithAll):
    def on_validation_epoch_end(self):
        self.trainer.should_stop = True


class Evaluated(WithAll):
    """A hook leaves a part in evaluation mode, once."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 0 and batch_idx == 1:
            self.net[2].eval()


class Fails(WithAll):
    def validation_step(self, batch, batch_idx):
        raise KeyError("mine")

    predict_step = validation_step


class OwnData(WithAll):
    def test_dataloader(self):
        return loader(16)


class Pairs(torch.utils.data.IterableDataset):
    """Rows whose number isn't known."""

    def __iter__(self):
        return iter(loader(36).dataset)


def verb(theirs, ours, **options):
    """Return the run of a verb on one loader."""

    def by_trainer(trainer, module, data):
        chosen = {"datamodule": data} if data else {"dataloaders": loader(16)}
        getattr(trainer, theirs)(module, **chosen, **options)

    return by_trainer, lambda model, data: getattr(model, ours)(data or loader(16), verbose=0)


def validating(ours, **theirs):
    """Return the run of a fit that validates at other times, or on less."""
    run = Run(fit_theirs, lambda model, _: fit_ours(model, None, **ours), Unwatched)
    return dataclasses.replace(run, theirs_alone=theirs)


RUNS = {
    "fit": fit(),
    "accumulation": fit(accumulate_grad_batches=2),
    "clipping": fit(gradient_clip_val=0.5, gradient_clip_algorithm="norm"),
    "manual": fit(Manual),
    "two validation sets": fit_on(lambda: loader(32), two_sets, TwoSets),
    "two training sets": fit_on(lambda: [loader(32), loader(16, seed=3)], kind=OfPairs),
    "unknown length": fit_on(lambda: torch.utils.data.DataLoader(Pairs(), 8), two_sets, TwoSets),
    "no validation": fit_on(lambda: loader(30), kind=Unwatched),
    "every second epoch": validating({"validation_freq": 2}, check_val_every_n_epoch=2),
    "twice an epoch": validating({"validation_freq": 0.5}, val_check_interval=0.5),
    "a part of the validation": validating({"validation_steps": 1}, limit_val_batches=1),
    "batches left out": fit(Skips),
    "rates that watch steps": fit(Watching),
    "closures": fit(Newton),
    "manual closures": fit(ManualNewton),
    "a stop": fit(Stops),
    "a stop at a validation": fit(StopsLater),
    "a part in evaluation": fit(Evaluated),
    "an error": fit(Fails),
    "the module's own data": Run(
        lambda trainer, module, _: trainer.test(module, verbose=False),
        lambda model, _: model.evaluate(verbose=0),
        OwnData,
    ),
    "validate": Run(*verb("validate", "evaluate", verbose=False), Validated),
    "test": Run(*verb("test", "evaluate", verbose=False)),
    "predict": Run(*verb("predict", "predict")),
}


def recorded(run, names, *, callbacks_hooks=CALLBACK_HOOKS, data_hooks=None):
    """Run a verb by both; return what each recorded, for the module, its callback and its data."""
    kind = recording(bringing(run.kind, callbacks_hooks), names)
    torch.manual_seed(1)
    theirs = kind()
    ours = copy.deepcopy(theirs)
    of_theirs = of_ours = None
    if data_hooks is not None:
        data_kind = recording(Data, data_hooks, of_data=True)
        of_theirs, of_ours = data_kind(), data_kind()
        of_theirs.calls = theirs.calls = []
        of_ours.calls = ours.calls = []
    else:
        theirs.calls, ours.calls = [], []
    trainer = pl.Trainer(max_epochs=2, **TRAINER, **run.settings, **run.theirs_alone)
    torch.manual_seed(2)
    with contextlib.suppress(KeyError):
        run.theirs(trainer, theirs, of_theirs)
    model = fitkit.Model(ours)
    model.compile(devices=1, accelerator="cpu", **run.settings)
    torch.manual_seed(2)
    with contextlib.suppress(KeyError):
        run.ours(model, of_ours)
    return theirs.calls, ours.calls


def assert_same(expected, found):
    """Compare two records, and show the first call that differs."""
    for theirs, ours in zip(expected, found, strict=False):
        assert ours == theirs
    assert [call[:2] for call in found] == [call[:2] for call in expected]


@pytest.mark.parametrize("name", RUNS)
def test_all_hooks_are_called_as_by_the_trainer(name):
    expected, found = recorded(RUNS[name], TOGETHER)
    assert len(expected) > 40
    for call in (expected[-1], found[-1]):
        if call[0] == "callback's on_exception":  # fitkit has restored the modes
            call[3].pop("modes")
    assert_same(expected, found)


@pytest.mark.parametrize("name", RUNS)
def test_callbacks_alone_see_what_they_see_beside_the_modules_hooks(name):
    expected, found = recorded(RUNS[name], [])
    assert len(expected) >= 9
    for call in (expected[-1], found[-1]):
        if call[0] == "callback's on_exception":
            call[3].pop("modes")
    assert_same(expected, found)


def test_batches_left_out_are_counted_in_their_group():
    run = fit(Skips, accumulate_grad_batches=2)
    expected, found = recorded(run, TOGETHER)
    counters = [
        [(*call[:2], call[3] and call[3]["counters"]) for call in one] for one in (expected, found)
    ]
    assert counters[1] == counters[0]


@pytest.mark.parametrize("name", ["fit", "test", "predict"])
def test_a_data_modules_hooks_come_between_them_as_by_the_trainer(name):
    expected, found = recorded(RUNS[name], TOGETHER, data_hooks=DATA_HOOKS)
    # The loaders are made at another time, so that lengths are known. The end of a fit notes the
    # state of the data, and that of a prediction has the modes of its batches.
    loaders = [[call[0] for call in one if call[0] in LOADERS] for one in (expected, found)]
    assert loaders[0] and sorted(loaders[0]) == sorted(loaders[1])
    left_out = {*LOADERS, "state_dict"}
    rest = [[call for call in one if call[0] not in left_out] for one in (expected, found)]
    for call in (*rest[0], *rest[1]):
        if call[0] == "teardown":
            call[3].pop("modes")
    assert_same(*rest)


class WithState(Data):
    def state_dict(self):
        return {"read": 1}

    def load_state_dict(self, state):
        assert state == {"read": 1}


def test_a_resume_gives_states_to_all_in_the_trainers_order(tmp_path, monkeypatch):
    monkeypatch.setattr(pl.Callback, "state_dict", lambda self: {"seen": 1})
    kind = recording(bringing(Unwatched, CALLBACK_HOOKS), TOGETHER)
    data_kind = recording(WithState, DATA_HOOKS, of_data=True)

    def made():
        torch.manual_seed(1)
        module, data = kind(), data_kind()
        module.calls = data.calls = []
        return module, data

    def by_trainer(path, **options):
        module, data = made()
        trainer = pl.Trainer(max_epochs=1 + len(options), **TRAINER)
        trainer.fit(module, datamodule=data, **options)
        trainer.save_checkpoint(path)
        return module.calls

    def by_fitkit(path, **options):
        module, data = made()
        model = fitkit.Model(module)
        model.compile(devices=1, accelerator="cpu")
        model.fit(data, epochs=1 + len(options), verbose=0, **options)
        model.save(path)
        return module.calls

    by_trainer(tmp_path / "one.ckpt")
    expected = by_trainer(tmp_path / "two.ckpt", ckpt_path=tmp_path / "one.ckpt")
    by_fitkit(tmp_path / "one.h5")
    found = by_fitkit(tmp_path / "two.h5", resume_from=tmp_path / "one.h5")
    orders = [
        [call[0] for call in one if call[1] == "begins" and call[0] not in LOADERS]
        for one in (expected, found)
    ]
    upto = [one[: one.index("on_train_start")] for one in orders]
    assert upto[1] == upto[0]
    assert upto[0][-5:] == [
        "callback's load_state_dict", "configure_optimizers", "callback's on_fit_start",
        "on_fit_start", "callback's on_train_start",
    ]  # fmt: skip


# Half a hundred trainings each. The other runs' hooks are among those of these.
ALONE = ("manual", "two validation sets", "validate", "test", "predict")
ALONE_SLOWLY = ("fit", "clipping", "accumulation", "closures", "rates that watch steps", "a stop")


@pytest.mark.parametrize(
    "name", [*ALONE, *(pytest.param(name, marks=pytest.mark.slow) for name in ALONE_SLOWLY)]
)
def test_a_hook_alone_sees_what_it_sees_among_all(name):
    run = RUNS[name]
    called = dict.fromkeys(call[0] for call in recorded(run, TOGETHER)[0])
    for hook in called:
        of_callback = hook.startswith("callback's ")
        theirs = [hook.removeprefix("callback's ")] if of_callback else []
        mine = [] if of_callback else [hook]
        assert_same(*recorded(run, mine, callbacks_hooks=theirs))


# ---------------------------------------------------------------------- overrides


def outcome(train, module):
    """Return a module's weights and modes after a training, or the kind of its failure."""
    try:
        train(module)
    except Exception:
        return "refused"
    return (
        [value.tolist() for value in module.state_dict().values()],
        [part.training for part in module.modules()],
    )


def nothing(self, *arguments, **named):
    """Do nothing."""


@pytest.mark.parametrize("kind", [WithAll, Manual])
@pytest.mark.parametrize("hook", [name for name in TOGETHER if has_body(name)])
def test_an_override_stands_in_place_of_a_hooks_own_body(hook, kind):
    overriding = type("Overriding", (kind,), {hook: nothing})

    def by_trainer(module):
        torch.manual_seed(2)
        trainer = pl.Trainer(max_epochs=2, gradient_clip_val=None, **TRAINER)
        fit_theirs(trainer, module, None)
        trainer.test(module, loader(16), verbose=False)

    def by_fitkit(module):
        torch.manual_seed(2)
        model = fitkit.Model(module)
        model.compile(devices=1, accelerator="cpu")
        fit_ours(model, None)
        model.evaluate(loader(16), verbose=0)

    torch.manual_seed(1)
    theirs = overriding()
    ours = copy.deepcopy(theirs)
    assert outcome(by_fitkit, ours) == outcome(by_trainer, theirs)
