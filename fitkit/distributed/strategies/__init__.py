"""Strategies: how a model trains across devices and ranks. One file per strategy."""

from fitkit.distributed.strategies.base import Assignment, SingleDevice, Strategy
from fitkit.distributed.strategies.ddp import DDP, DDPSpawn
from fitkit.distributed.strategies.ddp2 import DDP2
from fitkit.distributed.strategies.dp import DP
from fitkit.distributed.strategies.engine import Engine
from fitkit.distributed.strategies.fsdp import FSDP
from fitkit.distributed.strategies.sharded import DDPSharded
from fitkit.registry import Registry

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    hint="An object of fitkit.strategies is accepted too, such as DDPStrategy(…).",
    group="fitkit.strategies",
)
STRATEGIES.add("single_device", SingleDevice, "single")
STRATEGIES.add("dp", DP)
STRATEGIES.add("ddp", DDP)
STRATEGIES.add("ddp2", DDP2)
STRATEGIES.add("ddp_spawn", DDPSpawn)
STRATEGIES.add("ddp_sharded", DDPSharded)
STRATEGIES.add("fsdp", FSDP)
STRATEGIES.promise("fitkit.distributed.strategies.bagua:Bagua", "bagua")
STRATEGIES.promise("fitkit.distributed.strategies.deepspeed:DeepSpeed", "deepspeed")
STRATEGIES.promise("fitkit.distributed.strategies.horovod:Horovod", "horovod")
STRATEGIES.promise("fitkit.distributed.strategies.xla:XLA", "xla", "tpu")

__all__ = [
    "DDP",
    "DDP2",
    "DP",
    "FSDP",
    "STRATEGIES",
    "Assignment",
    "DDPSharded",
    "DDPSpawn",
    "Engine",
    "SingleDevice",
    "Strategy",
]
