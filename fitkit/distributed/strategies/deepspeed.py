"""DeepSpeed's engine: ZeRO's three stages."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fitkit.distributed.costs import Costs, Sizes, all_gather, all_reduce, whole
from fitkit.distributed.spread.module import check_trains
from fitkit.distributed.strategies.base import Assignment, Strategy
from fitkit.distributed.strategies.ddp import DDP
from fitkit.distributed.strategies.deepspeed_config import (
    bucket_of,
    check_deepspeed,
    check_stage,
    forget_groups,
    read_config,
)
from fitkit.distributed.strategies.deepspeed_engine import ZeroTraining
from fitkit.distributed.wrapped_model import Door
from fitkit.errors import ConfigurationError, warn

WHOLE = ("muon", "lamb", "lars")
"""Names of optimizers whose update of a number depends on the others of its parameter."""


class DeepSpeed(DDP):
    """DeepSpeed trains while `fit` runs: ZeRO, which spreads what learning needs over the ranks.

    The weights are those of `DDP`. Before and after `fit` the model is an ordinary one, with the
    same parameters and the same optimizer. On one rank there is nothing to spread, and the
    training is an ordinary one.

    Args:
        stage: 1 spreads the optimizer's state, 2 the gradients too, 3 the parameters too; None
            for the one in `config`, else 2.
        config: other settings of DeepSpeed (a dict or the path of a JSON file), but for those that
            `compile` and `fit` have arguments for.
        process_group_backend, timeout: as for `DDP`.

    Reference: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020, arXiv:1910.02054.
    """

    name = "deepspeed"
    starts = "workers"

    def __init__(
        self,
        stage: int | None = None,
        config: dict[str, Any] | str | os.PathLike[str] | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        super().__init__(process_group_backend, timeout)
        self.config = read_config(config)
        self.stage = check_stage(stage, self.config)
        self._training: ZeroTraining | None = None
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_training": None}

    def connect(self, assignment: Assignment) -> Strategy:
        check_deepspeed()
        name = assignment.precision.name
        if name in ("16-mixed", "16-true", "64-true"):
            raise ConfigurationError(
                f"precision={name!r} can't be kept under strategy='deepspeed', whose "
                "updates are made in float32 without scaled losses. Write '32-true', 'bf16-mixed' "
                "or 'bf16-true', or strategy='ddp_sharded'."
            )
        return super().connect(assignment)

    @property
    def evaluates_in_step(self) -> bool:
        return self._training is not None and self.stage == 3

    def costs(self, module: nn.Module, sizes: Sizes, devices: int, nodes: int) -> Costs:
        ranks = devices * nodes
        if ranks == 1:
            return whole(sizes)
        masters = sizes.numbers * 4 / ranks  # what is updated, beside what computes
        travelling = sizes.numbers * sizes.element
        bucket = bucket_of(self.config, sizes.numbers) * sizes.element
        is_third = self.stage == 3
        return dataclasses.replace(
            whole(sizes),
            parameters=sizes.parameters / (ranks if is_third else 1),
            gradients=sizes.gradients / (ranks if self.stage > 1 else 1),
            optimizer=sizes.optimizer / ranks + masters,
            # The third stage may have all parameters together (`stage3_max_live_parameters`).
            exchange=bucket + (travelling if is_third else 0.0),
            sent=2 * all_gather(travelling, ranks) + all_gather(sizes.gradients, ranks)
            if is_third
            else all_reduce(sizes.gradients, ranks) + all_gather(travelling, ranks),
        )

    def leave(self) -> None:
        super().leave()
        forget_groups()

    # ------------------------------------------------------------------ the module

    def place(self, module: nn.Module) -> None:
        if self._training is None:  # a callback may evaluate in the middle of a training
            super().place(module)

    def begin_training(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        if self.collectives.world_size == 1:
            return
        check_trains(module, optimizers, self.name)
        _check_optimizer(optimizers[0])
        self._training = ZeroTraining(
            module, optimizers[0], self.config, self.stage, self.collectives.rank, self.device
        )

    def rewrap(self) -> None:
        if self._training is not None:
            raise ConfigurationError(
                "Parameters were frozen or freed in the middle of a training, which DeepSpeed "
                "can't follow. Do it before fit, or write strategy='ddp'."
            )

    def for_file(self, make: Callable[[], Any]) -> Any:
        return make() if self._training is None else self._training.for_file(make)

    def for_folder(self, make: Callable[[], Any]) -> Any:
        """Rank 0 writes all of it: DeepSpeed's flat parts are no parts of a tensor's rows."""
        return self.for_file(make)

    def door(self, module: nn.Module) -> Door:
        return self.plain_door(module) if self._training is None else self._training.door

    def evaluation_door(self, module: nn.Module) -> Door:
        # Below the third stage every rank has all parameters, and none need wait.
        return self.door(module) if self.evaluates_in_step else self.plain_door(module)

    # ------------------------------------------------------------------ learning

    def backward(self, loss: torch.Tensor) -> None:
        if self._training is None:
            super().backward(loss)
        else:
            self._training.backward(loss)

    def exchange_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Nothing is left to do: DeepSpeed averages at the latest when an update is made."""
        if self._training is None:
            super().exchange_gradients(parameters)

    def scale_gradients(self, parameters: list[nn.Parameter], factor: float) -> None:
        if self._training is None:
            super().scale_gradients(parameters, factor)
        else:
            self._training.scale(factor)

    def clip_gradients(self, parameters: list[nn.Parameter], limit: float, algorithm: str) -> None:
        if self._training is None:
            super().clip_gradients(parameters, limit, algorithm)
        elif algorithm == "norm":
            self._training.clip(limit)
        else:
            raise ConfigurationError(
                f"gradient_clip_algorithm={algorithm!r} can't be kept under strategy='deepspeed', "
                "which limits the norm of all gradients. Write 'norm', or strategy='ddp_sharded'."
            )

    def update(self, optimizer: Optimizer) -> None:
        if self._training is None:
            super().update(optimizer)
        elif not self._training.update() and not self._warned:
            self._warned = True
            warn("Gradients aren't finite: DeepSpeed leaves such updates out, the weights stay.")

    def end_training(self) -> None:
        if self._training is not None:
            self._training.end(wanted=self.keeps_model)
            self._training = None

    def finish(self) -> None:
        super().finish()
        training, self._training = self._training, None
        if training is None:
            return
        training.abandon()
        if self.world.rank == 0 and training.has_stepped:
            warn(
                "The training was cut while the net was DeepSpeed's: its weights and its optimizer "
                "are those from before fit. To go on as if nothing had happened, write "
                "fit(…, resume_from=…) with a checkpoint."
            )


def _check_optimizer(optimizer: Optimizer) -> None:
    """Refuse what DeepSpeed's flat float32 parts of parameters can't train."""
    kind = type(optimizer).__name__
    if any(name in kind.lower() for name in WHOLE):
        raise ConfigurationError(
            f"{kind} looks at each parameter as a whole, of which strategy='deepspeed' gives a "
            "rank flat parts. Write strategy='ddp_sharded', or take another optimizer."
        )
    if isinstance(optimizer, torch.optim.Adagrad) and len(optimizer.param_groups) > 1:
        raise ConfigurationError(
            "DeepSpeed makes Adagrad's groups into one. Write strategy='ddp_sharded', or give it "
            "one group."
        )
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if not dtypes <= {torch.float32, torch.bfloat16}:
        listing = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigurationError(
            f"The net's parameters are {listing}; DeepSpeed updates float32 numbers. Cast the net "
            "with net.float(), or write strategy='ddp_sharded'."
        )
