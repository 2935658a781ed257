"""benchmarks/gpu.py runs, on the CPU for want of a GPU; its figures mean nothing there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import patience


@pytest.mark.slow
def test_the_gpu_benchmark_prints_one_table():
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick",
               "--turns", "1", "--modes", "plain", "--precisions", "fp32", "bf16",
               "--nets", "mlp", "gpt"]  # fmt: skip
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=True,
        cwd=Path(__file__).parents[2],
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    verbs = [("MLP", "fit"), ("MLP", "evaluate"), ("MLP", "predict"),
             ("GPT 110M", "fit"), ("GPT 110M", "evaluate"), ("GPT 110M", "predict"),
             ("MLP", "fit"), ("GPT 110M", "fit"),
             ("MLP", "fit, 1 GB by arrays"), ("MLP", "fit, 1 GB by loader")]  # fmt: skip
    assert [(row[0], row[1]) for row in rows] == verbs
    assert all(float(figure) > 0 for row in rows for figure in row[4:7])
