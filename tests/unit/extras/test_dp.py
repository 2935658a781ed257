"""The strategies dp and ddp2 in one process, against plain PyTorch and one device."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import fitkit
from fitkit.distributed.devices import Machine
from fitkit.distributed.launchers import InlineLauncher
from fitkit.distributed.resolve import resolve_strategy
from fitkit.distributed.world import World
from fitkit.errors import ConfigurationError
from fitkit.extras.launchers.ranks import RankLauncher
from tests.reference import assert_same_weights

ROWS = torch.arange(22 * 8).view(22, 8).sin()
LABELS = torch.arange(22) % 3
HARDWARE = [
    {"strategy": "dp", "devices": 3},
    {"strategy": "dp", "devices": 1},
    {"strategy": "ddp2", "devices": 3},
    {"strategy": "single_device"},
]


class Contrast(fitkit.Model):
    """Every other sample of a batch is a negative, so a part's loss is not the whole's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
        self.seen = []

    def embed(self, batch, *_):
        x, _ = batch
        return {"left": self.left(x), "right": self.right(x)}

    def contrast(self, outputs):
        self.seen.append(len(outputs["left"]))
        scores = outputs["left"] @ outputs["right"].T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))

    training_step = validation_step = test_step = embed
    training_step_end = validation_step_end = test_step_end = contrast


def plain_losses(net, x, batch_size, epochs, rate):
    """The mean loss of each epoch, of a loop that anyone would write."""
    learning = torch.optim.SGD([*net.left.parameters(), *net.right.parameters()], rate)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for rows in x.split(batch_size):
            loss = net.contrast(net.embed((rows, None)))
            learning.zero_grad()
            loss.backward()
            learning.step()
            total += loss.item() * len(rows)
        losses.append(total / len(x))
    return losses


@pytest.mark.parametrize("hardware", HARDWARE, ids=str)
def test_a_loss_over_the_whole_batch_learns_as_on_one_device(hardware):
    model = Contrast()
    plain = copy.deepcopy(model)
    model.compile("sgd", learning_rate=0.1, accelerator="cpu", **hardware)
    history = model.fit(ROWS, LABELS, batch_size=7, epochs=3, shuffle=False, verbose=0)
    assert model.seen == [7, 7, 7, 1] * 3
    expected = plain_losses(plain, ROWS, 7, 3, 0.1)
    torch.testing.assert_close(history.history["loss"], expected, rtol=0, atol=1e-6)
    assert_same_weights(model, plain, atol=1e-6)
    with torch.no_grad():
        losses = [plain.contrast(plain.embed((rows, None))) for rows in ROWS.split(7)]
    value = sum(loss * size for loss, size in zip(losses, (7, 7, 7, 1), strict=True)) / 22
    assert model.evaluate(ROWS, LABELS, batch_size=7, verbose=0) == pytest.approx(value.item())


def numbers_of(net, hardware, loss="cross_entropy"):
    """All that a compiled model tells, and the weights that it comes to."""
    model = fitkit.Model(copy.deepcopy(net))
    model.compile(
        "sgd", loss, metrics=["accuracy"], learning_rate=0.1, accelerator="cpu", **hardware
    )
    history = model.fit(
        ROWS, LABELS, batch_size=5, epochs=2, shuffle=False, verbose=0, validation_split=0.3
    )
    evaluated = model.evaluate(ROWS, LABELS, batch_size=5, verbose=0, return_dict=True)
    predicted = model.predict(ROWS, batch_size=5, verbose=0, as_numpy=False)
    return history.history, evaluated, predicted, model.state_dict()


@pytest.mark.parametrize("hardware", HARDWARE[:3], ids=str)
def test_compiled_losses_and_metrics_are_those_of_one_device(hardware):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))
    torch.testing.assert_close(
        numbers_of(net, hardware), numbers_of(net, HARDWARE[3]), rtol=0, atol=1e-6
    )


class Logs(fitkit.Model):
    """What a step logs, with a loss that is left to be averaged."""

    def __init__(self):
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics")
        torch.manual_seed(1)
        self.layer = nn.Linear(8, 3)
        self.right = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.layer(x)
        self.right.update(scores, y)
        self.log("right", self.right)
        self.log("largest", x.max(), reduce_fx="max")
        self.log("mean", x.mean())
        return nn.functional.cross_entropy(scores, y)


@pytest.mark.parametrize("hardware", HARDWARE[:3], ids=str)
def test_what_a_step_logs_is_that_of_one_device(hardware):
    told = []
    for words in (hardware, HARDWARE[3]):
        model = Logs()
        model.compile("sgd", learning_rate=0.1, accelerator="cpu", **words)
        history = model.fit(ROWS, LABELS, batch_size=5, epochs=2, shuffle=False, verbose=0)
        told.append((history.history, model.layer.weight.detach()))
    assert set(told[0][0]) == {"loss", "right", "largest", "mean"}
    torch.testing.assert_close(*told, rtol=0, atol=1e-6)


