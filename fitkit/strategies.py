"""Strategies by their public names."""

from fitkit.distributed.strategies import DDP, DDP2, DP, DDPSpawn, SingleDevice, Strategy

DDPStrategy = DDP
DDPSpawnStrategy = DDPSpawn
DDP2Strategy = DDP2
DPStrategy = DP
SingleDeviceStrategy = SingleDevice

__all__ = [
    "DDP",
    "DDP2",
    "DP",
    "DDP2Strategy",
    "DDPSpawn",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "DPStrategy",
    "SingleDevice",
    "SingleDeviceStrategy",
    "Strategy",
]
