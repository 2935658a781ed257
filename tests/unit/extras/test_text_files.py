"""Files with a row or a line an epoch: their exact content."""

import json
import math
import os

import pytest
import torch

import fitkit
from fitkit.callbacks import Callback, CSVLogger, JSONLogger
from fitkit.errors import ArgumentTypeError, ConfigurationError

X, Y = torch.ones(2, 1), torch.zeros(2, 1)


class Plays(Callback):
    """Replaces the epochs' logs."""

    def __init__(self, *logs):
        self.logs = logs

    def on_epoch_end(self, epoch, logs):
        logs.clear()
        logs.update(self.logs[epoch])


def fit(logger, *logs, first=0):
    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    model.fit(
        X, Y, epochs=len(logs), initial_epoch=first, verbose=0, callbacks=[Plays(*logs), logger]
    )


def test_a_table_has_a_row_an_epoch(tmp_path):
    path = tmp_path / "log.csv"
    logger = CSVLogger(path)
    fit(logger, {"loss": 0.5, "b": 1}, {"loss": 0.25, "b": math.nan})
    assert path.read_text() == "epoch,loss,b\n0,0.5,1\n1,0.25,nan\n"
    fit(logger, {"loss": 1.0})
    assert path.read_text() == "epoch,loss\n0,1.0\n"  # a second fit begins anew


def test_columns_that_come_later_are_added_and_lists_and_separators_kept(tmp_path):
    path = tmp_path / "log.tsv"
    fit(
        CSVLogger(str(path), separator="\t"),
        {"loss": 0.5},
        {"loss": 0.25, "val_loss": 2.0},
        {"loss": 0.125, "matrix": torch.tensor([[1, 2], [3, 4]]), 'odd,"name': "a\tb"},
    )
    rows = path.read_text().splitlines()
    assert rows[0] == 'epoch\tloss\tval_loss\tmatrix\t"odd,""name"'
    assert rows[1:3] == ["0\t0.5\tNA\tNA\tNA", "1\t0.25\t2.0\tNA\tNA"]
    assert rows[3] == '2\t0.125\tNA\t[[1, 2], [3, 4]]\t"a\tb"'
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_goes_on_after_a_crash(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss,old\n0,0.5,1\n1,0.2")  # the last row was cut short
    fit(CSVLogger(path, append=True), {}, {"loss": 0.25, "new": 7}, {"loss": 0.1}, first=1)
    assert path.read_text() == ("epoch,loss,old,new\n0,0.5,1,NA\n1,0.25,NA,7\n2,0.1,NA,NA\n")
    fit(CSVLogger(tmp_path / "fresh.csv", append=True), {"loss": 1.0})
    assert (tmp_path / "fresh.csv").read_text() == "epoch,loss\n0,1.0\n"


def test_json_lines_are_json_whatever_the_values(tmp_path):
    path = tmp_path / "log.jsonl"
    logs = {"loss": math.inf, "matrix": torch.tensor([1.0, math.nan]), "k": {"a": 1}, "o": object}
    fit(JSONLogger(path), {"loss": 0.5}, logs)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.open()]
    assert lines[0] == {"epoch": 0, "loss": 0.5}
    assert lines[1] | {"o": ""} == {
        "epoch": 1, "loss": None, "matrix": [1.0, None], "k": {"a": 1}, "o": "",
    }  # fmt: skip
    with path.open("a") as file:
        file.write('{"epoch": 2, "lo')
    fit(JSONLogger(path, append=True), {"loss": 0.1})
    assert [json.loads(line)["epoch"] for line in path.open()] == [0, 1, 0]


def test_epochs_that_are_made_again_after_a_restart_are_replaced(tmp_path):
    for logger, read in ((CSVLogger, _csv_epochs), (JSONLogger, _json_epochs)):
        path = tmp_path / logger.__name__
        fit(logger(path), *[{"loss": float(epoch)} for epoch in range(4)])
        fit(logger(path, append=True), {}, {}, {"loss": 9.0}, {"loss": 8.0}, first=2)
        assert read(path) == [(0, 0.0), (1, 1.0), (2, 9.0), (3, 8.0)]


def _csv_epochs(path):
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    return [(int(epoch), float(loss)) for epoch, loss in rows]


def _json_epochs(path):
    return [(entry["epoch"], entry["loss"]) for entry in map(json.loads, path.open())]


def test_logs_called_as_a_column_and_names_that_utf8_cannot_say_are_kept_beside(tmp_path):
    logs = [{"epoch": 7.5, "epoch_": 8.5, "a\ud800": 2.0, "text": "\udfff"}] * 3
    table, lines = tmp_path / "log.csv", tmp_path / "log.json"
    for first in (0, 1):  # a restart makes the epochs from 1 on again
        fit(CSVLogger(table, append=True), *logs, first=first)
        fit(JSONLogger(lines, append=True), *logs, first=first)
        assert table.read_text(encoding="utf-8") == (
            "epoch,epoch_,epoch__,a\\ud800,text\n"
            "0,7.5,8.5,2.0,\\udfff\n1,7.5,8.5,2.0,\\udfff\n2,7.5,8.5,2.0,\\udfff\n"
        )
        records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        assert records == [
            {"epoch": epoch, "epoch_": 7.5, "epoch__": 8.5, "a\\ud800": 2.0, "text": "\udfff"}
            for epoch in range(3)
        ]


def test_a_table_is_never_widened_through_somebody_elses_link(tmp_path):
    path, other = tmp_path / "log.csv", tmp_path / "other"
    other.write_text("secret")
    (tmp_path / f"log.csv.{os.getpid()}.tmp").symlink_to(other)
    fit(CSVLogger(path), {"loss": 0.5})
    assert path.read_text() == "epoch,loss\n0,0.5\n"
    assert other.read_text() == "secret"


def test_what_can_not_be_written_is_said_before_training(tmp_path):
    seen = []

    class Sees(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(epoch)

    model = fitkit.Model(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    for logger in (CSVLogger, JSONLogger):
        for append in (True, False):
            callback = logger(tmp_path / "absent" / "log", append=append)
            with pytest.raises(FileNotFoundError):
                model.fit(X, Y, verbose=0, callbacks=[callback, Sees()])
    assert seen == []


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: CSVLogger(5), ArgumentTypeError),
        (lambda: CSVLogger("a.csv", separator=", "), ConfigurationError),
        (lambda: CSVLogger("a.csv", append="yes"), ArgumentTypeError),
        (lambda: JSONLogger(None), ArgumentTypeError),
        (lambda: JSONLogger(""), ArgumentTypeError),
    ],
)
def test_wrong_arguments_fail_at_construction(make, error):
    with pytest.raises(error):
        make()
