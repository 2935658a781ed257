"""What counts, averages or compares batches is the same whatever `steps_per_execution`."""

import re

import pytest
import torch

import fitkit
from fitkit import callbacks
from fitkit.callbacks import Callback
from fitkit.checkpoint import open_checkpoint
from tests.compiling import TRACED
from tests.nets import dense, normal

ROWS, BATCH, EPOCHS = 28, 4, 2
STEPS = ROWS // BATCH
X = normal(ROWS, 3)
Y = X.sum(1, keepdim=True)
Y[20] = 400.0  # a loss that jumps


class Logged(fitkit.loggers.Logger):
    def __init__(self, update_freq):
        super().__init__(update_freq)
        self.rows = []

    def log_scalars(self, values, step, epoch):
        self.rows.append((step, epoch, values))


class Lost(Callback):
    """Makes the weights NaN at one update."""

    each_batch = True
    stops_alike = True

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 4:
            with torch.no_grad():
                self.model.net[0].weight.fill_(float("nan"))


def throughput():
    monitor = callbacks.ThroughputMonitor(tokens=5)
    monitor._clock = lambda: float(monitor.model.global_step)
    return monitor


CASES = {
    "EMA": (lambda: callbacks.EMA(0.8), lambda it: None),
    "EMA, each third": (lambda: callbacks.EMA(0.8, 3), lambda it: None),
    "SwapEMAWeights": (lambda: callbacks.SwapEMAWeights(True, 0.8), lambda it: None),
    "StochasticWeightAveraging": (
        lambda: callbacks.StochasticWeightAveraging(0.01, 0.5),
        lambda it: it.averaged,
    ),
    "LearningRateMonitor": (lambda: callbacks.LearningRateMonitor("step"), lambda it: it.rates),
    "LearningRateMonitor, epochs": (callbacks.LearningRateMonitor, lambda it: None),
    "NormMonitor": (callbacks.NormMonitor, lambda it: it.norms),
    "DetectLossSpike": (
        lambda: callbacks.DetectLossSpike(window=4, check_every=3),
        lambda it: it.spikes,
    ),
    "DetectNonFinite": (
        lambda: [Lost(), callbacks.DetectNonFinite("warn", check_every=3)],
        lambda it: it[1].found,
    ),
    "ThroughputMonitor": (throughput, lambda it: None),
    "Logger of batches": (lambda: Logged("batch"), lambda it: it.rows),
    "Logger of each third": (lambda: Logged(3), lambda it: it.rows),
}
"""What makes a callback, and what to compare of it beside the history and the weights."""


def trained(callback, group, **options):
    torch.manual_seed(0)
    model = fitkit.Model(dense(3, 4, 1))
    model.compile(
        "sgd", "mse", metrics=["mae"], learning_rate=1e-4, accelerator="cpu", devices=1,
        steps_per_execution=group, **{"lr_scheduler": "cosine", **options},
    )  # fmt: skip
    history = model.fit(
        X, Y, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=callback,
        validation_data=(X[:8], Y[:8]),
    )  # fmt: skip
    return model, history.history


