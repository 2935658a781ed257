"""The user's words about hardware, resolved once into a complete Strategy."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from fitkit.accelerators import device_for
from fitkit.arguments import describe
from fitkit.distributed.cluster import (
    Cluster,
    Environment,
    check_agreement,
    check_one_process,
    detect,
)
from fitkit.distributed.devices import (
    Machine,
    choose_kind,
    parse_devices,
    usable_cores,
)
from fitkit.distributed.precision import resolve_precision
from fitkit.distributed.strategies import STRATEGIES, Strategy
from fitkit.distributed.strategies.base import Assignment
from fitkit.distributed.world import users_cluster
from fitkit.errors import ArgumentTypeError, ConfigurationError, warn

BINDS_DEVICES = ("slurm", "openmpi", "pmi", "lsf")
"""Launchers that may show each process one GPU of its own, and call it 0 everywhere."""


def resolve_strategy(
    devices: Any,
    accelerator: Any,
    strategy: Any,
    precision: Any,
    num_nodes: int | None = None,
    machine: Machine | None = None,
    environment: Environment | None = None,
) -> Strategy:
    """Return what `compile`'s words mean on a machine, in the processes that a launcher started.

    Args:
        num_nodes: how many machines take part; None for as many as were started.
        machine: the machine's facts; None for this one.
        environment: the variables that tell what a launcher started; None for this process's.

    Raises:
        ConfigurationError, ArgumentTypeError: words that mean nothing, or nothing here; or
            other ranks than were started.
    """
    machine = Machine.here() if machine is None else machine
    chosen = None if _is_auto(strategy) else named_strategy(strategy).for_model()
    if chosen is None:
        kind = choose_kind(accelerator, machine)
    else:
        kind, machine = chosen.choose_kind(accelerator, machine)
    cluster = _cluster(environment)
    if cluster is None or cluster.launcher == "fitkit":
        # A script's own ranks read the words as rank 0 did before it started them.
        ids = parse_devices(devices, kind, machine)
        if chosen is not None and _is_auto(devices):
            ids = ids[: chosen.most_devices]
        if cluster is None and kind == "cpu" and (chosen is None or chosen.starts != "here"):
            _warn_of_many_processes(len(ids))
        check_agreement(None, len(ids), num_nodes)
        name = _automatic(kind, "single_device" if len(ids) == 1 else "ddp_spawn")
        chosen = chosen or STRATEGIES[name]()
        if len(ids) == 1 or chosen.starts != "script":
            cluster = None
        elif cluster is not None:
            from fitkit.extras.launchers.script_rank import check_script_size

            check_script_size(cluster.world_size, len(ids))
    else:
        replicates = chosen is not None and chosen.replicates
        ids = _launched_devices(devices, kind, machine, cluster, replicates)
        asked = None if _is_auto(devices) else len(ids)
        if chosen is not None and chosen.starts in ("here", "nodes"):
            check_one_process(cluster, chosen.name, on_each_node=chosen.starts == "nodes")
            asked = 1
        check_agreement(cluster, asked, num_nodes)
        if chosen is None:
            name = "single_device" if cluster.world_size == 1 else "ddp"
            chosen = STRATEGIES[_automatic(kind, name)]()
        ids = ids if replicates else ids[: cluster.local_world_size]
    placed = tuple(device_for(kind, index) for index in ids)
    return chosen.connect(Assignment(placed, ids, resolve_precision(precision), cluster))


def _warn_of_many_processes(count: int) -> None:
    """Say where many more processes are asked for than there are cores."""
    cores = usable_cores() or os.cpu_count() or 1
    if count > 4 * cores:
        warn(
            f"devices={count} on the CPU starts {count} processes, but this one may use {cores} "
            f"core{'s' if cores > 1 else ''}: they compute by turns, and each takes the memory "
            f"of a Python with torch. Write devices={cores}, or fewer."
        )


def _automatic(kind: str, name: str) -> str:
    """Return the strategy for a kind of device where `name` is that for the usual ones."""
    return "xla" if kind == "xla" else name


def _cluster(environment: Environment | None) -> Cluster | None:
    """Return what started this process, with others; None where it started by itself."""
    variables = os.environ if environment is None else environment
    found = detect(variables)
    if found is None and environment is None:
        return users_cluster()
    if found is not None and found.launcher == "fitkit" and environment is None:
        from fitkit.extras.launchers.script_rank import is_script_rank

        return found if is_script_rank(variables) else None
    return found


def _launched_devices(
    devices: Any, kind: str, machine: Machine, cluster: Cluster, replicates: bool
) -> tuple[int, ...]:
    """Return the devices of this node's ranks, in rank order; "auto" is one for each that was
    started.

    Args:
        replicates: whether one rank has all devices of its node.

    Raises:
        ConfigurationError: words that mean nothing here, or fewer devices than ranks.
    """
    ranks = cluster.local_world_size
    visible = machine.count(kind)
    has_index = kind == "cuda" or kind in machine.others
    bound = has_index and visible == 1 < ranks and cluster.launcher in BINDS_DEVICES
    if bound and kind == "cuda":
        machine = dataclasses.replace(machine, cuda_count=ranks)
    elif bound:
        machine = dataclasses.replace(machine, others={**machine.others, kind: ranks})
    if not _is_auto(devices) or replicates:
        ids = parse_devices(devices, kind, machine)
    elif kind == "cpu" or machine.count(kind) >= ranks:
        ids = tuple(range(ranks))
    else:
        raise ConfigurationError(
            f"{cluster.launcher} started {ranks} processes on this node, but the number of "
            f"visible {kind} devices is {visible}. Start one process for each, or write "
            "accelerator='cpu'."
        )
    return (0,) * len(ids) if bound else ids


def _is_auto(words: Any) -> bool:
    return isinstance(words, str) and words.strip().lower() == "auto"


def named_strategy(strategy: Any) -> Strategy:
    """Return the strategy of a name; an object is itself.

    Raises:
        ConfigurationError, ArgumentTypeError: neither.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        raise ArgumentTypeError(
            f"strategy is the class {strategy.__name__}. Write {strategy.__name__}()."
        )
    if isinstance(strategy, str):
        return STRATEGIES[strategy]()
    raise ArgumentTypeError(
        f"strategy={describe(strategy)} must be a name or a fitkit.strategies.Strategy."
    )
