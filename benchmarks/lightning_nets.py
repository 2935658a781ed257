"""A step of a LightningModule by fitkit, and by Lightning's Trainer: the time and the numbers.

    python benchmarks/lightning_nets.py               # on CPU, about a minute
    python benchmarks/lightning_nets.py --programs    # those of tests/lightning_programs.py

The same module trains both ways, in turns in one process. A pair's ratio is that of the times of
two fits, of which one is longer, so that what a fit costs once falls out. The differences are the
largest of the weights after three epochs, and of the logs where there are any.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit

ROWS, BATCH, EPOCHS = 2048, 32, 3


def modules() -> dict[str, tuple[Any, Any]]:
    """Return what makes each module, and its inputs, by name."""
    import lightning.pytorch as pl

    class Plain(pl.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    class Logging(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.last = outputs["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Manual(Plain):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def dense() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1))

    def images() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1)
        )

    table, pictures = torch.randn(ROWS, 32), torch.randn(ROWS, 3, 16, 16)
    return {
        "dense": (lambda: Plain(dense()), table),
        "dense, with logs, a hook and a schedule": (lambda: Logging(dense()), table),
        "dense, manual optimization": (lambda: Manual(dense()), table),
        "convolutions": (lambda: Plain(images()), pictures),
    }


def compare_programs(pairs: int) -> None:
    """Print a row for each program of the tests: small modules, with validation and logs."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.lightning_programs import PROGRAMS, by_fitkit, by_trainer

    print("| program | epoch ÷ the Trainer's | the Trainer's, ms | weights | logs |")
    print("|---|---|---|---|---|")
    longer = 8
    for name, program in PROGRAMS.items():
        (theirs, expected), (ours, found) = by_trainer(program), by_fitkit(program)
        states = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        apart = max(float((a.double() - b.double()).abs().max()) for a, b in states)
        logs = max(
            abs(a - b)
            for log in program.logged
            for a, b in zip(found[log], expected[log], strict=True)
        )
        seconds: list[list[float]] = []
        for _ in range(pairs):
            took = []
            for train in (by_trainer, by_fitkit):
                times = [time.perf_counter()]
                for epochs in (1, 1 + longer):
                    train(program, epochs)
                    times.append(time.perf_counter())
                took.append((times[2] - times[1]) - (times[1] - times[0]))
            seconds.append(took)
        ratio = statistics.median(mine / trainers for trainers, mine in seconds)
        epoch = statistics.median(trainers for trainers, _ in seconds) / longer * 1e3
        print(f"| {name} | {ratio:.2f} | {epoch:.1f} | {apart:.0e} | {logs:.0e} |", flush=True)


def main() -> None:
    import lightning.pytorch as pl

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--programs", action="store_true")
    arguments = parser.parse_args()
    pairs = arguments.pairs
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.programs:
        compare_programs(pairs)
        return
    print("| module | step ÷ the Trainer's | the Trainer's, ms | largest difference |")
    print("|---|---|---|---|")
    for name, (make, x) in modules().items():
        rows = TensorDataset(x, torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1)))
        batches = DataLoader(rows, batch_size=BATCH)

        def train(epochs: int, *, by_fitkit: bool, make: Any = make, batches: Any = batches) -> Any:
            torch.manual_seed(0)
            module = make()
            begin = time.perf_counter()
            if by_fitkit:
                model = fitkit.Model(module)
                model.compile(accelerator="cpu", devices=1)
                model.fit(batches, epochs=epochs, verbose=0)
            else:
                trainer = pl.Trainer(
                    accelerator="cpu",
                    devices=1,
                    max_epochs=epochs,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                trainer.fit(module, batches)
            return module, time.perf_counter() - begin

        theirs, ours = (train(EPOCHS, by_fitkit=which)[0] for which in (False, True))
        weights = zip(ours.parameters(), theirs.parameters(), strict=True)
        apart = max(float((a - b).detach().abs().max()) for a, b in weights)
        seconds: list[list[float]] = []
        for _ in range(pairs):
            took = [
                train(EPOCHS + 1, by_fitkit=which)[1] - train(1, by_fitkit=which)[1]
                for which in (False, True)
            ]
            seconds.append(took)
        ratio = statistics.median(mine / trainers for trainers, mine in seconds)
        step = statistics.median(trainers for trainers, _ in seconds) / (EPOCHS * ROWS / BATCH)
        print(f"| {name} | {ratio:.2f} | {step * 1e3:.2f} | {apart:.0e} |", flush=True)


if __name__ == "__main__":
    main()
