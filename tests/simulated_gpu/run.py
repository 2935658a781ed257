"""Run Python with simulated GPUs: python tests/simulated_gpu/run.py [--kind K] -- program.py …

K is cuda (4 devices, or `--gpus`), mps (one) or npu (4). What stands after `--` goes to Python: a
program, `-m module`, `-c code`. With `--minutes`, all that it started is ended after so long.

The library is compiled first if it isn't there (a minute), into .cache/simulated-gpu, under torch's
version and the sources' digest. Where the machine can't have it (it needs Linux on x86-64, g++ and
a CPU build of torch), the program says so and ends well.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "simulated-gpu"
OPTION = {"cuda": [], "mps": ["-DSIM_MPS"], "npu": ["-DSIM_NPU"]}


def impossible():
    """Why this machine can't have simulated GPUs; None where it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they need Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "their compiler g++ isn't installed"
    version = importlib.metadata.version("torch")
    if not version.endswith("+cpu"):
        return f"they need a CPU build of torch, this is {version}"
    return None


def place(kind):
    """Where the compiled library of a kind is, or will be."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".cpp", ".hpp"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    return CACHE / f"torch-{importlib.metadata.version('torch')}-{digest}" / f"lib{kind}.so"


def library(kind):
    """The compiled library of a kind, made first where it is missing."""
    found = place(kind)
    if found.exists():
        return found
    folder = found.parent
    folder.mkdir(parents=True, exist_ok=True)
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    made = folder / f".{kind}.{os.getpid()}.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC"]
    command += ["-Wno-interference-size", *OPTION[kind], str(HERE / "devices.cpp"), "-o", str(made)]
    command += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    command += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    print(f"[simulated-gpu] compiling {kind} for {folder.name} …", file=sys.stderr, flush=True)
    subprocess.run(command, check=True, env={**os.environ, "LD_PRELOAD": ""})
    made.replace(found)
    return found


def environment(kind="cuda", gpus=4):
    """What a process needs to have the devices."""
    path = str(library(kind))
    older = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "LD_PRELOAD": path,
        "SIM_LIBRARY": path,
        "SIM_KIND": kind,
        "SIM_GPUS": str(gpus),
        "PYTHONPATH": os.pathsep.join([str(HERE), *([older] if older else [])]),
    }


def bounded(command, seconds, **options):
    """Run a command, and end it and all that it started after so many seconds.

    Ranks that wait for each other in torch hear no signal of pytest's limits.

    Args:
        options: of `subprocess.Popen`.

    Returns:
        Its exit status; None where it was ended.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        signal.signal(signal.SIGTERM, before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kind", choices=OPTION, default="cuda")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    reason = impossible()
    if reason is not None:
        print(f"[simulated-gpu] not run: {reason}")
        return
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    command = [sys.executable, *program]
    variables = environment(given.kind, given.gpus)
    if given.minutes is None:
        os.execve(sys.executable, command, variables)
    status = bounded(command, 60 * given.minutes, env=variables)
    if status is None:
        print(f"[simulated-gpu] ended after {given.minutes:g} minutes: {' '.join(program)}")
    raise SystemExit(124 if status is None else status)


if __name__ == "__main__":
    main()
