"""The package that has the name fitkit on PyPI: another one, whose files would replace these."""

from __future__ import annotations

import os
from pathlib import Path

from fitkit.errors import warn
from fitkit.version import DISTRIBUTION


def warn_of_namesake(package: Path = Path(__file__).parent) -> None:
    """Say so if the package `fitkit` of PyPI is installed in the same folder.

    Args:
        package: the folder of this package.
    """
    try:
        beside = os.listdir(package.parent)
    except OSError:  # in a zip file
        return
    found = next((n for n in beside if n.startswith("fitkit-") and n.endswith(".dist-info")), None)
    if found is not None:
        release = found.removeprefix("fitkit-").removesuffix(".dist-info")
        warn(
            f"The package fitkit {release} is installed beside {DISTRIBUTION}. Both have a folder "
            "named fitkit, and files of one may have replaced the other's. Run: pip uninstall "
            f"fitkit, then pip install --force-reinstall --no-deps {DISTRIBUTION}."
        )
