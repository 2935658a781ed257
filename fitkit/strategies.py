"""Strategies by their public names."""

from fitkit.distributed.strategies import DDP, DDPSpawn, SingleDevice, Strategy

DDPStrategy = DDP
DDPSpawnStrategy = DDPSpawn
SingleDeviceStrategy = SingleDevice

__all__ = [
    "DDP",
    "DDPSpawn",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "SingleDevice",
    "SingleDeviceStrategy",
    "Strategy",
]
