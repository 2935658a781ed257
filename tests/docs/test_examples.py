"""The examples run as a user runs them, and come to what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = r"[-+]?\d+(?:\.\d+)?"

pytestmark = pytest.mark.timeout(300)


def run(name, folder, *arguments):
    """What an example prints; it must end with status 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def number(printed, label):
    """The first number after a label."""
    found = re.search(rf"{re.escape(label)}\D*?({NUMBER})", printed)
    assert found, printed
    return float(found.group(1))


@pytest.mark.slow
def test_the_autoencoder_loses_less_than_pca(tmp_path):
    printed = run("autoencoder.py", tmp_path, "--epochs", "20")
    assert "360 images as 8 numbers" in printed
    assert number(printed, "mean squared error") < 0.019
    assert number(printed, "of PCA with as many numbers") == pytest.approx(0.0253, abs=1e-3)


@pytest.mark.slow
def test_the_gan_draws_digits_of_all_kinds(tmp_path):
    printed = run("gan.py", tmp_path, "--epochs", "40")
    assert number(printed, "Fréchet distance") < 10
    counts = [int(count) for count in re.findall(r"\d x (\d+)", printed)]
    assert len(counts) == 10 and sum(counts) == 1000 and min(counts) > 10


@pytest.mark.slow
def test_two_replicas_compare_all_views_and_the_embeddings_beat_the_pixels(tmp_path):
    printed = run("contrastive.py", tmp_path, "--epochs", "25")
    assert number(printed, "views compared in a batch") == 512
    loss = number(printed, "first epoch's loss")
    assert loss == pytest.approx(number(printed, "of one device"), abs=1e-5)
    assert number(printed, "last epoch's loss") < 0.6 * loss
    accuracies = [float(percent) for percent in re.findall(r"([\d.]+)% by", printed)]
    assert accuracies[0] > accuracies[1] + 2


@pytest.mark.slow
def test_replicas_and_ranks_learn_the_mean_loss_of_one_process(tmp_path):
    printed = run("strategies_compared.py", tmp_path, "--rows", "dp", "ddp")
    tables = re.split(r"^ +(?=[A-Z]\w+ *$)", printed, flags=re.MULTILINE)[1:]
    differences = {
        (table.split()[0], row): float(difference)
        for table in tables
        for row, difference in re.findall(r"│ (\w+) +│ \S+ +│ (\S+) +│", table)
    }
    for row in ("dp", "ddp"):
        assert differences["Classifier", row] < 1e-6
        assert differences["Gathering", row] < 1e-6
    assert differences["Contrastive", "dp"] < 1e-6 < differences["Contrastive", "ddp"]


def test_the_guide_to_own_steps_names_what_became_of_each_name():
    from fitkit.hooks import INSTEAD, OTHER_NAMES, Hooks

    text = (ROOT / "docs" / "own-steps.md").read_text()
    hooks = [name for name in vars(Hooks) if not name.startswith("_") and "_epoch_end" not in name]
    stages = [name for name in hooks if not name.endswith("_step_end")]
    absent = [name for name in (*INSTEAD, *OTHER_NAMES, *stages) if f"`{name}" not in text]
    assert not absent
