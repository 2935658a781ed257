"""benchmarks/gpu.py runs, on the CPU for want of a GPU; its figures mean nothing there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import patience


@pytest.mark.slow
def test_the_gpu_benchmark_prints_one_table():
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick",
               "--modes", "plain", "graph", "--precisions", "fp32", "bf16"]  # fmt: skip
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=True,
        cwd=Path(__file__).parents[2],
    )
    rows = [line.split(" | ") for line in ran.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[0].strip("| ") for row in rows] == [
        "MLP",
        "MLP",
        "ResNet-18",
        "ResNet-18",
        "transformer",
        "transformer",
    ]
    assert all(float(row[3]) > 0 and float(row[4]) > 0 and float(row[5]) > 0 for row in rows)
