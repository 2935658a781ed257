"""What fitkit sees on a machine, on one screen: the text for a bug report."""

from __future__ import annotations

import os
import platform
import re
import shutil
import textwrap
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from fitkit.accelerators import computes_bfloat16, name_of
from fitkit.errors import ConfigurationError
from fitkit.extras.free_devices import GPU, probe_gpus
from fitkit.seams.machines import Machine, detect, overload, usable_cores
from fitkit.seams.strategies import resolve_strategy
from fitkit.version import DISTRIBUTION

NEEDED = ("torch", "numpy", "torchmetrics", "h5py", "rich", "cloudpickle", "xxhash", "safetensors")
VARIABLES = re.compile(
    r"(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|OMP_(NUM_THREADS|WAIT_POLICY)|SLURM_(JOB_ID|PROCID|NTASKS|NNODES)"
    r"|(RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)"
    r"|TORCHELASTIC_RUN_ID|(OMPI_COMM_WORLD|PMI|HOROVOD)_(RANK|SIZE)"
    r"|(NCCL|GLOO|FITKIT|PYTORCH)_\w+)"
)
"""Environment variables that change what fitkit does; no others are shown."""

OWN_EXTRAS = ("test", "dev", "docs", "examples")
"""Extras for work on fitkit itself."""

OTHER_NAMES = {"mlflow": "mlflow-skinny"}
"""Packages that may be installed under another name."""

GIB = 2**30
WIDTH = 100


def report(fitkit_version: str) -> str:
    """Return the text, with one line per subject. What can't be found out is reported, never
    raised.
    """
    package = f"{DISTRIBUTION} {_version(DISTRIBUTION) or '(used from a folder)'}"
    lines = {
        "fitkit": fitkit_version,
        "package": package,
        **_versions(),
        **_too_old(),
        **_machine(),
        **_launch(),
        **_choice(),
    }
    width = max(map(len, lines))
    return "\n".join(
        textwrap.fill(
            value, WIDTH, initial_indent=f"{name:{width}}  ", subsequent_indent=" " * (width + 2),
            break_on_hyphens=False,
        )
        for name, value in lines.items()
    )  # fmt: skip


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in (*NEEDED, *_optional())}
    found["torch"] = torch.__version__  # with its build, "+cu132", which the package's own may lack
    absent = sorted(name for name, number in found.items() if not number)
    extras = [f"{name} {found[name]}" for name in _optional() if found[name]]
    return {
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: found[name] or "not installed" for name in NEEDED},
        "optional": ", ".join(extras) or "none",
        "not installed": ", ".join(absent) or "none",
    }


def _asked() -> Iterator[tuple[Requirement, bool]]:
    """Yield what fitkit asks for, and whether only an extra for users asks for it.

    What holds on other systems or for another Python is left out.
    """
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # used from a folder, not installed
        return
    for line in lines:
        try:
            asked = Requirement(line)
        except InvalidRequirement:
            continue
        extra = re.search(r"""extra == ['"]([\w.-]+)""", line)
        if extra and extra[1] in OWN_EXTRAS:
            continue
        if asked.marker is None or asked.marker.evaluate({"extra": extra[1] if extra else ""}):
            yield asked, extra is not None


def _optional() -> list[str]:
    """Return the packages of the extras that users install."""
    return sorted({asked.name for asked, of_extra in _asked() if of_extra} - set(NEEDED))


def _too_old() -> dict[str, str]:
    """Return a line for each installed package, and for Python, that is older than fitkit asks."""
    try:
        python = SpecifierSet(metadata(DISTRIBUTION)["Requires-Python"] or "")
    except PackageNotFoundError:
        return {"too old": "not known: fitkit is used from a folder, which has no list"}
    found = {}
    if platform.python_version() not in python:
        found["update Python"] = f"{platform.python_version()} is older than fitkit's {python}"
    for asked, _ in _asked():
        installed = torch.__version__ if asked.name == "torch" else _version(asked.name)
        if installed and not asked.specifier.contains(installed, prereleases=True):
            found[f"update {asked.name}"] = (
                f"{installed} is installed. Run: pip install '{asked.name}{asked.specifier}'"
            )
    return found or {"too old": "nothing"}


