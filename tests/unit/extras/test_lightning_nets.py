"""LightningModules, trained as Lightning's own Trainer trains them."""

import copy
import dataclasses
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

import fitkit
from fitkit.extras.launchers.workers import end_workers

pytest.importorskip("lightning")

from tests import lightning_programs as programs
from tests.compiling import TRACED, compiled_anew
from tests.unit.extras import lightning_modules as modules
from tests.unit.extras.lightning_modules import (
    TRAINER,
    Recorded,
    RecordedManual,
    loader,
    made,
    pl,
    trained_by_lightning,
)

pytestmark = pytest.mark.filterwarnings("ignore")

ALONE = {"devices": 1, "accelerator": "cpu"}
TWO = {"devices": 2, "accelerator": "cpu", "strategy": "ddp_spawn"}


@pytest.fixture(autouse=True, scope="module")
def no_workers_left():
    yield
    end_workers()


def model_of(module, **compiled):
    model = fitkit.Model(module)
    model.compile(**{**ALONE, **compiled})
    return model


def trained(module, train, *, seed=2, epochs=2, validation=None, **compiled):
    """Train a module by fitkit; return the model."""
    model = model_of(module, **compiled)
    torch.manual_seed(seed)
    model.fit(train, validation_data=validation, epochs=epochs, verbose=0)
    return model


def assert_equal_weights(one, other, atol=0.0):
    theirs = other.state_dict()
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=atol)


# ---------------------------------------------------------------------- the order of hooks


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_fit_calls_the_hooks_in_lightnings_order(accumulate):
    theirs, ours = made(Recorded)
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    trained_by_lightning(theirs, loader(), validation=loader(8, 4), **options)
    trained(ours, loader(), validation=loader(8, 4), **options)
    assert ours.calls == theirs.calls


def test_a_manual_training_calls_the_hooks_in_lightnings_order():
    theirs, ours = made(RecordedManual)
    trained_by_lightning(theirs, loader(), validation=loader(8, 4))
    trained(ours, loader(), validation=loader(8, 4))
    assert ours.calls == theirs.calls
    assert_equal_weights(ours, theirs)


def test_evaluate_and_predict_call_the_hooks_in_lightnings_order():
    theirs, ours = made(Recorded)
    trainer = pl.Trainer(**TRAINER)
    (tested,) = trainer.test(theirs, loader(16), verbose=False)
    expected = trainer.predict(theirs, loader(16))
    model = model_of(ours)
    values = model.evaluate(loader(16), verbose=0, return_dict=True)
    predicted = model.predict(loader(16), verbose=0, as_numpy=False)
    assert ours.calls == theirs.calls
    assert values["test_loss"] == pytest.approx(tested["test_loss"])
    torch.testing.assert_close(predicted, torch.cat(expected), rtol=0, atol=0)


# ---------------------------------------------------------------------- numbers

