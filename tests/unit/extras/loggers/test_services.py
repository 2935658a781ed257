"""Weights & Biases offline and MLflow's folder, with the real packages."""

import struct

import pytest
import torch

import fitkit
from fitkit import callbacks, loggers, pictures
from fitkit.errors import ArgumentTypeError, ConfigurationError

BLOCK, FULL, LAST = 32768, 1, 4
X, Y = torch.randn(8, 2), torch.randn(8, 1)


def fit(*given, **options):
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", learning_rate=0.1)
    return model.fit(
        X, Y, batch_size=4, verbose=0, callbacks=list(given), **{"epochs": 2, **options}
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An MLflow folder's address."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    return f"file:{tmp_path}/runs"


def test_mlflow_keeps_settings_values_and_figures(folder):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from mlflow import MlflowClient

    logger = loggers.MLflow("mine", "first", folder, update_freq=1)

    class Adds(callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logs["per cent (%)"] = float("nan")
            logger.log_figure("curve", figure)

    history = fit(Adds(), logger).history
    client = MlflowClient(folder)
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "first"
    assert run.data.params["learning_rate"] == "0.1" and run.data.params["loss"] == "mse"
    losses = client.get_metric_history(logger.run_id, "loss")
    assert sorted((m.step, m.value) for m in losses) == list(
        zip([2, 4], history["loss"], strict=True)
    )
    assert len(client.get_metric_history(logger.run_id, "batch_loss")) == 4
    assert "per cent ___" in run.data.metrics
    assert [f.path for f in client.list_artifacts(logger.run_id)] == ["curve_2.png", "curve_4.png"]


@pytest.mark.slow
def test_mlflow_goes_on_with_a_run_and_says_how_one_ended(folder, tmp_path):
    from mlflow import MlflowClient

    class Fails(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError

    logger, again = (loggers.MLflow(tracking_uri=folder) for _ in range(2))
    with pytest.raises(RuntimeError):
        fit(logger, callbacks.ModelCheckpoint(tmp_path / "a.h5"), Fails())
    client = MlflowClient(folder)
    assert client.get_run(logger.run_id).info.status == "FAILED"
    fit(again, resume_from=tmp_path / "a.h5", epochs=3)
    assert again.run_id == logger.run_id
    assert client.get_run(logger.run_id).info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(logger.run_id, "loss")] == [2, 4, 6]


def test_mlflow_uses_a_run_of_yours_and_leaves_it_open(folder, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", folder)
    with mlflow.start_run() as run:
        fit(loggers.MLflow())
        assert mlflow.MlflowClient().get_run(run.info.run_id).info.status == "RUNNING"
    assert "loss" in mlflow.MlflowClient().get_run(run.info.run_id).data.metrics


def test_mlflows_arguments_are_checked(folder):
    with pytest.raises(ArgumentTypeError, match="experiment"):
        loggers.MLflow(3)


def test_a_figure_at_a_wrong_time_is_refused(folder, tmp_path):
    for logger in (loggers.MLflow(), loggers.TensorBoard(tmp_path / "logs")):
        with pytest.raises(ConfigurationError, match="while fit runs"):
            logger.log_figure("curve", None)


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_wandb_offline_keeps_all_in_its_file(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = loggers.WandB("mine", 1, mode="offline", dir=str(tmp_path), name="first")

    class Draws(callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            logger.log_figure("confusion", pictures.confusion_matrix([0, 1], [0, 1]))

    try:
        history = fit(logger, Draws()).history
    finally:
        wandb.teardown()  # its helper process, too
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = wandb_records(file)
    rows = [
        {
            item.key or "/".join(item.nested_key): float(item.value_json)
            for item in r.history.item
            if item.value_json[0] not in '{"'  # a picture's
        }
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    drawn = list(tmp_path.glob("wandb/offline-run-*/files/media/**/*.png"))
    assert [file.read_bytes()[1:4] for file in drawn] == [b"PNG"] * 2
    assert [r["loss"] for r in rows if "loss" in r] == history["loss"]
    assert [r["step"] for r in rows if "batch_loss" in r] == [1, 2, 3, 4]
    assert [(r["step"], r["epoch"]) for r in rows if "epoch" in r] == [(2, 0), (4, 1)]
    settings = {
        item.key or item.nested_key[0]: item.value_json
        for r in records
        if r.WhichOneof("record_type") in ("run", "config")
        for item in (r.run.config.update if r.HasField("run") else r.config.update)
    }
    assert settings["learning_rate"] == "0.1" and settings["loss"] == '"mse"'


def wandb_records(file):
    """The records of a run's file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = file.read_bytes(), 7, b"", []
    while place < len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK  # too little room for another header
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (FULL, LAST):
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return found


def test_wandbs_options_are_checked_at_once():
    pytest.importorskip("wandb")
    with pytest.raises(ArgumentTypeError, match="Did you mean 'project'"):
        loggers.WandB(projekt="mine")
