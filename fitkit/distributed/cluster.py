"""Cluster detection: this process's place among the processes that a launcher started.

Launchers nest (torchrun in a SLURM job, mpirun under LSF), and each leaves its variables to the
processes that it starts. The innermost one counts. It is the first of these whose variables exist:

1. `fitkit`: fitkit's script launcher, which never starts ranks inside another launch,
2. `torchrun` (also `torch.distributed.run`), by `TORCHELASTIC_RUN_ID`,
3. `horovodrun`, by `HOROVOD_RANK`,
4. torchrun's variables set by hand: RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR; also called
   `torchrun`,
5. `openmpi` (mpirun), 6. `pmi` (the mpiexec of MPICH, Intel, Cray), 7. `lsf` (jsrun),
8. `slurm` (srun), 9. `kubeflow`.

A scheduler may also set the variables of kinds 4 to 6: `srun --mpi=pmi2` sets PMI_RANK, jsrun sets
OMPI_COMM_WORLD_RANK, and scripts copy SLURM_PROCID to RANK. If rank and world size are the same as
an outer launcher's, it is one launch. The outer launcher is then used, because it knows the nodes.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fitkit.errors import ConfigurationError
from fitkit.registry import Registry

Environment = Mapping[str, str]

MOST_RANKS = 2**20
"""A number of processes or nodes above it is a mistake, and would only take memory."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process's place among the processes that a launcher started.

    Attributes:
        launcher: `"fitkit"`, `"torchrun"`, `"horovodrun"`, `"openmpi"`, `"pmi"`, `"lsf"`,
            `"slurm"` or `"kubeflow"`.
        rank: of this process among all, from 0.
        local_rank: of this process on its node.
        world_size: how many processes there are.
        local_world_size: how many on this node.
        node_rank: which node this is. Where the launcher doesn't say (MPI, LSF), ranks are
            taken to fill one node after the other, which is their default.
        num_nodes: how many nodes.
        master_address: where rank 0 can be reached; None where the launcher doesn't say.
        master_port: where it listens there; None where the launcher doesn't say.
        elastic: whether the launcher may start the job again on fewer or more nodes
            (`torchrun --max-restarts` above 0; the range itself is not in the environment).
            Its number of nodes is then the one that counts.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_address: str | None = None
    master_port: int | None = None
    elastic: bool = False


class Sign(NamedTuple):
    """The variables of a launcher whose reader is imported when they are there.

    They may speak for a launch of their own or repeat an outer launcher's.

    Attributes:
        launcher: its name in `CLUSTERS`.
        names: the variables that must all be set.
        rank, world_size: those that have these numbers.
    """

    launcher: str
    names: tuple[str, ...]
    rank: str
    world_size: str

    def is_in(self, environment: Environment) -> bool:
        """Whether all of the variables are set."""
        return all(environment.get(name, "").strip() for name in self.names)


OMPI_RANK, OMPI_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
JSM_RANK, JSM_SIZE = "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"

