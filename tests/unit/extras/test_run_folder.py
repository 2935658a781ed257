"""A run's folder: what is in it however the run ends, and who may write into it."""

import csv
import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fitkit
from fitkit import callbacks
from fitkit.__main__ import main
from fitkit.callbacks import RunFolder
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.run_folder import made_folder
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
        "log.csv", "log.hyperparameters.json", "resume.h5", "run.json", "steps.npy",
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


def test_placeholders_are_filled_in_when_fit_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: form.replace("%Y", "2031").replace("%%", "%"))
    for name in ("runs/3", "runs/x7", "runs/2031-run4b"):
        (tmp_path / name).mkdir(parents=True)
    three = [RunFolder("runs/%n"), RunFolder("runs/%n"), RunFolder("runs/%Y-run%nb/a")]
    assert three[0].resume_path is None
    with pytest.raises(ConfigurationError, match="when fit begins"):
        three[0].path.exists()
    fit([three, RunFolder(tmp_path / "%n" / "%n-%n"), RunFolder("plain")], epochs=1)
    folders = {file.parent.relative_to(tmp_path) for file in tmp_path.rglob("run.json")}
    assert sorted(path.as_posix() for path in folders) == [
        "1/1-1", "plain", "runs/2031-run5b/a", "runs/4", "runs/5",
    ]  # fmt: skip
    folds = three[0]
    for number in (6, 7):  # the folds of a cross-validation
        fit(folds, epochs=2)
        assert folds.path.as_posix() == f"runs/{number}"
    fit(folds, resume_from=folds.resume_path)
    assert folds.path.as_posix() == "runs/7" and len(record_in(folds.path)["epochs"]) == 3


def test_no_two_of_many_jobs_get_one_number(tmp_path):
    with ThreadPoolExecutor(8) as jobs:
        made = list(jobs.map(made_folder, [str(tmp_path / "runs" / "%n")] * 40))
    assert sorted(int(path.name) for path in made) == list(range(1, 41))


class Cut(callbacks.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, batch, logs):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("again", ["the same object", "another one"])
def test_a_run_that_was_cut_in_its_first_epoch_begins_again(error, again, tmp_path):
    runs, whole = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    with pytest.raises(type(error)):
        fit(runs, Cut(error))
    assert runs.resume_path is None and record_in(runs.path)["status"] != "finished"
    runs = runs if again == "the same object" else RunFolder(tmp_path / "a")
    fit(runs, resume_from=runs.resume_path)
    fit(whole)
    assert record_in(runs.path)["status"] == "finished"
    assert record_in(runs.path)["epochs"] == record_in(whole.path)["epochs"]
    assert rows_in(runs.path) == rows_in(whole.path)


