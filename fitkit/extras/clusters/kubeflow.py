"""Pods of Kubeflow's training operator."""

from __future__ import annotations

from fitkit.seams.machines import Cluster, Environment, LaunchVariables


def read_kubeflow(environment: Environment) -> Cluster | None:
    """Return this pod's place; None where torchrun runs in it, which left half of its variables."""
    if "LOCAL_RANK" in environment:
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
