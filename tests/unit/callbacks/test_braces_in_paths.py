"""Braces in a folder's name are part of the name, in each file that a callback writes there."""

import pytest
import torch

import fitkit
from fitkit import callbacks, loggers
from tests.nets import linear, normal

X = normal(8, 4)
Y = X.sum(1, keepdim=True)
RUNS = ["{a}", "{b}", "{epoch}", "{"]


def fit(*watching, epochs=2, **options):
    model = fitkit.Model(linear(4, 1))
    model.compile("sgd", "mse", learning_rate=0.05, accelerator="cpu", devices=1)
    model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(watching), **options)
    return model


def escaped(path):
    return str(path).replace("{", "{{").replace("}", "}}")


def by_parts(folder, **options):
    return callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", **options)


def whole(folder, **options):
    return callbacks.ModelCheckpoint(escaped(folder) + "/{epoch}.h5", **options)


ways = pytest.mark.parametrize("made", [by_parts, whole])


@ways
@pytest.mark.parametrize("options", [{}, {"monitor": "loss", "save_top_k": 1}], ids=str)
def test_each_runs_files_are_in_its_folder(tmp_path, made, options):
    for run in RUNS:
        fit(made(tmp_path / run, save_last=True, **options))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(RUNS)
    kept = ["2.h5", "last.h5"] if options else ["1.h5", "2.h5", "last.h5"]
    for run in RUNS:
        assert sorted(path.name for path in (tmp_path / run).iterdir()) == kept


@ways
def test_a_run_resumes_from_its_own_last_file(tmp_path, made):
    fit(made(tmp_path / "{a}", save_last=True), epochs=1)
    fit(made(tmp_path / "{b}", save_last=True), epochs=3)
    model = fit(made(tmp_path / "{a}", save_last=True), epochs=2, resume_from="last")
    assert len(model.history.epoch) == 2
    assert model.global_step == 4


@ways
def test_a_failed_runs_file_is_there_too(tmp_path, made):
    class Fails(callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == 3:
                raise KeyboardInterrupt

    saves = made(tmp_path / "{a}", save_on_exception=True)
    with pytest.raises(KeyboardInterrupt):
        fit(saves, Fails())
    assert (tmp_path / "{a}" / "exception.h5").is_file()
    model = fit(made(tmp_path / "{a}"), resume_from="last")
    assert model.global_step == 4


def test_the_best_and_the_last_file_need_two_names_there_too(tmp_path):
    path = escaped(tmp_path / "{a}") + "/last.h5"
    with pytest.raises(fitkit.ConfigurationError, match="writes the newest checkpoint there too"):
        callbacks.ModelCheckpoint(path, "loss", save_best_only=True, save_last=True)


@pytest.mark.parametrize(
    "made",
    [
        lambda folder: callbacks.BackupAndRestore(folder, delete_checkpoint=False),
        lambda folder: callbacks.CSVLogger(folder / "log.csv"),
        lambda folder: callbacks.JSONLogger(folder / "log.jsonl"),
        lambda folder: loggers.CSVLogger(folder),
    ],
)
def test_other_files_are_where_they_were_asked_for(tmp_path, made):
    torch.manual_seed(0)
    (tmp_path / "{a}").mkdir()
    fit(made(tmp_path / "{a}"))
    assert [path.name for path in tmp_path.iterdir()] == ["{a}"]
    assert any((tmp_path / "{a}").iterdir())