KINDS = [
    "Net", "Momentum", "Plateau", "ByFrequency", "Newton", "WarmedUp", "OwnBackward",
    "KeptGradients", "Skipping", "Frozen", "Moved", "WithoutIndex", "WithoutOptimizer",
    "Adversarial", "Parts", "Logged", "EvaluatedLater", "EvaluatedWhole", "ByStepsWatched",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_trainer(kind):
    theirs, ours = made(getattr(modules, kind))
    # An epoch that a hook ends has no validation in Lightning, and so draws other numbers.
    data, held_out = loader(40), None if kind == "Skipping" else loader(8, 4)
    trainer = trained_by_lightning(theirs, data, epochs=3, validation=held_out)
    model = trained(ours, data, epochs=3, validation=held_out)
    assert_equal_weights(ours, theirs)
    assert [part.training for part in ours.modules()] == [
        part.training for part in theirs.modules()
    ]
    assert model.global_step == trainer.global_step
    for rate, expected in zip(model.trainer.optimizers, trainer.optimizers, strict=True):
        if kind != "WithoutOptimizer":
            assert rate.param_groups[0]["lr"] == expected.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("kind", ["Net", "Recorded"])
def test_settings_mean_what_they_mean_to_the_trainer(kind, options):
    theirs, ours = made(getattr(modules, kind))
    data = loader(32)
    trained_by_lightning(theirs, data, validation=loader(8, 4), **options)
    trained(ours, data, validation=loader(8, 4), **options)
    assert_equal_weights(ours, theirs)


def test_logged_values_are_those_of_the_trainer():
    theirs, ours = made(modules.Logged)
    data, held_out = loader(20), loader(10, 4)
    trainer = trained_by_lightning(theirs, data, validation=held_out)
    model = trained(ours, data, validation=held_out)
    expected = trainer.callback_metrics
    found = model.trainer.callback_metrics
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
    (tested,) = trainer.test(theirs, held_out, verbose=False)
    values = model.evaluate(held_out, verbose=0, return_dict=True)
    assert values == pytest.approx(tested)


# ---------------------------------------------------------------------- processes, files, copies


@pytest.mark.parametrize(
    "kind",
    [
        "Momentum", "Plateau", "OwnBackward", "Moved", "Adversarial", "WarmedUp", "Recorded",
        "ByStepsWatched",
    ],
)  # fmt: skip
def test_two_processes_train_as_one(kind):
    one, two = made(getattr(modules, kind))
    for module in (one, two):
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
    first = trained(one, loader(32, 8), validation=loader(9, 4))
    second = trained(two, loader(32, 4), validation=loader(9, 4), **TWO)
    assert_equal_weights(two, one, atol=1e-6)
    assert second.global_step == first.global_step
    for name in {"loss", "val_loss", "seen"} & first.history.history.keys():
        values = first.history.history[name]
        assert second.history.history[name] == pytest.approx(values, abs=1e-6), name


@pytest.mark.parametrize("name", ["classifier", "by_epoch", "metrics", "gan"])
def test_so_do_two_processes_a_whole_program(name):
    program = programs.PROGRAMS[name]

    def batches_of_both():
        data = programs.loader()
        return DataLoader(data.dataset, batch_size=2 * data.batch_size)

    one, expected = programs.by_fitkit(dataclasses.replace(program, data=batches_of_both))
    two, found = programs.by_fitkit(program, devices=2)
    assert_equal_weights(two, one, atol=1e-6)
    for value in program.logged:
        assert found[value] == pytest.approx(expected[value], rel=1e-5, abs=1e-6), value


@pytest.mark.parametrize("kind", ["Momentum", "Plateau", "ByFrequency", "Logged", "Adversarial"])
def test_a_resumed_training_equals_an_uncut_one(kind, tmp_path):
    uncut, cut = made(getattr(modules, kind))
    data, held_out = loader(32), loader(8, 4)
    whole = trained(uncut, data, epochs=3, validation=held_out)

    class Stops(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and self.model.current_epoch == 1:
                self.model.save(tmp_path / "cut.h5")
                raise KeyboardInterrupt

    model = model_of(cut)
    torch.manual_seed(2)
    with pytest.raises(KeyboardInterrupt):
        model.fit(data, validation_data=held_out, epochs=3, verbose=0, callbacks=Stops())
    fresh, _ = made(getattr(modules, kind), seed=5)
    again = model_of(fresh)
    again.fit(data, validation_data=held_out, epochs=3, verbose=0, resume_from=tmp_path / "cut.h5")
    assert_equal_weights(fresh, uncut)
    # A metric's sum in float32 is added up in two parts.
    for name, values in whole.history.history.items():
        assert again.history.history[name] == pytest.approx(values, rel=1e-6), name


def test_pytorch_lightnings_modules_are_trained_too():
    theirs = pytest.importorskip("pytorch_lightning")

    class Old(theirs.LightningModule):
        def __init__(self, width=2):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch):
            self.log("width", self.hparams.width)
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = trained(Old(width=3), loader())
    assert model.hparams["width"] == 3
    assert model.history.history["width"] == [3.0, 3.0]


def test_copies_and_pickles_train_alike():
    module, other = made(modules.Momentum)
    model = model_of(module)
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model]
    for one in copies:
        assert type(pickle.loads(pickle.dumps(one.net))) is modules.Momentum
        assert type(copy.deepcopy(one.net)) is modules.Momentum
        torch.manual_seed(2)
        one.fit(loader(), epochs=2, verbose=0)
        assert_equal_weights(one.net, copies[0].net)
    assert isinstance(module, modules.Momentum)
    # It can still be trained by its own library.
    trained_by_lightning(module, loader(), epochs=1)
    torch.manual_seed(2)
    fitkit.Model(other).fit(loader(), epochs=2, verbose=0)
    assert_equal_weights(other, copies[0].net)


