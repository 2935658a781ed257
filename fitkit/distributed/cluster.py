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
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from fitkit.errors import ConfigurationError

FIRST_PORT, PORTS = 15000, 17000
"""Where job numbers become ports: above the registered services in use, below Linux's first
ephemeral port (32768), which an outgoing connection might hold."""

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM's step numbers from here on are no step of srun's: salloc's interactive shell
(0xfffffffa), the batch script (0xfffffffb) and others."""


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


def detect(
    environment: Environment = os.environ, *, has_terminal: Callable[[], bool] | None = None
) -> Cluster | None:
    """Return this process's place, or None where no launcher started it.

    Args:
        environment: the variables to read.
        has_terminal: tells whether the process has a controlling terminal, asked only where
            SLURM's variables can't tell a task from an interactive shell.

    Raises:
        ConfigurationError: a variable is missing or means nothing; the message names it.
    """
    for read in (_fitkit, _torchrun, _horovodrun):
        found = read(environment)
        if found is not None:
            return found
    voices = _voices(_has_terminal if has_terminal is None else has_terminal)
    for position, voice in enumerate(voices):
        if all(environment.get(name, "").strip() for name in voice.signs):
            found = _same_launch(voice, voices[position + 1 :], environment)
            found = voice.read(environment) if found is None else found
            if found is not None:
                return found
    _refuse_half_set(environment)
    return None


class _Voice(NamedTuple):
    """Variables that may speak for a launch of their own or repeat an outer launcher's."""

    read: Callable[[Environment], Cluster | None]
    rank: str
    world_size: str
    signs: tuple[str, ...]


