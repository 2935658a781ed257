"""jit_compile on several ranks, of a net whose class stands in the user's script."""

import json
import subprocess
import sys

import pytest

from tests.limits import patience

SCRIPT = """
import json
import os
import pathlib
import sys

import torch
from torch import nn

import fitkit

FOLDER = sys.argv[1]


def halved(x):
    return x / 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return x + halved(torch.relu(self.layer(x)))


def backend(graph, inputs):
    pathlib.Path(FOLDER, str(os.getpid())).touch()
    return graph.forward


def losses(strategy, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 3))
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    model = fitkit.Model(net)
    on = {"accelerator": "cpu", "devices": 2, "strategy": strategy}
    model.compile("adam", "cross_entropy", **on, **options)
    data = {"batch_size": 8, "shuffle": False, "validation_data": (x, y), "verbose": 0}
    history = model.fit(x, y, **data).history
    return [*history["loss"], *history["val_loss"], *(p.sum().item() for p in model.parameters())]


if __name__ == "__main__":
    found = []
    for strategy in ("ddp_spawn", "fsdp"):
        found.append([losses(strategy), losses(strategy, jit_compile={"backend": backend})])
    print(json.dumps([found, len(os.listdir(FOLDER))]))
"""


@pytest.mark.timeout(120)
def test_a_net_of_the_script_is_compiled_on_each_rank_and_computes_the_same(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "compiled"
    script.write_text(SCRIPT)
    folder.mkdir()
    ran = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, timeout=patience(110)
    )
    assert ran.returncode == 0, ran.stderr
    found, processes = json.loads(ran.stdout)
    for plain, compiled in found:
        assert compiled == pytest.approx(plain, rel=1e-6)
    assert processes == 2
