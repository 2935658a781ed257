"""What compile's words mean on pretended machines, under pretended launchers."""

import pytest
import torch

from fitkit.distributed.devices import Machine
from fitkit.distributed.launchers import InlineLauncher
from fitkit.distributed.resolve import resolve_strategy
from fitkit.distributed.strategies import SingleDevice
from fitkit.distributed.world import World
from fitkit.errors import ConfigurationError
from fitkit.extras.ddp import DDP, DDPSpawn
from fitkit.extras.launchers import script
from fitkit.extras.launchers.ranks import RankLauncher
from fitkit.extras.launchers.script import ScriptLauncher
from fitkit.extras.launchers.workers import WorkersLauncher

CPU, FOUR = Machine(), Machine(cuda_count=4)


def torchrun(rank=1, size=2, nodes=1):
    local = size // nodes
    return {
        "TORCHELASTIC_RUN_ID": "x", "RANK": f"{rank}", "WORLD_SIZE": f"{size}",
        "LOCAL_RANK": f"{rank % local}", "LOCAL_WORLD_SIZE": f"{local}",
        "GROUP_RANK": f"{rank // local}", "GROUP_WORLD_SIZE": f"{nodes}",
        "MASTER_ADDR": "alpha", "MASTER_PORT": "29400",
    }  # fmt: skip


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "alpha", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
}  # fmt: skip
OWN = {
    "FITKIT_LAUNCHED": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_script(monkeypatch):
    """As if this were a script, and not pytest."""
    monkeypatch.setattr(script, "what_runs_instead_of_a_script", lambda: None)


def resolved(devices="auto", strategy="auto", accelerator="auto", num_nodes=None,
             machine=CPU, environment=None):  # fmt: skip
    return resolve_strategy(
        devices, accelerator, strategy, "32-true", num_nodes, machine, environment or {}
    )


@pytest.mark.parametrize(
    ("devices", "strategy", "name", "launcher"),
    [
        ("auto", "auto", "single_device", InlineLauncher),
        (1, "single", "single_device", InlineLauncher),
        (1, "ddp", "ddp", InlineLauncher),
        (1, "ddp_spawn", "ddp_spawn", InlineLauncher),
        (2, "auto", "ddp_spawn", WorkersLauncher),
        (2, "ddp_spawn", "ddp_spawn", WorkersLauncher),
        (2, "ddp", "ddp", ScriptLauncher),
        (2, DDP(), "ddp", ScriptLauncher),
        (2, DDPSpawn(), "ddp_spawn", WorkersLauncher),
    ],
)
def test_without_a_launcher(devices, strategy, name, launcher):
    found = resolved(devices, strategy)
    assert (found.name, type(found.launcher)) == (name, launcher)
    assert found.world == World(0, 1 if devices == "auto" else devices)
    assert found.reads_on_rank_zero == (launcher is WorkersLauncher)


@pytest.mark.parametrize("strategy", ["single_device", type("Own", (SingleDevice,), {})()])
def test_all_devices_are_one_for_a_strategy_that_has_one(strategy):
    assert resolved(strategy=strategy, machine=FOUR).devices == (torch.device("cuda", 0),)
    with pytest.raises(ConfigurationError, match="has one device, but 2"):
        resolved(2, strategy, machine=FOUR)


def test_ddp_without_a_script_takes_workers_and_says_so(monkeypatch):
    monkeypatch.setattr(script, "what_runs_instead_of_a_script", lambda: "a dream")
    with pytest.warns(UserWarning, match="strategy=.ddp.*this is a dream. It uses worker"):
        found = resolved(2, "ddp")
    assert isinstance(found.launcher, WorkersLauncher) and found.reads_on_rank_zero


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_spawn", DDP(timeout=5)])
@pytest.mark.parametrize("devices", ["auto", 2, "2"])
def test_under_a_launcher_its_processes_are_the_ranks(devices, strategy):
    found = resolved(devices, strategy, environment=torchrun(rank=1))
    assert isinstance(found.launcher, RankLauncher)
    assert found.world == World(rank=1, size=2, local_rank=1)
    assert not found.reads_on_rank_zero


def test_each_rank_has_its_own_device_of_its_node():
    found = resolved([3, 1], machine=FOUR, environment=torchrun(rank=3, size=4, nodes=2))
    assert found.world == World(rank=3, size=4, local_rank=1, node_rank=1, num_nodes=2)
    assert (found.device_ids, found.device) == ((3, 1), torch.device("cuda", 1))
    found = resolved(num_nodes=2, machine=FOUR, environment=torchrun(rank=2, size=4, nodes=2))
    assert (found.device_ids, found.device) == ((0, 1), torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ({"devices": 1}, "started 2 processes.*devices=1"),
        ({"devices": 3}, "started 2 processes.*devices=3"),
        ({"devices": -1, "machine": FOUR}, "started 2 processes.*devices=4"),
        ({"devices": 2, "num_nodes": 2}, "started 2 processes.*num_nodes=2.*4 processes"),
        ({"strategy": "single_device"}, "started 2 processes.*devices=1"),
        ({"strategy": "single_device", "devices": 2}, "started 2 processes.*devices=1"),
        ({"strategy": "ddp", "devices": 1}, "started 2 processes.*devices=1"),
        ({"machine": Machine(cuda_count=1)}, "started 2 processes.*visible cuda devices is 1"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_than_were_started_are_refused_on_every_rank(words, numbers, rank):
    with pytest.raises(ConfigurationError, match=numbers):
        resolved(**words, environment=torchrun(rank))


def test_several_nodes_without_a_launcher_are_refused():
    with pytest.raises(ConfigurationError, match=r"num_nodes=2.*torchrun --nnodes=2"):
        resolved(2, num_nodes=2)


def test_one_process_of_a_launcher_needs_no_group():
    found = resolved(environment=torchrun(rank=0, size=1))
    assert (found.name, type(found.launcher)) == ("single_device", InlineLauncher)
    assert isinstance(resolved(strategy="ddp", environment=torchrun(0, 1)).launcher, InlineLauncher)


@pytest.mark.parametrize("devices", ["auto", 2])
def test_a_scheduler_that_shows_each_task_one_gpu_calls_it_0_everywhere(devices):
    found = resolved(devices, machine=Machine(cuda_count=1), environment=SLURM)
    assert (found.device_ids, found.device) == ((0, 0), torch.device("cuda", 0))


def test_a_scripts_rank_reads_the_words_as_the_first_rank_did():
    found = resolved(2, "ddp", environment=OWN)
    assert isinstance(found.launcher, ScriptLauncher)
    assert found.world == World(rank=1, size=2, local_rank=1)
    for words in ((), (1, "ddp"), (2, "ddp_spawn")):
        assert resolved(*words, environment=OWN).world.rank == 0
    assert isinstance(resolved(2, "ddp_spawn", environment=OWN).launcher, WorkersLauncher)
    with pytest.raises(ConfigurationError, match="asks for 3 ranks.*already runs on 2"):
        resolved(3, "ddp", environment=OWN)