def outcome(name, group, **options):
    make, look = CASES[name]
    callback = make()
    if name == "StochasticWeightAveraging":
        options["lr_scheduler"] = None
    model, history = trained(callback, group, **options)
    return repr((history, look(callback), [p.tolist() for p in model.parameters()]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulated"])
@pytest.mark.parametrize("name", CASES)
def test_a_group_of_batches_changes_nothing(name, options):
    alone = outcome(name, 1, **options)
    for group in (3, STEPS, 4):  # with a short last group, and without
        assert outcome(name, group, **options) == alone, group


@pytest.mark.parametrize("name", ["EMA", "Logger of batches"])
def test_compiled_groups_are_made_one_by_one_for_them(name):
    one, group = (outcome(name, group, jit_compile=TRACED) for group in (1, 4))
    assert group == one


def test_an_average_is_that_of_all_updates():
    """By hand: updates after two batches each, and a last one of a single batch."""
    average = callbacks.EMA(0.8)
    model, _ = trained(average, 3, accumulate_grad_batches=2, lr_scheduler=None)
    net = dense(3, 4, 1)
    means = [p.detach().clone() for p in net.parameters()]
    for _ in range(EPOCHS):
        for x, y in zip(X.split(2 * BATCH), Y.split(2 * BATCH), strict=True):
            net.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            with torch.no_grad():
                for mean, p in zip(means, net.parameters(), strict=True):
                    p -= 1e-4 * p.grad
                    mean.lerp_(p, 0.2)
    for mean, p in zip(means, model.net.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), mean, rtol=1e-5, atol=1e-7)


def group_ends(group):
    """The batches over all epochs after which hooks are called."""
    within = [*range(group, STEPS, group), STEPS]
    return [epoch * STEPS + end for epoch in range(EPOCHS) for end in within]


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
def test_saves_come_at_the_first_group_end_after_each_of_so_many_batches(tmp_path, group, every):
    saves = callbacks.ModelCheckpoint(tmp_path / "{epoch}-{batch}-{step}.h5", save_freq=every)
    trained(saves, group)
    due = {
        min(end for end in group_ends(group) if end >= batch)
        for batch in range(every, STEPS * EPOCHS + 1, every)
    }
    found = {}
    for path in tmp_path.glob("*.h5"):
        epoch, batch, step = map(int, re.findall(r"\d+", path.stem))
        with open_checkpoint(path) as file:
            assert file.state["training"]["updates"] == step  # the name says what is in it
        found[(epoch - 1) * STEPS + batch] = step
    assert set(found) == due
    assert all(step == batch for batch, step in found.items())


@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_backup_comes_then_too(tmp_path, group):
    trained(callbacks.BackupAndRestore(tmp_path, 5, delete_checkpoint=False, keep=9), group)
    found = [open_checkpoint(path) for path in sorted(tmp_path.glob("*.h5"))]
    ends = group_ends(group)
    wanted = [min(end for end in ends if end >= batch) for batch in (5, 10)]
    assert [file.__enter__().state["training"]["updates"] for file in found] == wanted


@pytest.mark.parametrize("kind", ["ModelCheckpoint", "BackupAndRestore"])
@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_saves_wait_for_the_updates_of_accumulated_batches(tmp_path, group, accumulate, kind):
    if kind == "ModelCheckpoint":
        saves = callbacks.ModelCheckpoint(tmp_path / "{epoch}-{batch}.h5", save_freq=3)
    else:
        saves = callbacks.BackupAndRestore(tmp_path, 3, delete_checkpoint=False, keep=9)
    model = fitkit.Model(dense(3, 4, 1))
    model.compile(
        "sgd", "mse", learning_rate=1e-4, accelerator="cpu", devices=1,
        steps_per_execution=group, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    model.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=saves)
    updates = {
        epoch * STEPS + end: epoch * -(-STEPS // accumulate) + -(-end // accumulate)
        for epoch in range(EPOCHS)
        for end in [*range(accumulate, STEPS, accumulate), STEPS]
    }
    places = sorted(set(group_ends(group)) & set(updates))
    due = {min(end for end in places if end >= n) for n in range(3, STEPS * EPOCHS + 1, 3)}
    found = []
    for path in tmp_path.glob("*.h5"):
        with open_checkpoint(path) as file:
            found.append(file.state["training"]["updates"])
    assert sorted(found) == sorted(updates[end] for end in due)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_a_check_of_the_loss_isnt_missed_between_groups(group):
    class Lost(Callback):
        def on_train_begin(self, logs=None):
            with torch.no_grad():
                self.model.net[0].weight.fill_(float("nan"))

    model, _ = trained([Lost(), callbacks.TerminateOnNaN(check_every=5)], group)
    assert model.global_step == min(end for end in group_ends(group) if end >= 5)
