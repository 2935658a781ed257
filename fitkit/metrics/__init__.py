"""Metrics: names and callables, and what torchmetrics computes, summed up over batches."""

from fitkit.metrics.compiled import CompiledMetrics

__all__ = ["CompiledMetrics"]
