"""Finding free GPUs, for users who leave the choice to fitkit.

A GPU is usable if a tensor can be placed on it and no other process occupies it. (A GPU in
exclusive mode that another process holds refuses tensors.) Other processes occupy it if they

- hold more than 1 GiB or 5 % of its memory, whichever is more. The driver, a desktop and an idle
  CUDA context stay below that; a training doesn't;
- or keep it more than half busy, however little memory they hold.

The caller's own processes don't count. The choice is made once, in the caller's process, and
passed to the ranks. Asked again, it would differ once rank 0 holds a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.launchers.private_folder import parent_of
from fitkit.extras.launchers.script_rank import is_script_rank

GIB = 2**30

CHOSEN = "FITKIT_FREE_GPUS"
"""The variable by which rank 0 passes its choices, in order, to the ranks that run its script."""

_chosen: list[list[int]] = []
"""This process's choices so far."""

OCCUPIED_BYTES, OCCUPIED_FRACTION, OCCUPIED_LOAD = GIB, 0.05, 0.5


def find_usable_cuda_devices(k: int = -1) -> list[int]:
    """Find free CUDA devices, those with the most free memory first.

    Free memory is compared in whole GiB. If it is equal, the less busy GPU comes first. A child
    process asks the GPUs, so no CUDA context is left in this process. In a script that runs once
    for each rank (`strategy="ddp"`), every rank gets what rank 0 chose.

    Args:
        k: the number of GPUs. -1 for all that are free, which may be fewer than the machine has.

    Returns:
        Indices among the visible devices (after `CUDA_VISIBLE_DEVICES`), as `devices=` takes them.

    Raises:
        ConfigurationError: there is no CUDA device, or too few are free. The message says what
            occupies the others, as far as known (`pip install nvidia-ml-py` shows more).

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(2, 1))
        >>> if torch.cuda.device_count() > 1:
        ...     model.compile("adam", "mse", devices=fitkit.find_usable_cuda_devices(2))
    """
    if isinstance(k, bool) or not isinstance(k, int):
        raise ArgumentTypeError(
            f"k={describe(k)} must be an int: a number of GPUs, or -1 for all that are free."
        )
    if k == 0 or k < -1:
        raise ConfigurationError(
            f"k={k} must be a number of GPUs of at least 1, or -1 for all that are free."
        )
    found = _handed_down(len(_chosen))
    if found is None:
        gpus = probe_gpus() if torch.cuda.device_count() else []
        found = select_free(k, [_without_own(gpu) for gpu in gpus])
    _chosen.append(found)
    if not _is_other_script_rank():
        os.environ[CHOSEN] = json.dumps(_chosen)
    return list(found)


def _handed_down(index: int) -> list[int] | None:
    """Rank 0's choice at its call number `index`, if rank 0 started this process later.

    Raises:
        ConfigurationError: the variable doesn't hold what fitkit writes there.
    """
    if not _is_other_script_rank():
        return None
    text = os.environ.get(CHOSEN, "[]")
    if not re.fullmatch(r"\[(\[(\d{1,4}(, \d{1,4})*)?\](, )?)*\]", text, re.ASCII):
        raise ConfigurationError(
            f"{CHOSEN}={text[:80]!r} isn't a list of lists of device numbers, as fitkit sets it "
            "for the ranks of a script. Unset it."
        )
    choices: list[list[int]] = json.loads(text)
    return choices[index] if index < len(choices) else None


def _is_other_script_rank() -> bool:
    return is_script_rank(os.environ) and os.environ.get("RANK") != "0"


