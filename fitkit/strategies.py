"""Strategies by their public names."""

from fitkit.distributed.strategies import (
    DDP,
    DDP2,
    DP,
    FSDP,
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
]
