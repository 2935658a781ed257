"""Strategies: how a model trains across devices and ranks. One file per strategy."""

from fitkit.distributed.strategies.base import Assignment, SingleDevice, Strategy
from fitkit.distributed.strategies.engine import Engine
from fitkit.registry import Registry, subclass_of

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    hint="An object of fitkit.strategies is accepted too, such as DDPStrategy(…).",
    group="fitkit.strategies",
    accepts=subclass_of(Strategy),
    expected="a subclass of fitkit.strategies.Strategy",
)
STRATEGIES.add("single_device", SingleDevice, "single")
STRATEGIES.promise("fitkit.extras.dp:DP", "dp")
STRATEGIES.promise("fitkit.extras.ddp:DDP", "ddp")
STRATEGIES.promise("fitkit.extras.ddp2:DDP2", "ddp2")
STRATEGIES.promise("fitkit.extras.ddp:DDPSpawn", "ddp_spawn")
STRATEGIES.promise("fitkit.extras.bagua.strategy:Bagua", "bagua")
STRATEGIES.promise("fitkit.extras.sharding.ddp_sharded:DDPSharded", "ddp_sharded")
STRATEGIES.promise("fitkit.extras.sharding.fsdp:FSDP", "fsdp")
STRATEGIES.promise("fitkit.extras.deepspeed:DeepSpeed", "deepspeed")
STRATEGIES.promise("fitkit.extras.horovod:Horovod", "horovod")
STRATEGIES.promise("fitkit.extras.xla:XLA", "xla", "tpu")

__all__ = [
    "STRATEGIES",
    "Assignment",
    "Engine",
    "SingleDevice",
    "Strategy",
]
