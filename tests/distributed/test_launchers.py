"""Ranks started by the script itself and by torchrun: one process's numbers, and agreement."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import fitkit

pytestmark = pytest.mark.timeout(90)

SCRIPT = """
    import argparse, os
    import torch, fitkit
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--strategy", default="auto")
    given = parser.parse_args()
    torch.manual_seed(0)
    x, y = torch.randn(103, 6), torch.randint(3, (103,))
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], learning_rate=0.1,
                  accelerator="cpu", devices=given.devices, strategy=given.strategy)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    loss, accuracy = model.evaluate(x, y, verbose=0)
    rows = len(model.predict(x, verbose=0))
    names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT".split()
    seen = all(name in os.environ for name in names) or model.is_global_zero
    with open(f"rank{model.global_rank}.txt", "w") as file:
        print(model.world_size, loss, accuracy, rows, seen, file=file)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(tmp_path, launcher, *arguments):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    inherited = {name: value for name, value in os.environ.items() if name != "FITKIT_LAUNCHED"}
    return subprocess.run(
        [sys.executable, *launcher, str(path), *arguments],
        capture_output=True, text=True, timeout=80, cwd=tmp_path,
        env={**inherited, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [([], ["--devices", "2", "--strategy", "ddp"]), (TORCHRUN, [])],
    ids=["script", "torchrun"],
)
def test_every_rank_gets_the_numbers_of_one_process(tmp_path, launcher, arguments):
    done = run(tmp_path, launcher, *arguments)
    assert done.returncode == 0, done.stderr
    ranks = [(tmp_path / f"rank{rank}.txt").read_text().split() for rank in (0, 1)]
    assert ranks[0][:4] == ranks[1][:4]
    size, loss, accuracy, rows, seen = ranks[1]
    assert (size, rows, seen) == ("2", "103", "True")
    torch.manual_seed(0)
    x, y = torch.randn(103, 6), torch.randint(3, (103,))
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], learning_rate=0.1,
                  accelerator="cpu", devices=1)  # fmt: skip
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    expected = model.evaluate(x, y, verbose=0)
    assert [float(loss), float(accuracy)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("devices", ["1", "3"])
def test_what_was_started_and_what_is_asked_must_agree_on_every_rank(tmp_path, devices):
    done = run(tmp_path, TORCHRUN, "--devices", devices)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "ConfigurationError: torchrun" in line]
    assert len(errors) == 2
    assert all("started 2 processes" in line and f"devices={devices}" in line for line in errors)
