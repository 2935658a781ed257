"""Callbacks for time limits, throughput, and the memory and use of devices."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from fitkit import trees
from fitkit.accelerators import (
    free_and_total_bytes,
    held_bytes,
    is_accelerator,
    name_of,
    peak_bytes,
    reset_peak,
)
from fitkit.arguments import check_choice, check_count, check_flag, check_number, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.seams.callbacks import (
    AnyRankFlag,
    Callback,
    Logs,
    from_all_ranks,
    from_rank_zero,
    print_on_rank_zero,
    run_of,
)
from fitkit.seams.data import unpack_batch

WRITTEN = re.compile(r"(\d+):(\d+):(\d+):(\d+)")


class Timer(Callback):
    """Ends `fit` after a given time, and measures `fit`, its validations and `evaluate`.

    Args:
        duration: the time limit: `"DD:HH:MM:SS"`, a `timedelta`, or a dict of its arguments
            (`{"hours": 8}`). None (default) only measures.
        interval: `"step"` (default) stops after the batch in which the time runs out. With several
            ranks this may be a twentieth of a second later, because they ask each other. `"epoch"`
            stops after the epoch.
        verbose: whether to print when the time has run out. Default True.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> timer = fitkit.callbacks.Timer(duration="00:12:00:00")
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[timer])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.

    Ranks:
        Rank 0's clock counts.
    """

    stops_alike = True

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        interval = check_choice("interval", interval, ("step", "epoch"))
        verbose = check_flag("verbose", verbose)
        self.duration_s: float | None = None if duration is None else seconds_of(duration)
        self.interval = interval
        self.verbose = verbose
        self._clock = time.monotonic
        self._before_s = 0.0
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._flag_of_any = AnyRankFlag()
        self._said = self._stops = False
        self._passes_s = {"validate": 0.0, "test": 0.0}
        self._pass_began_s: float | None = None

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds that a stage has taken.

        Args:
            stage: `"train"` (default): the current or last fit, with its validations and the time
                before a checkpoint. `"validate"`: its validations so far. `"test"`: the last
                `evaluate`.
        """
        stage = check_choice("stage", stage, ("train", "validate", "test"))
        if stage != "train":
            began_s = self._pass_began_s
            runs_s = 0.0 if began_s is None or stage != self._stage else self._clock() - began_s
            return self._passes_s[stage] + runs_s
        if self._began_s is None:
            return self._before_s
        end = self._clock() if self._ended_s is None else self._ended_s
        return self._before_s + end - self._began_s

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds until the limit, at least 0; None without a limit."""
        if self.duration_s is None:
            return None
        return max(self.duration_s - self.time_elapsed(stage), 0.0)

    @property
    def _stage(self) -> str:
        """The stage that the test hooks belong to."""
        return "validate" if self.params.get("stage") == "fit" else "test"

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._pass_began_s = self._clock()
        if self._stage == "test":
            self._passes_s["test"] = 0.0
            self.add_cleanup(setattr, self, "_pass_began_s", None)

    def on_test_end(self, logs: Logs) -> None:
        if self._pass_began_s is not None:
            self._passes_s[self._stage] += self._clock() - self._pass_began_s
            self._pass_began_s = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._before_s = self._passes_s["validate"] = 0.0
        self._pass_began_s = None
        self._began_s, self._ended_s = self._clock(), None
        self._flag_of_any.begin()
        self._said = self._stops = False
        self.add_cleanup(self._stop_clock)

    def _stop_clock(self) -> None:
        self._ended_s = self._clock()
        self._pass_began_s = None

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self.duration_s is None or self.interval != "step":
            return
        if self._flag_of_any.after_step(self.model, self.model.is_global_zero and self._is_over()):
            self._stop()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if self.duration_s is not None and from_rank_zero(self.model, self._is_over()):
            self._stop()

    def _is_over(self) -> bool:
        return self.time_remaining() == 0.0

    def _stop(self) -> None:
        self.model.stop_training = self._stops = True
        if self.verbose and not self._said:
            self._said = True
            limit = timedelta(seconds=self.duration_s or 0.0)
            print_on_rank_zero(self.model, f"Training stops: it reached the time limit of {limit}.")

    def state_dict(self) -> dict[str, Any]:
        return {
            "time_elapsed_s": self.time_elapsed(),
            "validate_s": self.time_elapsed("validate"),
            "stops": self._stops,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before_s = float(state["time_elapsed_s"])
        self._passes_s["validate"] = float(state.get("validate_s", 0.0))
        # With a later limit it goes on.
        if state.get("stops") and self.duration_s is not None and self._before_s >= self.duration_s:
            self._stop()


def seconds_of(duration: object) -> float:
    """Return a duration in seconds.

    Raises:
        ConfigurationError, ArgumentTypeError: it isn't a duration, or isn't above 0.
    """
    if isinstance(duration, str):
        found = WRITTEN.fullmatch(duration.strip())
        if found is None:
            raise ConfigurationError(f"duration={duration!r} must be written 'DD:HH:MM:SS'.")
        days, hours, minutes, seconds = map(int, found.groups())
        length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(duration, timedelta):
        length = duration
    elif isinstance(duration, Mapping):
        try:
            length = timedelta(**duration)
        except TypeError as error:
            raise ConfigurationError(
                f"duration={describe(duration)} isn't what timedelta takes: {error}"
            ) from None
    else:
        raise ArgumentTypeError(
            f"duration={describe(duration)} must be 'DD:HH:MM:SS', a timedelta, or a dict such "
            "as {'hours': 8}."
        )
    if length <= timedelta(0):
        raise ConfigurationError(f"duration={describe(duration)} must be more than 0 seconds.")
    return length.total_seconds()


PEAK_FLOPS = {
    "B200": 2.25e15, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A40": 149.7e12, "A10": 125e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
"""Half-precision operations per second, dense, by a part of torch's name for the device. From the
makers' data sheets. Longer names come first."""


