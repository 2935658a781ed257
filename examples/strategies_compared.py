"""The same class on the same samples under every strategy: what is the same, and what isn't.

    python examples/strategies_compared.py                  # about half a minute
    python examples/strategies_compared.py --rows dp ddp    # some of them

Two nets take 20 steps with 32 samples each. The classifier's loss is a mean over samples: every
strategy must learn the same. The contrastive loss of `training_step_end` is over all pairs of a
batch, so it tells how much of the batch it was given. The table has the last loss, and the largest
difference of any weight from one process's. The exit status is 1 where a strategy that should learn
what one process learns doesn't.

`ddp` starts this script once more for its second rank; for two "nodes" on this machine it is
started by torchrun, once a node.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit

STEPS = 20
SAMPLES = 32  # of an update, over all devices
SAME = 1e-6
ROWS: dict[str, dict[str, Any]] = {
    "one process": {"strategy": "single_device"},
    "dp": {"strategy": "dp", "devices": 2},
    "ddp_spawn": {"strategy": "ddp_spawn", "devices": 2},
    "ddp": {"strategy": "ddp", "devices": 2},
    "ddp2": {"strategy": "ddp2", "devices": 2},
    "ddp2, 2 nodes": {"strategy": "ddp2", "devices": 2, "num_nodes": 2},
}
SHARES = {"ddp_spawn": 2, "ddp": 2, "ddp2, 2 nodes": 2}
"""Into how many batches a strategy's ranks divide an update's samples; else one has them all."""
LAUNCHED = ("ddp", "ddp2, 2 nodes")
"""The strategies that start the script anew, or need a launcher."""


class Classifier(fitkit.Model):
    """A loss that is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (B, 64) to logits (B, 10)."""
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Contrastive(Classifier):
    """A loss over all pairs of samples: an image's upper half is to find its lower half."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        return {"upper": self(x[:, :32]), "lower": self(x[:, 32:])}

    def training_step_end(self, outputs: Any) -> torch.Tensor:
        likeness = outputs["upper"] @ outputs["lower"].T * 4
        self.log("pairs", float(likeness.numel()), reduce_fx="max")
        return F.cross_entropy(likeness, torch.arange(len(likeness), device=likeness.device))


class Gathering(Contrastive):
    """The same, with the other ranks' embeddings."""

    def training_step_end(self, outputs: Any) -> torch.Tensor:
        return super().training_step_end(self.all_gather(outputs))


CLASSES = (Classifier, Contrastive, Gathering)


def measured(row: str, into: Path) -> None:
    """Train each class under one strategy; rank 0 writes what came of it to a file."""
    digits = load_digits()
    images = torch.tensor(digits.data[: STEPS * SAMPLES] / 16.0, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(digits.target[: STEPS * SAMPLES]))
    found = {}
    for kind in CLASSES:
        fitkit.set_seed(0)
        model = kind()
        model.compile(accelerator="cpu", **ROWS[row])
        loader = DataLoader(data, batch_size=SAMPLES // SHARES.get(row, 1))
        history = model.fit(loader, verbose=0).history
        weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
        found[kind.__name__] = {
            "loss": history["loss"][0],  # the mean over all steps
            "pairs": int(history.get("pairs", [0])[0]),
            "weights": weights,
        }
    if model.is_global_zero:
        torch.save(found, into)


def start(row: str, into: Path) -> None:
    """Have a row measured: here, or by processes of its own."""
    if row not in LAUNCHED:
        measured(row, into)
        return
    own = [__file__, "--row", row, "--into", str(into)]
    nodes = ROWS[row].get("num_nodes", 1)
    if nodes == 1:
        subprocess.run([sys.executable, *own], check=True, timeout=120)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    launch += [f"--nnodes={nodes}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    started = [subprocess.Popen([*launch, f"--node-rank={node}", *own]) for node in range(nodes)]
    try:
        if any(process.wait(timeout=120) for process in started):
            raise RuntimeError(f"{row}: a node failed; see above.")
    finally:
        for process in started:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="*", choices=list(ROWS)[1:], default=list(ROWS)[1:])
    parser.add_argument("--row", help=argparse.SUPPRESS)  # given to the processes of a row
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        measured(arguments.row, arguments.into)
        return 0

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in ["one process", *arguments.rows]:
            into = Path(folder) / "row.pt"
            start(row, into)
            results[row] = torch.load(into)
    failed = False
    for kind in CLASSES:
        table = Table("strategy", "loss", "difference of weights", "pairs", title=kind.__name__)
        wanted = results["one process"][kind.__name__]
        for row, found in results.items():
            own = found[kind.__name__]
            difference = (own["weights"] - wanted["weights"]).abs().max().item()
            table.add_row(row, f"{own['loss']:.6f}", f"{difference:.1e}", str(own["pairs"]))
            failed |= difference > SAME and own["pairs"] == wanted["pairs"]
        Console().print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
