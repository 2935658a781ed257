"""One replica among those that live, by torchft's Manager."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]
from torch.nn.modules.batchnorm import _NormBase

from fitkit.errors import missing_package, warn

RETRIES = 50
"""Updates in a row that may fail before a replica gives up."""


def check_torchft() -> None:
    """Make sure that the package is there.

    Raises:
        MissingPackageError: it isn't.
    """
    if "torchft" not in sys.modules and importlib.util.find_spec("torchft") is None:
        raise missing_package("torchft", "fault-tolerant", "strategy='fault_tolerant'")


class ReplicaGroup:
    """This replica among those that live, until `leave`.

    Args:
        number: of this replica, from 0.
        replicas: how many there are when all live.
        lighthouse: the address of torchft's lighthouse.
        min_replicas: fewer than so many make no update.
        timeout: of an exchange.
        patience: how long to wait for enough replicas.
        device: of the module.
        give: gives a replica's whole state, for one that joins.
        take: takes another's over.
    """

    def __init__(
        self,
        number: int,
        replicas: int,
        lighthouse: str,
        min_replicas: int,
        timeout: timedelta,
        patience: timedelta,
        device: torch.device,
        give: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> None:
        check_torchft()
        os.environ.setdefault("RUST_LOG", "error")  # else several lines for each update
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        for name in ("torchft", "torchft.manager"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # `commits` tells what went wrong
        self._replicas = replicas
        host = socket.gethostname()
        # Where the others learn how to reach this replica; it needs no one's leave to come or go.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        kind = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
        self._group = kind(timeout=timeout)
        self._manager = Manager(
            pg=self._group,
            load_state_dict=take,
            state_dict=give,
            min_replica_size=min_replicas,
            timeout=timeout,
            quorum_timeout=patience,
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{number}",
            hostname=host,
            max_retries=RETRIES,
        )

    @torch.no_grad()
    def average(
        self, parameters: list[nn.Parameter], module: nn.Module, *, contributes: bool
    ) -> int:
        """Replace gradients, and batch norms' running statistics, by the mean over the replicas.

        A parameter that a replica didn't use counts as zero there; one that nobody used keeps no
        gradient.

        Args:
            parameters: that learn, the same on every replica.
            module: whose running statistics they are.
            contributes: whether this replica has gradients to give.

        Returns:
            How many replicas have contributed; 0 where nothing came of it.

        Ranks:
            Collective among the replicas that live.
        """
        self._manager.start_quorum()
        statistics = running_statistics(module)
        tensors = [_gradient(p) for p in parameters] + statistics
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
        told = [float(p.grad is not None) for p in parameters] + [1.0]
        flat = [tensor.reshape(-1).to(dtype) for tensor in tensors]
        packed = torch.cat([*flat, flat[0].new_tensor(told)])
        if not contributes:
            packed.zero_()
        self._manager.allreduce(packed, reduce_op=ReduceOp.SUM).wait()
        *parts, used = packed.split([*(tensor.numel() for tensor in tensors), len(told)])
        *users, count = used.tolist()
        if self._manager.errored() or not count:
            return 0
        for parameter, part, some in zip(parameters, parts, users, strict=False):
            if some:
                # Each has given its samples' part of the mean over all that there could be.
                mean = part.view_as(parameter).mul_(self._replicas / count)
                # Laid out as the weights are: a fused step reads both in the same order.
                parameter.grad = torch.empty_like(parameter).copy_(mean)
        for statistic, part in zip(statistics, parts[len(parameters) :], strict=True):
            statistic.copy_(part.view_as(statistic).div_(count))
        return round(count)

    def commits(self) -> bool:
        """Whether this replica makes the update; one that joins takes over a state before it."""
        commits: bool = self._manager.should_commit()
        if not commits:
            error = self._manager.errored()
            reason = str(error.original_exception).splitlines()[0] if error else "too few replicas"
            warn(f"An update is left out, because an exchange between replicas failed: {reason}")
        return commits

    def leave(self, *, wait: bool) -> None:
        """Leave the others.

        Args:
            wait: whether for this replica's own threads; not after a failure.
        """
        self._manager.shutdown(wait=wait)
        self._group.shutdown()


def running_statistics(module: nn.Module) -> list[torch.Tensor]:
    """Batch norms' running means and variances."""
    return [
        statistic
        for child in module.modules()
        if isinstance(child, _NormBase)
        for statistic in (child.running_mean, child.running_var)
        if statistic is not None
    ]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient; zeros where it has none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
