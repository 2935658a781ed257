"""Strategies by their public names."""

from fitkit.distributed.strategies import SingleDevice, Strategy

SingleDeviceStrategy = SingleDevice

__all__ = ["SingleDevice", "SingleDeviceStrategy", "Strategy"]
