"""Classes and functions of the user's script, in what processes send each other.

Pickle writes such an object as the name `__main__.Pair`. That is right between processes that run
the script: each uses its own class. In a worker process `__main__` is fitkit's program, so there
the object comes by value (cloudpickle). What a worker has got this way it also knows by name, as
the script does. So it can send it on by pickle, to a loader's workers for example.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing.spawn
import pickle
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import cloudpickle

_runs_the_script = True
"""Whether this process's `__main__` is the script; not in a worker process."""

MAIN = ("sys_argv", "init_main_from_name", "init_main_from_path")
"""What a process that multiprocessing spawns needs to know of the script."""


def is_of_script(value: Any) -> bool:
    """Whether a value is a class or function that `__main__` has under its name."""
    return (
        (isinstance(value, type) or inspect.isfunction(value))
        and value.__module__ == "__main__"
        and _in_main(value.__qualname__) is value
    )


def reduced(value: Any) -> tuple[Any, ...]:
    """How to pickle a class or function of the script for any other rank."""
    return _here, (value.__qualname__, cloudpickle.dumps(value))


def _here(name: str, data: bytes) -> Any:
    """Return this process's own object of the script. In a worker process, what was sent."""
    own = _in_main(name) if _runs_the_script else None
    return pickle.loads(data) if own is None else own


def _in_main(name: str) -> Any:
    """Return what `__main__` has under a name, which may have dots; None if it has nothing."""
    main = sys.modules.get("__main__")
    return functools.reduce(lambda value, part: getattr(value, part, None), name.split("."), main)


def script() -> dict[str, Any]:
    """Return the script of this process, for `take_part`."""
    found = multiprocessing.spawn.get_preparation_data("")
    return {name: found[name] for name in MAIN if name in found}


def take_part(script: dict[str, Any], named: dict[str, Any]) -> None:
    """Let this worker process start others as the script's own process would.

    Args:
        script: what `script` gave there.
        named: the script's objects that this process has, by name.
    """
    global _runs_the_script
    _runs_the_script = False
    main: Any = sys.modules["__main__"]
    sys.argv[:] = script["sys_argv"]
    name, path = script.get("init_main_from_name"), script.get("init_main_from_path")
    main.__spec__ = None if name is None else ModuleSpec(name, None)
    vars(main).pop("__file__", None)
    if path is not None:
        main.__file__ = path
    for name, value in named.items():
        if "." not in name:  # a class within another comes with it
            setattr(main, name, value)
