"""A long trial of trainings: ranks killed at random moments, and resources over many calls.

    python -m benchmarks.soak                          # some ten minutes
    python -m benchmarks.soak --kills 50 --share 1     # an hour: 50 kills of each kind
    python -m benchmarks.soak --seed 7 --only kills    # or: --only calls

1. Kills. A training of some seconds with dropout, Adam, a schedule, a shuffled loader and
   `BackupAndRestore` is started, and one of its processes is killed by SIGKILL at a random moment:
   while it starts, trains, saves or ends. Under elastic torchrun the ranks are started again by
   torchrun; else by the trial, as a user or a scheduler would. After some kills it may end. Its
   weights must then be those of a training that nobody cut, to the last bit.
2. Calls. Many fits, steps and predict calls in one process, and on two ranks (`ddp_spawn`).
   Memory, open files, threads and shared memory must not grow: the last reading may exceed that
   of two fifths of the way by no more than `ALLOWED`.

Ends with status 1 where anything else happened.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANKS = 2
KILLS_A_TRAINING = 4
LONGEST_S = 300
ALLOWED = {"memory": 12.0, "files": 0, "threads": 0, "shared": 0}
"""MiB of memory, and numbers of the others."""

SCRIPT = """
import os, sys, time
import torch, fitkit
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", 0))
fitkit.set_seed(0)
x, y = torch.randn(640, 16), torch.randint(4, (640,))
layers = torch.nn.Linear(16, 64), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(64, 4)
model = fitkit.Model(torch.nn.Sequential(*layers))
model.compile(
    "adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu",
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    **{"ddp_spawn": {"devices": 2, "strategy": "ddp_spawn"}, "one": {"devices": 1}}.get(
        sys.argv[1], {}))
class Note(fitkit.callbacks.Callback):
    stops_alike = True
    def on_train_begin(self, logs=None):
        name = f"pid{model.global_rank}"
        open(name + ".new", "w").write(str(os.getpid()))
        os.replace(name + ".new", name)
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.004)
backup = fitkit.callbacks.BackupAndRestore("backup", save_freq=7, keep=2)
loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
history = model.fit(loader, epochs=20, verbose=0, callbacks=[Note(), backup])
if model.is_global_zero:
    torch.save([list(model.state_dict().values()), history.history["loss"]], "end.new")
    os.replace("end.new", "end.pt")
