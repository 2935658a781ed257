"""DDP2 on two nodes of this machine: a rank on each, with what torchrun sets for it."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys

import pytest
import torch

from tests.limits import patience

pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.timeout(150)

# One module for the ranks and for the test, whose plain PyTorch is what they must come to.
NET = '''
import torch
from torch import nn

class Pairs(nn.Module):
    """Two encoders and a temperature that only the loss uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def step(self, batch):
        x = batch["x"]
        return {"left": self.left(x), "right": self.right(x), "captions": list(batch["captions"])}

    def contrast(self, outputs):
        """Every other sample of the batch is a negative."""
        scores = outputs["left"] @ outputs["right"].T * self.scale.exp()
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

def batches(node, nodes=2):
    """Uneven ones, the last with a single sample; each node has its own."""
    draw = torch.Generator().manual_seed(11)
    whole = torch.randn(nodes, 15, 6, generator=draw)[node]
    for rows in (slice(0, 5), slice(5, 9), slice(9, 14), slice(14, 15)):
        x = whole[rows]
        yield {"x": x, "captions": [f"{node}-{i}" for i in range(len(x))]}
'''

STEPS = """
import sys
from fitkit.distributed.resolve import resolve_strategy
strategy = resolve_strategy(2, "cpu", "ddp2", "32-true", 2)

def run(net, name):
    assert strategy.data_ranks.world_size == 2 and strategy.data_rank_count == 2
    node = strategy.data_ranks.rank
    assert node == strategy.world.node_rank == strategy.collectives.rank
    strategy.place(net)
    wrapped = strategy.wrap_for_training(net, averages=name == "averages")
    learning = torch.optim.SGD(net.parameters(), 0.5)
    for batch in batches(node):
        batch["x"] = batch["x"].to(strategy.device)
        learning.zero_grad()
        outputs = wrapped("step", batch)
        assert outputs["captions"] == batch["captions"], outputs["captions"]
        weights, samples = wrapped.weights, len(batch["x"])
        assert sum(weights) == samples and len(weights) == min(2, samples)
        net.contrast(outputs).backward()
        if name == "exchanges":
            strategy.collectives.mean_gradients(list(net.parameters()))
        learning.step()
    with torch.no_grad():
        if node:  # a node may have fewer batches than the other
            x = next(batches(node))["x"].to(strategy.device)
            found = strategy.wrap_for_evaluation(net)("", x)
            assert found["flags"].tolist() == [True] * 5 and found["n"].tolist() == [3, 2]
            assert found["none"] is None
            torch.testing.assert_close(found["loss"], x.mean())
    # Used on one rank, and on none.
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    if strategy.world.rank == 0:
        used.grad = torch.ones(2)
    strategy.collectives.mean_gradients([used, unused])
    assert used.grad.tolist() == [1 / strategy.world.size] * 2 and unused.grad is None
    strategy.finish()
    torch.save(net.state_dict(), f"{name}{strategy.world.rank}.pt")

def forward(self, x):
    return {"flags": x.sum(1) < 99, "n": len(x), "none": None, "loss": x.mean()}

Pairs.forward = forward
for name in ("averages", "exchanges"):
    net = Pairs()
    with torch.no_grad():
        net.scale += strategy.world.rank  # rank 0's numbers are everyone's
    strategy.launcher.launch("run", run, net, name)
"""


def expected_weights():
    """Plain PyTorch: the mean of the two nodes' losses, of all of each node's samples."""
    names = {}
    exec(NET, names)
    net = names["Pairs"]()
    learning = torch.optim.SGD(net.parameters(), 0.5)
    for pair in zip(names["batches"](0), names["batches"](1), strict=True):
        learning.zero_grad()
        sum(net.contrast(net.step(batch)) for batch in pair).div(2).backward()
        learning.step()
    return net.state_dict()


def free_port():
    """One that no outgoing connection takes in the seconds until rank 0 listens there."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


def nodes_run(folder, text, nodes=2):
    """Start each node's rank as torchrun does; what each printed to stderr, and its exit status."""
    path = folder / "train.py"
    path.write_text(text)
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FITKIT"))}
    variables = {**outside, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    port = free_port()
    with contextlib.ExitStack() as stack:
        started = []
        for node in range(nodes):
            own = {"RANK": node, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": node,
                   "GROUP_WORLD_SIZE": nodes, "WORLD_SIZE": nodes,
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                   "TORCHELASTIC_RUN_ID": "ddp2"}  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, str(path)], cwd=folder, text=True,
                env={**variables, **{name: str(value) for name, value in own.items()}},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.terminate)
            started.append(process)
        told = [process.communicate(timeout=patience(120))[1] for process in started]
    return [(process.returncode, err) for process, err in zip(started, told, strict=True)]


MODEL = """
import json, os
import torch, fitkit, torchmetrics
from torch import nn

class Logs(fitkit.Model):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
        self.metric = torchmetrics.classification.BinaryAUROC()
        # States that can't be merged, and a metric inside of another.
        self.pearson = torchmetrics.PearsonCorrCoef()
        self.range = torchmetrics.MinMaxMetric(torchmetrics.CatMetric())

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.metric.update(x[:, 0].sigmoid(), y)
        self.log("auroc", self.metric)
        self.pearson.update(x[:, 0], x[:, 1])
        self.log("pearson", self.pearson)
        self.range.update(x[:, 2])
        self.log("mean", x.mean())
        self.log("largest", x.max(), reduce_fx="max")
        return {"left": self.left(x), "right": self.right(x)}

    def training_step_end(self, outputs):
        scores = outputs["left"] @ outputs["right"].T
        self.log("rows", float(len(scores)), reduce_fx="sum")
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def validation_step_end(self, outputs):
        return self.training_step_end(outputs)

    def forward(self, x):
        return self.left(x)

x, y = torch.arange(38 * 8.0).view(38, 8).sin(), torch.arange(38) % 2
model = Logs()
model.compile("sgd", learning_rate=0.1, accelerator="cpu", **HARDWARE)
history = model.fit(x[:30], y[:30], batch_size=5, epochs=2, shuffle=False, verbose=0,
                    validation_data=(x[30:], y[30:]))
numbers = {**history.history, "weights": model.left.weight.tolist()}
numbers["predicted"] = model.predict(x, batch_size=3, verbose=0).tolist()
numbers["range"] = float(model.range._base_metric.compute().sum())
numbers["effective"] = [model.effective_batch_size]
"""
WRITE = """
open(f"numbers{os.environ['RANK']}.json", "w").write(json.dumps(numbers))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder to which two nodes wrote."""
    folder = tmp_path_factory.mktemp("nodes")
    hardware = "HARDWARE = {'strategy': 'ddp2', 'devices': 2, 'num_nodes': 2}\n"
    for code, err in nodes_run(folder, NET + STEPS + hardware + MODEL + WRITE):
        assert code == 0, err
    return folder


@pytest.mark.parametrize("way", ["averages", "exchanges"])
def test_two_nodes_learn_what_one_process_learns_of_each_nodes_whole_batch(written, way):
    wanted = expected_weights()
    for rank in range(2):
        found = torch.load(written / f"{way}{rank}.pt")
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=f"{rank} {name}")


def test_a_model_logs_and_predicts_on_two_nodes_what_it_does_on_one_device(written):
    # An update of two nodes is one of two batches.
    alone = {"HARDWARE": {"strategy": "single_device", "accumulate_grad_batches": 2}}
    exec(MODEL, alone)
    wanted = {**alone["numbers"], "effective": [10]}
    assert wanted["rows"] == [30, 30]
    whole, parts = wanted.pop("range"), []  # what wasn't logged is each node's own
    for rank in range(2):
        found = json.loads((written / f"numbers{rank}.json").read_text())
        parts.append(found.pop("range"))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert len(set(parts)) == 2 and sum(set(parts)) == pytest.approx(whole, abs=1e-5)
