"""The variables that launchers leave in the environment, read with errors that name them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fitkit.errors import ConfigurationError

Environment = Mapping[str, str]

MOST_RANKS = 2**20
"""A number of processes or nodes above it is a mistake, and would only take memory."""


class LaunchVariables:
    """One launcher's variables, read with errors that name them.

    Args:
        environment: the variables.
        launcher: what users call the launcher.
        sign: the variable by which it was found.
    """

    def __init__(self, environment: Environment, launcher: str, sign: str) -> None:
        self.environment = environment
        self.launcher = launcher
        self.sign = sign

    def find(self, *names: str) -> str | None:
        """The first of `names` that is set and not empty."""
        return next((name for name in names if self.environment.get(name, "").strip()), None)

    def text(self, *names: str) -> str:
        """The value of the first of `names` that is set; an error where none is."""
        name = self.find(*names)
        if name is None:
            raise ConfigurationError(
                f"{self.sign}={self.environment.get(self.sign)!r} says that {self.launcher} "
                f"started this process, but {' or '.join(names)} is not set. Start the script "
                f"with {self.launcher}, or unset {self.sign} to train in one process."
            )
        return self.environment[name].strip()

    def number(self, *names: str, minimum: int = 0, maximum: int = 2**32) -> int:
        """Likewise, as a whole number within the bounds."""
        text = self.text(*names)
        if not re.fullmatch("[0-9]{1,20}", text) or not minimum <= int(text) <= maximum:
            bound = f" of at most {maximum}" if maximum < 2**32 else ""
            raise ConfigurationError(
                f"{self.find(*names)}={text!r} must be a whole number of at least {minimum}"
                f"{bound}; {self.launcher} sets it. Start the script with {self.launcher}, or "
                f"unset {self.sign} to train in one process."
            )
        return int(text)

    def size(self, *names: str) -> int:
        """Likewise, as a number of processes or nodes."""
        return self.number(*names, minimum=1, maximum=MOST_RANKS)

    def master(self) -> tuple[str | None, int | None]:
        """What MASTER_ADDR and MASTER_PORT say; None for what isn't set."""
        address = self.environment.get("MASTER_ADDR", "").strip() or None
        port = self.find("MASTER_PORT")
        return address, self.number(port, minimum=1, maximum=65535) if port else None
