"""Who are we: launchers found by their variables, and whether they started what was asked."""

import pytest

from fitkit.distributed.cluster import Cluster, check_agreement, detect, expand_counts, expand_hosts
from fitkit.errors import ConfigurationError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29400",
}

SLURM = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-04],spare",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-vm-17656@1",
    "PMIX_RANK": "1",
}

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}

LSF = {
    "LSB_JOBID": "20001",
    "LSB_MCPU_HOSTS": "batch5 1 h22n07 42 h22n08 42",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}

KUBEFLOW = {
    "KUBERNETES_PORT": "tcp://10.0.0.1:443",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "3",
}

HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
}

FITKIT = {
    "FITKIT_LAUNCHED": "1",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "NODE_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "40001",
}

LAUNCHERS = {
    "torchrun": (TORCHRUN, Cluster("torchrun", 3, 1, 4, 2, 1, 2, "alpha", 29400)),
    "slurm": (SLURM, Cluster("slurm", 3, 1, 5, 2, 1, 3, "gpu03", 15000 + 16002)),
    "openmpi": (OPENMPI, Cluster("openmpi", 1, 1, 2, 2, 0, 1)),
    "pmi": (MPICH, Cluster("pmi", 1, 1, 2, 2, 0, 1)),
    "lsf": (LSF, Cluster("lsf", 3, 1, 4, 2, 1, 2, "h22n07", 15000 + 3001)),
    "kubeflow": (KUBEFLOW, Cluster("kubeflow", 1, 0, 3, 1, 1, 3, "job-master-0", 23456)),
    "horovodrun": (HOROVOD, Cluster("horovodrun", 3, 1, 4, 2, 1, 2)),
    "fitkit": (FITKIT, Cluster("fitkit", 1, 1, 2, 2, 0, 1, "127.0.0.1", 40001)),
}


def found_or_complaint(environment):
    try:
        return detect(environment), ""
    except ConfigurationError as error:
        return None, str(error)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_is_found_by_its_variables(launcher):
    environment, place = LAUNCHERS[launcher]
    assert detect(environment) == place


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_variable_that_is_needed_is_missed_by_its_name_or_not_needed(launcher):
    environment, place = LAUNCHERS[launcher]
    for name in environment.keys() - {"KUBERNETES_PORT"}:  # Without: half of torchrun's.
        rest = {key: value for key, value in environment.items() if key != name}
        found, complaint = found_or_complaint(rest)
        # Missed; or not needed; or a sign, without which nobody is seen to have started us.
        assert name in complaint if complaint else found is None or found.rank == place.rank


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("value", ["two", "-1", "1.5", "", "99999999999"])
def test_a_rank_or_size_that_is_no_number_is_refused_by_name(launcher, value):
    environment, _ = LAUNCHERS[launcher]
    name = next(key for key in environment if key.endswith(("WORLD_SIZE", "_SIZE", "NUM_TASKS")))
    found, complaint = found_or_complaint(environment | {name: value})
    # Empty counts as not set, which hides the launchers whose sign it is.
    assert name in complaint if complaint else value == "" and found is None


def test_a_rank_beyond_the_world_size_is_refused_with_the_bound():
    with pytest.raises(ConfigurationError, match="RANK='4'.*at most 3.*torchrun"):
        detect(TORCHRUN | {"RANK": "4"})


def test_an_empty_environment_means_that_nobody_started_us():
    assert detect({}) is None


def test_torchrun_with_one_process_is_a_cluster_of_one():
    one = TORCHRUN | dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    one |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
    assert detect(one) == Cluster("torchrun", 0, 0, 1, 1, 0, 1, "alpha", 29400)


def test_torchrun_is_elastic_if_it_may_restart():
    assert detect(TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3"}).elastic
    assert not detect(TORCHRUN).elastic


def test_torchrun_s_variables_set_by_hand_are_enough():
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "alpha"}
    assert detect(environment) == Cluster("torchrun", 1, 1, 2, 2, 0, 1, "alpha", None)


