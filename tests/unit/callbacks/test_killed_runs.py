"""Runs killed at any step of their saves: the next one leaves what is wanted, and no other file."""

import json
import os
import subprocess
import sys

import pytest

# One process imports torch; each of its children trains, and is killed before its n-th change of a
# file or folder (0: never). It says the status, and what lies in the folder afterwards.
RUNS = """
import json, os, sys, tempfile, torch
import fitkit
from fitkit.callbacks import BackupAndRestore, Callback, ModelCheckpoint
from fitkit.extras.dcp import unfinished_folder

x, y = torch.ones(16, 3), torch.ones(16, 1)

class Plays(Callback):
    def on_epoch_end(self, epoch, logs):
        logs["val_loss"] = [4.0, 3.0, 2.5, 2.0, 9.0][epoch]

def callback(kind, folder):
    if kind == "backup":
        return BackupAndRestore(folder, asynchronous=True)
    if kind == "backup-dcp":
        return BackupAndRestore(folder, sharded=True)
    name, suffix = kind.split(".")
    return ModelCheckpoint(f"{folder}/{{epoch}}.{suffix}", save_top_k=2, save_last=True,
                           asynchronous=name == "thread")

def die_at(number):
    left = [number]
    def dying(call):
        def wrapped(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return call(*arguments, **options)
        return wrapped
    for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "link", "fsync"):
        setattr(os, name, dying(getattr(os, name)))
    unfinished_folder._exchange = dying(unfinished_folder._exchange)

def run(kind, folder, number):
    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Linear(3, 1))
    model.compile("sgd", "mse")
    saves = callback(kind, folder)
    resume = {} if kind.startswith("backup") else {"resume_from": "last"}
    if number is not None:
        die_at(number)
    model.fit(x, y, epochs=5, verbose=0, validation_data=(x, y), callbacks=[saves, Plays()],
              **resume)

with tempfile.TemporaryDirectory() as folder:  # imports what is imported late
    for kind in ("once.h5", "once.dcp", "backup"):
        run(kind, os.path.join(folder, kind), None)

for line in sys.stdin:
    kind, folder, number = json.loads(line)
    child = os.fork()
    if not child:
        try:
            run(kind, folder, number)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    print(json.dumps([status, found]), flush=True)
"""


@pytest.fixture(scope="module")
def run():
    """Calls a run in a new process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = subprocess.Popen([sys.executable, "-c", RUNS], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, env=environment)  # fmt: skip

    def call(kind, folder, number):
        print(json.dumps([kind, str(folder), number]), file=runs.stdin, flush=True)
        return json.loads(runs.stdout.readline())

    yield call
    runs.stdin.close()
    runs.kill()
    runs.wait()
    runs.stdout.close()


WANTED = {
    "once.h5": ["3.h5", "4.h5", "last.h5"],
    "thread.h5": ["3.h5", "4.h5", "last.h5"],
    "once.dcp": ["3.dcp", "4.dcp", "last.dcp"],
    "backup": [],
    "backup-dcp": [],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kind",
    [*list(WANTED)[:2], *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(WANTED)[2:])],
)
def test_what_a_run_leaves_that_is_killed_at_any_step_is_gone_after_the_next(tmp_path, run, kind):
    # Folders take many steps, most of them alike.
    every = 7 if "dcp" in kind else 5
    for number in range(1, 200, every):
        folder = tmp_path / str(number)
        status, _ = run(kind, folder, number)
        assert status in (9, 0)
        assert run(kind, folder, 0) == [0, WANTED[kind]], number
        if status == 0:
            break
    assert number > 20