def test_files_have_the_modules_own_names(tmp_path):
    module, other = made(modules.Net)
    model = trained(module, loader())
    model.save_weights(tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert_equal_weights(other, module)


@pytest.mark.parametrize("kind", ["Net", "Momentum", "Logged"])
def test_compiled_training_gives_the_same_numbers(kind, recwarn):
    plain, compiled = made(getattr(modules, kind))
    for module in (plain, compiled):
        module.net[2].p = 0.0
    trained(plain, loader())
    trained(compiled, loader(), jit_compile=TRACED)
    assert_equal_weights(compiled, plain, atol=1e-6)
    assert not [w for w in recwarn if "jit_compile" in str(w.message)]


class Annealed(modules.Net):
    """A weight that rises with the updates, another with the epochs; logs of both."""

    def training_step(self, batch, batch_idx):
        outputs, part = self.net(batch[0]), min(1.0, (self.global_step + 1) / 8)
        loss = torch.nn.functional.cross_entropy(outputs, batch[1]) + part * outputs.square().mean()
        if self.current_epoch > 1:
            loss = loss / self.current_epoch
        self.log_dict({"part": part, "batch": float(batch_idx)}, on_step=False, on_epoch=True)
        return loss


def test_a_compiled_step_reads_counters_that_change(recwarn):
    histories, modules_ = [], made(Annealed, dropout=0.0)
    for module, jit in zip(modules_, (False, TRACED), strict=True):
        model = fitkit.Model(module)
        model.compile(accelerator="cpu", devices=1, jit_compile=jit)
        model.fit(loader(48), epochs=3, verbose=0)
        compiled_anew()
        histories.append(model.fit(loader(48), epochs=5, initial_epoch=3, verbose=0).history)
    assert compiled_anew() == 0
    assert not [w for w in recwarn if "jit_compile" in str(w.message)]
    assert_equal_weights(*modules_, atol=1e-6)
    for name, values in histories[0].items():
        assert histories[1][name] == pytest.approx(values, abs=1e-6), name


class LeavingOut(modules.Net):
    """Leaves out its third batch, under a schedule that moves with each update."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_is_left_out_counts_as_lightning_counts_it_compiled_or_not(accumulate):
    theirs, ours = made(LeavingOut, dropout=0.0)
    ours = ours, copy.deepcopy(ours)
    options = {"accumulate_grad_batches": accumulate}
    trainer = trained_by_lightning(theirs, loader(40), epochs=2, **options)
    wanted = trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]
    for module, jit in zip(ours, (False, TRACED), strict=True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="jit_compile compiles")
            model = trained(module, loader(40), jit_compile=jit, **options)
        assert (model.global_step, model.optimizer.param_groups[0]["lr"]) == wanted
    assert_equal_weights(*ours, atol=1e-6)


def test_a_model_goes_with_its_last_name():
    model = trained(modules.Logged(), loader(), validation=loader(8, 4))
    module, gone = model.net, weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert module.trainer.fitkit_model is None


def test_a_trained_module_exports_itself():
    model = trained(modules.Net(), loader())
    x, _ = next(iter(loader()))
    scripted = model.net.to_torchscript(method="trace", example_inputs=x)
    torch.testing.assert_close(scripted(x), model.net.eval()(x))


class Outliving(modules.Net):
    """A module that asks its trainer in its forward."""

    def forward(self, x):
        trainer = self.trainer
        self.answers = {
            "epoch": self.current_epoch,
            "step": self.global_step,
            "device": self.device,
            "rank": (self.global_rank, self.local_rank, trainer.world_size),
            "is_zero": trainer.is_global_zero,
            "training": trainer.training,
            "epochs": trainer.max_epochs,
        }
        return super().forward(x)


def test_a_module_that_outlives_its_model_still_gets_answers():
    def train():
        model = trained(Outliving(), loader(), epochs=2)
        return model.net

    module = train()
    gc.collect()
    assert module.trainer.fitkit_model is None
    module(torch.ones(2, 4))
    assert module.answers == {
        "epoch": 2, "step": 6, "device": torch.device("cpu"), "rank": (0, 0, 1),
        "is_zero": True, "training": False, "epochs": 2,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="trainer.callback_metrics"):
        _ = module.trainer.callback_metrics
    again = trained(module, loader(), epochs=1)
    assert again.net.global_step == 3


@pytest.mark.parametrize("frequency", [1, 2, 4])
def test_a_schedule_of_every_so_many_batches_is_lightning_s_compiled_or_not(frequency):
    class Scheduled(modules.Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            plan = {"scheduler": schedule, "interval": "step", "frequency": frequency}
            return {"optimizer": optimizer, "lr_scheduler": plan}

    theirs, ours = made(Scheduled, dropout=0.0)
    ours = ours, copy.deepcopy(ours)
    trainer = trained_by_lightning(theirs, loader(48), epochs=2)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    for module, jit in zip(ours, (False, TRACED), strict=True):
        model = trained(module, loader(48), jit_compile=jit)
        assert model.optimizer.param_groups[0]["lr"] == rate
        assert_equal_weights(module, theirs, atol=1e-6)


# ---------------------------------------------------------------------- data


class OwnData(modules.Logged):
    """Has its data, which `setup` makes."""

    def __init__(self):
        super().__init__()
        self.made = []

    def prepare_data(self):
        self.made.append("prepared")

    def setup(self, stage):
        self.made.append(stage)
        self.data = loader(20)

    def train_dataloader(self):
        return self.data

    def val_dataloader(self):
        return [loader(8, 4, seed=1), loader(12, 4, seed=2)]

    def test_dataloader(self):
        return self.data

    def predict_dataloader(self):
        return self.data

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("valid", self.loss(batch))
        self.log(f"own_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        pass


def test_a_modules_own_data_are_used_where_there_are_no_others():
    theirs, ours = made(OwnData)
    trainer = pl.Trainer(max_epochs=2, **TRAINER)
    torch.manual_seed(2)
    trainer.fit(theirs)
    expected = trainer.callback_metrics
    model = model_of(ours)
    torch.manual_seed(2)
    model.fit(epochs=2, verbose=0)
    assert_equal_weights(ours, theirs)
    found = model.trainer.callback_metrics
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
    assert ours.made == theirs.made == ["prepared", "fit"]
    assert model.evaluate(verbose=0, return_dict=True).keys() == {"m_test_loss", "m_acc"}
    assert len(model.predict(verbose=0)) == 20


def test_several_loaders_to_train_on_are_read_as_lightning_reads_them():
    class Several(modules.Net):
        def __init__(self):
            super().__init__(dropout=0.0)

        def train_dataloader(self):
            return {"a": loader(24), "b": loader(16, seed=1)}

        def training_step(self, batch, batch_idx):
            return self.loss(batch["a"]) + self.loss(batch["b"])

    theirs, ours = made(Several)
    torch.manual_seed(2)
    pl.Trainer(max_epochs=2, **TRAINER).fit(theirs)
    torch.manual_seed(2)
    model_of(ours).fit(epochs=2, verbose=0)
    assert_equal_weights(ours, theirs)


def test_evaluate_calls_validation_hooks_where_there_is_no_test_step():
    module = modules.OnlyValidated()
    values = model_of(module).evaluate(loader(8, 4), verbose=0, return_dict=True)
    assert values.keys() == {"seen"}
    assert module.calls == ["validate", "on_validation_start", "on_validation_end"]


# ---------------------------------------------------------------------- what a module asks


class Asking(modules.Net):
    """Notes what it is told."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        trainer = self.trainer
        self.told = {
            "max_epochs": trainer.max_epochs,
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "num_training_batches": trainer.num_training_batches,
            "estimated_stepping_batches": trainer.estimated_stepping_batches,
            "world_size": trainer.world_size,
            "num_devices": trainer.num_devices,
            "num_nodes": trainer.num_nodes,
            "global_rank": trainer.global_rank,
            "local_rank": trainer.local_rank,
            "is_global_zero": trainer.is_global_zero,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "is_last_batch": trainer.is_last_batch,
            "training": trainer.training,
            "validating": trainer.validating,
            "sanity_checking": trainer.sanity_checking,
            "should_stop": trainer.should_stop,
            "stage": trainer.state.stage.value,
            "fn": trainer.state.fn.value,
            "max_steps": trainer.max_steps,
            "logger": trainer.logger,
            "limit_train_batches": trainer.limit_train_batches,
            "log_every_n_steps": trainer.log_every_n_steps,
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
            "rates": [config.scheduler for config in trainer.lr_scheduler_configs],
            "optimizers": [type(one) for one in trainer.optimizers],
            "module": trainer.lightning_module is self,
            "data": len(trainer.train_dataloader.dataset),
            "device": self.device,
            "own": (self.global_step, self.current_epoch, self.global_rank, self.local_rank),
            "gathered": self.all_gather(torch.ones(2)).shape,
        }


class Remembering(fitkit.loggers.Logger):
    def __init__(self):
        super().__init__()
        self.said = []

    def start(self):
        self.connection = self.said

    def log_hyperparameters(self, values):
        self.said.append(values.get("mine"))

    def log_scalars(self, values, step, epoch):
        self.said.append((values, step))


class LoggingItself(modules.Net):
    def on_fit_start(self):
        with pytest.raises(fitkit.ConfigurationError, match="before the logger is open"):
            _ = self.logger.experiment
        self.logger.log_hyperparams({"mine": 3})

    def on_train_epoch_start(self):
        self.logger.experiment.append("own")

    def on_train_epoch_end(self):
        self.logger.log_metrics({"m": torch.tensor(2.0)})
        with pytest.raises(AttributeError, match="its logger has no 'watch'"):
            self.logger.watch(self)


def test_the_logger_has_lightnings_methods():
    logger = Remembering()
    model_of(LoggingItself()).fit(modules.loader(24), epochs=1, verbose=0, callbacks=logger)
    (values, step) = logger.said.pop()
    assert step == 3 and "loss" in values
    assert logger.said == [None, 3, "own", ({"m": 2.0}, 3)]


def test_the_trainer_answers_what_lightnings_answers():
    theirs, ours = made(Asking)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trained_by_lightning(theirs, loader(32), **options)
    trained(ours, loader(32), **options)
    assert ours.told == theirs.told


def test_an_unknown_attribute_of_the_trainer_is_named():
    _, ours = made(modules.Net)
    model = model_of(ours)
    with pytest.raises(AttributeError, match=r"'signal_connector'.*FK084"):
        assert model.net.trainer.signal_connector
    assert not hasattr(model.net.trainer, "signal_connector")
    with pytest.raises(AttributeError, match="FK084"):
        assert model.net.trainer.strategy.lightning_module


def test_what_can_only_be_read_is_named_when_it_is_set():
    class Sets(modules.Net):
        def on_train_start(self):
            self.trainer.accumulate_grad_batches = 2

    with pytest.raises(AttributeError, match=r"trainer.accumulate_grad_batches.*FK084"):
        trained(Sets(), loader())


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "on_train_start"])
@pytest.mark.parametrize("compiled", [ALONE, TWO], ids=["one process", "two processes"])
def test_a_hook_before_the_training_can_end_it_too(hook, compiled):
    def stops(self, *arguments):
        self.trainer.should_stop = True
        return getattr(super(kind, self), hook)(*arguments)

    kind = type("Stops", (modules.Net,), {hook: stops})
    model = model_of(kind(), **compiled)
    model.fit(loader(), epochs=2, verbose=0)
    assert model.global_step == 1  # as in Keras, after a batch


