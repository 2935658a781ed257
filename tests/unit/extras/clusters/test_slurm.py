"""SLURM: which processes are tasks, and where rank 0 is."""

import pytest

from fitkit.distributed.cluster import detect
from fitkit.errors import ConfigurationError
from fitkit.extras.clusters import slurm
from tests.launched import SLURM


def test_a_batch_script_without_srun_is_not_started_by_slurm():
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert detect(batch) is None
    assert detect(SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFB)}) is None


def test_the_shell_of_salloc_is_no_task():
    # As seen in a real one, but for the tasks, which it may inherit from the allocation.
    assert detect(SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PTY_PORT": "34889"}) is None


def test_a_shell_of_srun_pty_is_no_task_but_what_it_starts_with_srun_is(monkeypatch):
    shell = SLURM | {"SLURM_PTY_PORT": "34889"}
    monkeypatch.setattr(slurm, "_has_terminal", lambda: True)
    assert detect(shell) is None
    monkeypatch.setattr(slurm, "_has_terminal", lambda: False)
    assert detect(shell).launcher == "slurm"
    assert detect(shell | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_older_names_of_slurm_are_read():
    older = {key: value for key, value in SLURM.items() if "STEP_N" not in key}
    del older["SLURM_STEP_ID"], older["SLURM_JOB_ID"]
    older |= {"SLURM_STEPID": "2", "SLURM_JOBID": "1000", "SLURM_STEP_NUM_TASKS": "5"}
    older |= {"SLURM_NNODES": "3", "SLURM_NODELIST": "gpu[03-04],spare"}
    assert detect(older) == detect(SLURM)


def test_a_step_on_one_node_needs_no_lists():
    one_node = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    place = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    found = detect(one_node | place)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, 1, 2)


def test_slurm_s_address_and_port_can_be_given():
    found = detect(SLURM | {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "5000"})
    assert (found.master_address, found.master_port) == ("10.0.0.5", 5000)


def test_two_steps_of_a_job_have_two_ports():
    ports = {detect(SLURM | {"SLURM_STEP_ID": str(step)}).master_port for step in range(16)}
    assert len(ports) == 16 and all(15000 <= port < 32000 for port in ports)


def test_slurm_on_one_node_meets_on_it():
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
    found = detect(SLURM | one_node | {"SLURM_STEP_NODELIST": "odd["})
    assert (found.master_address, found.local_world_size) == ("127.0.0.1", 5)


@pytest.mark.parametrize("nodes", ["gpu[3-", "gpu]3", "gpu[5-3]", "gpu[a-b]", ",", "gpu[]", "a,,b"])
def test_a_node_list_that_means_nothing_is_refused_by_name(nodes):
    with pytest.raises(ConfigurationError, match="SLURM_STEP_NODELIST=.*MASTER_ADDR"):
        detect(SLURM | {"SLURM_STEP_NODELIST": nodes})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("alpha", ["alpha"]),
        ("alpha,beta", ["alpha", "beta"]),
        ("host[03-05,9],other", ["host03", "host04", "host05", "host9", "other"]),
        ("n[1,3],m[2-3]-ib0", ["n1", "n3", "m2-ib0", "m3-ib0"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("a[1]b[2]c,d", ["a1b2c", "d"]),
        ("[10-11].cluster.org", ["10.cluster.org", "11.cluster.org"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_node_lists_are_expanded_in_order(text, hosts):
    assert slurm.expand_hosts(text) == hosts


def test_task_counts_are_expanded():
    assert slurm.expand_counts("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "2(x", "0", "x2", "2,,1"):
        with pytest.raises(ValueError):
            slurm.expand_counts(text)
