"""DeepSpeed as fitkit uses it: quiet, without compilers, and forgetting the groups it has left."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from fitkit.errors import ConfigurationError, missing_package


def check_deepspeed() -> None:
    """Make sure that the package is there, without importing it, which takes seconds.

    Raises:
        MissingPackageError: it isn't.
    """
    if "deepspeed" not in sys.modules and importlib.util.find_spec("deepspeed") is None:
        raise missing_package("deepspeed", "deepspeed", "strategy='deepspeed'")


def load_deepspeed(device: torch.device) -> Any:
    """The package, ready for a device.

    Raises:
        MissingPackageError: it isn't there.
        ConfigurationError: it was imported for another kind of device.
    """
    check_deepspeed()
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    if chosen.split(":")[0] != device.type:
        raise ConfigurationError(
            f"deepspeed has chosen {chosen!r}, but this run is on {device.type}. Set the "
            f"environment variable DS_ACCELERATOR={device.type} before deepspeed is imported."
        )
    # Else it compiles a C++ operator when it first meets a process group on CPU; a start that is
    # ended meanwhile leaves a lock for which every later one waits.
    operators: dict[str, bool] = getattr(deepspeed.ops, "__compatible_ops__", {})
    operators["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def count_anew() -> None:
    """Let DeepSpeed number modules and parameters from 0.

    It compares the numbers over the ranks, and a rank that has been in more trainings than
    another (a worker that was started again) would be ahead.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    (counter,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    counter[0] = 0


@contextmanager
def surroundings(device: torch.device) -> Iterator[None]:
    """What holds while DeepSpeed trains: the variable by which it knows this rank's device.

    Afterwards `torch.nn.functional.linear` is torch's again. DeepSpeed's third stage puts another
    in its place for good, whose gradients come in another order: ranks that differ in it would
    add up wrong ones in a later training by the second stage.
    """
    before, linear = os.environ.get("LOCAL_RANK"), functional.linear
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        functional.linear = linear
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


def forget_groups() -> None:
    """Let DeepSpeed forget the process groups that this process leaves; it would use them again."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups._release_process_group_references()