def test_what_a_callback_holds_in_evaluation_mode_is_held_for_its_epochs_alone():
    class Counted(modules.Net):
        def __init__(self):
            super().__init__()
            self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

        def forward(self, x):
            return self.net(self.backbone(x))

    module = Counted()
    model = model_of(module)
    thaws = fitkit.callbacks.BackboneFinetuning(2, backbone="backbone", train_bn=False)
    model.fit(loader(), epochs=3, verbose=0, callbacks=thaws)
    assert module.backbone[1].num_batches_tracked == 3  # of the last epoch


def test_a_step_that_reads_the_batches_itself_is_refused():
    class Reads(modules.Net):
        def training_step(self, dataloader_iter):
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(fitkit.ConfigurationError, match="training_step takes dataloader_iter"):
        trained(Reads(), loader())


def test_a_module_can_end_the_training():
    class Ends(modules.Net):
        def on_train_epoch_end(self):
            self.trainer.should_stop = self.current_epoch == 1

    theirs, ours = made(Ends)
    trained_by_lightning(theirs, loader(), epochs=5)
    model = trained(ours, loader(), epochs=5)
    assert len(model.history.history["loss"]) == 2
    assert_equal_weights(ours, theirs)


def test_configured_callbacks_take_part():
    class Configures(modules.Plateau):
        def configure_callbacks(self):
            return fitkit.callbacks.EarlyStopping("seen", patience=0, min_delta=100.0, mode="min")

    _, ours = made(Configures)
    model = trained(ours, loader(), validation=loader(8, 4), epochs=9)
    assert len(model.history.history["seen"]) == 2


