"""Strategies by their public names, and how to add your own.

The decorator `register("my_strategy")` on a subclass of `Strategy` makes it known to `compile` by
that name. An installed package does the same with an entry point of the group `fitkit.strategies`.
"""

# ruff: noqa: N811 (its rule on capitals)
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fitkit.distributed.strategies import STRATEGIES, Engine, Strategy
from fitkit.distributed.strategies import SingleDevice as SingleDeviceStrategy
from fitkit.registry import imported_on_demand

if TYPE_CHECKING:
    from fitkit.extras.bagua.strategy import Bagua as BaguaStrategy
    from fitkit.extras.ddp import DDP as DDPStrategy
    from fitkit.extras.ddp import DDPSpawn as DDPSpawnStrategy
    from fitkit.extras.ddp2 import DDP2 as DDP2Strategy
    from fitkit.extras.deepspeed import DeepSpeed as DeepSpeedStrategy
    from fitkit.extras.dp import DP as DPStrategy
    from fitkit.extras.horovod import Horovod as HorovodStrategy
    from fitkit.extras.sharding.ddp_sharded import DDPSharded as DDPShardedStrategy
    from fitkit.extras.sharding.fsdp import FSDP as FSDPStrategy
    from fitkit.extras.xla import XLA as XLAStrategy
    from fitkit.extras.xla_adapters import Adapter as XLAAdapter
else:
    __getattr__ = imported_on_demand(
        __name__,
        {
            "BaguaStrategy": "fitkit.extras.bagua.strategy:Bagua",
            "DDP2Strategy": "fitkit.extras.ddp2:DDP2",
            "DDPSpawnStrategy": "fitkit.extras.ddp:DDPSpawn",
            "DDPStrategy": "fitkit.extras.ddp:DDP",
            "DDPShardedStrategy": "fitkit.extras.sharding.ddp_sharded:DDPSharded",
            "DPStrategy": "fitkit.extras.dp:DP",
            "DeepSpeedStrategy": "fitkit.extras.deepspeed:DeepSpeed",
            "FSDPStrategy": "fitkit.extras.sharding.fsdp:FSDP",
            "HorovodStrategy": "fitkit.extras.horovod:Horovod",
            "XLAAdapter": "fitkit.extras.xla_adapters:Adapter",
            "XLAStrategy": "fitkit.extras.xla:XLA",
        },
    )

Kind = TypeVar("Kind", bound=type[Strategy])


def register(name: str, *aliases: str) -> Callable[[Kind], Kind]:
    """Register a subclass of `Strategy` under a name for `compile`. Use it as a decorator.

    Args:
        name, aliases: names, in any case. For type checkers write `fitkit.typing.Name(name)`.

    Example:
        >>> import torch, fitkit
        >>> from fitkit.strategies import DDPStrategy, register
        >>> @register("patient_ddp")
        ... class PatientDDP(DDPStrategy):
        ...     "DDP that waits for an hour."
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile(strategy=fitkit.typing.Name("patient_ddp"), devices=1)
    """

    def added(kind: Kind) -> Kind:
        STRATEGIES.add(name, kind, *aliases)
        return kind

    return added


__all__ = [
    "BaguaStrategy",
    "DDP2Strategy",
    "DDPShardedStrategy",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "DPStrategy",
    "DeepSpeedStrategy",
    "Engine",
    "FSDPStrategy",
    "HorovodStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "XLAAdapter",
    "XLAStrategy",
    "register",
]


def __dir__() -> list[str]:
    """List the public names only."""
    return __all__
