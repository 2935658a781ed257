"""Metrics: names and callables, and what torchmetrics computes, summed up over batches."""

from fitkit.metrics.group import CompiledMetrics

__all__ = ["CompiledMetrics"]
