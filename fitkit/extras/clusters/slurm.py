"""SLURM's srun."""

from __future__ import annotations

import os
import re

from fitkit.errors import ConfigurationError
from fitkit.extras.clusters import port_of
from fitkit.seams.machines import MOST_RANKS, Cluster, Environment, LaunchVariables

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM's step numbers from here on are no step of srun's: salloc's interactive shell
(0xfffffffa), the batch script (0xfffffffb) and others."""


def read_slurm(environment: Environment) -> Cluster | None:
    """Return this process's place in a step of srun's; None for a batch script or a shell."""
    if not environment.get("SLURM_STEP_ID") and not environment.get("SLURM_STEPID"):
        return None  # A batch script.
    sign = "SLURM_STEP_ID" if environment.get("SLURM_STEP_ID") else "SLURM_STEPID"
    read = LaunchVariables(environment, "srun", sign)
    step_number = read.number(sign)
    if step_number >= FIRST_SPECIAL_STEP:
        return None
    size = read.size("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    # Set by `srun --pty` and by salloc's shell, and inherited by what such a shell starts with
    # another srun. Those tasks have no terminal; a shell (all of its step that lives) has one.
    if environment.get("SLURM_PTY_PORT") and (size == 1 or _has_terminal()):
        return None
    nodes = read.size("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node = read.number("SLURM_NODEID", maximum=nodes - 1)
    local_size = size if nodes == 1 else _tasks(read, node)
    address, port = read.master()
    return Cluster(
        launcher="slurm",
        rank=read.number("SLURM_PROCID", maximum=size - 1),
        local_rank=read.number("SLURM_LOCALID", maximum=local_size - 1),
        world_size=size,
        local_world_size=local_size,
        node_rank=node,
        num_nodes=nodes,
        master_address=address or _first_host(read, nodes),
        # 16 steps of 1,000 jobs in a row have ports of their own.
        master_port=port or port_of(read.number("SLURM_JOB_ID", "SLURM_JOBID") * 16 + step_number),
    )


def _tasks(read: LaunchVariables, node: int) -> int:
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


def _first_host(read: LaunchVariables, num_nodes: int) -> str:
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


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except (OSError, AttributeError):  # No terminal; no such thing on Windows.
        return False
    return True


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
