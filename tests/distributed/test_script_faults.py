"""Faults of ranks that run the whole script: strategy="ddp", and torchrun."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from fitkit.extras import free_devices
from fitkit.extras.launchers.private_folder import process_name
from tests.limits import patience

pytestmark = pytest.mark.timeout(120)

BEGIN = """
    import os, sys, time
    import torch, fitkit
    from fitkit.callbacks import LambdaCallback
    rank = int(os.environ.get("RANK", 0))
    open(f"rank{rank}.pid", "w").write(str(os.getpid()))
    def rows(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(48, 6, generator=generator), torch.arange(48) % 3
    x, y = rows(0)
    model = fitkit.Model(torch.nn.Linear(6, 3))
    strategy = fitkit.strategies.DDPStrategy(timeout=60)
    def compile(**arguments):
        model.compile("sgd", "cross_entropy", accelerator="cpu", strategy=strategy, **arguments)
    def note(error):
        with open(f"errors{rank}.txt", "a") as file:
            print(type(error).__name__, str(error).splitlines()[0], file=file)
"""


def run(tmp_path, text, *launcher, **variables):
    """A script's status and standard error; its processes are gone afterwards."""
    (tmp_path / "train.py").write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"], capture_output=True, text=True,
        timeout=patience(110),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
             **variables},
    )  # fmt: skip
    pids = [path.read_text() for path in tmp_path.glob("rank*.pid")]
    deadline = time.monotonic() + patience(15)
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    return done.returncode, done.stderr


def errors(tmp_path, rank):
    return (tmp_path / f"errors{rank}.txt").read_text().splitlines()


def test_faults_in_data_and_calls_end_a_script_s_call_on_every_rank(tmp_path):
    code, err = run(
        tmp_path,
        """
        from torch.utils.data import DataLoader, Dataset, random_split
        class Rows(Dataset):
            def __len__(self):
                return len(x)
            def __getitem__(self, index):
                if rank == 1 and index > 30:
                    raise KeyError("mine")
                return x[index], y[index]
        class Whole(Rows):
            def __getitem__(self, index):
                return x[index], y[index]
        compile(devices=2)
        unlike = rows(rank)
        split, _ = random_split(Whole(), [24, 24], torch.Generator().manual_seed(rank))
        for data in (unlike, (split,), (DataLoader(Rows(), batch_size=4, num_workers=1),)):
            try:
                model.fit(*data, verbose=0)
            except (fitkit.ConfigurationError, fitkit.WorkerError, KeyError) as error:
                note(error)
        assert len(model.fit(x, y, verbose=0).history["loss"]) == 1
        strategy = fitkit.strategies.DDPStrategy(timeout=6)
        compile(devices=2)
        def evaluate(epoch, logs):
            if rank == 0:
                model.evaluate(x, y, verbose=0)
        model.fit(x, y, epochs=2, verbose=0, callbacks=LambdaCallback(on_epoch_end=evaluate))
        """,
    )
    assert code == 1 and "waited for each other in different exchanges" in err, err
    first, second, third = errors(tmp_path, 0)
    assert "x (48, 6) float32 holds other numbers on rank 1 than on rank 0" in first
    assert "Subset's indices holds other numbers" in second
    assert third.startswith("WorkerError Rank 1 failed: KeyError")
    assert errors(tmp_path, 1)[:2] == [first, second]
    assert errors(tmp_path, 1)[2].startswith("KeyError")


def test_what_only_a_rank_s_own_script_has(tmp_path):
    code, err = run(
        tmp_path,
        """
        from torch.utils.data import DataLoader, TensorDataset
        from fitkit.callbacks import CSVLogger, ModelCheckpoint, SkipBadUpdates
        compile(devices=2)
        saves = ModelCheckpoint("weights.h5")
        for verb in (model.fit, model.evaluate):
            try:
                verb(x, y, verbose=0, callbacks=saves if rank == 0 else None)
            except fitkit.ConfigurationError as error:
                note(error)
        model.fit(x, y, verbose=0, callbacks=CSVLogger("log.csv") if rank == 0 else None)

        compile(devices=2, replace_sampler=False)  # labels that don't count, on one rank alone
        own = torch.where(y > 1, -100, y) if rank == 0 else y
        model.fit(DataLoader(TensorDataset(x, own), batch_size=16), verbose=0)

        compile(devices=2, accumulate_grad_batches=2)  # rank 0 has no second batch
        x[2] = float("nan")
        found = model.fit(x[:3], y[:3], batch_size=1, shuffle=False, verbose=0,
                          callbacks=SkipBadUpdates())
        note(Exception(found.skipped[0]))
        """,
    )
    assert code == 0, err
    *refused, skipped = errors(tmp_path, 0)
    assert len(refused) == 2 and all("different callbacks" in line for line in refused)
    assert "'batch': 1, 'rank': 1, 'indices': [2]" in skipped
    assert errors(tmp_path, 1) == [*refused, skipped]


def test_a_port_in_use_is_named_before_a_rank_is_started(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        code, err = run(tmp_path, "compile(devices=2)\nmodel.fit(x, y)", MASTER_PORT=port)
    assert code == 1 and f"MASTER_PORT='{port}' can't be used" in err
    assert not (tmp_path / "rank1.pid").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [0, 1])
def test_under_torchrun_the_others_learn_that_a_rank_has_ended(tmp_path, ending):
    code, err = run(
        tmp_path,
        f"""
        compile()
        model.fit(x, y, verbose=0)
        if rank == {ending}:
            sys.exit(0)
        try:
            model.evaluate(x, y, verbose=0)
        except fitkit.WorkerError as error:
            note(error)
        """,
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    )  # fmt: skip
    assert code == 0, err
    (told,) = errors(tmp_path, 1 - ending)
    assert f"the script of rank {ending} has ended" in told


def test_a_script_s_ranks_get_the_free_gpus_that_rank_0_chose(monkeypatch):
    monkeypatch.setattr(free_devices, "_chosen", [])
    monkeypatch.setattr(free_devices, "probe_gpus", list)
    monkeypatch.setattr(free_devices, "select_free", lambda k, gpus: [2, 0][:k])
    monkeypatch.setenv("FITKIT_FREE_GPUS", "[]")
    assert free_devices.find_usable_cuda_devices(2) == [2, 0]
    assert json.loads(os.environ["FITKIT_FREE_GPUS"]) == [[2, 0]]
    # The same call in rank 1, where GPU 2 is no longer free:
    monkeypatch.setattr(free_devices, "_chosen", [])
    monkeypatch.setattr(free_devices, "select_free", lambda k, gpus: [1, 3][:k])
    parent = {"FITKIT_LAUNCHED": "1", "FITKIT_PARENT": process_name(os.getppid()), "RANK": "1"}
    for name, value in parent.items():
        monkeypatch.setenv(name, value)
    assert free_devices.find_usable_cuda_devices(2) == [2, 0]
    assert free_devices.find_usable_cuda_devices(2) == [1, 3]  # a call that rank 0 hadn't made