def test_a_nets_own_loss_is_the_mean_over_samples():
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor
        logits: torch.Tensor

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.layer = nn.Linear(8, 3)

        def forward(self, input_rows, labels):
            logits = self.layer(input_rows)
            return Output(nn.functional.cross_entropy(logits, labels), logits)

    weights = []
    for words in (HARDWARE[0], HARDWARE[3]):
        model = fitkit.Model(Net())
        model.compile("sgd", learning_rate=0.1, accelerator="cpu", **words)
        data = torch.utils.data.StackDataset(input_rows=ROWS, labels=LABELS)
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        model.fit(loader, epochs=2, verbose=0)
        weights.append(model.net.layer.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_a_compiled_net_is_refused():
    model = fitkit.Model(nn.Linear(8, 3))
    model.net.compile()
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=2, strategy="dp")
    with pytest.raises(ConfigurationError, match=r"compiled.*jit_compile=False.*'ddp'"):
        model.fit(ROWS, LABELS, verbose=0)


# ---------------------------------------------------------------------- words

FOUR = Machine(cuda_count=4)


def torchrun(rank, size, nodes, local=None):
    local = local or size // nodes
    return {
        "TORCHELASTIC_RUN_ID": "x", "RANK": f"{rank}", "WORLD_SIZE": f"{size}",
        "LOCAL_RANK": f"{rank % local}", "LOCAL_WORLD_SIZE": f"{local}",
        "GROUP_RANK": f"{rank // local}", "GROUP_WORLD_SIZE": f"{nodes}",
        "MASTER_ADDR": "alpha", "MASTER_PORT": "29400",
    }  # fmt: skip


def resolved(devices, strategy, num_nodes=None, machine=Machine(), environment=None):  # noqa: B008
    return resolve_strategy(
        devices, "auto", strategy, "32-true", num_nodes, machine, environment or {}
    )


@pytest.mark.parametrize("strategy", ["dp", "DP", "ddp2", fitkit.strategies.DPStrategy(),
                                      fitkit.strategies.DDP2Strategy(bucket_cap_mb=5)])  # fmt: skip
def test_without_a_launcher_one_process_has_all_devices(strategy):
    found = resolved([3, 1], strategy, machine=FOUR)
    assert found.device_ids == (3, 1) and found.device == torch.device("cuda", 3)
    assert (found.world, found.replicas, found.data_rank_count) == (World(), 2, 1)
    assert type(found.launcher) is InlineLauncher
    assert resolved("auto", strategy, machine=FOUR).device_ids == (0, 1, 2, 3)
    assert len(resolved(3, strategy).devices) == 3


def test_ddp2_takes_one_process_a_node():
    once = resolved("auto", "ddp2", machine=FOUR, environment=torchrun(1, 2, 2))
    assert (once.replicas, once.data_rank_count, once.device) == (4, 2, torch.device("cuda", 0))
    assert type(once.launcher) is RankLauncher
    some = resolved([2, 3], "ddp2", 2, FOUR, torchrun(1, 2, 2))
    assert (some.replicas, some.data_rank_count, some.device) == (2, 2, torch.device("cuda", 2))
    alone = resolved(2, "ddp2", machine=FOUR, environment=torchrun(0, 1, 1))
    assert (alone.replicas, type(alone.launcher)) == (2, InlineLauncher)


@pytest.mark.parametrize(
    ("words", "started", "message"),
    [
        ((2, "dp"), (2, 1), "started 2 processes.*'dp' is one process.*all its devices"),
        ((2, "dp"), (2, 2), "started 2 processes.*'dp' is one process"),
        ((1, "single"), (2, 2), "started 2 processes.*'single_device' is one process"),
        (
            (2, "ddp2", 2),
            (4, 2),
            "started 4 processes.*one process on each node.*--nnodes=2 "
            "--nproc-per-node=1, or write strategy='ddp'",
        ),
        (("auto", "ddp2"), (4, 1), "started 4 processes.*--nnodes=1 --nproc-per-node=1"),
        ((2, "ddp2", 3), (2, 2), "started 2 processes.*num_nodes=3"),
        ((2, "ddp2", 1), (2, 2), "started 2 processes.*num_nodes=1"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_other_processes_than_were_started_are_refused_on_every_rank(words, started, message, last):
    size, nodes = started
    with pytest.raises(ConfigurationError, match=message):
        resolved(*words, environment=torchrun(size - 1 if last else 0, size, nodes))


@pytest.mark.parametrize(("rank", "local"), [(0, 1), (2, 2)])
def test_nodes_of_different_numbers_of_processes_are_refused(rank, local):
    with pytest.raises(ConfigurationError, match="started 3 processes"):
        resolved("auto" if local == 2 else 2, "ddp2", environment=torchrun(rank, 3, 2, local))
