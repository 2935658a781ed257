"""Ways in which ranks that train a module keep together, beside DDP's."""

from fitkit.distributed.exchange.algorithms import (
    Asynchronous,
    Decentralized,
    GradientAllreduce,
    LowPrecisionDecentralized,
    PostLocalSGD,
)
from fitkit.distributed.exchange.base import Algorithm, Peers
from fitkit.distributed.exchange.compression import ByteGrad
from fitkit.distributed.exchange.qadam import QAdam, QAdamOptimizer
from fitkit.registry import Registry

ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")
for _class in (
    GradientAllreduce,
    ByteGrad,
    Decentralized,
    LowPrecisionDecentralized,
    Asynchronous,
    QAdam,
    PostLocalSGD,
):
    ALGORITHMS.add(_class.name, _class)

__all__ = ["ALGORITHMS", "Algorithm", "Peers", "QAdamOptimizer"]
