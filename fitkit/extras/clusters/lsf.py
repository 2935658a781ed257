"""LSF's jsrun."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fitkit.errors import ConfigurationError
from fitkit.extras.clusters import port_of
from fitkit.seams.machines import Cluster, Environment, LaunchVariables


def read_lsf(environment: Environment) -> Cluster:
    """Return this process's place as jsrun's variables say it."""
    read = LaunchVariables(environment, "jsrun", "JSM_NAMESPACE_RANK")
    place = read.place(
        "lsf",
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
    )
    return dataclasses.replace(
        place,
        master_address=place.master_address or _first_host(read, place.num_nodes),
        master_port=place.master_port or port_of(read.number("LSB_JOBID")),
    )


def _first_host(read: LaunchVariables, num_nodes: int) -> str:
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
