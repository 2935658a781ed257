"""The loggers under Lightning's names: the same folders, the main arguments."""

import csv

import pytest
import torch

import fitkit
from fitkit import loggers


def fit(logger):
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    x = torch.ones(4, 1)
    model.fit(x, x, epochs=2, verbose=0, callbacks=logger)


def test_csv_logger_writes_metrics_into_the_next_version(tmp_path):
    for _ in range(2):
        fit(loggers.CSVLogger(tmp_path / "new", name="mine"))
    for version in (0, 1):
        with open(tmp_path / "new" / "mine" / f"version_{version}" / "metrics.csv") as file:
            assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1"]
    fixed = loggers.CSVLogger(tmp_path, name=None, version="best")
    assert fixed.log_dir == tmp_path / "best"
    assert loggers.CSVLogger(tmp_path, version=3).log_dir == tmp_path / "lightning_logs/version_3"


def rows_of(path):
    with open(path) as file:
        return [row["epoch"] for row in csv.DictReader(file)]


def test_each_training_has_a_version_of_its_own_whichever_logger_was_made_first(tmp_path):
    first, second = (loggers.CSVLogger(tmp_path, "mine") for _ in range(2))
    for logger in (second, first, second):  # made together; one of them used twice
        fit(logger)
    found = sorted(path.name for path in (tmp_path / "mine").iterdir())
    assert found == ["version_0", "version_1", "version_2"]
    assert all(rows_of(tmp_path / "mine" / name / "metrics.csv") == ["0", "1"] for name in found)
    assert [first.log_dir.name, second.log_dir.name] == ["version_1", "version_2"]
    assert first.path == first.log_dir / "metrics.csv"


def test_the_loggers_of_one_fit_share_a_version(tmp_path):
    pytest.importorskip("tensorboard")
    both = loggers.TensorBoardLogger(tmp_path), loggers.CSVLogger(tmp_path)
    for number in range(2):
        fit(list(both))
        assert {logger.log_dir.name for logger in both} == {f"version_{number}"}
        assert len(list(both[0].log_dir.iterdir())) >= 2


def test_a_training_that_goes_on_keeps_its_version(tmp_path):
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    x, logger = torch.ones(4, 1), loggers.CSVLogger(tmp_path, "mine")
    model.fit(x, x, epochs=2, verbose=0, callbacks=logger)
    model.fit(x, x, epochs=4, initial_epoch=2, verbose=0, callbacks=logger)
    assert rows_of(tmp_path / "mine" / "version_0" / "metrics.csv") == ["0", "1", "2", "3"]
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_tensor_board_logger_writes_lightnings_folders_and_names(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = loggers.TensorBoardLogger(tmp_path, name="mine")
    fit(logger)
    assert isinstance(logger, loggers.TensorBoard)
    (file,) = (tmp_path / "mine" / "version_0").iterdir()
    written = events.EventAccumulator(str(file))
    written.Reload()
    assert {"loss", "epoch"} <= set(written.Tags()["scalars"])
    steps = [event.step for event in written.Scalars("loss")]
    assert steps == [event.step for event in written.Scalars("epoch")] == [1, 2]
    assert [event.value for event in written.Scalars("epoch")] == [0, 1]
    assert loggers.TensorBoardLogger(tmp_path, "mine").log_dir == tmp_path / "mine" / "version_1"


def test_wandb_logger_is_wandb_with_lightnings_arguments(tmp_path):
    pytest.importorskip("wandb")
    logger = loggers.WandbLogger(
        name="a", save_dir=tmp_path, offline=True, project="p", tags=["t"], update_freq=2
    )
    assert isinstance(logger, loggers.WandB)
    assert logger.options == {"name": "a", "dir": tmp_path, "mode": "offline", "tags": ["t"]}
    assert (logger.project, logger.update_freq) == ("p", 2)
    with pytest.raises(fitkit.ConfigurationError, match="no argument 'log_model'"):
        loggers.WandbLogger(log_model=True)


def test_mlflow_logger_is_mlflow_with_lightnings_arguments(tmp_path):
    pytest.importorskip("mlflow")
    logger = loggers.MLFlowLogger("e", run_name="r", save_dir=str(tmp_path))
    assert isinstance(logger, loggers.MLflow)
    assert (logger.experiment, logger.run_name) == ("e", "r")
    assert logger.tracking_uri == f"file:{tmp_path}"
    assert loggers.MLFlowLogger(tracking_uri="sqlite:///a.db").tracking_uri == "sqlite:///a.db"


@pytest.mark.parametrize(("options", "name"), [
    ({"save_dir": 3}, "save_dir"), ({"save_dir": "a", "name": 3}, "name"),
    ({"save_dir": "a", "version": 1.5}, "version"), ({"save_dir": "a", "version": True}, "version"),
])  # fmt: skip
def test_wrong_arguments_fail_at_construction(options, name):
    with pytest.raises(TypeError, match=f"{name}="):
        loggers.CSVLogger(**options)
