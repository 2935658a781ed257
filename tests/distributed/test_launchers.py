"""Ranks that torchrun started: one process's numbers, refusals on each of them, and failures.

Those that a script starts itself are in test_script.py.
"""

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import fitkit
from tests.distributed.test_script import SAVES
from tests.limits import patience

pytestmark = pytest.mark.timeout(90)

SCRIPT = """
    import os, time
    import torch, fitkit
    from fitkit.callbacks import LambdaCallback
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    x, y = torch.randn(103, 6), torch.randint(3, (103,))
    model = fitkit.Model(torch.nn.Linear(6, 3))
    def compile(**arguments):
        model.compile("sgd", "cross_entropy", metrics=["accuracy"], learning_rate=0.1,
                      accelerator="cpu", **arguments)
    refused = []
    for devices in (1, 3):
        try:
            compile(devices=devices)
        except fitkit.ConfigurationError as error:
            refused.append(str(error).splitlines()[0])
    compile()
    def again_compiled():
        again = fitkit.Model(torch.nn.Linear(6, 3))
        again.compile("sgd", "cross_entropy", accelerator="cpu")
        return again
    def train(**arguments):
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, **arguments)
    train()
    loss, accuracy = model.evaluate(x, y, verbose=0)
    rows = len(model.predict(x, verbose=0))
    names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT".split()
    seen = all(name in os.environ for name in names)
    with open(f"rank{model.global_rank}.txt", "w") as file:
        print(model.world_size, loss, accuracy, rows, seen, *refused, sep="\\n", file=file)
    trained = model
    SAVES
    def fail(epoch, logs):
        open("failed", "w").close()
        raise KeyError("mine")
    model = trained
    train(callbacks=LambdaCallback(on_epoch_end=fail) if model.global_rank == 1 else None)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of torchrun: its folder, its status and what it wrote to standard error."""
    folder = tmp_path_factory.mktemp("torchrun")
    path = folder / "train.py"
    saves = textwrap.dedent(SAVES).replace("compiled()", "again_compiled()").strip()
    path.write_text(textwrap.dedent(SCRIPT).replace("SAVES\n", saves + "\n"))
    inherited = {name: value for name, value in os.environ.items() if name != "FITKIT_LAUNCHED"}
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(path)],
        capture_output=True, text=True, timeout=patience(80), cwd=folder,
        env={**inherited, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ended = time.time()
    assert (folder / "failed").exists(), done.stderr
    return folder, done.returncode, done.stderr, ended - (folder / "failed").stat().st_mtime


def results(folder):
    """What each rank wrote."""
    return [(folder / f"rank{rank}.txt").read_text().splitlines() for rank in (0, 1)]


def test_every_rank_gets_the_numbers_of_one_process(ended):
    ranks = results(ended[0])
    assert ranks[0] == ranks[1]
    size, loss, accuracy, rows, seen, *_ = ranks[1]
    assert (size, rows, seen) == ("2", "103", "True")
    torch.manual_seed(0)
    x, y = torch.randn(103, 6), torch.randint(3, (103,))
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], learning_rate=0.1,
                  accelerator="cpu", devices=1)  # fmt: skip
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    expected = model.evaluate(x, y, verbose=0)
    assert [float(loss), float(accuracy)] == pytest.approx(expected, abs=1e-6)


def test_what_was_started_and_what_is_asked_must_agree_on_every_rank(ended):
    for *_, alone, three in results(ended[0]):
        for devices, message in ((1, alone), (3, three)):
            assert message.startswith("torchrun") and "started 2 processes" in message
            assert f"devices={devices}" in message


def test_every_rank_reads_what_rank_0_has_saved(ended):
    folder = ended[0]
    assert (folder / "alone.h5").exists()
    assert (folder / "read0.txt").read_text().startswith("CheckpointError")
    assert (folder / "read1.txt").read_text().startswith("WorkerError: Rank 0 failed (CheckpointEr")


def test_a_rank_that_fails_is_named_by_the_others(ended):
    _, code, err, seconds = ended
    assert code != 0 and seconds < 30
    errors = re.findall(r"^(?:\[rank\d\]: )?(?:fitkit.errors.)?(\w+Error: .*)$", err, re.MULTILINE)
    assert sorted(error for error in errors if not error.startswith("ChildFailed")) == [
        "KeyError: 'mine'",
        "WorkerError: Rank 1 failed: KeyError: 'mine'",
    ]