def _voices(has_terminal: Callable[[], bool]) -> tuple[_Voice, ...]:
    """Return the launchers after horovodrun, the inner ones first."""
    slurm = functools.partial(_slurm, has_terminal=has_terminal)
    torch_signs = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    pods = ("KUBERNETES_PORT", "MASTER_ADDR", "WORLD_SIZE", "RANK")
    return (
        _Voice(_by_hand, "RANK", "WORLD_SIZE", torch_signs),
        _Voice(_openmpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_RANK",)),
        _Voice(_pmi, "PMI_RANK", "PMI_SIZE", ("PMI_RANK", "PMI_SIZE")),
        _Voice(_lsf, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_RANK",)),
        _Voice(slurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_PROCID",)),
        _Voice(_kubeflow, "RANK", "WORLD_SIZE", pods),
    )


def _same_launch(
    inner: _Voice, outer: tuple[_Voice, ...], environment: Environment
) -> Cluster | None:
    """Return the outermost launcher that says the same rank and world size: it knows most."""
    said = (environment[inner.rank].strip(), environment.get(inner.world_size, "").strip())
    for voice in reversed(outer):
        if all(environment.get(name, "").strip() for name in voice.signs):
            try:
                found = voice.read(environment)
            except ConfigurationError:
                continue  # Half an outer launcher's variables don't matter: the inner counts.
            if found and (str(found.rank), str(found.world_size)) == said:
                return found
    return None


def _place(
    read: LaunchVariables,
    launcher: str,
    rank: tuple[str, ...],
    world_size: tuple[str, ...],
    local_rank: tuple[str, ...],
    local_world_size: tuple[str, ...],
) -> Cluster:
    """Return the place that four variables give; nodes are counted, filled one by one."""
    size = read.size(*world_size)
    local_size = read.number(*local_world_size, minimum=1, maximum=size)
    rank_here = read.number(*rank, maximum=size - 1)
    address, port = read.master()
    return Cluster(
        launcher=launcher,
        rank=rank_here,
        local_rank=read.number(*local_rank, maximum=local_size - 1),
        world_size=size,
        local_world_size=local_size,
        node_rank=rank_here // local_size,
        num_nodes=-(-size // local_size),
        master_address=address,
        master_port=port,
    )


def _fitkit(environment: Environment) -> Cluster | None:
    if environment.get("FITKIT_LAUNCHED", "").strip() in ("", "0"):
        return None
    read = LaunchVariables(environment, "fitkit's script launcher", "FITKIT_LAUNCHED")
    local = ("LOCAL_WORLD_SIZE",) if read.find("LOCAL_WORLD_SIZE") else ("WORLD_SIZE",)
    place = _place(read, "fitkit", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), local)
    return dataclasses.replace(
        place,
        node_rank=read.number("NODE_RANK", maximum=place.num_nodes - 1),
        master_address=read.text("MASTER_ADDR"),
        master_port=read.number("MASTER_PORT", minimum=1, maximum=65535),
    )


def _torchrun(environment: Environment) -> Cluster | None:
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    read = LaunchVariables(environment, "torchrun", "TORCHELASTIC_RUN_ID")
    place = _place(
        read, "torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)
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


def _horovodrun(environment: Environment) -> Cluster | None:
    if "HOROVOD_RANK" not in environment:
        return None
    read = LaunchVariables(environment, "horovodrun", "HOROVOD_RANK")
    place = _place(
        read,
        "horovodrun",
        ("HOROVOD_RANK",),
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
    )
    nodes = read.size("HOROVOD_CROSS_SIZE")
    node = read.number("HOROVOD_CROSS_RANK", maximum=nodes - 1)
    return dataclasses.replace(place, node_rank=node, num_nodes=nodes)


def _by_hand(environment: Environment) -> Cluster:
    read = LaunchVariables(environment, "torchrun", "RANK")
    on_one_node = environment["RANK"].strip() == environment["LOCAL_RANK"].strip()
    if not read.find("LOCAL_WORLD_SIZE") and on_one_node:
        local: tuple[str, ...] = ("WORLD_SIZE",)
    else:
        local = ("LOCAL_WORLD_SIZE",)
    place = _place(read, "torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), local)
    node = read.find("GROUP_RANK", "NODE_RANK")
    if node is None:
        return place
    return dataclasses.replace(place, node_rank=read.number(node, maximum=place.num_nodes - 1))


def _openmpi(environment: Environment) -> Cluster:
    # OMPI_COMM_WORLD_NODE_RANK is a rank on the node, not the node's.
    read = LaunchVariables(environment, "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK")
    return _place(
        read,
        "openmpi",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    )


def _pmi(environment: Environment) -> Cluster:
    read = LaunchVariables(environment, "mpiexec", "PMI_RANK")
    return _place(
        read,
        "pmi",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    )


def _lsf(environment: Environment) -> Cluster:
    read = LaunchVariables(environment, "jsrun", "JSM_NAMESPACE_RANK")
    place = _place(
        read,
        "lsf",
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
    )
    return dataclasses.replace(
        place,
        master_address=place.master_address or _lsf_first_host(read, place.num_nodes),
        master_port=place.master_port or FIRST_PORT + read.number("LSB_JOBID") % PORTS,
    )


def _lsf_first_host(read: LaunchVariables, num_nodes: int) -> str:
    """Return the host of rank 0: the job's first, but for the node that jsrun was called on."""
    if num_nodes == 1:
        return "127.0.0.1"
    if read.find("LSB_MCPU_HOSTS"):
        names = read.text("LSB_MCPU_HOSTS").split()[::2]  # Names and slots take turns.
    elif read.find("LSB_HOSTS"):
        names = read.text("LSB_HOSTS").split()
    else:
        path = Path(read.text("LSB_DJOB_RANKFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS"))
        try:
            names = path.read_text().split()
        except OSError as error:
            raise ConfigurationError(
                f"LSB_DJOB_RANKFILE={str(path)!r} can't be read ({error.strerror}), so rank 0's "
                "host isn't known. Set MASTER_ADDR to its name."
            ) from error
    hosts = list(dict.fromkeys(names))
    if len(hosts) < num_nodes:
        raise ConfigurationError(
            f"LSF names {len(hosts)} hosts, but jsrun started {num_nodes} nodes. Set MASTER_ADDR "
            "to the name of rank 0's host."
        )
    return hosts[0] if len(hosts) == num_nodes else hosts[1]


def _slurm(environment: Environment, has_terminal: Callable[[], bool]) -> Cluster | None:
    if not environment.get("SLURM_STEP_ID") and not environment.get("SLURM_STEPID"):
        return None  # A batch script.
    sign = "SLURM_STEP_ID" if environment.get("SLURM_STEP_ID") else "SLURM_STEPID"
    read = LaunchVariables(environment, "srun", sign)
    step_number = read.number(sign)
    if step_number >= FIRST_SPECIAL_STEP:
        return None
    size = read.size("SLURM_STEP_NUM_TASKS")
    # Set by `srun --pty` and by salloc's shell, and inherited by what such a shell starts with
    # another srun. Those tasks have no terminal; a shell (all of its step that lives) has one.
    if environment.get("SLURM_PTY_PORT") and (size == 1 or has_terminal()):
        return None
    nodes = read.size("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node = read.number("SLURM_NODEID", maximum=nodes - 1)
    local_size = _slurm_tasks(read, node)
    address, port = read.master()
    return Cluster(
        launcher="slurm",
        rank=read.number("SLURM_PROCID", maximum=size - 1),
        local_rank=read.number("SLURM_LOCALID", maximum=local_size - 1),
        world_size=size,
        local_world_size=local_size,
        node_rank=node,
        num_nodes=nodes,
        master_address=address or _slurm_first_host(read, nodes),
        # 16 steps of 1,000 jobs in a row have ports of their own.
        master_port=port
        or FIRST_PORT + (read.number("SLURM_JOB_ID", "SLURM_JOBID") * 16 + step_number) % PORTS,
    )


def _slurm_tasks(read: LaunchVariables, node: int) -> int:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = read.text(*names)
    try:
        counts = expand_counts(text)
    except ValueError as error:
        raise ConfigurationError(f"{read.find(*names)}={text!r} {error}.") from error
    if node >= len(counts):
        raise ConfigurationError(
            f"{read.find(*names)}={text!r} names {len(counts)} nodes, but SLURM_NODEID={node}."
        )
    return counts[node]


def _slurm_first_host(read: LaunchVariables, num_nodes: int) -> str:
    if num_nodes == 1:
        return "127.0.0.1"
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    text = read.text(*names)
    try:
        return expand_hosts(text)[0]
    except ValueError as error:
        raise ConfigurationError(
            f"{read.find(*names)}={text!r} {error}. Set MASTER_ADDR to the name of rank 0's host."
        ) from error


def _kubeflow(environment: Environment) -> Cluster | None:
    if "LOCAL_RANK" in environment:  # Half of torchrun's variables, in a pod.
        return None
    read = LaunchVariables(environment, "Kubeflow's training operator", "RANK")
    size = read.size("WORLD_SIZE")
    rank = read.number("RANK", maximum=size - 1)
    return Cluster(
        launcher="kubeflow",
        rank=rank,
        local_rank=0,
        world_size=size,
        local_world_size=1,
        node_rank=rank,
        num_nodes=size,
        master_address=read.text("MASTER_ADDR"),
        master_port=read.number("MASTER_PORT", minimum=1, maximum=65535),
    )


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


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except (OSError, AttributeError):  # No terminal; no such thing on Windows.
        return False
    return True


Environment = Mapping[str, str]

MOST_RANKS = 2**20
"""A number of processes or nodes above it is a mistake, and would only take memory."""


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


def expand_counts(text: str) -> list[int]:
    """Return the tasks of each node: `"2(x3),1"` is 2, 2, 2, 1.

    Raises:
        ValueError: it isn't such a list. The message continues after the list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item.strip())
        nodes = int(match[2] or 1) if match else 0
        if match is None or int(match[1]) == 0 or len(counts) + nodes > MOST_RANKS:
            raise ValueError("isn't a list of task counts like '2(x3),1'")
        counts += [int(match[1])] * nodes
    return counts


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a SLURM node list: `"n[03-05,9],other"` is n03, n04, n05, n9, other.

    Raises:
        ValueError: it isn't such a list. The message continues after the list.
    """
    # Commas inside brackets part ranges, the others part hosts.
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(items) != text.strip() or not items:
        raise ValueError("isn't a list of hosts like 'n[03-05,9],other'")
    hosts: list[str] = []
    for item in items:
        hosts += _expand_item(item.strip())
        if len(hosts) > MOST_RANKS:
            raise ValueError(f"names more than {MOST_RANKS} hosts")
    return hosts


def _expand_item(item: str) -> list[str]:
    """Return the hosts of one item: every bracket's numbers with every other's."""
    hosts = [""]
    for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", item):
        middles = _expand_ranges(ranges) if ranges or f"{plain}[]" in item else [""]
        if len(hosts) * len(middles) > MOST_RANKS:
            raise ValueError(f"names more than {MOST_RANKS} hosts")
        hosts = [f"{host}{plain}{middle}" for host in hosts for middle in middles]
    return hosts


def _expand_ranges(text: str) -> list[str]:
    """Return the numbers of `"03-05,9"`, with their leading zeros."""
    numbers: list[str] = []
    for item in text.split(","):
        match = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", item.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last) or int(last) - int(first) + len(numbers) >= 100_000:
            raise ValueError(f"has [{text}], which isn't a list of numbers like [03-05,9]")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


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
