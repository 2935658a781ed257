"""Who are we: launchers found by their variables, and whether they started what was asked."""

import pytest

from fitkit.distributed.cluster import Cluster, check_agreement, detect
from fitkit.errors import ConfigurationError
from tests.launched import FITKIT, HOROVOD, KUBEFLOW, LSF, MPICH, OPENMPI, SLURM, TORCHRUN

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
