"""What a node's ranks count and note in a step, brought together as that of replicas is."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

from fitkit import trees
from fitkit.distributed.metric_copies import (
    Counts,
    begin,
    counts_of,
    is_metric,
    metrics_in,
    restore,
    take_up,
)
from fitkit.distributed.module_copies import ABSENT, shallow


class NodeState:
    """What one step does to a module beside its outputs, on this rank.

    Between `begin` and `end` the module's metrics count from nothing, and the module is told
    that it is a replica, if it wants to know it (see `Replicas`). `merge` takes up what all of
    the node's ranks counted and noted, so that they have the same again.

    Args:
        module: whose method is the step.
        device: this rank's.
        samples: of its rows.
    """

    def __init__(self, module: Any, device: torch.device, samples: int) -> None:
        self._module = module
        self._device = device
        self._samples = samples
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._metrics = metrics_in(module)
        # Those inside of others come first: the others reset them.
        every = reversed(list(module.modules()))
        self._all_metrics: list[Any] = [child for child in every if is_metric(child)]
        self._set_aside: list[Any] = []
        self._before: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._begun = b""
        self._counts: list[Counts] = []
        self._noted = b""

    def begin(self) -> None:
        """Before the step."""
        for metric in self._all_metrics:
            self._set_aside.append(copy.copy(metric))
            begin(metric)
        if hasattr(type(self._module), "_begin_replica"):
            self._before = vars(self._module).copy()
            self._module._begin_replica(self._device, self._samples)
            self._told = self._new()
            self._begun = self._packed(self._told)

    def end(self) -> bool:
        """After the step; whether there is something to merge."""
        self._noted = self._packed(self.restore())
        return self._noted != self._begun or not all(counts.is_empty for counts in self._counts)

    def restore(self) -> dict[str, Any]:
        """Put the module back as it was before `begin`; returns what it was told and noted."""
        self._counts = [counts_of(metric) for metric in self._metrics]
        for metric, older in zip(self._all_metrics, self._set_aside, strict=True):
            restore(metric, older)
        held = vars(self._module)
        told = {name: held[name] for name in self._told}
        for name in told:
            if name in self._before:
                held[name] = self._before[name]
            else:
                del held[name]
        return told

    def payload(self) -> bytes:
        """What the other ranks need."""
        return self._packed((self._counts, self._noted))

    def merge(self, payloads: list[bytes]) -> None:
        """Take up what the ranks counted and noted.

        Args:
            payloads: of those that had samples, in their order.
        """
        replicas: list[nn.Module] = []
        for payload in payloads:
            counts, noted = self._unpacked(payload)
            for metric, counted in zip(self._metrics, counts, strict=True):
                take_up(metric, counted)
            replica = shallow(self._module)
            vars(replica).update(self._unpacked(noted))
            replicas.append(replica)
        if hasattr(type(self._module), "_end_replicas"):
            self._module._end_replicas(replicas)

    def _new(self) -> dict[str, Any]:
        """The attributes that are other ones than before."""
        return {
            name: value
            for name, value in vars(self._module).items()
            if self._before.get(name, ABSENT) is not value
        }

    def _packed(self, value: Any) -> bytes:
        with io.BytesIO() as stream:
            _Pickler(stream, self._paths).dump(value)
            return stream.getvalue()

    def _unpacked(self, data: bytes) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._module.get_submodule  # type: ignore[method-assign]

        def place(leaf: Any) -> Any:
            return leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf

        return trees.map_leaves(place, unpickler.load())


class _Pickler(pickle.Pickler):
    """Writes a module's submodules as their names, and tensors as they are on the CPU."""

    def __init__(self, stream: io.BytesIO, paths: dict[int, str]) -> None:
        super().__init__(stream)
        self._paths = paths

    def persistent_id(self, value: Any) -> str | None:
        return self._paths.get(id(value)) if isinstance(value, nn.Module) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
