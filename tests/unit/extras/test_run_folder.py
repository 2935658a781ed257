"""A run's folder: what is in it however the run ends, and who may write into it."""

import csv
import json
import sys

import pytest
import torch

import fitkit
from fitkit import callbacks
from fitkit.__main__ import main
from fitkit.callbacks import RunFolder
from fitkit.errors import ArgumentTypeError, ConfigurationError
from tests import reference
from tests.nets import linear, regression

X, Y = regression(32, 2)


def fit(runs, *others, epochs=3, learning_rate=0.1, validation_split=0.25, **options):
    model = reference.compiled(linear(2, 1), loss="mse", learning_rate=learning_rate)
    model.fit(
        X, Y, batch_size=8, epochs=epochs, verbose=0, shuffle=False,
        validation_split=validation_split, callbacks=[*others, runs], **options,
    )  # fmt: skip
    return model


def record_in(path):
    return json.loads((path / "run.json").read_text())


def rows_in(path):
    with open(path / "log.csv") as file:
        return [(row["epoch"], row["loss"], row["val_loss"]) for row in csv.DictReader(file)]


def test_it_holds_settings_environment_values_curves_and_weights(tmp_path):
    pytest.importorskip("matplotlib")
    runs = RunFolder(tmp_path / "first")
    model = fit(runs)
    assert sorted(file.name for file in runs.path.iterdir()) == [
        "best.safetensors", "curves.png", "index.html", "last.safetensors",
        "log.csv", "log.hyperparameters.json", "resume.h5", "run.json",
    ]  # fmt: skip
    record, history = record_in(runs.path), model.history.history
    assert record["status"] == "finished" and record["begun"] <= record["ended"]
    assert record["settings"]["learning_rate"] == 0.1 and record["settings"]["epochs"] == 3
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["python"] == sys.version.split()[0]
    assert [one["val_loss"] for one in record["epochs"]] == history["val_loss"]
    assert [float(row[1]) for row in rows_in(runs.path)] == history["loss"]
    assert (runs.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (runs.path / "index.html").read_text()
    assert f"{history['val_loss'][-1]:.6g}" in page and "data:image/png" in page
    last = fitkit.Model(linear(2, 1))
    last.load_weights(runs.path / "last.safetensors")
    assert torch.equal(last.net.weight, model.net.weight)


def test_the_best_weights_are_those_of_the_best_validation_or_else_of_the_best_loss(tmp_path):
    seen = []

    class Keeps(callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            seen.append((logs.get("val_loss", logs["loss"]), self.model.net.weight.clone()))

    for number, split in enumerate([0.25, 0.0]):
        seen.clear()
        runs = RunFolder(tmp_path / str(number))
        fit(runs, Keeps(), learning_rate=0.9, epochs=4, validation_split=split)
        best = fitkit.Model(linear(2, 1))
        best.load_weights(runs.path / "best.safetensors")
        assert torch.equal(best.net.weight, min(seen, key=lambda pair: pair[0])[1])


def test_another_training_is_refused_and_a_resumed_one_continues(tmp_path):
    runs, whole = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    fit(runs, epochs=2)
    before = {file.name: file.read_bytes() for file in runs.path.iterdir()}
    for other in (RunFolder(tmp_path / "a"), runs):
        with pytest.raises(ConfigurationError, match="holds a run"):
            fit(other)
    assert {file.name: file.read_bytes() for file in runs.path.iterdir()} == before
    fit(RunFolder(tmp_path / "a"), epochs=4, resume_from=runs.resume_path)
    fit(whole, epochs=4)
    assert rows_in(runs.path) == rows_in(whole.path)
    record = record_in(runs.path)
    assert record["id"] == json.loads(before["run.json"])["id"] and record["continues"] == ""
    assert record["epochs"] == record_in(whole.path)["epochs"]
    with pytest.raises(ConfigurationError, match="holds a run"):  # it belongs to the other folder
        fit(RunFolder(tmp_path / "b"), epochs=5, resume_from=runs.resume_path)
    elsewhere = RunFolder(tmp_path / "c")
    fit(elsewhere, epochs=5, resume_from=runs.resume_path)
    assert record_in(elsewhere.path)["continues"] == record["id"]


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("<why>"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_it_says_how_a_run_ended_and_can_be_continued(error, status, tmp_path):
    class Fails(callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.current_epoch == 2:
                raise error

    runs, whole = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    with pytest.raises(type(error)):
        fit(runs, Fails())
    record, page = record_in(runs.path), (runs.path / "index.html").read_text()
    assert record["status"] == status and len(record["epochs"]) == 2
    assert status in page and "<why>" not in page
    fit(runs, resume_from=runs.resume_path)
    fit(whole)
    assert record_in(runs.path)["status"] == "finished" and record_in(runs.path)["error"] == ""
    assert rows_in(runs.path) == rows_in(whole.path)


def test_placeholders_stand_for_the_next_number_and_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: form.replace("%Y", "2031").replace("%%", "%"))
    assert RunFolder("runs/%n").path.as_posix() == "runs/1"
    for name in ("runs/3", "runs/x7", "runs/2031-run4b"):
        (tmp_path / name).mkdir(parents=True)
    assert RunFolder("runs/%n").path.as_posix() == "runs/4"
    assert RunFolder("runs/%Y-run%nb").path.as_posix() == "runs/2031-run5b"
    assert RunFolder(tmp_path / "%n" / "%n").path == tmp_path / "1" / "1"
    assert RunFolder("plain").path.as_posix() == "plain"


def test_two_runs_are_compared_by_their_folders(tmp_path, capsys):
    pytest.importorskip("rich")
    one, other = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    fit(one)
    fit(other, learning_rate=0.2)
    assert main(["diff", str(one.path), str(other.path)]) == 0
    shown = capsys.readouterr().out
    assert "settings" in shown and "learning_rate" in shown and "2 of 2 tensors differ" in shown


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, '{"id": 3}', "\udcff"])
def test_a_record_that_fitkit_did_not_write_refuses_the_folder(content, tmp_path):
    (tmp_path / "run.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigurationError, match="holds a run"):
        fit(RunFolder(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_without_matplotlib_there_are_no_curves(tmp_path, monkeypatch):
    monkeypatch.setattr("fitkit.extras.run_folder.find_spec", lambda name: None)
    runs = RunFolder(tmp_path)
    fit(runs)
    assert (
        not (tmp_path / "curves.png").exists()
        and "<img" not in (tmp_path / "index.html").read_text()
    )


def test_wrong_arguments_fail_at_once():
    with pytest.raises(ArgumentTypeError, match="folder"):
        RunFolder(3)
    with pytest.raises(ConfigurationError, match="URL|folder"):
        RunFolder("s3://bucket/run")
    with pytest.raises(ConfigurationError, match="needs arguments"):
        callbacks.CallbackList("run_folder")


def test_rank_zero_alone_keeps_the_folder(tmp_path):
    runs = RunFolder(tmp_path / "a")
    model = fitkit.Model(linear(2, 1))
    model.compile("sgd", "mse", devices=2, accelerator="cpu", strategy="ddp_spawn")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=runs)
    record = record_in(runs.path)
    assert record["status"] == "finished" and record["settings"]["world_size"] == 2
    assert [one["loss"] for one in record["epochs"]] == model.history.history["loss"]
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=runs, resume_from=runs.resume_path)
    assert len(record_in(runs.path)["epochs"]) == 3