# ---------------------------------------------------------------------- refusals


def refused(kind, code="FK083", **compiled):
    _, ours = made(kind)
    model = model_of(ours, **compiled)
    with pytest.raises(fitkit.ConfigurationError, match=code):
        model.fit(loader(), epochs=1, verbose=0)


@pytest.mark.parametrize("given", [{"loss": "mse"}, {"metrics": ["mae"]}])
def test_a_compiled_loss_beside_a_training_step_is_refused(given):
    refused(modules.Net, **given)


def test_several_optimizers_need_manual_optimization():
    class Several(modules.Net):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.net[at].parameters(), lr=0.1) for at in (0, 3)]

    refused(Several)


AT_CALLBACKS = [
    name
    for name in modules.HOOKS.split()
    if name.startswith("on_") and hasattr(pl.Callback, name) and not name.endswith("_zero_grad")
]


class Notes(pl.Callback):
    """Notes its hooks, and halves the rate after the first batch."""

    def __init__(self):
        self.calls = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls.append(("on_train_batch_end", batch_idx, len(batch[0])))
        if trainer.global_step == 1:
            trainer.optimizers[0].param_groups[0]["lr"] /= 2


def noting(name):
    def hook(self, trainer, pl_module, *arguments):
        numbers = [one for one in arguments if isinstance(one, int)]
        self.calls.append((name, *numbers, trainer.current_epoch, type(pl_module).__name__))

    return hook


