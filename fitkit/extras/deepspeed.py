"""DeepSpeed's engine: ZeRO's three stages."""

from __future__ import annotations

import copy
import json
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.arguments import describe
from fitkit.errors import ArgumentTypeError, ConfigurationError, require
from fitkit.extras.ddp import DDP
from fitkit.extras.deepspeed_engine import ZeroTraining, forget_groups
from fitkit.extras.sharding.sharded_module import check_trains
from fitkit.seams.strategies import Assignment, Engine, Strategy, held_by

WHOLE = ("muon", "lamb", "lars")
"""Names of optimizers whose update of a number depends on the parameter's other numbers."""


class DeepSpeed(DDP):
    """Trains with DeepSpeed's ZeRO, which shards the training's memory over the ranks.

    The weights are the same as with `DDP`. Before and after `fit`, the model is an ordinary one
    with the same parameters and the same optimizer. On one rank there is nothing to shard, and
    training is ordinary.

    Args:
        stage: 1 shards the optimizer's state, 2 also the gradients, 3 also the parameters. None
            uses the stage in `config`, or 2.
        config: other DeepSpeed settings (a dict or the path of a JSON file), except those that
            `compile` and `fit` have arguments for.
        process_group_backend, timeout, output: as for `DDP`.

    Reference: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020, arXiv:1910.02054.

    Example:
        >>> import fitkit
        >>> strategy = fitkit.strategies.DeepSpeedStrategy(stage=2)
    """

    name = "deepspeed"
    starts = "workers"
    has_engine = True

    def __init__(
        self,
        stage: int | None = None,
        config: dict[str, Any] | str | os.PathLike[str] | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = None,
        output: str | None = None,
    ) -> None:
        super().__init__(process_group_backend, timeout, output=output)
        self.config: dict[str, Any] = read_config(config)
        self.stage: int = check_stage(stage, self.config)

    def connect(self, assignment: Assignment) -> Strategy:
        require("deepspeed", "deepspeed", "strategy='deepspeed'")
        name = assignment.precision.name
        if name in ("16-mixed", "16-true", "64-true"):
            raise ConfigurationError(
                f"precision={name!r} can't be used under strategy='deepspeed', whose "
                "updates are made in float32 without scaled losses. Write '32-true', 'bf16-mixed' "
                "or 'bf16-true', or strategy='ddp_sharded'."
            )
        return super().connect(assignment)

    def leave(self) -> None:
        super().leave()
        forget_groups()

    # ------------------------------------------------------------------ the module

    def place(self, module: nn.Module, *, for_training: bool = False) -> None:
        if self.engine is None:  # a callback may evaluate during a training
            super().place(module)

    def engine_for(self, module: nn.Module, optimizers: list[Optimizer]) -> Engine | None:
        if self.collectives.world_size == 1:
            return None
        check_trains(module, optimizers, self.name)
        if len(optimizers) > 1:
            raise ConfigurationError(
                f"DeepSpeed trains with one optimizer, but there are {len(optimizers)}. Write "
                "strategy='fsdp' or 'ddp_sharded', or give one optimizer."
            )
        _check_optimizer(optimizers[0])
        config = partial(full_config, self.config, self.stage)
        rank = self.collectives.rank
        return ZeroTraining(module, optimizers[0], config, self.stage, rank, self.device)


def _check_optimizer(optimizer: Optimizer) -> None:
    """Refuse what DeepSpeed can't train as flat float32 parts of parameters."""
    kind = type(optimizer).__name__
    if any(name in kind.lower() for name in WHOLE):
        raise ConfigurationError(
            f"{kind} needs each parameter as a whole, but strategy='deepspeed' gives each rank "
            "flat parts. Write strategy='ddp_sharded', or use another optimizer."
        )
    if isinstance(optimizer, torch.optim.Adagrad) and len(optimizer.param_groups) > 1:
        raise ConfigurationError(
            "DeepSpeed merges Adagrad's groups into one. Write strategy='ddp_sharded', or give it "
            "one group."
        )
    dtypes = {parameter.dtype for parameter in held_by(optimizer)}
    if not dtypes <= {torch.float32, torch.bfloat16}:
        listing = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigurationError(
            f"The net's parameters are {listing}; DeepSpeed updates float32 numbers. Cast the net "
            "with net.float(), or write strategy='ddp_sharded'."
        )


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
"""Settings that are set elsewhere."""

BUCKET = 500_000_000
"""DeepSpeed's own `reduce_bucket_size`. It always allocates a buffer of that many numbers."""


def read_config(config: Any) -> dict[str, Any]:
    """Return the user's settings: a copy of a dict, or the contents of a JSON file. Empty for None.

    Raises:
        ConfigurationError: the file doesn't exist or isn't JSON, or has settings that fitkit makes.
        ArgumentTypeError: `config` is neither a dict nor a path.
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
        # Other libraries' files have "auto" where the library decides.
        if name in found and not _is_left_open(found.pop(name)):
            raise ConfigurationError(
                f"DeepSpeed's setting {name!r} belongs in {place}. Set it there, and leave "
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
    """ZeRO's stage: the given one, the settings' own, or 2.

    Raises:
        ConfigurationError: it isn't 1, 2 or 3, or the two differ.
    """
    own = config.get("zero_optimization", {}).get("stage", "auto")
    own = None if own == "auto" else own
    chosen = (2 if own is None else own) if stage is None else stage
    if isinstance(chosen, bool) or chosen not in (1, 2, 3):
        raise ConfigurationError(
            f"stage={chosen!r} must be 1 (shards the optimizer's state), 2 (also the gradients) "
            "or 3 (also the parameters). Without any, write strategy='ddp'."
        )
    if own is not None and own != chosen:
        raise ConfigurationError(
            f"stage={stage}, but config's zero_optimization has stage {own}. Leave one of them out."
        )
    return int(chosen)


def bucket_of(config: dict[str, Any], numbers: int) -> int:
    """Return the number of gradients sent together. The buffer is never larger than the net."""
    chosen = config.get("zero_optimization", {}).get("reduce_bucket_size", "auto")
    return min(BUCKET, numbers) if chosen == "auto" else int(chosen)


def full_config(
    config: dict[str, Any], stage: int, dtype: torch.dtype, numbers: int
) -> dict[str, Any]:
    """Return the user's settings with fitkit's added.

    Args:
        dtype: the parameters' dtype.
        numbers: how many numbers the parameters have.
    """
    own = config.get("zero_optimization", {})
    zero = {
        "reduce_bucket_size": bucket_of(config, numbers),
        **{name: value for name, value in own.items() if value != "auto"},
    }
    return {
        "steps_per_print": None,
        # Allow torch's and users' optimizers: those that can't be sharded were refused before.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **config,
        "zero_optimization": {**zero, "stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
        # fitkit cuts, weighs and counts batches: each `step` makes an update.
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
    }
