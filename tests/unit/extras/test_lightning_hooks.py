"""All hooks of a LightningModule and its data module, side by side with Lightning's Trainer."""

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
    DATA_HOOKS,
    LOADERS,
    MODULE_HOOKS,
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


def fit_theirs(trainer, module, data):
    trainer.fit(module, **({"datamodule": data} if data else given()))


def fit_ours(model, data):
    if data:
        return model.fit(data, epochs=2, verbose=0)
    held_out = given()["val_dataloaders"]
    return model.fit(given()["train_dataloaders"], validation_data=held_out, epochs=2, verbose=0)


def given():
    return {"train_dataloaders": loader(32), "val_dataloaders": loader(8, 4)}


class TwoSets(WithAll):
    """Validates on two sets."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if dataloader_idx == 0:
            self.log("val_loss", self.loss(batch), add_dataloader_idx=False)


def two_sets():
    return [loader(8, 4), loader(12, 4)]


def verb(theirs, ours, **options):
    """Return the run of a verb on one loader."""

    def by_trainer(trainer, module, data):
        chosen = {"datamodule": data} if data else {"dataloaders": loader(16)}
        getattr(trainer, theirs)(module, **chosen, **options)

    return by_trainer, lambda model, data: getattr(model, ours)(data or loader(16), verbose=0)


RUNS = {
    "fit": Run(fit_theirs, fit_ours),
    "accumulation": Run(fit_theirs, fit_ours, settings={"accumulate_grad_batches": 2}),
    "clipping": Run(
        fit_theirs,
        fit_ours,
        settings={"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"},
    ),
    "manual": Run(fit_theirs, fit_ours, Manual),
    "two validation sets": Run(
        lambda trainer, module, _: trainer.fit(module, loader(32), two_sets()),
        lambda model, _: model.fit(loader(32), validation_data=two_sets(), epochs=2, verbose=0),
        TwoSets,
    ),
    "validate": Run(*verb("validate", "evaluate", verbose=False), Validated),
    "test": Run(*verb("test", "evaluate", verbose=False)),
    "predict": Run(*verb("predict", "predict")),
}


def recorded(run, names, *, data_hooks=None):
    """Run a verb by both; return what each recorded, for the module and for its data."""
    kind = recording(run.kind, names)
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
    trainer = pl.Trainer(max_epochs=2, **TRAINER, **run.settings)
    torch.manual_seed(2)
    run.theirs(trainer, theirs, of_theirs)
    model = fitkit.Model(ours)
    model.compile(devices=1, accelerator="cpu", **run.settings)
    torch.manual_seed(2)
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
    assert_same(expected, found)


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


# Half a hundred trainings each, whose hooks are among those of the other runs.
AMONG_OTHERS = ("fit", "clipping", "accumulation")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in AMONG_OTHERS else ()) for n in RUNS]
)
def test_a_hook_alone_sees_what_it_sees_among_all(name):
    run = RUNS[name]
    called = dict.fromkeys(call[0] for call in recorded(run, TOGETHER)[0])
    for hook in called:
        assert_same(*recorded(run, [hook]))


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
