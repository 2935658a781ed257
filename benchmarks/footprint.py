"""What fitkit costs before and beside a step: importing it, calling it, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.measuring import Row, Spread

IMPORTS = """
import importlib, json, time

def peak_memory():
    # Not ru_maxrss, which begins with what the process held that started this one.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

found = {}
for module in ("torch", "fitkit"):
    began = time.perf_counter(), time.process_time()
    importlib.import_module(module)
    took = time.perf_counter() - began[0], time.process_time() - began[1]
    found[module] = [*took, peak_memory()]
print(json.dumps(found))
"""

CALLS = """
import json, sys, time, torch, fitkit
torch.set_num_threads(1)
model = fitkit.Model(torch.nn.Linear(784, 10))
model.compile("sgd", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
x, y = torch.randn(32, 784), torch.randint(10, (32,))
verbs = {
    "fit": lambda: model.fit(x, y, verbose=0),
    "evaluate": lambda: model.evaluate(x, y, verbose=0),
    "predict": lambda: model.predict(x, verbose=0),
}
found = {}
for name, verb in verbs.items():
    verb()
    found[name] = []
    for _ in range(40):
        began = time.perf_counter(), time.process_time()
        verb()
        found[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
print(json.dumps(found))
"""


def rows(pairs: int) -> Iterator[Row]:
    """Measure imports of torch, then fitkit in the same process; and a call of one step."""
    _python(IMPORTS)  # so that byte code and the system's cache are there
    found = [json.loads(_python(IMPORTS)) for _ in range(pairs)]
    for module, task in (("torch", "import"), ("fitkit", "import, torch being there")):
        walls, cpus, _ = zip(*(run[module] for run in found), strict=True)
        yield Row(
            "footprint",
            task,
            module,
            unit="ms",
            wall=Spread.of([seconds * 1e3 for seconds in walls]),
            cpu=Spread.of([seconds * 1e3 for seconds in cpus]),
        )
    for module in ("torch", "fitkit"):
        yield Row(
            "footprint",
            "memory after import",
            module,
            unit="MiB",
            wall=Spread.of([run[module][2] for run in found]),
        )
    calls = json.loads(_python(CALLS))
    for verb, seconds in calls.items():
        yield Row(
            "footprint",
            f"a later call of {verb}, one batch",
            "fitkit",
            unit="ms",
            wall=Spread.of([wall * 1e3 for wall, _ in seconds]),
            cpu=Spread.of([cpu * 1e3 for _, cpu in seconds]),
        )


def _python(code: str) -> str:
    """Return what a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        # An empty value lets Python keep the byte code, as it does for whoever installed it.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""},
    )
    return done.stdout.splitlines()[-1]
