"""`strategy="fault_tolerant"` with the real torchft: replicas that die, and come back, on gloo."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("torchft", reason="torchft isn't installed here: make test-engines")
pytestmark = pytest.mark.timeout(240)

LIGHTHOUSE = str(Path(sys.executable).with_name("torchft_lighthouse"))

BEGIN = """
    import os, sys, time
    import torch, fitkit
    from fitkit.callbacks import Callback, LambdaCallback
    from fitkit.strategies import FaultTolerantStrategy

    number = os.environ["REPLICA_GROUP_ID"]
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(200) % 3
    def net(seed=0):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    def compiled(module, **options):
        model = fitkit.Model(module)
        model.compile("adam", "cross_entropy", learning_rate=0.01, accelerator="cpu",
                      strategy=FaultTolerantStrategy(timeout=10), **options)
        return model
"""

EXACT = """
    model = compiled(net(int(number)), gradient_clip_val=0.5, accumulate_grad_batches=3)
    data = torch.utils.data.TensorDataset(x[:116], y[:116])
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    model.fit(loader, epochs=4, verbose=0, callbacks=LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.save(f"{number}-{epoch}.h5")))
    assert model.effective_batch_size == 12
    scores = model.evaluate(x[:37], y[:37], verbose=0), model.predict(x[:37], verbose=0)
    torch.save([model.net.state_dict(), *scores], f"end{number}.pt")
"""

RESUMED = """
    model = compiled(net(7), gradient_clip_val=0.5, accumulate_grad_batches=3)
    data = torch.utils.data.TensorDataset(x[:116], y[:116])
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    model.fit(loader, epochs=4, verbose=0, resume_from=f"{number}-1.h5")
    assert model.history.epoch == [0, 1, 2, 3]
    torch.save(model.net.state_dict(), f"resumed{number}.pt")
"""

DIES = """
    class Slow(Callback):
        def on_train_batch_end(self, batch, logs=None):
            with open(f"steps{number}", "a") as file:
                file.write(f"{self.model.current_epoch} {batch}\\n")
            time.sleep(0.1)
    module = net(os.getpid())
    module.insert(1, torch.nn.BatchNorm1d(33))
    model = compiled(module, gradient_clip_val=0.5, lr_scheduler="cosine")
    history = model.fit(x, y, batch_size=10, epochs=20, validation_data=(x[:50], y[:50]),
                        verbose=0, callbacks=Slow()).history
    torch.save([model.net.state_dict(), model.optimizer.state_dict(), history["val_loss"],
                model.history.epoch, model._fitkit.fit_state.updates], f"end{number}.pt")
"""


class Job:
    """A lighthouse and two replicas' processes, which end with the test."""

    def __init__(self, folder, min_replicas):
        self.folder = folder
        self.processes = []
        options = ["--bind", "[::]:0", "--heartbeat_timeout_ms", "2000"]
        command = [LIGHTHOUSE, "--min_replicas", str(min_replicas), *options]
        with open(folder / "lighthouse.log", "w") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        found, until = None, time.monotonic() + 30
        while found is None and time.monotonic() < until:
            time.sleep(0.1)
            found = re.search(r"listening on:? \S*:(\d+)", (folder / "lighthouse.log").read_text())
        assert found, (folder / "lighthouse.log").read_text()
        self.address = f"http://localhost:{found[1]}"

    def start(self, number, text):
        script = self.folder / "train.py"
        script.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                       "OMP_NUM_THREADS": "1", "REPLICA_GROUP_ID": str(number),
                       "NUM_REPLICA_GROUPS": "2", "TORCHFT_LIGHTHOUSE": self.address}
        with open(self.folder / f"log{number}", "a") as log:
            process = subprocess.Popen([sys.executable, str(script)], cwd=self.folder,
                                       stdout=log, stderr=log, env=environment)
        self.processes.append(process)
        return process

    def ends_well(self, *replicas):
        for replica in replicas:
            assert replica.wait(100) == 0, [
                (self.folder / f"log{number}").read_text()[-4000:] for number in (0, 1)]

    def steps(self, number):
        path = self.folder / f"steps{number}"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, number, steps):
        until = time.monotonic() + 60
        while len(self.steps(number)) < steps:
            assert time.monotonic() < until, (self.folder / f"log{number}").read_text()[-4000:]
            time.sleep(0.05)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def job_of(tmp_path):
    jobs = []

    def make(min_replicas):
        jobs.append(Job(tmp_path, min_replicas))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def plainly():
    """The first replica's net after a training on whole batches, as EXACT's replicas make it."""
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))[:116]
    y = torch.arange(116) % 3
    modules = []
    for seed in (0, 1):  # the weights come from whichever replica the others take for the first
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 3))
        adam = torch.optim.Adam(module.parameters(), 0.01)
        for _ in range(4):
            for rows in torch.arange(116).split(36):
                adam.zero_grad()
                F.cross_entropy(module(x[rows]), y[rows]).backward()
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                adam.step()
        modules.append(module)
    return x, y, modules


def test_replicas_that_live_train_as_one_process_does_and_go_on_from_a_file(job_of, tmp_path):
    job = job_of(2)
    job.ends_well(job.start(0, EXACT), job.start(1, EXACT))
    first, second = (torch.load(tmp_path / f"end{n}.pt", weights_only=False) for n in (0, 1))
    x, y, modules = plainly()

    def off(module):
        return max((first[0][name] - value).abs().max().item()
                   for name, value in module.state_dict().items())

    module = min(modules, key=off)
    assert off(module) < 1e-5
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    with torch.no_grad():
        outputs = module(x[:37])
    for _, loss, predictions in (first, second):
        assert loss == pytest.approx(F.cross_entropy(outputs, y[:37]).item(), abs=1e-5)
        torch.testing.assert_close(torch.tensor(predictions), outputs, rtol=0, atol=1e-4)
    job.ends_well(job.start(0, RESUMED), job.start(1, RESUMED))
    for number in (0, 1):
        for name, value in torch.load(tmp_path / f"resumed{number}.pt").items():
            torch.testing.assert_close(value, first[0][name], rtol=0, atol=1e-6)


def test_a_replica_that_is_killed_comes_back_and_both_end_with_the_same(job_of, tmp_path):
    job = job_of(1)
    first, second = job.start(0, DIES), job.start(1, DIES)
    job.wait_for(1, 25)
    second.send_signal(signal.SIGKILL)
    second.wait()
    before = len(job.steps(0))
    job.wait_for(0, before + 20)  # the other goes on alone
    assert first.poll() is None
    second = job.start(1, DIES)
    job.ends_well(first, second)
    ends = [torch.load(tmp_path / f"end{n}.pt", weights_only=False) for n in (0, 1)]
    (weights, state, *others), (weights_2, state_2, *others_2) = ends
    assert all(torch.equal(weights[name], weights_2[name]) for name in weights)
    for number, moments in state["state"].items():
        assert all(torch.equal(moments[n], state_2["state"][number][n]) for n in moments)
    assert others == others_2 and others[1] == list(range(20)) and others[2] == 200
    # It has gone on where the other was, and made the rest with it.
    came_back = job.steps(1)[25:]
    assert job.steps(0)[-40:] == came_back[-40:] and len(came_back) < 200 - before - 10
