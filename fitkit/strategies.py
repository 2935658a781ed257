"""Strategies by their public names, and how to add one of your own.

`register("my_strategy")` above a subclass of `Strategy` makes it known to `compile` by that name;
an installed package does the same with an entry point of the group `fitkit.strategies`.
"""

from fitkit.distributed.strategies import (
    DDP,
    DDP2,
    DP,
    FSDP,
    STRATEGIES,
    Bagua,
    DDPSharded,
    DDPSpawn,
    SingleDevice,
    Strategy,
)

BaguaStrategy = Bagua
DDPStrategy = DDP
DDPSpawnStrategy = DDPSpawn
DDPShardedStrategy = DDPSharded
DDP2Strategy = DDP2
DPStrategy = DP
FSDPStrategy = FSDP
SingleDeviceStrategy = SingleDevice
register = STRATEGIES.register

__all__ = [
    "DDP",
    "DDP2",
    "DP",
    "FSDP",
    "Bagua",
    "BaguaStrategy",
    "DDP2Strategy",
    "DDPSharded",
    "DDPShardedStrategy",
    "DDPSpawn",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "DPStrategy",
    "FSDPStrategy",
    "SingleDevice",
    "SingleDeviceStrategy",
    "Strategy",
    "register",
]
