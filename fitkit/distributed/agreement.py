"""Whether the processes that a launcher started are those that compile asks for."""

from __future__ import annotations

from fitkit.distributed.cluster import Cluster
from fitkit.errors import ConfigurationError

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
"""How each launcher is told the number of processes."""


def check_agreement(cluster: Cluster | None, devices: int | None, num_nodes: int | None) -> None:
    """Refuse to train on other processes than were started.

    Args:
        cluster: what was started; None where nothing was.
        devices: processes for each node; None for as many as there are ("auto").
        num_nodes: likewise. An elastic launch has its own number, whatever is written here.

    Raises:
        ConfigurationError: they differ. The message has both numbers. It is raised for one
            device too: two ranks that each train for themselves look like success.
    """
    if cluster is None:
        if num_nodes is not None and num_nodes > 1:
            raise _no_launcher(devices, num_nodes)
        return
    nodes = cluster.num_nodes if num_nodes is None or cluster.elastic else num_nodes
    agree = nodes == cluster.num_nodes
    if devices is not None:
        # The product is the same on every rank, so that all of them refuse where nodes differ.
        agree &= devices * nodes == cluster.world_size and devices == cluster.local_world_size
    if not agree:
        raise _disagreement(cluster, devices, nodes)


def check_one_process(cluster: Cluster, strategy: str) -> None:
    """Refuse several processes for a strategy that is one.

    Raises:
        ConfigurationError: there are several. Each would train for itself, and that looks like
            success.
    """
    if cluster.world_size > 1:
        restart = RESTART[cluster.launcher].format(nodes=1, devices=1, world=1)
        raise ConfigurationError(
            f"{_started(cluster)}, but strategy={strategy!r} is one process, with "
            f"{'all its devices' if strategy == 'dp' else 'devices=1'}. Write strategy='ddp', or "
            f"start {restart}."
        )


def check_one_process_a_node(cluster: Cluster, strategy: str) -> None:
    """Refuse several processes on a node for a strategy that has one on each.

    Raises:
        ConfigurationError: there are several on some node; on every rank alike.
    """
    if cluster.world_size > cluster.num_nodes:
        nodes = cluster.num_nodes
        restart = RESTART[cluster.launcher].format(nodes=nodes, devices=1, world=nodes)
        raise ConfigurationError(
            f"{_started(cluster)}, but strategy={strategy!r} has one process on each node, with "
            f"all its devices. Start {restart}, or write strategy='ddp'."
        )


def _started(cluster: Cluster) -> str:
    return (
        f"{cluster.launcher} started {_count(cluster.world_size, 'process')} "
        f"({cluster.local_world_size} on this node, {_count(cluster.num_nodes, 'node')})"
    )


def _no_launcher(devices: int | None, num_nodes: int) -> ConfigurationError:
    count = "GPUS" if devices is None else devices
    return ConfigurationError(
        f"num_nodes={num_nodes}, but no launcher started this process, so there is 1 node. Start "
        f"the script on each node with torchrun --nnodes={num_nodes} --nproc-per-node={count} "
        "--rdzv-backend=c10d --rdzv-endpoint=HOST:29400, HOST being one node's name, or write "
        "num_nodes=1."
    )


def _disagreement(cluster: Cluster, devices: int | None, nodes: int) -> ConfigurationError:
    """What was started, what was asked, and the two ways to make them one."""
    local = cluster.local_world_size
    wanted = local if devices is None else devices
    asked = "devices='auto'" if devices is None else f"devices={devices}"
    even = local * cluster.num_nodes == cluster.world_size
    fitting = f"devices={local}, num_nodes={cluster.num_nodes}" if even else "devices='auto'"
    restart = RESTART[cluster.launcher].format(nodes=nodes, devices=wanted, world=wanted * nodes)
    return ConfigurationError(
        f"{_started(cluster)}, but {asked} and num_nodes={nodes} ask for "
        f"{_count(wanted * nodes, 'process')}. Write {fitting}, or start {restart}."
    )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
