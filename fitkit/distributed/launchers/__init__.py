"""How the ranks of a run come to make the same call."""

from fitkit.distributed.launchers.inline import InlineLauncher, Launcher

__all__ = ["InlineLauncher", "Launcher"]