for _name in set(AT_CALLBACKS) - {"on_train_batch_end", "on_train_end", "on_fit_end"}:
    setattr(Notes, _name, noting(_name))


class Brings(modules.WithAll):
    def configure_callbacks(self):
        self.notes = getattr(self, "notes", None) or Notes()
        return [self.notes]


def test_callbacks_that_a_module_brings_are_called_as_by_lightning():
    theirs, ours = made(Brings, dropout=0.0)
    trained_by_lightning(theirs, loader(), validation=loader(16, 4))
    trained(ours, loader(), validation=loader(16, 4))
    assert ours.notes.calls == theirs.notes.calls
    assert_equal_weights(ours, theirs)
    two = model_of(Brings(0.0), **TWO)
    two.fit(loader(batch_size=4), validation_data=loader(16, 4), epochs=1, verbose=0)
    assert [call for call in two.net.notes.calls if call[0] == "on_train_batch_end"] == [
        ("on_train_batch_end", index, 4) for index in range(3)
    ]


class Remembers(modules.Net):
    """Learns by no gradient, as models with a memory do."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        return torch.tensor(0.0, requires_grad=True)

    def configure_optimizers(self):
        return None


def test_a_module_without_an_optimizer_computes_its_loss_of_no_parameter_on_two_processes():
    first = Remembers()
    model = model_of(copy.deepcopy(first), **TWO)
    model.fit(loader(batch_size=4), epochs=2, verbose=0)
    assert model.net.seen == 24
    for mine, expected in zip(model.net.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, expected)


class Counts(pl.Callback):
    """Logs, notes errors, and changes what predict returns."""

    def __init__(self):
        self.batches, self.errors = 0, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log("batches", float(self.batches))
        self.log_dict({"twice": 2.0 * self.batches})

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        outputs["twice"] = 2 * outputs["y"]

    def on_exception(self, trainer, pl_module, exception):
        self.errors.append(exception)


class Counted(modules.Net):
    def __init__(self):
        super().__init__(dropout=0.0)
        self.counts = Counts()

    def configure_callbacks(self):
        return self.counts

    def predict_step(self, batch, batch_idx):
        return {"y": self(batch[0])}


def test_callbacks_that_a_module_brings_log_and_change_what_predict_returns():
    theirs, ours = Counted(), Counted()
    trainer = trained_by_lightning(theirs, loader(), validation=loader(16, 4))
    model = trained(ours, loader(), validation=loader(16, 4))
    for name in ("batches", "twice"):
        assert model.history.history[name][-1] == float(trainer.callback_metrics[name])
    theirs.load_state_dict(ours.state_dict())
    expected = torch.cat([one["twice"] for one in trainer.predict(theirs, loader())])
    found = model.predict(loader(), verbose=0)
    assert found.keys() == {"y", "twice"}
    torch.testing.assert_close(torch.as_tensor(found["twice"]), expected)


def test_brought_callbacks_get_an_error():
    model = model_of(Counted())
    error = ZeroDivisionError()

    def fails(batch, batch_idx):
        raise error

    model.net.training_step = fails
    with pytest.raises(ZeroDivisionError):
        model.fit(loader(), epochs=1, verbose=0)
    assert model.net.counts.errors == [error]


def test_callbacks_derived_from_those_that_steer_the_trainer_are_refused():
    class Mine(pl.callbacks.StochasticWeightAveraging):
        pass

    class Configures(modules.Net):
        def configure_callbacks(self):
            return Mine(0.1)

    with pytest.raises(
        fitkit.ConfigurationError, match=r"fitkit.callbacks.StochasticWeightAveraging.*FK083"
    ):
        trained(Configures(), loader())


def test_callbacks_of_lightning_are_refused():
    class Configures(modules.Net):
        def configure_callbacks(self):
            return [pl.callbacks.EarlyStopping("loss")]

    with pytest.raises(fitkit.ConfigurationError, match=r"fitkit.callbacks.EarlyStopping.*FK083"):
        trained(Configures(), loader())
    with pytest.raises(fitkit.ConfigurationError, match="FK083"):
        model_of(modules.Net()).fit(loader(), callbacks=[pl.callbacks.ModelSummary()], verbose=0)


class LogsAndStays(pl.Callback):
    """Logs, counts batches in its state, and keeps more in checkpoints."""

    batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        self.log("seen", outputs["loss"])
        self.log_dict({"index": float(batch_idx)}, on_epoch=True, on_step=False)

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["weight"] = pl_module.net[0].weight.clone()

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        assert torch.equal(checkpoint["weight"], pl_module.net[0].weight)
        self.was_loaded = True


class BringsOne(modules.Net):
    def configure_callbacks(self):
        self.brought = getattr(self, "brought", None) or LogsAndStays()
        return self.brought

    def on_train_epoch_start(self):
        assert self.brought in self.trainer.callbacks

    def on_train_start(self):
        self.at_begin = self.brought.batches, getattr(self.brought, "was_loaded", False)

    def on_train_epoch_end(self):
        batches = self.all_gather(torch.tensor(float(self.at_begin[0])))
        loaded = self.all_gather(torch.tensor(float(self.at_begin[1])))
        self.log_dict({"batches": batches.min(), "loaded": loaded.min()})


@pytest.mark.parametrize("compiled", [ALONE, TWO], ids=["one process", "two processes"])
def test_callbacks_that_a_module_brings_log_and_are_in_checkpoints(compiled, tmp_path):
    model = model_of(BringsOne(0.0), **compiled)
    model.fit(loader(batch_size=4), epochs=1, verbose=0)
    last = 24 // 4 // compiled["devices"] - 1
    assert model.history.history["index"] == [last / 2]
    assert "seen" in model.history.history
    model.save(tmp_path / "one.h5")
    again = model_of(BringsOne(0.0), **compiled)
    again.fit(loader(batch_size=4), epochs=2, verbose=0, resume_from=tmp_path / "one.h5")
    assert again.history.history["batches"][1] == last + 1  # on all ranks
    assert again.history.history["loaded"][1] == 1


def test_a_refused_file_leaves_nothing_for_the_next_fit(tmp_path):
    model = model_of(BringsOne(0.0))
    model.fit(loader(), epochs=1, verbose=0)
    model.save(tmp_path / "one.h5")
    other = model_of(BringsOne(0.0))
    other.net.configure_optimizers = lambda: torch.optim.Adagrad(other.net.parameters())
    with pytest.raises(fitkit.errors.CheckpointError, match="compiled with Adagrad"):
        other.fit(loader(), verbose=0, resume_from=tmp_path / "one.h5")
    other.fit(loader(), epochs=1, verbose=0)
    assert other.net.at_begin == (0, False)


def test_an_epochs_value_that_is_not_one_is_named():
    class Logs(modules.Net):
        def on_train_epoch_end(self):
            self.log("value", 1.0, on_epoch=False)

    with pytest.raises(fitkit.ConfigurationError, match=r"on_train_epoch_end.*FK083"):
        trained(Logs(), loader())


def test_predict_batches_ends_when_no_more_are_wanted():
    class Notes(modules.WithAll):
        def setup(self, stage):
            self.calls = ["setup"]

        def predict_step(self, batch, batch_idx):
            self.calls.append("step")
            return self(batch[0])

        def teardown(self, stage):
            self.calls.append("teardown")

    model = model_of(Notes())
    assert len(list(model.predict_batches(loader(), verbose=0))) == 3
    assert model.net.calls == ["setup", *["step"] * 3, "teardown"]
    batches = model.predict_batches(loader(), verbose=0)
    next(batches)
    batches.close()
    assert model.net.calls[-1] == "teardown"


def test_a_stop_within_a_group_makes_the_update_by_the_modules_hook():
    class Stops(modules.Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            self.seen = batch_idx
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = True

    module, other = made(Stops, dropout=0.0)
    model = trained(module, loader(), accumulate_grad_batches=2)
    trained(other, DataLoader(torch.utils.data.Subset(loader().dataset, range(8)), 8))
    assert (module.seen, model.global_step) == (0, 1)
    assert_equal_weights(module, other)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_end", "predict_step"])
def test_hooks_without_logs_are_named(hook):
    def logs(self, *arguments):
        self.log("value", 1.0)

    kind = type("Logs", (modules.Net,), {hook: logs})
    model = model_of(kind())
    with pytest.raises(fitkit.ConfigurationError, match=rf"{hook}.*FK083"):
        model.predict(loader(), verbose=0) if hook == "predict_step" else model.fit(
            loader(), epochs=1, verbose=0
        )


def test_a_subclass_of_model_says_that_the_module_trains_itself():
    class Mine(fitkit.Model):
        pass

    with pytest.raises(fitkit.ConfigurationError, match="FK083"):
        Mine(modules.Net())


def test_a_module_without_a_training_step_trains_by_a_compiled_loss():
    class Forward(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def forward(self, x):
            return self.net(x)

    model = model_of(Forward(), optimizer="adam", loss="mse")
    history = model.fit(loader(), epochs=3, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert model.predict(loader(), verbose=0).shape == (24, 1)


# ---------------------------------------------------------------------- what hooks add to files


class Counting(pl.LightningModule):
    """Keeps in checkpoints how many batches it has seen."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.seen = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += 1
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_save_checkpoint(self, checkpoint):
        assert set(checkpoint["state_dict"]) == {"net.weight", "net.bias"}
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


