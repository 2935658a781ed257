"""Classes and functions of a script, in what ranks exchange and send on to processes of theirs."""

import os
import subprocess
import sys

import pytest

from tests.limits import patience

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import collections, dataclasses, multiprocessing, sys
import torch, fitkit
from torch.utils.data import DataLoader, Dataset, Sampler

Pair = collections.namedtuple("Pair", "x y")

@dataclasses.dataclass
class Row:
    x: torch.Tensor
    y: torch.Tensor

def transform(tensor):
    return tensor / 8

class Own(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return Pair(transform(torch.full((4,), float(index))), torch.tensor(index % 3))

class InOrder(Sampler):
    def __iter__(self):
        return iter(range(8))
    def __len__(self):
        return 8

def collate(rows):
    return Pair(torch.stack([row.x for row in rows]), torch.stack([row.y for row in rows]))

def begin(worker):
    assert issubclass(Own, Dataset)

def squared(number):
    return number * number

class Model(fitkit.Model):
    def training_step(self, batch, batch_idx):
        assert isinstance(batch, (Pair, Row)), type(batch)
        return torch.nn.functional.cross_entropy(self.net(batch.x), batch.y)
    def predict_step(self, batch, batch_idx):
        return [Pair(x, y) for x, y in zip(self.net(batch.x), batch.y)]

class Pools(fitkit.callbacks.Callback):
    def on_train_begin(self, logs=None):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(squared, [1, 2, 3]) == [1, 4, 9]

def trained(data, devices=2, batches=1, **options):
    torch.manual_seed(0)
    model = Model(torch.nn.Linear(4, 3))
    model.compile("sgd", learning_rate=0.1, accelerator="cpu", devices=devices,
                  accumulate_grad_batches=batches, strategy=sys.argv[1] if devices > 1 else "auto")
    model.fit(data, verbose=0, **options)
    return model

if __name__ == "__main__":
    rows = [Own()[index] for index in range(8)]
    batches = [collate(rows[start:start + 2]) for start in range(0, 8, 2)]
    expected = trained(batches, devices=1, batches=2).net.weight
    def same(data, **options):
        found = trained(data, **options).net.weight
        assert torch.allclose(found, expected, atol=1e-6), (found, expected)
    # Ranks that run the script start processes as any script does.
    for kind in ("spawn", "forkserver") if sys.argv[1] == "ddp_spawn" else ():
        loader = DataLoader(
            Own(), 2, sampler=InOrder(), num_workers=1, collate_fn=collate,
            worker_init_fn=begin, multiprocessing_context=kind,
        )
        same(loader, callbacks=Pools() if kind == "spawn" else None)
    same(batches)
    same(batch for batch in batches)
    same(iter([Row(*batch) for batch in batches]))
    found = trained(batches).predict(batches, verbose=0)
    assert len(found) and all(isinstance(one, Pair) for one in found)
    print("done")
"""


@pytest.mark.parametrize("strategy", [pytest.param("ddp_spawn", marks=pytest.mark.slow), "ddp"])
def test_every_way_finds_them(strategy, tmp_path):
    """Workers have them by value; ranks that run the script have their own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "train.py", strategy],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=patience(120),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split()[-1] == "done"
