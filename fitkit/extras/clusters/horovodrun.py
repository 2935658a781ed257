"""horovodrun."""

from __future__ import annotations

import dataclasses

from fitkit.seams.machines import Cluster, Environment, LaunchVariables


def read_horovodrun(environment: Environment) -> Cluster:
    """Return this process's place as horovodrun's variables say it."""
    read = LaunchVariables(environment, "horovodrun", "HOROVOD_RANK")
    place = read.place(
        "horovodrun",
        ("HOROVOD_RANK",),
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
    )
    nodes = read.size("HOROVOD_CROSS_SIZE")
    node = read.number("HOROVOD_CROSS_RANK", maximum=nodes - 1)
    return dataclasses.replace(place, node_rank=node, num_nodes=nodes)
