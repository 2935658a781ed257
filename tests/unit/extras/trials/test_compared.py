"""Comparing models over seeds: pairs, early ends, failures, folders."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from fitkit.callbacks import LambdaCallback
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.tune import compare

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.3 * torch.randn(96, 1, generator=torch.Generator().manual_seed(1))
FIT = {"validation_split": 0.25, "workers": 1, "verbose": 0}


def build(rate=0.05, net=None):
    model = fitkit.Model(net or nn.Linear(4, 1))
    model.compile("sgd", "mse", learning_rate=rate, accelerator="cpu", devices=1)
    return model


def noted(noise, offset=0.0):
    """A builder whose runs have the values that a function of torch's random numbers gives."""

    def made():
        value = noise() + offset

        def set_value(epoch, logs):
            logs["val_accuracy"] = value

        return build(), {"callbacks": [LambdaCallback(on_epoch_end=set_value)]}

    return made


def test_the_better_one_is_named_after_the_first_seeds_that_settle_it():
    found = compare({"slow": lambda: build(1e-3), "fast": build}, X, Y, **FIT)
    assert found.better == "fast" and len(found.seeds) == 6
    differences = np.subtract(found.runs["fast"], found.runs["slow"])
    assert found.difference == pytest.approx(differences.mean())
    low, high = found.interval
    assert low < found.difference < high < 0  # a loss: less is better
    assert str(found).startswith("fast is better by ") and "6 seeds" in str(found)
    again = compare({"slow": lambda: build(1e-3), "fast": build}, X, Y, seeds=range(2, 20), **FIT)
    assert again.seeds[:4] == [2, 3, 4, 5] and again.runs["fast"][:4] == found.runs["fast"][2:6]
    other_way = compare({"fast": build, "slow": lambda: build(1e-3)}, X, Y, **FIT)
    assert other_way.better == "fast" and other_way.pairs["slow"].verdict == "worse"
    assert other_way.runs["fast"] == found.runs["fast"]


def test_no_difference_worth_it_ends_the_runs_too():
    noise = lambda: 0.9 + 0.001 * torch.randn(()).item()  # noqa: E731
    shifted = lambda: 0.9 + 0.001 * torch.randn(3)[2].item()  # noqa: E731
    names = {"a": noted(noise), "b": noted(shifted)}
    found = compare(names, X, Y, metric="val_accuracy", practical=0.005, **FIT)
    assert found.better is None and found.pairs["b"].verdict == "no difference"
    assert len(found.seeds) < 20 and str(found).startswith("no difference worth 0.5 points")


def test_without_a_difference_all_seeds_are_used():
    found = compare({"a": build, "b": build}, X, Y, seeds=7, **FIT)
    assert found.better is None and found.difference == 0.0
    assert str(found) == "not settled after 7 seeds"


def test_a_seed_gives_all_the_same_weights_where_shapes_are_equal_and_the_same_batches():
    weights, batches = {}, {}

    class Seen(nn.Module):
        def __init__(self, name, *layers):
            super().__init__()
            self.layers, self.name = nn.Sequential(*layers), name

        def forward(self, x):
            if self.training:
                batches.setdefault(self.name, []).append(x.clone())
            return self.layers(x)

    def of(name, layers):
        net = Seen(name, *layers())
        weights.setdefault(name, []).append([p.detach().clone() for p in net.parameters()])
        return build(net=net)

    def orthogonal():
        first = nn.Linear(4, 8)
        nn.init.orthogonal_(first.weight)
        return first, nn.Linear(8, 1)

    compare(
        {
            "plain": lambda: of("plain", lambda: (nn.Linear(4, 8), nn.Linear(8, 1))),
            "deep": lambda: of(
                "deep", lambda: (nn.Linear(4, 8), nn.Linear(8, 5), nn.Linear(5, 8), nn.Linear(8, 1))
            ),
            "dropped": lambda: of(
                "dropped", lambda: (nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
            ),
            "own": lambda: of("own", orthogonal),
        },
        X, Y, seeds=8, **FIT,
    )  # fmt: skip
    for seed in range(2):
        plain, deep, dropped, own = (weights[name][seed] for name in weights)
        assert torch.equal(plain[0], deep[0]) and torch.equal(plain[2], deep[6])
        assert all(map(torch.equal, plain, dropped))
        assert torch.allclose(own[0].T @ own[0], torch.eye(4), atol=1e-5)  # its own way to begin
        assert torch.equal(own[2], plain[2])
    assert not torch.equal(weights["plain"][0][0], weights["plain"][1][0])
    assert all(
        torch.equal(a, b)
        for name in ("deep", "dropped", "own")
        for a, b in zip(batches["plain"][:9], batches[name][:9], strict=True)
    )


def test_pairs_halve_the_variance_of_the_difference_on_digits():
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")

    def digits(rate):
        model = fitkit.Model(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)))
        model.compile(
            "adam", "cross_entropy", metrics=["accuracy"], learning_rate=rate, devices=1,
            accelerator="cpu",
        )  # fmt: skip
        return model

    names = {"a": lambda: digits(1e-3), "b": lambda: digits(1.1e-3)}
    found = compare(names, x, y, metric="val_accuracy", batch_size=64, practical=1e-9, **FIT)
    a, b = (np.array(values) for values in found.runs.values())
    unpaired = a.var(ddof=1) + b.var(ddof=1)
    assert len(a) >= 6 and (b - a).var(ddof=1) <= unpaired / 2


