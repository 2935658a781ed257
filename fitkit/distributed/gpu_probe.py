"""What each visible GPU is doing, asked by a child process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fitkit.errors import ConfigurationError

TIMEOUT_S = 90.0
"""Importing torch takes up to 15 s on a loaded machine, and waking up eight GPUs as much."""

MARK = "fitkit-gpu "
"""Begins a line that is ours: drivers print too."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that uses a GPU.

    Attributes:
        pid: its number, as the driver knows it.
        name: its program; empty if unknown.
        used_bytes: of the GPU's memory; None if the driver doesn't say.
    """

    pid: int
    name: str = ""
    used_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class GPU:
    """What is known of a visible GPU.

    Attributes:
        index: among the visible ones.
        failure: why no tensor could be placed on it; None if one could.
        free_bytes: of its memory.
        used_bytes: by other processes than the one that asked.
        total_bytes: of its memory.
        load: how busy it was lately, 0 to 1; None if unknown (no nvidia-ml-py).
        holders: who uses it, the largest first; empty if unknown.
    """

    index: int
    failure: str | None = None
    free_bytes: int = 0
    used_bytes: int = 0
    total_bytes: int = 0
    load: float | None = None
    holders: tuple[Holder, ...] = ()


def probe_gpus(timeout_s: float = TIMEOUT_S) -> list[GPU]:
    """All visible GPUs, in order; one that doesn't answer in time is there with that failure.

    Raises:
        ConfigurationError: the child could not even count them.
    """
    code = (
        "import sys; sys.path[:] = sys.argv[1].split('\\n'); "
        "from fitkit.distributed.gpu_probe import report; report()"
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
    """The marked lines that some code prints in a Python of its own, and why there are no more.

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
    """The child's part: how many GPUs there are, then a line for each."""
    import torch

    print(MARK + str(torch.cuda.device_count()), flush=True)
    nvml = load_nvml()
    for index in range(torch.cuda.device_count()):
        gpu = examine(index, torch.cuda, torch.zeros, nvml)
        print(MARK + json.dumps(dataclasses.asdict(gpu)), flush=True)


def load_nvml() -> Any:
    """The module pynvml (of nvidia-ml-py), ready for questions; None without it or a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return None
    return nvml


def examine(index: int, cuda: Any, zeros: Any, nvml: Any) -> GPU:
    """What torch, and NVML where it is there, say about one GPU.

    NVML is asked first: to place a tensor makes a context here, of some 0.5 GiB.
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
    """Memory, load and processes; what NVML refuses to say (MIG, containers) is left out.

    By UUID, because NVML's own order is that of the bus: torch's is another one, unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID, and CUDA_VISIBLE_DEVICES leaves some out.
    """
    facts: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # Its errors; other modules called pynvml know less.
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
