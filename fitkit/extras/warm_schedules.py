"""Schedules that are one word each: a warm-up, then a way down to a floor at the last update."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fitkit.arguments import check_number


class WarmSchedule(LRScheduler):
    """The rates after a warm-up, from their values then to a floor.

    The first update after the warm-up has the whole rate. Once `total_updates` are over, the rates
    are at the floor. They stay there.

    Args:
        optimizer: the optimizer whose rates it sets. The ratios of its groups' rates stay.
        total_updates: how many updates follow the warm-up.
        floor: the last rate, as a part of the first one. From 0, below 1.

    Raises:
        ConfigurationError, ArgumentTypeError: an impossible part.
    """

    in_words: ClassVar[tuple[str, ...]] = ("warmup", "floor")
    warmup_part: ClassVar[float] = 0.05
    t_in_epochs = False
    last_epoch: int

    def __init__(self, optimizer: Optimizer, total_updates: int, floor: float = 0.0) -> None:
        floor = check_number("lr_scheduler's floor", floor, minimum=0, below=1)
        self.total_updates: int = total_updates
        self.floor = floor
        super().__init__(optimizer)

    def height(self, passed: float) -> float:
        """Return the part of the way between the floor and the whole rate, from 1 to 0.

        Args:
            passed: the part of the updates that is over, from 0 to 1.
        """
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        """Return the groups' rates for the next update."""
        height = self.height(min(self.last_epoch / self.total_updates, 1.0))
        factor = self.floor + (1.0 - self.floor) * height
        return [rate * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Its position, and the rates that it comes from."""
        rates = [float(rate) for rate in self.base_lrs]
        return {
            "total_updates": self.total_updates, "last_epoch": self.last_epoch, "base_lrs": rates
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state. Other entries than its own are left alone."""
        total, last = int(state_dict["total_updates"]), int(state_dict["last_epoch"])
        rates: list[Any] = [float(rate) for rate in state_dict["base_lrs"]]
        if total < 1 or last < 0 or len(rates) != len(self.base_lrs):
            raise ValueError(f"no position in a schedule of {len(self.base_lrs)} groups")
        self.total_updates, self.last_epoch, self.base_lrs = total, last, rates


class WarmupCosine(WarmSchedule):
    """Half a cosine: slow at first, fast in the middle, slow at the end.

    Reference: Loshchilov and Hutter, SGDR, 2017, arXiv:1608.03983.
    """

    def height(self, passed: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * passed)) if passed < 1.0 else 0.0


class WarmupLinear(WarmSchedule):
    """A straight line."""

    def height(self, passed: float) -> float:
        return 1.0 - passed


class WarmupPolynomial(WarmSchedule):
    """A power of the straight line.

    Args:
        optimizer, total_updates, floor: as for `WarmSchedule`.
        power: the power, above 0. 1 is the line.
    """

    in_words: ClassVar[tuple[str, ...]] = ("warmup", "floor", "power")

    def __init__(
        self, optimizer: Optimizer, total_updates: int, floor: float = 0.0, power: float = 2.0
    ) -> None:
        power = check_number("lr_scheduler's power", power, above=0)
        self.power = power
        super().__init__(optimizer, total_updates, floor)

    def height(self, passed: float) -> float:
        return float((1.0 - passed) ** self.power)


class WarmupConstant(WarmSchedule):
    """The whole rate up to the end."""

    in_words: ClassVar[tuple[str, ...]] = ("warmup",)

    def height(self, passed: float) -> float:
        return 1.0


class WarmupStableDecay(WarmSchedule):
    """The whole rate for long, then a straight line to the floor.

    Args:
        optimizer, total_updates, floor: as for `WarmSchedule`.
        decay: the part of the updates after the warm-up in which the rate falls. Above 0, below 1.

    Reference: Hu et al., MiniCPM, 2024, arXiv:2404.06395. Hägele et al., Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations, 2024, arXiv:2405.18392, say how long
    the decay should be.
    """

    in_words: ClassVar[tuple[str, ...]] = ("warmup", "floor", "decay")

    def __init__(
        self, optimizer: Optimizer, total_updates: int, floor: float = 0.0, decay: float = 0.2
    ) -> None:
        decay = check_number("lr_scheduler's decay", decay, above=0, below=1)
        self.decay = decay
        super().__init__(optimizer, total_updates, floor)

    def height(self, passed: float) -> float:
        return min((1.0 - passed) / self.decay, 1.0)
