"""Ways in which ranks that train a module keep together, beside DDP's."""

from fitkit.distributed.exchange.algorithms import (
    Asynchronous,
    Decentralized,
    GradientAllreduce,
    LowPrecisionDecentralized,
    PostLocalSGD,
)
from fitkit.distributed.exchange.base import Exchange
from fitkit.distributed.exchange.compression import ByteGrad
from fitkit.distributed.exchange.peers import GroupPeers, Peers
from fitkit.distributed.exchange.qadam import QAdam, QAdamOptimizer
from fitkit.registry import Registry

EXCHANGES: Registry[type[Exchange]] = Registry("algorithm")
for _class in (
    GradientAllreduce,
    ByteGrad,
    Decentralized,
    LowPrecisionDecentralized,
    Asynchronous,
    QAdam,
    PostLocalSGD,
):
    EXCHANGES.add(_class.name, _class)

__all__ = ["EXCHANGES", "Exchange", "GroupPeers", "Peers", "QAdamOptimizer"]
