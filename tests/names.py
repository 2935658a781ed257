"""The names in fitkit/typing.py: `python -m tests.names` writes them anew from the registries."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

FILE = Path(__file__).parent.parent / "fitkit" / "typing.py"
BEGIN = "# --- written by `python -m tests.names` from here\n"
END = "# --- to here\n"


def names() -> dict[str, list[str]]:
    """The names of each type: those of fitkit itself, none that an installed package adds."""
    import torch

    from fitkit.arguments import snake_case
    from fitkit.distributed.devices import ACCELERATORS
    from fitkit.distributed.precision import PRECISIONS
    from fitkit.distributed.strategies import STRATEGIES
    from fitkit.losses.names import LOSSES
    from fitkit.metrics.named import NAMES
    from fitkit.optimizers import OPTIMIZERS
    from fitkit.schedulers import SCHEDULERS

    def own(registry):
        return list(registry._spelling.values())

    return {
        "OptimizerName": [form for name in own(OPTIMIZERS) for form in (name.lower(), name)],
        "LossName": own(LOSSES) + [name for name in dir(torch.nn) if name in LOSSES],
        "MetricName": own(NAMES),
        "SchedulerName": [form for name in own(SCHEDULERS) for form in (snake_case(name), name)],
        "StrategyName": ["auto", *own(STRATEGIES)],
        "AcceleratorName": list(ACCELERATORS),
        "PrecisionName": own(PRECISIONS),
    }


def written() -> str:
    """The lines of fitkit/typing.py."""
    lines = []
    for kind, found in names().items():
        quoted = ", ".join(f'"{name}"' for name in dict.fromkeys(found)) + ","
        lines.append(f"{kind}: TypeAlias = Literal[")
        lines += textwrap.wrap(quoted, 96, initial_indent="    ", subsequent_indent="    ",
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
        lines.append("]  # fmt: skip")
    return "\n".join(lines) + "\n"


def registered() -> str:
    """What `written` gives in a process of its own, in which nobody has registered a name."""
    call = "from tests.names import written; print(written(), end='')"
    return subprocess.run(
        [sys.executable, "-c", call], cwd=FILE.parent.parent, text=True, check=True,
        stdout=subprocess.PIPE,
    ).stdout  # fmt: skip


def parts() -> tuple[str, str, str]:
    """What stands before the names in the file, the names, what stands behind."""
    before, _, rest = FILE.read_text().partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before + BEGIN, inside, END + after


if __name__ == "__main__":
    before, _, after = parts()
    FILE.write_text(before + written() + after)