def select_free(k: int, gpus: Sequence[GPU]) -> list[int]:
    """Choose from what is known of each visible GPU; see `find_usable_cuda_devices`."""
    if not gpus:
        raise ConfigurationError(
            f"k={k} asks for CUDA devices, but none is visible (torch {torch.__version__}, "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Write "
            "accelerator='auto' or 'cpu' with devices='auto'.",
            code="FK034",
        )
    occupied = {gpu.index: reason for gpu in gpus if (reason := why_occupied(gpu))}
    free = [gpu for gpu in gpus if gpu.index not in occupied]
    if k > len(gpus):
        raise ConfigurationError(
            f"k={k} asks for {k} GPUs, but {len(gpus)} {'is' if len(gpus) == 1 else 'are'} "
            f"visible. Write k={len(gpus)} at most, or k=-1 for all that are free."
        )
    if not free or k > len(free):
        listing = "; ".join(f"GPU {index} {reason}" for index, reason in sorted(occupied.items()))
        remedy = "Wait for them to become free"
        if free:
            remedy = f"Write k={len(free)}, or k=-1 for all that are free"
        raise ConfigurationError(
            f"k={k} asks for {'all free GPUs' if k == -1 else f'{k} free GPUs'}, but "
            f"{len(free)} of {len(gpus)} {'is' if len(free) == 1 else 'are'} free: {listing}. "
            f"{remedy}, or name them yourself: devices=[…].",
            code="FK037",
        )
    free.sort(key=lambda gpu: (-(gpu.free_bytes // GIB), gpu.load or 0.0, gpu.index))
    return [gpu.index for gpu in free[: len(free) if k == -1 else k]]


def why_occupied(gpu: GPU) -> str | None:
    """Why a GPU can't be used, as text after its name; None if it is free."""
    if gpu.failure is not None:
        return f"takes no tensor ({gpu.failure}{_by(gpu.holders)})"
    if gpu.used_bytes > max(OCCUPIED_BYTES, OCCUPIED_FRACTION * gpu.total_bytes):
        used, total = gpu.used_bytes / GIB, gpu.total_bytes / GIB
        return f"has {used:.1f} of {total:.1f} GiB in use{_by(gpu.holders)}"
    if gpu.load is not None and gpu.load > OCCUPIED_LOAD and gpu.holders:
        return f"is {gpu.load:.0%} busy{_by(gpu.holders)}"
    return None


def _by(holders: Sequence[Holder]) -> str:
    listing = [
        f"pid {holder.pid}"
        + (f" {holder.name}" if holder.name else "")
        + (f" with {holder.used_bytes / GIB:.1f} GiB" if holder.used_bytes else "")
        for holder in holders[:4]
    ]
    return f" by {', '.join(listing)}{', …' if len(holders) > 4 else ''}" if listing else ""


def _without_own(gpu: GPU) -> GPU:
    """Return the GPU as it would be without the caller's own processes (including earlier
    workers).
    """
    own = [holder for holder in gpu.holders if _is_own(holder.pid)]
    own_bytes = sum(holder.used_bytes or 0 for holder in own)
    if not own_bytes and torch.cuda.is_initialized() and torch.cuda.memory_reserved(gpu.index):
        # In a container the driver's process numbers differ. A context takes about 0.5 GiB.
        own_bytes = torch.cuda.memory_reserved(gpu.index) + GIB // 2
    own_bytes = min(own_bytes, gpu.used_bytes)
    return dataclasses.replace(
        gpu,
        used_bytes=gpu.used_bytes - own_bytes,
        free_bytes=gpu.free_bytes + own_bytes,
        holders=tuple(holder for holder in gpu.holders if holder not in own),
    )


def _is_own(pid: int) -> bool:
    """Whether a process is this one or descends from it."""
    while pid > 1 and pid != os.getpid():
        try:
            pid = parent_of(pid)
        except OSError:
            return False
    return pid == os.getpid()


TIMEOUT_S = 90.0
"""Importing torch takes up to 15 s on a loaded machine, and waking up eight GPUs as long."""

MARK = "fitkit-gpu "
"""Marks lines of fitkit's: drivers print, too."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that uses a GPU.

    Attributes:
        pid: its process number for the driver.
        name: its program; empty if unknown.
        used_bytes: the GPU memory that it uses; None if the driver doesn't say.
    """

    pid: int
    name: str = ""
    used_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class GPU:
    """What is known of a visible GPU.

    Attributes:
        index: its index among the visible ones.
        failure: why no tensor could be placed on it; None if one could.
        free_bytes: its free memory.
        used_bytes: memory used by processes other than the asking one.
        total_bytes: all of its memory.
        load: how busy it was lately, 0 to 1; None if unknown (no nvidia-ml-py).
        holders: the processes that use it, the largest first; empty if unknown.
    """

    index: int
    failure: str | None = None
    free_bytes: int = 0
    used_bytes: int = 0
    total_bytes: int = 0
    load: float | None = None
    holders: tuple[Holder, ...] = ()


def probe_gpus(timeout_s: float = TIMEOUT_S) -> list[GPU]:
    """All visible GPUs, in order. One that doesn't answer in time has that as its failure.

    Raises:
        ConfigurationError: the child couldn't even count them.
    """
    code = (
        "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
        "from fitkit.extras.free_devices import report; report()"
    )
    lines, complaint = run_child(code, timeout_s)
    if not lines:
        raise ConfigurationError(
            f"The GPUs could not be looked at ({complaint}). Name them yourself: devices=[…]."
        )
    known = [_parse(line) for line in lines[1:]]
    return known + [
        GPU(index, failure=f"it gave no answer: {complaint}")
        for index in range(len(known), int(lines[0]))
    ]


def run_child(code: str, timeout_s: float) -> tuple[list[str], str]:
    """Run code in its own Python. Returns the marked lines, and why there are no more.

    A process that waits for a broken driver can't be killed, so nothing here waits for its end.
    """
    arguments = [sys.executable, "-c", code, "\n".join(sys.path)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, text=True
        )
        try:
            status = child.wait(timeout_s)
            errors.seek(0)
            last_lines = errors.read().strip().splitlines()[-1:]
            complaint = "; ".join([f"exit status {status}", *last_lines])
        except subprocess.TimeoutExpired:
            complaint = f"nothing within {timeout_s:g} s"
        finally:
            child.kill()
        output.seek(0)
        lines = [line[len(MARK) :].strip() for line in output if line.startswith(MARK)]
    return lines, complaint


def _parse(line: str) -> GPU:
    facts = json.loads(line)
    facts["holders"] = tuple(Holder(**holder) for holder in facts["holders"])
    return GPU(**facts)


def report() -> None:
    """Do the child's part: print the number of GPUs, then a line for each."""
    import torch

    print(MARK + str(torch.cuda.device_count()), flush=True)
    nvml = load_nvml()
    for index in range(torch.cuda.device_count()):
        gpu = examine(index, torch.cuda, torch.zeros, nvml)
        print(MARK + json.dumps(dataclasses.asdict(gpu)), flush=True)


def load_nvml() -> Any:
    """Return the module pynvml (of nvidia-ml-py), initialised. None without it or a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return None
    return nvml


def examine(index: int, cuda: Any, zeros: Any, nvml: Any) -> GPU:
    """Return what torch, and NVML if present, say about one GPU.

    NVML is asked first, because placing a tensor creates a context of about 0.5 GiB.
    """
    facts: dict[str, Any] = {"index": index}
    try:
        properties = cuda.get_device_properties(index)
        facts["total_bytes"] = properties.total_memory
        if nvml is not None:
            facts |= _ask_nvml(nvml, str(properties.uuid))
        zeros(1, device=f"cuda:{index}").item()
        if "free_bytes" not in facts:
            free, total = cuda.mem_get_info(index)
            facts |= {"free_bytes": free, "used_bytes": total - free}
    except Exception as error:
        facts["failure"] = (str(error) or type(error).__name__).splitlines()[0]
    return GPU(**facts)


def _ask_nvml(nvml: Any, uuid: str) -> dict[str, Any]:
    """Memory, load and processes. What NVML doesn't report (MIG, containers) is left out.

    It asks by UUID, because NVML orders GPUs by bus. torch's order differs, unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID, and CUDA_VISIBLE_DEVICES leaves some out.
    """
    facts: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # NVML's errors; other modules named pynvml have less
        handle = nvml.nvmlDeviceGetHandleByUUID(
            uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        )
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        facts = {"free_bytes": memory.free, "used_bytes": memory.used, "total_bytes": memory.total}
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        holders = [Holder(p.pid, _program(p.pid), p.usedGpuMemory) for p in processes]
        holders.sort(key=lambda holder: -(holder.used_bytes or 0))
        facts["holders"] = tuple(holders)
        facts["load"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return facts


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
