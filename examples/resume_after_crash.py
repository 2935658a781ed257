"""A training that is killed goes on, and ends with the weights of one that never was.

    pip install scikit-learn
    python examples/resume_after_crash.py       # some 30 seconds: it starts itself four times

Shows `BackupAndRestore`: run the same script again after a crash, and it goes on from the last
backup. Here the training runs in a process of its own, which is killed (kill -9: nothing can be
caught or cleaned up) twice in the middle of an epoch, then runs to its end. Expect not one bit of
difference from the weights of an uninterrupted training; on a GPU some kernels add numbers up in
an order of their own, so it stays on the CPU.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import fitkit
from fitkit.callbacks import BackupAndRestore, LambdaCallback

EPOCHS = 6


def train(backups: str, weights: str) -> None:
    """Do what a user's script does."""
    fitkit.set_seed(0)
    images, digits = load_digits(return_X_y=True)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu", devices=1)
    say = LambdaCallback(on_train_batch_end=lambda batch, logs: print("step", flush=True))
    history = model.fit(
        images / 16,
        digits,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[BackupAndRestore(backups, save_freq=20), say],
    )
    print("losses", *(f"{loss:.6f}" for loss in history.history["loss"]))
    model.save_weights(weights)


def run(backups: Path, weights: Path, kill_after: int | None = None) -> tuple[int, str]:
    """Train in another process: the steps that it made, and the losses of all epochs."""
    command = [sys.executable, __file__, str(backups), str(weights)]
    steps, losses = 0, ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            steps += line == "step\n"
            losses = line.strip() if line.startswith("losses") else losses
            if steps == kill_after:
                process.kill()
    return steps, losses


def compare() -> None:
    """Kill a training twice, and one never."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        whole = run(place / "unused", place / "whole.pt")
        for kill_after in (130, 100):
            steps, _ = run(place / "backups", place / "resumed.pt", kill_after)
            print(f"killed after          {steps} steps")
        resumed = run(place / "backups", place / "resumed.pt")
        print(f"went on, and made     {resumed[0]} steps of the {whole[0]} of a whole training")
        print(f"whole    {whole[1]}")
        print(f"resumed  {resumed[1]}")
        one, other = torch.load(place / "whole.pt"), torch.load(place / "resumed.pt")
    difference = max(float((one[name] - other[name]).abs().max()) for name in one)
    print(f"largest difference    {difference:g} of any weight")


if len(sys.argv) == 3:
    train(*sys.argv[1:])
else:
    compare()
