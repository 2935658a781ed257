"""Metrics: names and callables, and what torchmetrics computes, summed up over batches."""

from fitkit.metrics.compiled import CompiledMetrics
from fitkit.metrics.meters import Meters

__all__ = ["CompiledMetrics", "Meters"]
