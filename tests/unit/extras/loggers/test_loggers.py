"""What loggers write and when: step by step against the batches' own losses."""

import builtins
import csv
import json
import math
import os

import cloudpickle
import pytest
import torch

import fitkit
from fitkit import callbacks, loggers
from fitkit.errors import ArgumentTypeError, ConfigurationError, MissingPackageError
from fitkit.extras.watches import BatchLosses
from tests import reference
from tests.nets import linear, regression

X, Y = regression(20, 2)


class Keeps(loggers.Logger):
    """A logger as one writes it: it keeps all in lists."""

    def __init__(self, update_freq="epoch", step="batches"):
        super().__init__(update_freq, step)
        self.told = []

    def start(self):
        self.told.append(("start", self.resumes))

    def log_hyperparameters(self, values):
        self.told.append(("settings", values))

    def log_scalars(self, values, step, epoch):
        self.told.append((step, epoch, values))

    def finish(self, error=None):
        self.told.append(("finish", error))

    def records(self, *, of_epochs):
        return [t for t in self.told if len(t) == 3 and (t[1] is not None) == of_epochs]


def compiled(**arguments):
    arguments = {"loss": "mse", "learning_rate": 0.1, **arguments}
    return reference.compiled(linear(2, 1), **arguments)


def fit(model, *loggers_, epochs=2, **options):
    return model.fit(
        X, Y, batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=loggers_, **options
    )


def plain_losses(epochs, learning_rate=0.1):
    """Each batch's loss and the epochs' means, by plain PyTorch."""
    net = compiled().net
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    losses = []
    for batch in reference.slices(X, Y, 4) * epochs:
        losses += reference.plain_loop(net, optimizer, [batch], loss=torch.nn.functional.mse_loss)
    return losses


def test_a_logger_is_told_the_settings_once_and_each_epoch_with_its_step():
    logger = Keeps()
    fit(compiled(), logger)
    losses = plain_losses(2)
    assert [t[0] for t in logger.told] == ["start", "settings", 5, 10, "finish"]
    assert [t[:2] for t in logger.records(of_epochs=True)] == [(5, 0), (10, 1)]
    means = [t[2]["loss"] for t in logger.records(of_epochs=True)]
    assert means == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5])
    assert logger.told[-1] == ("finish", None)