class ThroughputMonitor(Callback):
    """Adds `batches_per_sec` and `samples_per_sec` to the epoch's logs, and token rates on request.

    They cover the epoch's last steps on all ranks together. The first step (which compiles and
    warms up) and the validation don't count. An epoch of one step has no values.

    `tokens` also adds `tokens_per_sec`. If the devices' peak is known, it adds `mfu`, too: the
    fraction of the peak that the net's multiplications use. A token takes 6 operations for each
    parameter that learns and 4 for each frozen one. Embeddings and attention itself don't count.

    Args:
        window_size: the most steps to average over. Default 100.
        separator: the text between `prefix` and a name. Default `"/"`.
        prefix: the prefix of the names: `"train"` gives `train/batches_per_sec`. Default `""`.
        tokens: True counts the integers in the inputs (`"input_ids"` in a dict, without those that
            its `"attention_mask"` hides). A number means that many tokens per sample. A function
            returns the number of tokens in a batch. Default None: not counted.
        peak_flops: a device's peak in operations per second. Default None: the half-precision peak
            of known GPUs, if training is in half precision.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.ThroughputMonitor()
        ... ])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid, or the inputs have no
            tokens.
    """

    stops_alike = True

    def __init__(
        self,
        window_size: int = 100,
        separator: str = "/",
        prefix: str = "",
        *,
        tokens: bool | int | Callable[[Any], Any] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        window_size = check_count("window_size", window_size, minimum=2)
        for name, value in (("separator", separator), ("prefix", prefix)):
            if not isinstance(value, str):
                raise ArgumentTypeError(f"{name}={describe(value)} must be a string.")
        if tokens is not None and not isinstance(tokens, bool) and not callable(tokens):
            tokens = check_count("tokens", tokens)
        peak_flops = check_number("peak_flops", peak_flops, above=0, optional=True)
        self.window_size = window_size
        self.separator = separator
        self.prefix = prefix
        self.tokens: bool | int | Callable[[Any], Any] | None = tokens
        self.each_batch: bool = bool(tokens)
        self.peak_flops: float | None = peak_flops
        self._clock = time.monotonic
        self._ends: deque[tuple[float, int]] = deque()  # times, and batches done by then
        self._before: list[tuple[float, int]] = []  # of this epoch, before a resume
        self._tokens: deque[Any] = deque(maxlen=window_size)  # of each step, on this rank
        self._end_s: float | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._before = []
        self._ends.clear()
        self._tokens.clear()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        groups = self.window_size // self.params.get("steps_per_execution", 1)
        self._ends = deque(maxlen=max(groups, 1) + 1)
        self._ends.extend(self._before)
        if not self._before:
            self._tokens.clear()
        self._end_s = None

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch's last steps, and every rank's tokens in them.

        Ranks:
            Collective with `tokens`.
        """
        last_s = self._ends[-1][0] if self._ends else 0.0
        ends = [[seconds - last_s, batch] for seconds, batch in self._ends]
        tokens = [float(number) for number in self._tokens]
        return {
            "ends": ends,
            "tokens": from_all_ranks(self.model, tokens) if self.tokens else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = [(float(seconds), int(batch)) for seconds, batch in state.get("ends", ())]
        rank = self.model.global_rank
        if self._before and rank < len(state["tokens"]):
            self._tokens.extend(state["tokens"][rank])

    def _continue(self, skipped: int = 0) -> None:
        """Move the times before a resume so that the last one is now.

        Args:
            skipped: the number of batches since the resume, which don't count.
        """
        self._before = []
        now_s, kept = self._clock(), self._ends
        moved = ((now_s + seconds, batch + skipped) for seconds, batch in kept)
        self._ends = deque(moved, maxlen=kept.maxlen)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self._before:  # the first step after a resume doesn't count either
            self._continue(batch + 1 - self._ends[-1][1])
            return
        if self.tokens and self._ends:
            self._tokens.append(self._tokens_of(getattr(run_of(self.model), "batch", None)))
        self._ends.append((self._clock(), batch + 1))

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._note_end()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self._note_end()
        tokens = 0.0
        if self.tokens:
            tokens = sum(from_all_ranks(self.model, float(sum(self._tokens))))
            # Ranks that compute a batch together have counted the same tokens.
            tokens /= self.model._fitkit.compilation.strategy.ranks_per_batch
        ends = list(self._ends)
        self._ends.clear()
        self._tokens.clear()
        if len(ends) < 2 or self._end_s is None or self._end_s <= ends[0][0]:
            return
        seconds = self._end_s - ends[0][0]
        batches = (ends[-1][1] - ends[0][1]) / seconds
        logs[self._name("batches_per_sec")] = batches * self.model.world_size
        samples = self._samples_in_a_step()
        if samples is not None:
            logs[self._name("samples_per_sec")] = batches * samples
        if self.tokens:
            rate = logs[self._name("tokens_per_sec")] = tokens / seconds
            peak = self._peak_of_all()
            if peak:
                logs[self._name("mfu")] = rate * operations_of_token(self.model) / peak

    def _note_end(self) -> None:
        # A GPU runs behind the loop. By now its losses were read, so it has caught up.
        if self._before:
            self._continue()
        if self._end_s is None:
            self._end_s = self._clock()

    def _samples_in_a_step(self) -> float | None:
        samples, steps = self.params.get("samples"), self.params.get("steps")
        if samples and steps:
            return float(samples) / steps
        size = self.params.get("batch_size")
        return size and size * self.model._fitkit.compilation.strategy.data_rank_count

    def _name(self, name: str) -> str:
        return f"{self.prefix}{self.separator}{name}" if self.prefix else name

    def _tokens_of(self, batch: Any) -> Any:
        """Return the number of tokens in a batch: a number, or a tensor () on the device."""
        if batch is None or not batch.samples:  # a placeholder batch
            return 0
        samples, batch = batch.samples, batch.data
        if callable(self.tokens):
            return self.tokens(batch)
        if self.tokens is not True:
            return samples * int(self.tokens or 0)
        inputs: Any = unpack_batch(batch)[0]
        mask: Any = None
        if isinstance(inputs, Mapping):
            inputs, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        arrays = [torch.as_tensor(a) for a in trees.leaves(inputs) if hasattr(a, "__array__")]
        found = arrays[0] if arrays else None
        if found is None or found.is_floating_point() or found.is_complex():
            raise ConfigurationError(
                "ThroughputMonitor(tokens=True) found no integers in the inputs that could be "
                "tokens. Write the number of tokens in a sample, like tokens=128, or give a "
                "function of a batch."
            )
        return mask.sum() if isinstance(mask, torch.Tensor) and mask.ndim == 2 else found.numel()

    def _peak_of_all(self) -> float | None:
        """Return the peak of all devices in the run together, in operations per second."""
        strategy = self.model._fitkit.compilation.strategy
        peak = self.peak_flops
        if peak is None and "16" in strategy.precision.name:
            name = name_of(strategy.device)
            peak = next((PEAK_FLOPS[known] for known in PEAK_FLOPS if known in name), None)
        return None if peak is None else peak * strategy.world.size * strategy.replicas


def operations_of_token(net: torch.nn.Module) -> float:
    """Return the operations for one token's forward and backward pass, by the number of parameters.

    Reference: Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B.
    """
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = {id(m.weight) for m in net.modules() if isinstance(m, embeddings)}
    # An embedding that is also the head does multiply.
    tables -= {id(m.weight) for m in net.modules() if isinstance(m, torch.nn.Linear)}
    return float(
        sum(
            (6 if p.requires_grad else 4) * p.numel()
            for p in net.parameters()
            if id(p) not in tables
        )
    )


resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

MIB = 2**20


class DeviceStatsMonitor(Callback):
    """Adds the devices' memory to the epoch's logs. It asks once per epoch, not in the loop.

    On CUDA, `gpu_memory_peak_mib` is the most memory that torch held on any GPU of the run during
    the epoch. On the CPU, `cpu_percent` is this process's use of one core (rank 0's, over the
    epoch), and `cpu_memory_peak_mib` its peak so far.

    Args:
        cpu_stats: whether to log the CPU's values. Default None: if the run is on the CPU.
        log_gpu_memory: `"all"` adds `gpu_<index>_memory_mib` for each GPU of the run: the memory in
            use by anyone, as nvidia-smi shows it. On several nodes the name is
            `rank_<rank>_gpu_<index>_…`. `"min_max"` adds the smallest and largest of these,
            `gpu_memory_min_mib` and `gpu_memory_max_mib`. None (default) adds neither.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> history = model.fit(x, x.sum(1), epochs=2, verbose=0, callbacks=[
        ...     fitkit.callbacks.DeviceStatsMonitor()
        ... ])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.
    """

    stops_alike = True

    def __init__(self, cpu_stats: bool | None = None, log_gpu_memory: str | None = None) -> None:
        cpu_stats = check_flag("cpu_stats", cpu_stats, optional=True)
        log_gpu_memory = check_choice("log_gpu_memory", log_gpu_memory, (None, "all", "min_max"))
        self.cpu_stats = cpu_stats
        self.log_gpu_memory = log_gpu_memory
        self._began = (0.0, 0.0)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._began = _times()
        for device in self._gpus():
            reset_peak(device)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        on_cpu = self.model.device.type == "cpu"
        if on_cpu if self.cpu_stats is None else self.cpu_stats:
            logs.update(self._cpu_values())
        if is_accelerator(self.model.device):
            mine = {device.index or 0: _memory(device) for device in self._gpus()}
            logs.update(self._gpu_values(from_all_ranks(self.model, mine)))

    def _gpus(self) -> list[torch.device]:
        """Return the GPUs of this rank: its own, or all if one process uses several."""
        strategy = self.model._fitkit.compilation.strategy
        devices = list(strategy.devices) if strategy.world.size == 1 else [strategy.device]
        return [device for device in devices if is_accelerator(device)]

    def _cpu_values(self) -> dict[str, float]:
        used, passed = (now - then for now, then in zip(_times(), self._began, strict=True))
        values = {"cpu_percent": 100.0 * used / max(passed, 1e-9)}
        if resource is not None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            values["cpu_memory_peak_mib"] = peak / (MIB if sys.platform == "darwin" else 1024)
        return values

    def _gpu_values(self, ranks: list[dict[int, tuple[float, float]]]) -> dict[str, float]:
        """Return the logs, from each rank's (peak, used) by device index."""
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
    """Return the most memory that torch held in the epoch, and all memory in use now, in MiB."""
    free, total = free_and_total_bytes(device) or (0, held_bytes(device))
    return peak_bytes(device) / MIB, (total - free) / MIB


def _times() -> tuple[float, float]:
    """Seconds of CPU time of this process, and of the clock."""
    times = os.times()
    return times.user + times.system, time.monotonic()