def test_a_pod_of_a_trainjob_without_torchrun_is_an_error_instead_of_n_trainings():
    pod = {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"}
    with pytest.raises(ConfigurationError, match=r"\[torchrun, train.py\]"):
        detect(pod)
    with pytest.raises(ConfigurationError, match="1:4"):
        detect({**pod, "PET_NNODES": "1:4"})
    assert detect({**pod, "PET_NNODES": "1"}) is None
    assert detect({**pod, **TORCHRUN}).launcher == "torchrun"


def test_half_of_torchrun_s_variables_is_an_error_instead_of_two_trainings():
    with pytest.raises(ConfigurationError, match="but not LOCAL_RANK and MASTER_ADDR"):
        detect({"RANK": "0", "WORLD_SIZE": "2"})
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert detect({"WORLD_SIZE": "2"}) is None


# SLURM: only a task of a step counts.


def test_a_batch_script_without_srun_is_not_started_by_slurm():
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert detect(batch) is None
    assert detect(SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFB)}) is None


def test_the_shell_of_salloc_is_no_task():
    # As seen in a real one, but for the tasks, which it may inherit from the allocation.
    assert detect(SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PTY_PORT": "34889"}) is None


def test_a_shell_of_srun_pty_is_no_task_but_what_it_starts_with_srun_is():
    shell = SLURM | {"SLURM_PTY_PORT": "34889"}
    assert detect(shell, has_terminal=lambda: True) is None
    assert detect(shell, has_terminal=lambda: False).launcher == "slurm"
    one = shell | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert detect(one, has_terminal=lambda: False) is None


def test_older_names_of_slurm_are_read():
    older = {key: value for key, value in SLURM.items() if "STEP_N" not in key}
    del older["SLURM_STEP_ID"], older["SLURM_JOB_ID"]
    older |= {"SLURM_STEPID": "2", "SLURM_JOBID": "1000", "SLURM_STEP_NUM_TASKS": "5"}
    older |= {"SLURM_NNODES": "3", "SLURM_NODELIST": "gpu[03-04],spare"}
    assert detect(older) == LAUNCHERS["slurm"][1]


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
    assert expand_hosts(text) == hosts


def test_task_counts_are_expanded():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "2(x", "0", "x2", "2,,1"):
        with pytest.raises(ValueError):
            expand_counts(text)


# LSF.


def test_lsf_s_hosts_are_read_from_whichever_variable_has_them(tmp_path):
    rest = {key: value for key, value in LSF.items() if key != "LSB_MCPU_HOSTS"}
    assert detect(rest | {"LSB_HOSTS": "batch a a b b"}).master_address == "a"
    ranks = tmp_path / "ranks"
    ranks.write_text("batch\na\na\nb\nb\n")
    assert detect(rest | {"LSB_DJOB_RANKFILE": str(ranks)}).master_address == "a"
    assert detect(rest | {"LSB_HOSTS": "a a b b"}).master_address == "a"  # No launch node.
    with pytest.raises(ConfigurationError, match="LSB_DJOB_RANKFILE.*MASTER_ADDR"):
        detect(rest | {"LSB_DJOB_RANKFILE": str(tmp_path / "absent")})
    with pytest.raises(ConfigurationError, match="1 hosts.*2 nodes"):
        detect(rest | {"LSB_HOSTS": "batch"})


# One inside the other.


@pytest.mark.parametrize("outer", ["slurm", "lsf", "openmpi", "pmi"])
@pytest.mark.parametrize("inner", ["torchrun", "horovodrun", "fitkit"])
def test_the_inner_launcher_wins(inner, outer):
    assert detect(LAUNCHERS[outer][0] | LAUNCHERS[inner][0]) == LAUNCHERS[inner][1]


def test_mpirun_inside_a_slurm_step_wins_if_it_started_other_processes():
    assert detect(SLURM | OPENMPI).launcher == "openmpi"
    assert detect(SLURM | MPICH).launcher == "pmi"


def test_srun_with_pmi_is_srun_even_without_pmi_s_local_ranks():
    assert detect(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "5"}) == LAUNCHERS["slurm"][1]


def test_jsrun_that_speaks_open_mpi_s_variables_too_is_jsrun():
    same = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert detect(LSF | OPENMPI | same) == LAUNCHERS["lsf"][1]


def test_a_script_that_copies_slurm_s_ranks_to_torch_s_variables_is_slurm():
    copied = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03"}
    assert detect(SLURM | copied) == LAUNCHERS["slurm"][1]


def test_mpirun_under_lsf_or_with_half_of_slurm_s_variables_is_mpirun():
    assert detect(OPENMPI | {"LSB_JOBID": "5", "LSB_HOSTS": "a b"}).launcher == "openmpi"
    assert detect(OPENMPI | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}).launcher == "openmpi"