def _version(package: str) -> str:
    """Return the installed release; empty where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return _version(OTHER_NAMES[package]) if package in OTHER_NAMES else ""


def _machine() -> dict[str, str]:
    machine = Machine.here()
    count = machine.cuda_count
    busy = overload()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    built = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "no GPU")
    return {
        "cpu": f"{os.cpu_count()} cores, {usable_cores() or os.cpu_count()} for this "
        f"process, of which torch uses {torch.get_num_threads()}",
        **({} if busy is None else {"load": busy}),
        "memory": _memory(),
        "accelerator": "none" if accelerator is None else accelerator.type,
        "cuda": f"{count} device{'' if count == 1 else 's'} (torch was built for {built})",
        **_gpus(count),
        "mps": "yes" if machine.has_mps else "no",
        **{
            kind: f"{many} device{'' if many == 1 else 's'}, {name_of(torch.device(kind, 0))}"
            for kind, many in machine.others.items()
        },
        "backends": ", ".join(_backends()) or "none: one process only",
    }


def _memory() -> str:
    """Return main memory, and the free shared memory by which ranks and workers pass data."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
        found.append(f"{total / GIB:.1f} GiB, {free / GIB:.1f} free")
    except (OSError, KeyError, ValueError, IndexError):
        found.append("unknown")
    if Path("/dev/shm").is_dir():
        found.append(f"/dev/shm {shutil.disk_usage('/dev/shm').free / GIB:.1f} GiB free")
    return "; ".join(found)


def _gpus(count: int) -> dict[str, str]:
    """Return a line per GPU. A separate process asks them, so that a broken one can't stop this
    one.
    """
    if not count:
        return {}
    try:
        return {f"cuda:{gpu.index}": _gpu(gpu) for gpu in probe_gpus()}
    except ConfigurationError as error:
        return {"cuda:0": " ".join(str(error).split())}


def _gpu(gpu: GPU) -> str:
    if gpu.failure is not None:
        return f"can't be used: {gpu.failure}"
    load = "" if gpu.load is None else f", {gpu.load:.0%} busy"
    device = torch.device("cuda", gpu.index)
    bf16 = "" if computes_bfloat16(device) else ", no bfloat16 of its own"
    name = name_of(device)
    free, total = gpu.free_bytes / GIB, gpu.total_bytes / GIB
    return f"{name}, {free:.1f} of {total:.1f} GiB free{load}{bf16}"


def _backends() -> Iterator[str]:
    """By what processes can exchange tensors, and what computes fast."""
    if torch.distributed.is_available():
        for name in ("gloo", "nccl", "xccl", "mpi", "ucc"):
            is_there = getattr(torch.distributed, f"is_{name}_available", None)
            if is_there is not None and is_there():
                yield name
    for name in ("cudnn", "mkldnn"):
        if getattr(torch.backends, name).is_available():
            yield name


def _launch() -> dict[str, str]:
    try:
        cluster = detect()
    except ConfigurationError as error:
        started = str(error)
    else:
        started = (
            "none"
            if cluster is None
            else f"{cluster.launcher}, rank {cluster.rank} of {cluster.world_size}, node "
            f"{cluster.node_rank} of {cluster.num_nodes}"
        )
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name))
    # Users show the output of doctor to others.
    values = {n: "(set)" if n.endswith("SECRET") else os.environ[n] for n in names}
    shown = " ".join(f"{name}={value}" for name, value in values.items())
    return {"launcher": started, "environment": shown or "nothing that concerns fitkit"}


def _choice() -> dict[str, str]:
    """Return what `compile` chooses if nothing is said about the hardware."""
    try:
        strategy = resolve_strategy("auto", "auto", "auto", "32-true", None)
    except ConfigurationError as error:
        return {"devices='auto'": f"refused: {error}"}
    devices = ", ".join(map(str, strategy.devices))
    world = f", {strategy.world.size} ranks in all" if strategy.world.size > 1 else ""
    return {"devices='auto'": devices, "strategy='auto'": f"{strategy.name!r}{world}"}