def test_a_failing_run_is_reported_and_the_rest_goes_on():
    calls = []

    def at_times():
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no luck")
        if len(calls) == 3:
            return build(), {"callbacks": [LambdaCallback(on_epoch_end=lost)]}
        return build()

    def lost(epoch, logs):
        logs["val_loss"] = math.nan

    found = compare({"a": lambda: build(1e-3), "b": at_times}, X, Y, **FIT)
    assert [(one.name, one.seed) for one in found.failures] == [("b", 1), ("b", 2)]
    assert found.failures[0].error == "ValueError: no luck"
    assert found.runs["b"][1:3] == [None, None] and found.pairs["b"].seeds == 6
    assert found.better == "b" and "2 runs of b failed" in str(found)


def test_a_candidate_that_only_fails_is_given_up():
    def broken():
        raise ValueError("never")

    found = compare({"a": lambda: build(1e-3), "b": broken, "c": build}, X, Y, **FIT)
    assert found.better == "c" and len(found.failures) == 3
    with pytest.raises(ConfigurationError, match="ValueError: never"):
        compare({"a": build, "b": broken}, X, Y, **FIT)
    with pytest.raises(ConfigurationError, match="val_acuracy"):
        compare({"a": build, "b": build}, X, Y, metric="val_acuracy", **FIT)


def test_ctrl_c_returns_what_is_known():
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return build()

    found = compare({"a": build, "b": interrupted}, X, Y, **FIT)
    assert found.interrupted and len(found.seeds) == 3
    assert str(found) == "not settled after 3 seeds, interrupted"


def test_a_folder_keeps_each_run_and_a_later_call_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("fitkit.extras.run_folder.find_spec", lambda name: None)  # no curves
    calls = []

    def counted(stop):
        def made():
            calls.append(1)
            if len(calls) == stop:
                raise KeyboardInterrupt
            return build()

        return made

    def both(stop):
        return {"slow": lambda: build(1e-3), "fast": counted(stop)}

    whole = compare(both(0), X, Y, epochs=2, **FIT)
    calls.clear()
    assert compare(both(3), X, Y, epochs=2, folder=tmp_path, **FIT).interrupted
    found = compare(both(0), X, Y, epochs=2, folder=tmp_path, **FIT)
    assert len(calls) == 7  # the third call was interrupted
    assert found.runs == whole.runs and found.interval == whole.interval
    assert json.loads((tmp_path / "fast" / "0" / "run.json").read_text())["status"] == "finished"
    with pytest.raises(ConfigurationError, match="epochs"):
        compare(both(0), X, Y, epochs=3, folder=tmp_path, **FIT)
    with pytest.raises(ConfigurationError, match="name"):
        compare({"a": build, "../b": build}, X, Y, folder=tmp_path, **FIT)
    (tmp_path / "runs.jsonl").write_text("hello\n")
    with pytest.raises(ConfigurationError, match="isn't a file of runs"):
        compare(both(0), X, Y, epochs=2, folder=tmp_path, **FIT)


@pytest.mark.timeout(120)
def test_two_workers_find_what_one_finds():
    names = {"slow": lambda: build(1e-3), "fast": build}
    one = compare(names, X, Y, seeds=8, **FIT)
    two = compare(names, X, Y, seeds=8, **{**FIT, "workers": 2})
    assert one.runs == two.runs and one.interval == two.interval


def test_it_is_data_a_table_and_a_picture(capsys, tmp_path):
    found = compare({"slow": lambda: build(1e-3), "fast": build}, X, Y, **{**FIT, "verbose": 1})
    lines = capsys.readouterr().out
    assert "seed 5: slow" in lines and str(found) in lines and "██" in lines
    plain = json.loads(found.to_json())
    assert plain["better"] == "fast" and plain["runs"]["fast"] == found.runs["fast"]
    assert plain["interval"] == list(found.interval) and plain["text"] == str(found)
    pytest.importorskip("matplotlib")
    found.plot(path=tmp_path / "runs.png")
    assert (tmp_path / "runs.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"seeds": 5}, ConfigurationError),
        ({"seeds": [3, 1, 2, 3, 4, 5, 6]}, ConfigurationError),
        ({"folder": "runs/%n"}, ConfigurationError),
        ({"level": 1.0}, ConfigurationError),
        ({"practical": 0}, ConfigurationError),
        ({"epoch": 3}, ArgumentTypeError),
        ({"workers": "two"}, ArgumentTypeError),
        ({"metric": "val_thing"}, ConfigurationError),
        ({"validation_data": iter([])}, ConfigurationError),
    ],
)
def test_wrong_arguments_are_refused_before_a_run(change, error):
    def never():
        raise AssertionError

    with pytest.raises(error):
        compare({"a": never, "b": never}, X, Y, **{**FIT, **change})
    with pytest.raises(ArgumentTypeError):
        compare({"a": build(), "b": build}, X, Y, **FIT)
    with pytest.raises(ConfigurationError):
        compare({"a": build}, X, Y, **FIT)
