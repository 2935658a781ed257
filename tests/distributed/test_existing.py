"""Ranks that exist already: torchrun, a scheduler, or a process group of the script's own."""

import os
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest

from tests.limits import patience

pytestmark = pytest.mark.timeout(90)

BEGIN = """
    import os, sys
    import torch, fitkit
    torch.manual_seed(0)
    x, y = torch.randn(103, 6), torch.randint(3, (103,))
    model = fitkit.Model(torch.nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    def train(**arguments):
        return model.fit(x, y, batch_size=8, verbose=0, **arguments)
"""
NUMBERS = """
    train()
    loss, rows = model.evaluate(x, y, verbose=0), len(model.predict(x, verbose=0))
    open(f"rank{model.global_rank}.txt", "w").write(
        f"{model.world_size} {model.local_rank} {loss} {rows} {torch.distributed.is_initialized()}")
"""


def begin(tmp_path, text, launcher=(), **variables):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FITKIT"))}
    return subprocess.Popen(
        [*launcher, str(path)] if launcher else [sys.executable, str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**outside, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
             **variables},
    )  # fmt: skip


def assert_two_ranks_agree(tmp_path, in_group="False"):
    rows = [(tmp_path / f"rank{rank}.txt").read_text().split() for rank in (0, 1)]
    assert [row[:2] for row in rows] == [["2", "0"], ["2", "1"]]
    assert rows[0][2:] == rows[1][2:] and rows[0][3:] == ["103", in_group]


def test_a_group_of_the_scripts_own_is_used_and_left_alone(tmp_path):
    text = f"""
        torch.distributed.init_process_group("gloo")
        {textwrap.indent(textwrap.dedent(NUMBERS), " " * 8).strip()}
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        train()
    """
    job = {  # as torchrun sets them; test_launchers.py starts it itself
        "TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
    }  # fmt: skip
    processes = [begin(tmp_path, text, RANK=rank, LOCAL_RANK=rank, **job) for rank in "01"]
    for process in processes:
        with process:
            _, err = process.communicate(timeout=patience(80))
        assert process.returncode == 0, err
    assert_two_ranks_agree(tmp_path, in_group="True")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.slow
def test_the_tasks_of_slurm_are_the_ranks(tmp_path):
    job = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": free_port(),
    }  # fmt: skip
    processes = [
        begin(tmp_path, NUMBERS, SLURM_PROCID=rank, SLURM_LOCALID=rank, **job) for rank in "01"
    ]
    for process in processes:
        with process:
            _, err = process.communicate(timeout=patience(80))
        assert process.returncode == 0, err
    assert_two_ranks_agree(tmp_path)


def assert_two_pods_agree(tmp_path, processes):
    for process in processes:
        with process:
            _, err = process.communicate(timeout=patience(80))
        assert process.returncode == 0, err
    rows = [(tmp_path / f"rank{rank}.txt").read_text().split() for rank in (0, 1)]
    assert rows[0] == rows[1]
    assert rows[0][:2] == ["2", "0"] and rows[0][3:] == ["103", "False"]


@pytest.mark.slow
def test_the_pods_of_a_trainjob_are_the_nodes(tmp_path):
    # What Kubeflow's Trainer sets in each pod, in which the command is `torchrun train.py`.
    job = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": free_port(),
    }  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    assert_two_pods_agree(
        tmp_path,
        [begin(tmp_path, NUMBERS, launcher, PET_NODE_RANK=node, **job) for node in "01"],
    )


@pytest.mark.slow
def test_the_pods_of_a_pytorchjob_are_the_ranks(tmp_path):
    job = {
        "KUBERNETES_PORT": "tcp://10.0.0.1:443", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(), "WORLD_SIZE": "2",
    }  # fmt: skip
    assert_two_pods_agree(tmp_path, [begin(tmp_path, NUMBERS, RANK=rank, **job) for rank in "01"])


@pytest.mark.slow  # how it is recognised is a unit test, how ranks take part is that of Slurm
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_the_processes_of_mpirun_are_the_ranks(tmp_path):
    options = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    with begin(tmp_path, NUMBERS, options) as process:
        _, err = process.communicate(timeout=patience(80))
    assert process.returncode == 0, err
    assert_two_ranks_agree(tmp_path)