SIGNS = (
    Sign("by_hand", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"), "RANK", "WORLD_SIZE"),
    Sign("openmpi", (OMPI_RANK,), OMPI_RANK, OMPI_SIZE),
    Sign("pmi", ("PMI_RANK", "PMI_SIZE"), "PMI_RANK", "PMI_SIZE"),
    Sign("lsf", (JSM_RANK,), JSM_RANK, JSM_SIZE),
    Sign("slurm", ("SLURM_PROCID",), "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    Sign(
        "kubeflow",
        ("KUBERNETES_PORT", "MASTER_ADDR", "WORLD_SIZE", "RANK"),
        "RANK",
        "WORLD_SIZE",
    ),
)
"""The launchers after horovodrun, the inner ones first."""


def detect(environment: Environment = os.environ) -> Cluster | None:
    """Return this process's place, or None where no launcher started it.

    Args:
        environment: the variables to read.

    Raises:
        ConfigurationError: a variable is missing or means nothing; the message names it.
    """
    if environment.get("FITKIT_LAUNCHED", "").strip() not in ("", "0"):
        return _fitkit(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        return _torchrun(environment)
    if "HOROVOD_RANK" in environment:
        return CLUSTERS["horovodrun"](environment)
    for position, sign in enumerate(SIGNS):
        if sign.is_in(environment):
            found = _same_launch(sign, SIGNS[position + 1 :], environment)
            found = CLUSTERS[sign.launcher](environment) if found is None else found
            if found is not None:
                return found
    _refuse_half_set(environment)
    return None


def _same_launch(inner: Sign, outer: tuple[Sign, ...], environment: Environment) -> Cluster | None:
    """Return the outermost launcher that says the same rank and world size: it knows most."""
    said = (environment[inner.rank].strip(), environment.get(inner.world_size, "").strip())
    for sign in reversed(outer):
        if sign.is_in(environment):
            try:
                found = CLUSTERS[sign.launcher](environment)
            except ConfigurationError:
                continue  # Half an outer launcher's variables don't matter: the inner counts.
            if found and (str(found.rank), str(found.world_size)) == said:
                return found
    return None


def _fitkit(environment: Environment) -> Cluster:
    read = LaunchVariables(environment, "fitkit's script launcher", "FITKIT_LAUNCHED")
    local = ("LOCAL_WORLD_SIZE",) if read.find("LOCAL_WORLD_SIZE") else ("WORLD_SIZE",)
    place = read.place("fitkit", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), local)
    return dataclasses.replace(
        place,
        node_rank=read.number("NODE_RANK", maximum=place.num_nodes - 1),
        master_address=read.text("MASTER_ADDR"),
        master_port=read.number("MASTER_PORT", minimum=1, maximum=65535),
    )


def _torchrun(environment: Environment) -> Cluster:
    read = LaunchVariables(environment, "torchrun", "TORCHELASTIC_RUN_ID")
    place = read.place(
        "torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)
    )
    nodes = read.size("GROUP_WORLD_SIZE")
    restarts = read.find("TORCHELASTIC_MAX_RESTARTS")
    return dataclasses.replace(
        place,
        node_rank=read.number("GROUP_RANK", maximum=nodes - 1),
        num_nodes=nodes,
        master_address=read.text("MASTER_ADDR"),
        master_port=read.number("MASTER_PORT", minimum=1, maximum=65535),
        elastic=restarts is not None and read.number(restarts) > 0,
    )


def _by_hand(environment: Environment) -> Cluster:
    read = LaunchVariables(environment, "torchrun", "RANK")
    on_one_node = environment["RANK"].strip() == environment["LOCAL_RANK"].strip()
    if not read.find("LOCAL_WORLD_SIZE") and on_one_node:
        local: tuple[str, ...] = ("WORLD_SIZE",)
    else:
        local = ("LOCAL_WORLD_SIZE",)
    place = read.place("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), local)
    node = read.find("GROUP_RANK", "NODE_RANK")
    if node is None:
        return place
    return dataclasses.replace(place, node_rank=read.number(node, maximum=place.num_nodes - 1))


def _refuse_half_set(environment: Environment) -> None:
    """Refuse some of torchrun's variables: to leave them alone would train n times, apart."""
    nodes = environment.get("PET_NNODES", "").strip().rpartition(":")[2]
    if environment.get("PET_MASTER_ADDR") and nodes.isdecimal() and int(nodes) > 1:
        raise ConfigurationError(
            f"PET_NNODES={environment['PET_NNODES']!r} is set, as in a pod of a Kubeflow TrainJob, "
            "but torchrun, which reads it, didn't start this process: each node would train alone. "
            "Write command: [torchrun, train.py] in the job, or unset PET_NNODES."
        )
    if not environment.get("RANK") or environment.get("WORLD_SIZE", "1").strip() in ("", "1"):
        return
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR") if not environment.get(name)]
    raise ConfigurationError(
        f"RANK={environment['RANK']!r} and WORLD_SIZE={environment['WORLD_SIZE']!r} are set, but "
        f"not {' and '.join(missing)}. Start the processes with torchrun, which sets them all, or "
        "unset RANK and WORLD_SIZE to train in one process.",
        code="FK049",
    )


class LaunchVariables:
    """One launcher's variables, read with errors that name them.

    Args:
        environment: the variables.
        launcher: what users call the launcher.
        sign: the variable by which it was found.
    """

    def __init__(self, environment: Environment, launcher: str, sign: str) -> None:
        self.environment = environment
        self.launcher = launcher
        self.sign = sign

    def find(self, *names: str) -> str | None:
        """Return the first of `names` that is set and not empty."""
        return next((name for name in names if self.environment.get(name, "").strip()), None)

    def text(self, *names: str) -> str:
        """Return the value of the first of `names` that is set; an error where none is."""
        name = self.find(*names)
        if name is None:
            raise ConfigurationError(
                f"{self.sign}={self.environment.get(self.sign)!r} says that {self.launcher} "
                f"started this process, but {' or '.join(names)} is not set. Start the script "
                f"with {self.launcher}, or unset {self.sign} to train in one process."
            )
        return self.environment[name].strip()

    def number(self, *names: str, minimum: int = 0, maximum: int = 2**32) -> int:
        """Return the variable's value as a whole number within the bounds."""
        text = self.text(*names)
        if not re.fullmatch("[0-9]{1,20}", text) or not minimum <= int(text) <= maximum:
            bound = f" of at most {maximum}" if maximum < 2**32 else ""
            raise ConfigurationError(
                f"{self.find(*names)}={text!r} must be a whole number of at least {minimum}"
                f"{bound}; {self.launcher} sets it. Start the script with {self.launcher}, or "
                f"unset {self.sign} to train in one process."
            )
        return int(text)

    def size(self, *names: str) -> int:
        """Return the variable's value as a number of processes or nodes."""
        return self.number(*names, minimum=1, maximum=MOST_RANKS)

    def master(self) -> tuple[str | None, int | None]:
        """Return what MASTER_ADDR and MASTER_PORT say; None for what isn't set."""
        address = self.environment.get("MASTER_ADDR", "").strip() or None
        port = self.find("MASTER_PORT")
        return address, self.number(port, minimum=1, maximum=65535) if port else None

    def place(
        self,
        launcher: str,
        rank: tuple[str, ...],
        world_size: tuple[str, ...],
        local_rank: tuple[str, ...],
        local_world_size: tuple[str, ...],
    ) -> Cluster:
        """Return the place that four variables give; nodes are counted, filled one by one.

        Args:
            launcher: its name in `CLUSTERS`.
            rank, world_size, local_rank, local_world_size: the variables' names. The first that
                is set counts.
        """
        size = self.size(*world_size)
        local_size = self.number(*local_world_size, minimum=1, maximum=size)
        rank_here = self.number(*rank, maximum=size - 1)
        address, port = self.master()
        return Cluster(
            launcher=launcher,
            rank=rank_here,
            local_rank=self.number(*local_rank, maximum=local_size - 1),
            world_size=size,
            local_world_size=local_size,
            node_rank=rank_here // local_size,
            num_nodes=-(-size // local_size),
            master_address=address,
            master_port=port,
        )


CLUSTERS: Registry[Callable[[Environment], Cluster | None]] = Registry("launcher")
"""What reads the variables of each launcher; None for a process that isn't one of its tasks."""
CLUSTERS.add("fitkit", _fitkit)
CLUSTERS.add("torchrun", _torchrun)
CLUSTERS.add("by_hand", _by_hand)
CLUSTERS.promise("fitkit.extras.clusters.horovodrun:read_horovodrun", "horovodrun")
CLUSTERS.promise("fitkit.extras.clusters.mpi:read_openmpi", "openmpi")
CLUSTERS.promise("fitkit.extras.clusters.mpi:read_pmi", "pmi")
CLUSTERS.promise("fitkit.extras.clusters.lsf:read_lsf", "lsf")
CLUSTERS.promise("fitkit.extras.clusters.slurm:read_slurm", "slurm")
CLUSTERS.promise("fitkit.extras.clusters.kubeflow:read_kubeflow", "kubeflow")

RESTART = {
    "torchrun": "torchrun --nnodes={nodes} --nproc-per-node={devices}",
    "slurm": "srun --nodes={nodes} --ntasks-per-node={devices}",
    "openmpi": "mpirun -n {world}",
    "pmi": "mpiexec -n {world}",
    "lsf": "jsrun -n {world}",
    "horovodrun": "horovodrun -np {world}",
    "kubeflow": "torchrun --nproc-per-node={devices} in each of {nodes} pods",
    "fitkit": "it without FITKIT_LAUNCHED",
}
"""How to set the number of processes for each launcher."""


def check_agreement(cluster: Cluster | None, devices: int | None, num_nodes: int | None) -> None:
    """Refuse to train on other processes than were started.

    Args:
        cluster: what was started; None where nothing was.
        devices: processes for each node; None for as many as there are ("auto").
        num_nodes: how many nodes; None for as many as there are. An elastic launch has its own
            number, whatever is written here.

    Raises:
        ConfigurationError: they differ. The message has both numbers. It is raised for one
            device too: two ranks that each train for themselves look like success.
    """
    if cluster is None:
        if num_nodes is not None and num_nodes > 1:
            count = "GPUS" if devices is None else devices
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but no launcher started this process, so there is 1 node. "
                f"Start the script on each node with torchrun --nnodes={num_nodes} "
                f"--nproc-per-node={count} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400, HOST "
                "being one node's name, or write num_nodes=1.",
                code="FK047",
            )
        return
    nodes = cluster.num_nodes if num_nodes is None or cluster.elastic else num_nodes
    agree = nodes == cluster.num_nodes
    if devices is not None:
        # The product is the same on every rank, so that all of them refuse where nodes differ.
        agree &= devices * nodes == cluster.world_size and devices == cluster.local_world_size
    if not agree:
        raise _disagreement(cluster, devices, nodes)


def check_one_process(cluster: Cluster, strategy: str, *, on_each_node: bool) -> None:
    """Refuse several processes for a strategy that is one, or one on each node.

    Raises:
        ConfigurationError: there are several; on every rank alike. Each would train for itself, and
            that looks like success.
    """
    most = cluster.num_nodes if on_each_node else 1
    if cluster.world_size <= most:
        return
    started = f"{_started(cluster)}, but strategy={strategy!r}"
    restart = RESTART[cluster.launcher].format(nodes=most, devices=1, world=most)
    if on_each_node:
        raise ConfigurationError(
            f"{started} has one process on each node, with all its devices. Start {restart}, or "
            "write strategy='ddp'."
        )
    devices = "all its devices" if strategy == "dp" else "devices=1"
    raise ConfigurationError(
        f"{started} is one process, with {devices}. Write strategy='ddp', or start {restart}."
    )


def _started(cluster: Cluster) -> str:
    return (
        f"{cluster.launcher} started {_count(cluster.world_size, 'process')} "
        f"({cluster.local_world_size} on this node, {_count(cluster.num_nodes, 'node')})"
    )


def _disagreement(cluster: Cluster, devices: int | None, nodes: int) -> ConfigurationError:
    """Return what was started, what was asked, and the two ways to make them one."""
    local = cluster.local_world_size
    wanted = local if devices is None else devices
    asked = "devices='auto'" if devices is None else f"devices={devices}"
    even = local * cluster.num_nodes == cluster.world_size
    fitting = f"devices={local}, num_nodes={cluster.num_nodes}" if even else "devices='auto'"
    restart = RESTART[cluster.launcher].format(nodes=nodes, devices=wanted, world=wanted * nodes)
    return ConfigurationError(
        f"{_started(cluster)}, but {asked} and num_nodes={nodes} ask for "
        f"{_count(wanted * nodes, 'process')}. Write {fitting}, or start {restart}.",
        code="FK048",
    )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
