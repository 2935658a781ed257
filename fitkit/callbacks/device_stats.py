"""Memory and use of the devices, as logs."""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType
from typing import Any

import torch

from fitkit.arguments import check_choice, check_flag
from fitkit.callbacks.base import Callback, Logs
from fitkit.callbacks.ranks import from_all_ranks

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

MIB = 2**20


class DeviceStatsMonitor(Callback):
    """Adds the devices' memory to the epoch's logs; asked once an epoch, not in the loop.

    On CUDA `gpu_memory_peak_mib` is the most that torch held on any of the run's GPUs in the
    epoch. On the CPU `cpu_percent` is this process's use of one core (rank 0's, over the epoch),
    `cpu_memory_peak_mib` its peak so far.

    Args:
        cpu_stats: whether to log the CPU's; None (default): where the run is on the CPU.
        log_gpu_memory: `"all"` adds for each GPU of the run `gpu_<index>_memory_mib`, what is
            used there by anybody, as nvidia-smi shows it (on several nodes
            `rank_<rank>_gpu_<index>_…`); `"min_max"` adds the least and the most of them,
            `gpu_memory_min_mib` and `gpu_memory_max_mib`. None (default): neither.

    Raises:
        ConfigurationError, ArgumentTypeError: arguments that can't be.
    """

    stops_alike = True

    def __init__(self, cpu_stats: bool | None = None, log_gpu_memory: str | None = None) -> None:
        check_flag("cpu_stats", cpu_stats, optional=True)
        check_choice("log_gpu_memory", log_gpu_memory, (None, "all", "min_max"))
        self.cpu_stats = cpu_stats
        self.log_gpu_memory = log_gpu_memory
        self._began = (0.0, 0.0)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._began = _times()
        for device in self._gpus():
            torch.cuda.reset_peak_memory_stats(device)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        on_cpu = self.model.device.type == "cpu"
        if on_cpu if self.cpu_stats is None else self.cpu_stats:
            logs.update(self._cpu_values())
        if self.model.device.type == "cuda":
            mine = {device.index or 0: _memory(device) for device in self._gpus()}
            logs.update(self._gpu_values(from_all_ranks(self.model, mine)))

    def _gpus(self) -> list[torch.device]:
        """The GPUs of this rank: its own, or all where one process has them."""
        strategy = self.model._fitkit.compilation.strategy
        devices = list(strategy.devices) if strategy.world.size == 1 else [strategy.device]
        return [device for device in devices if device.type == "cuda"]

    def _cpu_values(self) -> dict[str, float]:
        used, passed = (now - then for now, then in zip(_times(), self._began, strict=True))
        values = {"cpu_percent": 100.0 * used / max(passed, 1e-9)}
        if resource is not None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            values["cpu_memory_peak_mib"] = peak / (MIB if sys.platform == "darwin" else 1024)
        return values

    def _gpu_values(self, ranks: list[dict[int, tuple[float, float]]]) -> dict[str, float]:
        """The logs from every rank's (peak, used) by device index."""
        places = [(rank, index) for rank, found in enumerate(ranks) for index in found]
        several_nodes = len({index for _, index in places}) < len(places)
        used = {}
        for rank, index in places:
            name = f"rank_{rank}_gpu_{index}" if several_nodes else f"gpu_{index}"
            used[f"{name}_memory_mib"] = ranks[rank][index][1]
        peaks = [peak for found in ranks for peak, _ in found.values()]
        values = {"gpu_memory_peak_mib": max(peaks)} if peaks else {}
        if self.log_gpu_memory == "all":
            values.update(used)
        elif self.log_gpu_memory == "min_max" and used:
            values["gpu_memory_min_mib"] = min(used.values())
            values["gpu_memory_max_mib"] = max(used.values())
        return values


def _memory(device: torch.device) -> tuple[float, float]:
    """What torch held at most since the epoch's begin, and what anybody uses now, in MiB."""
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_allocated(device) / MIB, (total - free) / MIB


def _times() -> tuple[float, float]:
    """Seconds of computing by this process, and of the clock."""
    times = os.times()
    return times.user + times.system, time.monotonic()