def test_what_on_save_checkpoint_adds_comes_back_when_the_training_is_resumed(tmp_path):
    data = torch.utils.data.TensorDataset(torch.rand(12, 4), torch.rand(12, 1))
    train = torch.utils.data.DataLoader(data, 4)
    first = Counting()
    model = model_of(first)
    model.fit(train, epochs=2, verbose=0)
    model.save(tmp_path / "two.h5")
    again = Counting()
    resumed = model_of(again)
    resumed.fit(train, epochs=3, verbose=0, resume_from=tmp_path / "two.h5")
    assert (first.seen, again.seen) == (6, 9)


class Writing(modules.Net):
    """Writes into its batches wherever it gets them."""

    def __init__(self):
        super().__init__(dropout=0.0)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        batch[0].mul_(0.5)
        return batch

    def on_train_batch_start(self, batch, batch_idx):
        batch[1].sub_(1)

    def on_validation_batch_start(self, batch, batch_idx):
        batch[1].sub_(1)

    def training_step(self, batch, batch_idx):
        batch[0].add_(1)
        return self.loss(batch)

    validation_step = training_step

    def on_train_batch_end(self, outputs, batch, batch_idx):
        batch[0].zero_()


def test_a_module_may_write_into_its_batches():
    """Lightning's own Trainer writes into batches that are kept; so it gets new ones."""
    kept = list(loader())
    before = copy.deepcopy(kept)
    theirs, ours = made(Writing)
    trained_by_lightning(theirs, loader(), validation=loader())
    trained(ours, kept, validation=kept)
    assert_equal_weights(ours, theirs, atol=1e-6)
    for one, other in zip(kept, before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
