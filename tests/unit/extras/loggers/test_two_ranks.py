"""Loggers on two real ranks: written once, with the epochs' values of both."""

import csv
import json

import pytest
import torch

import fitkit
from fitkit import loggers
from fitkit.extras.launchers.workers import end_workers

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(autouse=True)
def _no_worker_left():
    yield
    end_workers()


def test_rank_zero_alone_writes_and_epochs_have_all_ranks_values(tmp_path):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 2, generator=generator), torch.randn(16, 1, generator=generator)
    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", devices=2, accelerator="cpu", strategy="ddp_spawn")
    given = [
        loggers.CSV(tmp_path / "a.csv", "batch"),
        loggers.JSONLines(tmp_path / "a.jsonl"),
        loggers.TensorBoard(tmp_path / "logs"),
    ]
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=given).history
    settings, *records = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert settings["hyperparameters"]["world_size"] == 2
    assert [(r["step"], r["epoch"], r["loss"]) for r in records] == [
        (2, 0, history["loss"][0]), (4, 1, history["loss"][1]),
    ]  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4", "4"]
    assert len(list((tmp_path / "logs").rglob("events*"))) == 1
    events = tensorboard.EventAccumulator(str(tmp_path / "logs" / "train")).Reload()
    assert [e.value for e in events.Scalars("epoch_loss")] == pytest.approx(history["loss"])