def test_mpi_in_a_pod_is_mpi():
    assert detect(OPENMPI | {"KUBERNETES_PORT": "tcp://10.0.0.1:443"}).launcher == "openmpi"


# What was started and what was asked.

TWO = Cluster("torchrun", 0, 0, 2, 2, 0, 1, "127.0.0.1", 29500)
TWO_BY_TWO = Cluster("slurm", 0, 0, 4, 2, 0, 2, "a", 15000)


@pytest.mark.parametrize(
    ("cluster", "devices", "num_nodes"),
    [
        (None, None, None),
        (None, 4, 1),
        (TWO, None, None),
        (TWO, 2, None),
        (TWO, 2, 1),
        (TWO, None, 1),
        (TWO_BY_TWO, 2, 2),
        (TWO_BY_TWO, None, 2),
        (TWO_BY_TWO, 2, None),
        (Cluster("torchrun", 0, 0, 1, 1, 0, 1), 1, 1),
        (Cluster("slurm", 0, 0, 5, 2, 0, 3), None, 3),  # Uneven nodes, taken as they are.
    ],
)
def test_what_was_started_and_asked_agrees(cluster, devices, num_nodes):
    check_agreement(cluster, devices, num_nodes)


def test_torchrun_with_two_processes_and_one_device_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigurationError,
        match=r"torchrun started 2 processes .*devices=1.* 1 process\. Write devices=2, "
        r"num_nodes=1, or start torchrun --nnodes=1 --nproc-per-node=1",
    ):
        check_agreement(TWO, 1, 1)


@pytest.mark.parametrize(
    ("cluster", "devices", "num_nodes", "numbers"),
    [
        (TWO, 4, None, ("2 processes", "4 processes", "--nproc-per-node=4")),
        (TWO, 2, 2, ("2 processes", "4 processes", "--nnodes=2")),
        (TWO, None, 2, ("1 node", "num_nodes=2", "4 processes")),
        (TWO_BY_TWO, 4, 1, ("2 on this node", "devices=4", "srun --nodes=1 --ntasks-per-node=4")),
        (TWO_BY_TWO, 1, None, ("4 processes", "2 processes")),
        (Cluster("slurm", 0, 0, 5, 2, 0, 3), 2, None, ("5 processes", "6 processes", "'auto'")),
        (Cluster("horovodrun", 0, 0, 2, 2, 0, 1), 3, None, ("horovodrun -np 3",)),
    ],
)
def test_a_disagreement_names_both_numbers_and_the_remedy(cluster, devices, num_nodes, numbers):
    with pytest.raises(ConfigurationError) as caught:
        check_agreement(cluster, devices, num_nodes)
    assert all(number in str(caught.value) for number in numbers), str(caught.value)


def test_every_rank_of_uneven_nodes_refuses():
    ranks = [Cluster("slurm", 0, 0, 3, 2, 0, 2), Cluster("slurm", 2, 0, 3, 1, 1, 2)]
    for rank in ranks:
        with pytest.raises(ConfigurationError):
            check_agreement(rank, 2, 2)


def test_an_elastic_launch_has_its_own_number_of_nodes_but_not_of_devices():
    elastic = Cluster("torchrun", 0, 0, 2, 2, 0, 1, elastic=True)
    check_agreement(elastic, 2, 2)
    check_agreement(elastic, None, 4)
    with pytest.raises(ConfigurationError):
        check_agreement(elastic, 4, 2)


def test_several_nodes_without_a_launcher_are_refused_with_the_command():
    with pytest.raises(ConfigurationError, match="on each node with torchrun --nnodes=2"):
        check_agreement(None, 4, 2)


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        (FITKIT, "WORLD_SIZE", "9" * 5000),
        (FITKIT, "WORLD_SIZE", "4000000000"),
        (FITKIT, "MASTER_PORT", "70000"),
        (MPICH, "PMI_SIZE", "1048577"),
        (SLURM, "SLURM_STEP_TASKS_PER_NODE", "2(x999999999)"),
        (SLURM, "SLURM_STEP_TASKS_PER_NODE", "9" * 5000),
        (SLURM, "SLURM_STEP_NODELIST", "a[0-99999]b[0-99999]"),
        (LSF, "LSB_JOBID", "1" * 5000),
    ],
)
def test_numbers_that_no_launcher_sets_are_refused_before_they_take_memory(variables, name, value):
    with pytest.raises(ConfigurationError, match=name):
        detect({**variables, name: value})
