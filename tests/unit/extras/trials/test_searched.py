"""A search: what is chosen, what is best, what is pruned, and how it goes on."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import LambdaCallback
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.tune import Between, search

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
FIT = {"validation_split": 0.25, "workers": 1, "verbose": 0}
SPACE = {"rate": Between(1e-4, 1.0, log=True), "momentum": [0.0, 0.9], "width": Between(2, 4)}


def build(rate, momentum, width):
    net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)
    model = fitkit.Model(net)
    model.compile(optimizer, "mse", accelerator="cpu", devices=1)
    return model


def given_values(value, **_):
    """A model whose runs have the values of a function of the epoch."""

    def set_value(epoch, logs):
        logs["val_loss"] = value * (epoch + 1)

    model = fitkit.Model(nn.Linear(4, 1))
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    return model, {"callbacks": LambdaCallback(on_epoch_end=set_value)}


def test_the_best_comes_first_and_each_run_has_the_value_of_its_own_training():
    found = search(build, SPACE, X, Y, runs=6, **FIT)
    values = [run.value for run in found.runs]
    assert values == sorted(values) and found.best is found.runs[0] and len(values) == 6
    for run in found.runs:
        assert 1e-4 <= run.params["rate"] <= 1 and run.params["momentum"] in (0.0, 0.9)
        assert run.params["width"] in (2, 3, 4) and type(run.params["width"]) is int
    assert json.loads(found.to_json())["best"]["params"] == found.best.params
    more = search(build, SPACE, X, Y, runs=7, **FIT)
    assert [run for run in more.runs if run.number < 6] == found.runs


def test_ranges_are_even_in_their_own_measure():
    parts = (np.arange(9000) + 0.5) / 9000
    counts = np.bincount([Between(1, 3).at(part) for part in parts])
    assert counts.tolist() == [0, 3000, 3000, 3000]
    assert Between(1e-4, 1.0, log=True).at(0.5) == pytest.approx(1e-2)
    assert Between(0.0, 1.0).at(0.25) == 0.25
    assert {Between(1, 100, log=True).at(part) for part in (0, 1 - 1e-12)} == {1, 100}


def test_it_goes_on_in_its_folder_and_failures_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("fitkit.extras.run_folder.find_spec", lambda name: None)  # no curves
    calls = []

    def counted(value):
        calls.append(value)
        if len(calls) == 2:
            raise ValueError("bad settings")
        if len(calls) == 4:
            raise KeyboardInterrupt
        return given_values(value)

    space = {"value": Between(0.0, 1.0)}
    cut = search(counted, space, X, Y, runs=6, folder=tmp_path, **FIT)
    assert cut.interrupted and len(cut.runs) == 3
    assert cut.runs[-1].state == "failed" and cut.runs[-1].error == "ValueError: bad settings"
    with open(tmp_path / "runs.jsonl", "a") as file:
        file.write('{"number": 4, "par')  # a process that died as it wrote
    found = search(counted, space, X, Y, runs=6, folder=tmp_path, **FIT)
    assert len(found.runs) == 6 and len(calls) == 7 and calls[3] == calls[4]
    assert len(set(calls)) == 6
    complete = [run for run in found.runs if run.state == "complete"]
    assert [run.value for run in complete] == [run.params["value"] for run in complete]
    with pytest.raises(ConfigurationError, match="space"):
        search(counted, {"value": Between(0.0, 2.0)}, X, Y, folder=tmp_path, **FIT)


def test_optuna_chooses_prunes_and_goes_on(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    monkeypatch.setattr("fitkit.extras.run_folder.find_spec", lambda name: None)
    seen = []

    def counted(value, kind):
        seen.append((value, kind))
        if len(seen) == 9:
            raise KeyboardInterrupt
        return given_values(value)

    options = {
        "sampler": "tpe",
        "pruner": optuna.pruners.MedianPruner(n_startup_trials=3),
        "epochs": 3,
        "folder": tmp_path,
        **FIT,
    }
    space = {"value": Between(0.0, 1.0), "kind": ["a", "b"]}
    search(counted, space, X, Y, runs=12, **options)
    found = search(counted, space, X, Y, runs=12, **options)
    assert len(seen) == 13 and seen[8] == seen[9]  # the run that was cut had its settings
    pruned = [run for run in found.runs if run.state == "pruned"]
    assert len(found.runs) == 12 and pruned
    for run in pruned:
        assert 1 <= len(run.reports) <= 3 and run.value is None
        assert run.reports[0] == pytest.approx(run.params["value"])
    assert found.best.value == pytest.approx(3 * found.best.params["value"])
    worst = max(run.params["value"] for run in found.runs if run.state == "complete")
    assert found.best.params["value"] < worst


def test_a_value_that_is_no_number_is_a_failure():
    with pytest.warns(UserWarning, match="No run of 1 has a val_loss.*isn't a finite number"):
        found = search(lambda value: given_values(math.nan), {"value": [1]}, X, Y, runs=1, **FIT)
    assert found.best is None and found.runs[0].state == "failed"
    assert str(found) == "no run has a val_loss"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"space": {}}, ArgumentTypeError),
        ({"space": {"rate": (object(),)}}, ArgumentTypeError),
        ({"space": {"rate": 0.1}}, ArgumentTypeError),
        ({"sampler": "tpa"}, ConfigurationError),
        ({"pruner": 3}, ArgumentTypeError),
        ({"runs": 0}, ConfigurationError),
        ({"build": 3}, ArgumentTypeError),
    ],
)
def test_wrong_arguments_are_refused(change, error):
    arguments = {"build": build, "space": SPACE, **FIT, **change}
    with pytest.raises(error):
        search(arguments.pop("build"), arguments.pop("space"), X, Y, **arguments)
    with pytest.raises(ConfigurationError):
        Between(2, 1)
    with pytest.raises(ConfigurationError):
        Between(0, 1, log=True)
