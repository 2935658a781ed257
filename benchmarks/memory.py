"""Memory of each rank with 500 MB of data in memory: shared once, or copied for each rank.

    python benchmarks/memory.py [--ranks 2 3] [--megabytes 500]

Linux only. PSS counts shared pages in equal parts, so that its sum is what the run really takes;
"own" is what a process alone holds. Measured on every rank after an epoch has read all the data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAUNCHERS = ("ddp_spawn", "ddp")


def memory() -> dict[str, float]:
    """Return this process's memory in MB, by /proc."""
    fields: dict[str, float] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, amount, *_ = line.split()
        fields[name.rstrip(":")] = int(amount) / 1000
    own = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"pss": fields["Pss"], "own": own}


def side(strategy: str, ranks: int, megabytes: int, folder: str) -> None:
    """Train for an epoch; each rank leaves what it holds in a file."""
    import torch

    import fitkit
    from fitkit.typing import Name

    torch.manual_seed(0)
    samples = megabytes * 250
    x, y = torch.full((samples, 1000), 0.5), torch.randint(10, (samples,))
    model = fitkit.Model(torch.nn.Linear(1000, 10))
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=ranks, strategy=Name(strategy))

    def note(epoch: int, logs: object) -> None:
        rank = model.global_rank
        Path(folder, f"{rank}.json").write_text(json.dumps(memory()))

    watch = fitkit.callbacks.LambdaCallback(on_epoch_end=note)
    model.fit(x, y, batch_size=256, verbose=0, callbacks=watch)


def run(strategy: str, ranks: int, megabytes: int) -> list[dict[str, float]]:
    """Return what each rank holds."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable, __file__, "--side", strategy, "--ranks", str(ranks),
                "--megabytes", str(megabytes), "--folder", folder,
            ],
            check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--side", choices=LAUNCHERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        side(arguments.side, arguments.ranks[0], arguments.megabytes, arguments.folder)
        return
    for strategy in LAUNCHERS:
        for ranks in arguments.ranks:
            empty = sum(rank["pss"] for rank in run(strategy, ranks, 1))
            found = run(strategy, ranks, arguments.megabytes)
            whole = sum(rank["pss"] for rank in found)
            each = "; ".join(f"{rank['pss']:.0f} ({rank['own']:.0f} own)" for rank in found)
            print(
                f"{strategy:9s} on {ranks} ranks: PSS {each} MB; in all {whole:.0f} MB, "
                f"{whole - empty:.0f} more than with 1 MB of data"
            )


if __name__ == "__main__":
    main()
