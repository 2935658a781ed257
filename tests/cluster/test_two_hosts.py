"""Training across two machines, which are two network namespaces here: `make test-cluster`."""

import json
import textwrap
from pathlib import Path

import pytest
import torch
from hosts import two_hosts, until, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

SCRIPT = """
    import json, os, sys, time
    import torch, fitkit
    from fitkit.strategies import DDPStrategy
    open(f"pid{os.getpid()}", "w").close()

    class Steps(fitkit.callbacks.Callback):
        stops_alike = True
        def on_train_begin(self, logs=None):
            start = [os.environ["HOST"], self.model.world_size, self.model.global_step]
            if self.model.local_rank == 0:
                open("starts", "a").write(json.dumps(start) + "\\n")
        def on_train_batch_end(self, batch, logs):
            time.sleep(float(os.environ.get("PAUSE", 0)))
            if self.model.is_global_zero:
                open("steps", "a").write("x")

    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    strategy = DDPStrategy(timeout=float(os.environ.get("TIMEOUT", 60)))
    model.compile(torch.optim.SGD(model.parameters(), lr=0.05), "mse", accelerator="cpu")
    model.compile(strategy=strategy)
    x = torch.linspace(-1, 1, 96 * 4).reshape(96, 4)
    y = x.sum(1, keepdim=True)
    callbacks = [Steps()]
    if "BACKUP" in os.environ:
        callbacks.append(fitkit.callbacks.BackupAndRestore("backup", save_freq=1))
    epochs = int(os.environ.get("EPOCHS", 2))
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    scores = model.evaluate(x, y, verbose=0)
    torch.save(model.net.state_dict(), f"rank{os.environ['HOST']}-{model.local_rank}.pt")
    print("score", scores)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def steps(folder):
    path = folder / "steps"
    return len(path.read_text()) if path.exists() else 0


def alive(path):
    status = Path("/proc", path.name.removeprefix("pid"), "stat")
    try:  # an agent that waits for its store doesn't collect the ranks that have ended
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def starts(folder):
    path = folder / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_four_ranks_on_two_hosts_learn_what_one_process_learns(tmp_path, script):
    with two_hosts() as hosts:
        for host in hosts:
            host.torchrun(tmp_path, script, "--nnodes=2", "--nproc-per-node=2")
        until(lambda: all(host.agent.poll() is not None for host in hosts), 120, tmp_path)
        assert [host.wait(1) for host in hosts] == [0, 0], (tmp_path / "agent1.log").read_text()
    ranks = [torch.load(tmp_path / f"rank{h}-{r}.pt") for h in (1, 2) for r in (0, 1)]

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.linspace(-1, 1, 96 * 4).reshape(96, 4)
    for _ in range(2):
        for rows in x.split(32):
            optimizer.zero_grad()
            (net(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    for name, expected in net.state_dict().items():
        for rank in ranks:
            torch.testing.assert_close(rank[name], expected, atol=1e-6, rtol=0)


def test_a_host_that_is_cut_off_ends_every_rank_within_the_timeout(tmp_path, script):
    with two_hosts() as hosts:
        for host in hosts:
            options = "--nnodes=2", "--nproc-per-node=1"
            host.torchrun(tmp_path, script, *options, PAUSE="0.2", EPOCHS="100", TIMEOUT="8")
        until(lambda: steps(tmp_path) >= 4, 90, tmp_path)
        hosts[1].unplug()
        until(lambda: not any(map(alive, tmp_path.glob("pid*"))), 40, tmp_path)
        assert hosts[0].wait(30) != 0
    for number in (1, 2):
        told = (tmp_path / f"agent{number}.log").read_text()
        assert "WorkerError" in told and "out of reach" in told, told


def test_an_elastic_training_grows_shrinks_and_goes_on_where_it_was(tmp_path, script):
    settings = {"PAUSE": "0.25", "EPOCHS": "10", "TIMEOUT": "10", "BACKUP": "1"}
    options = "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5"
    with two_hosts() as (first, second):
        first.torchrun(tmp_path, script, *options, **settings)
        until(lambda: steps(tmp_path) >= 6, 90, tmp_path)
        second.torchrun(tmp_path, script, *options, **settings)
        until(lambda: any(size == 2 for _, size, _ in starts(tmp_path)), 90, tmp_path)
        seen = steps(tmp_path)
        until(lambda: steps(tmp_path) >= seen + 6, 60, tmp_path)
        second.kill()
        assert first.wait(150) == 0, (tmp_path / "agent1.log").read_text()[-3000:]
    own = [(size, step) for host, size, step in starts(tmp_path) if host == "1"]
    assert [size for size, _ in own] == [1, 2, 1]
    assert 0 == own[0][1] < own[1][1] < own[2][1]  # nothing begins anew
