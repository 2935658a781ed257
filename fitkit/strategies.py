"""Strategies by their public names, and how to add one of your own.

`register("my_strategy")` above a subclass of `Strategy` makes it known to `compile` by that name;
an installed package does the same with an entry point of the group `fitkit.strategies`.
"""

from fitkit.distributed.engines.xla_adapters import Adapter as XLAAdapter
from fitkit.distributed.strategies import (
    DDP,
    DDP2,
    DP,
    FSDP,
    STRATEGIES,
    XLA,
    Bagua,
    DDPSharded,
    DDPSpawn,
    DeepSpeed,
    Horovod,
    SingleDevice,
    Strategy,
)

BaguaStrategy = Bagua
DDPStrategy = DDP
DDPSpawnStrategy = DDPSpawn
DDPShardedStrategy = DDPSharded
DDP2Strategy = DDP2
DeepSpeedStrategy = DeepSpeed
DPStrategy = DP
FSDPStrategy = FSDP
HorovodStrategy = Horovod
SingleDeviceStrategy = SingleDevice
XLAStrategy = XLA
register = STRATEGIES.register

__all__ = [
    "DDP",
    "DDP2",
    "DP",
    "FSDP",
    "XLA",
    "Bagua",
    "BaguaStrategy",
    "DDP2Strategy",
    "DDPSharded",
    "DDPShardedStrategy",
    "DDPSpawn",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "DPStrategy",
    "DeepSpeed",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "Horovod",
    "HorovodStrategy",
    "SingleDevice",
    "SingleDeviceStrategy",
    "Strategy",
    "XLAAdapter",
    "XLAStrategy",
    "register",
]
