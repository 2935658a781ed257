"""The examples with other libraries come to what they promise (their exit status says so)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import patience

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "package", "arguments"),
    [
        ("hugging_face.py", "transformers", ["--epochs", "1"]),
        ("sklearn_pipeline.py", "sklearn", []),
        ("optuna_search.py", "optuna", []),
        ("better_or_luck.py", "sklearn", []),
    ],
)  # fmt: skip
def test_an_example_keeps_its_promise(tmp_path, name, package, arguments):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} isn't installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patience(240),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