"""


# ------------------------------------------------------------------------------------ kills


@dataclasses.dataclass
class Training:
    """A way to train that somebody kills.

    Attributes:
        name: for the table.
        how: the script's argument.
        elastic: whether torchrun starts ranks again.
    """

    name: str
    how: str
    elastic: bool = False

    def command(self) -> list[str]:
        """Return what starts it."""
        launcher: list[str] = []
        if self.how == "torchrun":
            restarts = str(10 * KILLS_A_TRAINING if self.elastic else 0)
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            launcher += [str(RANKS), "--max-restarts", restarts]
        return [sys.executable, *launcher, "train.py", self.how]


TRAININGS = (
    Training("one process", "one"),
    Training("two ranks, ddp_spawn", "ddp_spawn"),
    Training("two ranks, elastic torchrun", "torchrun", elastic=True),
)


def started(training: Training, folder: Path) -> subprocess.Popen[bytes]:
    """Return the training's process, in a session of its own."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return subprocess.Popen(
        training.command(), cwd=folder, env={**os.environ, **variables}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=(folder / "errors.txt").open("ab"),
    )  # fmt: skip


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill all that a training has started, and see that it has gone."""
    for number in sessions_processes(process.pid):
        try_to_kill(number)
    process.wait()


def sessions_processes(session: int) -> list[int]:
    """Return the processes whose session, or whose parents' session, it is."""
    parents: dict[int, int] = {}
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.name)] = int(fields[1])
            if int(fields[3]) == session:
                found.add(int(path.name))
    while more := {number for number, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def try_to_kill(number: int) -> bool:
    """Whether there was such a process to kill."""
    try:
        os.kill(number, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def ended_in_time(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """Whether a training that nobody kills any more has ended well."""
    try:
        return process.wait(LONGEST_S) == 0 and (folder / "end.pt").exists()
    except subprocess.TimeoutExpired:
        return False


def kill_and_go_on(
    training: Training, folder: Path, generator: random.Random, duration_s: float
) -> Counter[str]:
    """One training with its kills, to its end; what happened, by a word for it."""
    found: Counter[str] = Counter()
    process = started(training, folder)
    try:
        while found["kills"] < KILLS_A_TRAINING:
            for path in folder.glob("pid*"):
                path.unlink(missing_ok=True)
            deadline = time.monotonic() + LONGEST_S
            early = generator.random() < 0.2  # while it starts
            while not early and not list(folder.glob("pid[0-9]")):
                if process.poll() is not None or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            time.sleep(generator.uniform(0, 4.0 if early else duration_s / 2))
            if process.poll() is not None:
                break  # it has ended before the kill
            numbers = sessions_processes(process.pid)
            if training.elastic:  # whom torchrun has started: its own end is another trial
                numbers = [number for number in numbers if number != process.pid]
            if numbers and try_to_kill(generator.choice(numbers)):
                found["kills"] += 1
            if not training.elastic:
                try:
                    process.wait(60)  # rank 0 notices a worker's end by itself
                except subprocess.TimeoutExpired:
                    found["WRONG: went on or hung after a kill"] += 1
                end_session(process)
                found["starts again"] += 1
                process = started(training, folder)
        if not ended_in_time(process, folder):
            if training.elastic or process.poll() is None:
                found[f"WRONG: no end (status {process.poll()})"] += 1
            else:  # it was killed just before; the same command goes on
                found["starts again"] += 1
                process = started(training, folder)
                if not ended_in_time(process, folder):
                    found[f"WRONG: no end (status {process.poll()})"] += 1
    finally:
        end_session(process)
    return found


def outcome(folder: Path) -> bytes:
    """Return what a training has come to: weights and losses as bytes."""
    import torch

    weights, losses = torch.load(folder / "end.pt")
    return b"".join(weight.numpy().tobytes() for weight in weights) + repr(losses).encode()


def kills(count: int, generator: random.Random) -> Iterator[tuple[str, Counter[str]]]:
    """Kill trainings of each kind about `count` times."""
    for training in TRAININGS:
        found: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder, "whole")
            make(whole)
            if not ended_in_time(started(training, whole), whole):
                raise SystemExit((whole / "errors.txt").read_text())
            trained = whole / "end.pt", whole / "pid0"
            duration_s = trained[0].stat().st_mtime - trained[1].stat().st_mtime
            expected = outcome(whole)
            number = 0
            while found["kills"] < count:
                number += 1
                cut = Path(folder, f"cut{number}")
                make(cut)
                one = kill_and_go_on(training, cut, generator, duration_s)
                if any(word.startswith("WRONG") for word in one):
                    print((cut / "errors.txt").read_text()[-4000:], file=sys.stderr, flush=True)
                else:
                    equal = outcome(cut) == expected
                    one["equal ends" if equal else "WRONG: other weights"] += 1
                found.update(one)
                found["trainings"] += 1
        yield training.name, found


def make(folder: Path) -> None:
    """Make a folder with the script."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)


# ------------------------------------------------------------------------------------ calls

CALLS = """
import gc, json, os, sys, torch, fitkit
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
what, devices, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
x, y = torch.randn(256, 16), torch.randint(4, (256,))
layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
model = fitkit.Model(torch.nn.Sequential(*layers))
model.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu", devices=devices)
loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
def read(number):
    gc.collect()
    total = [0.0, 0, 0]
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    for pid in ["self", *children]:
        status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)
        total[0] += int(status["VmRSS"].split()[0]) / 1024
        total[1] += len(os.listdir(f"/proc/{pid}/fd"))
        total[2] += int(status["Threads"])
    shared = sum("torch" in name or "sem" in name for name in os.listdir("/dev/shm"))
    print(json.dumps([number, *total, shared]), flush=True)
class Count(fitkit.callbacks.Callback):
    stops_alike = True
    done = 0
    def on_train_batch_end(self, batch, logs=None):
        if model.is_global_zero:
            Count.done += 1
            if Count.done % (count // 5) == 0:
                read(Count.done)
if what == "steps":
    model.fit(x, y, batch_size=2, epochs=count * devices // 128 + 1, verbose=0, callbacks=Count())
else:
    call = {"fits": lambda: model.fit(loader, epochs=1, verbose=0, validation_data=(x, y)),
            "predicts": lambda: model.predict(x, verbose=0)}[what]
    for number in range(1, count + 1):
        call()
        if number % (count // 5) == 0:
            read(number)
"""

COUNTS = {"fits": (300, 1), "fits on two ranks": (300, 2), "steps": (50_000, 1),
          "steps on two ranks": (50_000, 2), "predicts": (10_000, 1),
          "predicts on two ranks": (10_000, 2)}  # fmt: skip


def calls(share: float) -> Iterator[tuple[str, list[list[float]], str]]:
    """Yield readings (number, memory, files, threads, shared) of each kind, and what is wrong."""
    for name, (whole, devices) in COUNTS.items():
        count = max(int(whole * share), 50)
        command = [sys.executable, "-c", CALLS, name.split()[0], str(devices), str(count)]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True
        )
        readings = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode or len(readings) < 5:
            yield name, readings, f"WRONG: {done.stderr[-2000:]}"
            continue
        grown = {
            key: readings[4][column] - readings[1][column]
            for column, key in enumerate(ALLOWED, start=1)
        }
        wrong = [f"{key} +{grown[key]:g}" for key, most in ALLOWED.items() if grown[key] > most]
        yield name, readings[:5], f"WRONG: {', '.join(wrong)}" if wrong else ""


def main() -> int:
    """Run the trials; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="of each kind of training")
    parser.add_argument("--share", type=float, default=0.1, help="of the calls; 1 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("kills", "calls"))
    given = parser.parse_args()
    wrong = False
    if given.only != "calls":
        print("| training | trainings | kills | started again | ends with the same weights |")
        print("|---|---|---|---|---|", flush=True)
        for name, found in kills(given.kills, random.Random(given.seed)):
            notes = [f"{word} ({n})" for word, n in found.items() if word.startswith("WRONG")]
            wrong = wrong or bool(notes)
            cells = [found[key] for key in ("trainings", "kills", "starts again", "equal ends")]
            again = "by torchrun" if "torchrun" in name else cells[2]
            print(
                f"| {name} | {cells[0]} | {cells[1]} | {again} | {cells[3]} {' '.join(notes)} |",
                flush=True,
            )
    if given.only != "kills":
        print("\n| calls | number | memory, MiB | open files | threads | shared memory |")
        print("|---|---|---|---|---|---|", flush=True)
        for name, readings, problem in calls(given.share):
            wrong = wrong or bool(problem)
            columns = [
                " → ".join(f"{readings[at][column]:,.0f}" for at in (0, 1, 4))
                for column in range(5)
                if len(readings) == 5
            ]
            print(f"| {name} | {' | '.join(columns)} {problem} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
