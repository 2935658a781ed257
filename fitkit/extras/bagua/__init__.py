"""Ways in which ranks that train a module keep together, beside DDP's."""

from fitkit.extras.bagua.algorithms import (
    Asynchronous,
    Decentralized,
    GradientAllreduce,
    LowPrecisionDecentralized,
    PostLocalSGD,
)
from fitkit.extras.bagua.base import Algorithm, Peers
from fitkit.extras.bagua.compression import ByteGrad
from fitkit.extras.bagua.qadam import QAdam, QAdamOptimizer
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
