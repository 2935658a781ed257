"""A folder that no other user can reach, and names of processes that aren't used again."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from fitkit.errors import ConfigurationError


def private_folder() -> Path:
    """Return this user's own folder for short-lived files; nobody else can read or plant one.

    Raises:
        ConfigurationError: someone else has made a folder of that name.
    """
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    folder = Path(tempfile.gettempdir()) / f"fitkit-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise ConfigurationError(
            f"{folder} must belong to this user and be closed to others (mode 0700). Remove it, "
            "or set TMPDIR to another folder."
        )
    return folder


def is_private(folder: Path) -> bool:
    """Whether it is a folder that this user alone can look into; always, where none has owners."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.getuid()


def process_name(process: int) -> str:
    """Return a process's number and when it started: numbers are used again."""
    try:
        return f"{process}-{_status(process)[19]}"
    except (OSError, IndexError):
        return str(process)


def parent_of(process: int) -> int:
    """Return the process that started another; an OSError where that can't be looked at."""
    return int(_status(process)[1])


def _status(process: int) -> list[str]:
    """Return the fields of /proc/N/stat after the name, which may hold blanks: state, parent, …"""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