@pytest.mark.parametrize("every", ["batch", 1, 2, 4])
def test_between_epochs_it_is_told_the_mean_loss_of_the_last_batches(every):
    logger = Keeps(every)
    fit(compiled(), logger)
    n, losses = 1 if every == "batch" else every, plain_losses(2)
    found = {step: values["batch_loss"] for step, _, values in logger.records(of_epochs=False)}
    # A window doesn't reach back into the last epoch.
    begins = {step: max(step - n, 5 * ((step - 1) // 5)) for step in range(n, 11, n)}
    assert found == pytest.approx(
        {step: sum(losses[b:step]) / (step - b) for step, b in begins.items()}
    )
    assert all(v["batch_learning_rate"] == 0.1 for _, _, v in logger.records(of_epochs=False))
    steps = [t[0] for t in logger.told if len(t) == 3]
    assert steps == sorted(steps)


def test_steps_may_count_updates_which_accumulate_batches():
    """An epoch of five batches makes updates of two, two and one. A further fit continues."""
    logger = Keeps(2, "updates")
    model = compiled(accumulate_grad_batches=2, learning_rate=0.0)
    fit(model, logger)
    fit(model, logger, epochs=1)
    losses = plain_losses(1, learning_rate=0.0)
    first, second, last = sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]
    found = [(step, values["batch_loss"]) for step, _, values in logger.records(of_epochs=False)]
    expected = {
        2: sum(losses[:4]) / 4,
        4: first,
        6: (2 * second + last) / 3,
        8: sum(losses[:4]) / 4,
    }
    assert found == [(step, pytest.approx(loss)) for step, loss in expected.items()]
    assert [t[:2] for t in logger.records(of_epochs=True)] == [(3, 0), (6, 1), (9, 0)]
    assert logger.step == model.global_step == 9


def test_each_of_several_optimizers_makes_updates_that_steps_count():
    class Two(fitkit.Model):
        def training_step(self, batch, batch_idx, optimizer_idx):
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return [torch.optim.SGD([p], 0.1) for p in self.net.parameters()]

    logger = Keeps(4, "updates")
    model = Two(linear(2, 1))
    model.compile(loss="mse")
    fit(model, logger)
    assert [t[0] for t in logger.records(of_epochs=False)] == [4, 8, 12, 16, 20]
    assert [t[0] for t in logger.records(of_epochs=True)] == [10, 20]
    with pytest.raises(ConfigurationError, match="'batches' or 'updates'"):
        Keeps(step="epochs")


def test_each_batchs_loss_costs_no_look_at_the_device(monkeypatch):
    """All losses of an epoch are read at once."""
    looks = []
    take = BatchLosses.take

    def taken(self):
        found = take(self)
        looks.extend([1] if found else [])  # where nothing is kept, nothing is read
        return found

    monkeypatch.setattr(BatchLosses, "take", taken)
    fit(compiled(), Keeps("batch"), epochs=2)
    assert len(looks) == 2


def test_it_sees_what_later_callbacks_add_and_numbers_only():
    class Adds(callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logs.update(
                extra=torch.tensor([2]), nothing=math.nan, matrix=torch.ones(2, 2), text="a"
            )

    logger = Keeps()
    fit(compiled(), logger, Adds(), epochs=1)
    values = logger.records(of_epochs=True)[0][2]
    assert (
        values["extra"] == 2.0 and type(values["extra"]) is float and math.isnan(values["nothing"])
    )
    assert not {"matrix", "text"} & set(values)


def test_settings_are_plain_and_the_same_in_every_process():
    def my_loss(prediction, target):
        return ((prediction - target) ** 2).mean()

    logger, model = Keeps(), compiled(loss=my_loss, metrics=["mae"], gradient_clip_val=0.5)
    model.compile(optimizer=torch.optim.Adam)
    fit(model, logger, epochs=1)
    values = logger.told[1][1]
    assert values["loss"] == "my_loss" and values["optimizer"] == "Adam"
    assert values["metrics"] == "mae" and values["gradient_clip_val"] == 0.5
    assert (values["epochs"], values["batch_size"], values["parameters"]) == (1, 4, 3)
    assert all(type(v) in (str, int, float, bool) for v in values.values())
    assert not any("0x" in str(v) for v in values.values())


def test_a_fit_that_fails_is_finished_with_its_error_and_its_last_losses():
    class Fails(callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if batch == 2:
                raise RuntimeError("no power")

    logger = Keeps("batch")
    with pytest.raises(RuntimeError, match="no power"):
        fit(compiled(), logger, Fails())
    assert [t[0] for t in logger.records(of_epochs=False)] == [1, 2]
    assert logger.told[-1][0] == "finish" and str(logger.told[-1][1]) == "no power"


def test_other_ranks_write_nothing(monkeypatch):
    logger = Keeps("batch")
    monkeypatch.setattr(fitkit.Model, "is_global_zero", False)
    fit(compiled(), logger)
    assert logger.told == []
    assert (logger.step, logger.state_dict()["epoch"]) == (10, 1)


@pytest.mark.parametrize("step", ["batches", "updates"])
@pytest.mark.parametrize("made", [loggers.CSV, loggers.JSONLines])
def test_a_resumed_training_has_the_rows_of_a_whole_one(made, step, tmp_path):
    """Cut in the middle of the second epoch, after rows that the checkpoint doesn't know."""

    class Cuts(callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.current_epoch == 1 and batch == 3:
                raise KeyboardInterrupt

    def train(path, *given, **options):
        model = compiled(accumulate_grad_batches=2)
        fit(model, made(path, "batch", step=step), *given, epochs=3, **options)

    saver = callbacks.ModelCheckpoint(tmp_path / "s.h5", every_n_train_steps=7)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole)
    with pytest.raises(KeyboardInterrupt):
        train(cut, saver, Cuts())
    train(cut, resume_from=tmp_path / "s.h5")
    assert cut.read_text() == whole.read_text()


def test_a_table_and_lines_can_be_read_back(tmp_path):
    table, lines = loggers.CSV(tmp_path / "a.csv", 5), loggers.JSONLines(tmp_path / "a.jsonl")
    history = fit(compiled(), table, lines, validation_data=(X, Y)).history
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [(row["step"], row["epoch"]) for row in rows] == [
        ("5", "NA"), ("5", "0"), ("10", "NA"), ("10", "1"),
    ]  # fmt: skip
    assert [float(row["val_loss"]) for row in rows[1::2]] == history["val_loss"]
    settings, *records = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [r["loss"] for r in records] == history["loss"]
    assert settings["hyperparameters"] == json.loads(
        (tmp_path / "a.hyperparameters.json").read_text()
    )
    fit(compiled(), table, lines, epochs=1)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2  # a new fit begins anew


class Names(callbacks.Callback):
    """Adds logs called as the loggers' own columns, and one that UTF-8 can't say."""

    def on_epoch_end(self, epoch, logs):
        logs.clear()
        logs.update({"epoch": 7.5, "step": 8.5, "step_": 9.5, "a\ud800": 1.0})


def test_names_of_columns_and_names_that_utf8_cannot_say_are_kept_beside(tmp_path):
    table, lines = tmp_path / "log.csv", tmp_path / "log.jsonl"
    saves = callbacks.ModelCheckpoint(tmp_path / "run.h5")

    def made():
        return loggers.CSV(table), loggers.JSONLines(lines), Names()

    fit(compiled(), *made(), saves, epochs=1)
    fit(compiled(), *made(), epochs=2, resume_from=tmp_path / "run.h5")
    names = ["epoch_", "step_", "step__", "a\\ud800"]
    rows = list(csv.reader(table.read_text(encoding="utf-8").splitlines()))
    values = ["7.5", "8.5", "9.5", "1.0"]
    assert rows == [["step", "epoch", *names], ["5", "0", *values], ["10", "1", *values]]
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    own = dict(zip(names, map(float, values), strict=True))
    assert records[1:] == [{"step": 5, "epoch": 0, **own}, {"step": 10, "epoch": 1, **own}]


def test_a_logger_travels_to_other_ranks_after_a_fit_too(tmp_path):
    logger = loggers.JSONLines(tmp_path / "a.jsonl", "batch")
    fit(compiled(), logger, epochs=1)
    fit(compiled(), cloudpickle.loads(cloudpickle.dumps(logger)), epochs=1)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 1 + 5 + 1


def test_with_update_freq_1_each_step_has_its_metrics_and_what_it_logged():
    class Logs(callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            self.model.log("number", batch, on_step=True)

    logger = Keeps(1)
    fit(compiled(metrics=["mae"], learning_rate=0.0), Logs(), logger, epochs=1)
    found = [values for _, _, values in logger.records(of_epochs=False)]
    assert [values["batch_number"] for values in found] == [0, 1, 2, 3, 4]
    errors = (compiled().net(X) - Y).detach().abs()
    so_far = [errors[: 4 * n].mean().item() for n in range(1, 6)]
    assert [values["batch_mae"] for values in found] == pytest.approx(so_far)


@pytest.mark.parametrize("given", [0, -1, "step", 1.5, True, None])
def test_a_wrong_update_freq_fails_at_once(given):
    with pytest.raises(ConfigurationError, match="update_freq"):
        Keeps(given)


def test_wrong_paths_and_flags_fail_at_once(tmp_path):
    for make in (loggers.CSV, loggers.JSONLines, callbacks.TensorBoard):
        with pytest.raises(ArgumentTypeError, match="must be a path"):
            make(3)
    with pytest.raises(ArgumentTypeError, match="append"):
        loggers.CSV(tmp_path / "a", append=1)


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("wandb", lambda: loggers.WandB("p")),
        ("mlflow", lambda: loggers.MLflow()),
        ("tensorboard", lambda: loggers.TensorBoard("logs")),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package, make, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == package or name == f"torch.utils.{package}":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=rf"torch-fitkit\[{package}\]"):
        make()
    assert not os.path.exists("logs")
