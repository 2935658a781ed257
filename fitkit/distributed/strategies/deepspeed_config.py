"""The DeepSpeed package, and the configuration that it gets."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, missing_package


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


DECIDED = {
    "train_batch_size": "fit(batch_size=…)",
    "train_micro_batch_size_per_gpu": "fit(batch_size=…)",
    "gradient_accumulation_steps": "compile(accumulate_grad_batches=…)",
    "managed_gradient_accumulation": "compile(accumulate_grad_batches=…)",
    "gradient_clipping": "compile(gradient_clip_val=…)",
    "optimizer": "compile(optimizer=…)",
    "scheduler": "compile(lr_scheduler=…)",
    "fp16": "compile(precision=…)",
    "bf16": "compile(precision=…)",
    "torch_autocast": "compile(precision=…)",
    "amp": "compile(precision=…)",
}
"""Settings that have their place elsewhere."""

BUCKET = 500_000_000
"""DeepSpeed's own `reduce_bucket_size`; it makes a buffer of that many numbers in any case."""


def read_config(config: Any) -> dict[str, Any]:
    """The user's settings: a copy of a dict, or what a JSON file has; empty for None.

    Raises:
        ConfigurationError: a file that isn't there or isn't JSON, or settings that fitkit makes.
        ArgumentTypeError: something else.
    """
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        config = _read_file(Path(config))
    if not isinstance(config, dict):
        raise ArgumentTypeError(
            f"config={describe(config)} must be a dict of DeepSpeed's settings, the path of a JSON "
            "file with one, or None."
        )
    if not isinstance(config.get("zero_optimization", {}), dict):
        raise ArgumentTypeError(
            f"config's zero_optimization={describe(config['zero_optimization'])} must be a dict, "
            "like {'stage': 2}."
        )
    found = copy.deepcopy(config)
    for name, place in DECIDED.items():
        # "auto" is what other libraries' files have where the library decides.
        if name in found and not _is_left_open(found.pop(name)):
            raise ConfigurationError(
                f"DeepSpeed's setting {name!r} has its place in {place}. Set it there, and leave "
                "it out of config (or write 'auto')."
            )
    return found


def _is_left_open(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(_is_left_open(v) for v in value.values())
    return isinstance(value, str) and value == "auto"


def _read_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            f"config={str(path)!r} can't be read: {error.strerror}. Give the path of a JSON file "
            "with DeepSpeed's settings, or a dict of them."
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"config={str(path)!r} isn't JSON: {error}.") from error


def check_stage(stage: Any, config: dict[str, Any]) -> int:
    """ZeRO's stage; the settings' own where none is given, else 2.

    Raises:
        ConfigurationError: another number, or two that differ.
    """
    own = config.get("zero_optimization", {}).get("stage", "auto")
    own = None if own == "auto" else own
    chosen = (2 if own is None else own) if stage is None else stage
    if isinstance(chosen, bool) or chosen not in (1, 2, 3):
        raise ConfigurationError(
            f"stage={chosen!r} must be 1 (optimizer state spread over the ranks), 2 (gradients "
            "too) or 3 (parameters too). Without any, write strategy='ddp'."
        )
    if own is not None and own != chosen:
        raise ConfigurationError(
            f"stage={stage}, but config's zero_optimization has stage {own}. Leave one of them out."
        )
    return int(chosen)


def bucket_of(config: dict[str, Any], numbers: int) -> int:
    """How many gradients travel together; never a larger buffer than the net has numbers."""
    chosen = config.get("zero_optimization", {}).get("reduce_bucket_size", "auto")
    return min(BUCKET, numbers) if chosen == "auto" else int(chosen)


def full_config(
    config: dict[str, Any], stage: int, dtype: torch.dtype, numbers: int
) -> dict[str, Any]:
    """The user's settings with those that fitkit makes.

    Args:
        dtype: of the parameters.
        numbers: how many numbers the parameters have.
    """
    own = config.get("zero_optimization", {})
    zero = {
        "reduce_bucket_size": bucket_of(config, numbers),
        **{name: value for name, value in own.items() if value != "auto"},
    }
    return {
        "steps_per_print": None,
        # Optimizers of torch's own and of users: those that can't be spread are refused before.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **config,
        "zero_optimization": {**zero, "stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
        # Batches are cut, weighed and counted by fitkit: each `step` makes an update.
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
    }
