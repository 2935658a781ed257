"""Ways in which ranks that train a module keep together, beside DDP's: one file an algorithm."""

from fitkit.distributed.exchange.asynchronous import Asynchronous
from fitkit.distributed.exchange.base import Exchange
from fitkit.distributed.exchange.compression import ByteGrad
from fitkit.distributed.exchange.decentralized import Decentralized, LowPrecisionDecentralized
from fitkit.distributed.exchange.gradient_allreduce import GradientAllreduce, PostLocalSGD
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
