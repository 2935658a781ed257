"""The search for hostile files itself: a few cases of each kind, in a child as it runs them."""

import json
import sys

import pytest
import torch

import fitkit
from fitkit.errors import CheckpointError
from tests import fuzz
from tests.compiling import every_second


@pytest.mark.parametrize("target", every_second(sorted(fuzz.TARGETS)))
def test_a_few_cases_of_each_target_run_and_find_nothing(tmp_path, target):
    assert fuzz.search(target, [1, 2, 3], tmp_path) == (3, [])


def test_a_crash_an_endless_case_and_another_error_are_findings(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    monkeypatch.setattr(fuzz, "SECONDS", 2)
    for code, words in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("import time; time.sleep(60)", "no end within 2 seconds"),
        ("raise SystemExit(3)", "ended with status 3"),
    ):
        begins = json.dumps({"begins": 7})
        script.write_text(f"print({begins!r}, flush=True)\n{code}\n")
        monkeypatch.setattr(fuzz, "COMMAND", [sys.executable, str(script)])
        ran, ((seed, what),) = fuzz.search("state", [7], tmp_path)
        assert ran == 1 and seed == 7 and words in what


def test_another_error_and_a_model_that_a_refusal_has_changed_are_findings(tmp_path, monkeypatch):
    def raw(model, path):
        raise TypeError("raw")

    def changed(model, path):
        torch.nn.init.ones_(model.net[0].bias)
        raise CheckpointError("refused, too late")

    for wrong, words in ((raw, "TypeError: raw"), (changed, "the model has changed")):
        monkeypatch.setattr(fitkit.Model, "load_weights", wrong)
        found = [fuzz.run_case("safetensors", seed, tmp_path) for seed in range(6)]
        assert any(words in what for what in found)
