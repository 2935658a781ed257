"""What a path may be. `urls`, which reads and writes at URLs, is imported with the first one."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from fitkit.errors import ConfigurationError
from fitkit.registry import imported_on_demand

if TYPE_CHECKING:
    from fitkit.extras import urls as urls
else:
    __getattr__ = imported_on_demand(__name__, {"urls": "fitkit.extras.urls"})

# At least two letters: `C://` is a drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://")
_COLLAPSED = re.compile(r"(?:s3|gs|gcs|az|abfs|abfss|adl|hdfs|sftp|ssh|https?|memory|file):/[^/]")


def is_url(path: object) -> bool:
    """Return whether a path is a URL.

    Raises:
        ConfigurationError: it was a URL before `pathlib` removed one of its slashes.
    """
    if isinstance(path, os.PathLike) and _COLLAPSED.match(os.fspath(path)):
        raise ConfigurationError(
            f"{os.fspath(path)!r} was a URL, but pathlib.Path removed one of its slashes. Give "
            "URLs as strings."
        )
    return isinstance(path, str) and _URL.match(path) is not None


def refuse_url(path: object, what: str, instead: str) -> None:
    """Refuse a URL where only a local path works.

    Raises:
        ConfigurationError: the path is a URL; the message says what to write instead.
    """
    if is_url(path):
        raise ConfigurationError(
            f"{path!r} is a URL, and {what} can't be written to one. {instead}"
        )


def parent(path: str) -> str:
    """Return the folder of a path or URL; `os.path.join` can add a name to it."""
    if not is_url(path):
        return os.path.dirname(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rpartition('/')[0]}"