def test_a_killed_run_is_free_and_a_running_one_is_not(tmp_path):
    class Looks(callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            if self.model.global_step == 1:
                shutil.copytree(tmp_path / "a", tmp_path / "killed")  # what kill -9 leaves
            if self.model.global_step == 4:  # also after its first epoch
                with pytest.raises(ConfigurationError, match="going on"):
                    fit(RunFolder(tmp_path / "a"))

    fit(RunFolder(tmp_path / "a"), Looks())
    assert record_in(tmp_path / "a")["status"] == "finished"
    assert record_in(tmp_path / "killed")["status"] == "running"
    fit(RunFolder(tmp_path / "killed"))
    assert rows_in(tmp_path / "killed") == rows_in(tmp_path / "a")


def test_a_disk_that_is_full_when_fit_begins_leaves_the_folder_free(tmp_path, monkeypatch):
    def fails(*given):
        raise OSError(28, "No space left on device")

    runs = RunFolder(tmp_path / "a")
    with monkeypatch.context() as full:
        full.setattr("fitkit.extras.run_folder.replace_text", fails)
        with pytest.raises(OSError, match="No space"):
            fit(runs)
    fit(runs)
    assert record_in(runs.path)["status"] == "finished"


def test_what_the_refusal_says_works_when_it_is_followed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(RunFolder("runs/mine"), epochs=2)
    with pytest.raises(ConfigurationError) as caught:
        fit(RunFolder("runs/mine"))
    said = str(caught.value)
    continued = re.search(r"fit\((resume_from=.*?)\), or choose", said)[1]
    options = eval(f"dict({continued})")
    fit(options.pop("callbacks"), **options)
    assert len(record_in(tmp_path / "runs" / "mine")["epochs"]) == 3
    other = eval(re.search(r"RunFolder\('[^']*%n'\)", said)[0])
    fit(other)
    assert other.path.as_posix() == "runs/1"
    (tmp_path / "runs" / "mine" / "resume.h5").unlink()
    with pytest.raises(ConfigurationError, match="Delete the folder"):
        fit(RunFolder("runs/mine"))
    shutil.rmtree("runs/mine")
    fit(RunFolder("runs/mine"))


class Accuracies(fitkit.Model):
    """Validates without a loss."""

    def validation_step(self, batch, batch_idx):
        self.log("val_near", (self(batch[0]) - batch[1]).abs().mean())


@pytest.mark.parametrize(
    ("kind", "data", "given", "best_by", "validation_freq"),
    [
        (fitkit.Model, {"day": (X, Y), "night": (X, -Y)}, None, "val_day_loss", 1),
        (fitkit.Model, {"day": (X, Y), "night": (X, -Y)}, "val_night_loss", "val_night_loss", 1),
        (fitkit.Model, (X, Y), None, "val_loss", 1),
        (fitkit.Model, (X, Y), None, "val_loss", 2),
        (fitkit.Model, (X, Y), None, "val_loss", 0.5),
        (fitkit.Model, None, None, "loss", 1),
        (Accuracies, (X, Y), None, "loss", 0.5),
    ],
)
def test_the_best_weights_are_chosen_by_a_value_that_there_is(
    kind, data, given, best_by, validation_freq, tmp_path
):
    model = reference.compiled(linear(2, 1), loss="mse", learning_rate=0.9, kind=kind)
    runs = RunFolder(tmp_path, given)
    history = model.fit(
        X, Y, batch_size=8, epochs=4, verbose=0, shuffle=False, validation_data=data,
        validation_freq=validation_freq, callbacks=runs,
    )  # fmt: skip
    assert record_in(tmp_path)["monitor"] == best_by
    if validation_freq == 1 and best_by != "loss":
        name = best_by.removeprefix("val_").removesuffix("loss").rstrip("_")
        x, y = data if isinstance(data, tuple) else data[name]
        best = reference.compiled(linear(2, 1), loss="mse")
        best.load_weights(tmp_path / "best.safetensors")
        assert best.evaluate(x, y, verbose=0) == pytest.approx(min(history.history[best_by]))


@pytest.mark.parametrize(
    "others",
    [
        lambda: callbacks.EMA(0.5),
        lambda: callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1),
        lambda: callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
    ],
    ids=["EMA", "SWA", "best"],
)
def test_the_last_weights_are_those_that_fit_leaves(others, tmp_path):
    runs = RunFolder(tmp_path)
    model = fit(runs, others(), learning_rate=0.9)
    last = fitkit.Model(linear(2, 1))
    last.load_weights(tmp_path / "last.safetensors")
    assert torch.equal(last.net.weight, model.net.weight)
    model.load(runs.resume_path)  # the training's own
    assert not torch.equal(last.net.weight, model.net.weight)


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
    runs = RunFolder(tmp_path / "%n")
    model = fitkit.Model(linear(2, 1))
    model.compile("sgd", "mse", devices=2, accelerator="cpu", strategy="ddp_spawn")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=runs)
    record = record_in(runs.path)
    assert record["status"] == "finished" and record["settings"]["world_size"] == 2
    assert [one["loss"] for one in record["epochs"]] == model.history.history["loss"]
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=runs, resume_from=runs.resume_path)
    assert len(record_in(runs.path)["epochs"]) == 3 and runs.path == tmp_path / "1"
