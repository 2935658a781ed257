"""What fitkit costs before and beside a step: importing it, calling it, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.measuring import Row, Seconds, Spread, in_turns, row_of

IMPORT = """
import resource, sys, json, time
began = time.perf_counter()
import {module}
wall = time.perf_counter() - began
usage = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which begins with what the process held that started this one.
lines = open("/proc/self/status").read().splitlines()
memory = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
print(json.dumps([wall, usage.ru_utime + usage.ru_stime, memory / 1024]))
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
    """Importing against importing torch alone, and the cost of a call of one step."""
    memory: dict[str, list[float]] = {}

    def imported(module: str) -> Seconds:
        wall, cpu, megabytes = json.loads(_python(IMPORT.format(module=module)))
        memory.setdefault(module, []).append(megabytes)
        return Seconds(wall, cpu)

    imported("fitkit")  # so that byte code and the system's cache are there
    found = in_turns(lambda: imported("torch"), lambda: imported("fitkit"), pairs)
    yield Row(
        "footprint",
        "import",
        "torch",
        unit="s",
        wall=Spread.of([torch.wall for torch, _ in found]),
        cpu=Spread.of([torch.cpu for torch, _ in found]),
    )
    yield row_of(
        found,
        1.0,
        scenario="footprint",
        task="import",
        contender="fitkit",
        reference="torch",
        unit="s",
    )
    for module, megabytes in memory.items():
        yield Row(
            "footprint",
            "memory after import",
            module,
            unit="MiB",
            wall=Spread.of(megabytes),
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
    """What a fresh process prints."""
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
