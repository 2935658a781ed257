"""Strategies: how a model trains across devices and ranks. One file per strategy."""

from fitkit.distributed.strategies.bagua import Bagua
from fitkit.distributed.strategies.base import Assignment, SingleDevice, Strategy
from fitkit.distributed.strategies.ddp import DDP, DDPSpawn
from fitkit.distributed.strategies.ddp2 import DDP2
from fitkit.distributed.strategies.deepspeed import DeepSpeed
from fitkit.distributed.strategies.dp import DP
from fitkit.distributed.strategies.engine import Engine
from fitkit.distributed.strategies.fsdp import FSDP
from fitkit.distributed.strategies.horovod import Horovod
from fitkit.distributed.strategies.sharded import DDPSharded
from fitkit.distributed.strategies.xla import XLA
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
STRATEGIES.add("bagua", Bagua)
STRATEGIES.add("ddp_sharded", DDPSharded)
STRATEGIES.add("fsdp", FSDP)
STRATEGIES.add("deepspeed", DeepSpeed)
STRATEGIES.add("horovod", Horovod)
STRATEGIES.add("xla", XLA, "tpu")

__all__ = [
    "DDP",
    "DDP2",
    "DP",
    "FSDP",
    "STRATEGIES",
    "XLA",
    "Assignment",
    "Bagua",
    "DDPSharded",
    "DDPSpawn",
    "DeepSpeed",
    "Engine",
    "Horovod",
    "SingleDevice",
    "Strategy",
]
