"""How long a test waits for what may hang: longer where the machine is busy."""

import os


def patience(seconds: float) -> float:
    """Seconds to wait: as many as given, and more by as much as the load is above the cores.

    What works ends long before; only what hangs takes them all.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return seconds * min(max(1.0, load / cores), 8)
