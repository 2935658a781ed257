"""Evaluation on further data at the ends of epochs: the compiled values, or other metrics."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from fitkit.arguments import check_count, describe
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.seams.callbacks import Callback, run_of
from fitkit.seams.data import check_data_type
from fitkit.seams.metrics import CompiledMetrics
from fitkit.seams.networks import verb_of


class EvaluateEvery(Callback):
    """Evaluates the model on another data set every few epochs.

    It adds `<name>_loss`, `<name>_accuracy`, … to the logs of those epochs. Callbacks after it in
    the list can monitor them.

    Args:
        x, y, batch_size, sample_weight, steps: as in `model.evaluate`. The data must be readable
            more than once.
        every: evaluate after every so many epochs. Default 1.
        name: the prefix of the names in the logs. Default `"extra"`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> every = fitkit.callbacks.EvaluateEvery(x, x.sum(1), name="clean")
        >>> history = model.fit(x + 1, x.sum(1), epochs=2, verbose=0, callbacks=[every])

    Raises:
        ConfigurationError, ArgumentTypeError: an argument is invalid.

    Ranks:
        The values cover all samples, each counted once, whatever the number of ranks.
    """

    stops_alike = True

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        every: int = 1,
        name: str = "extra",
        batch_size: int = 32,
        sample_weight: Any = None,
        steps: int | None = None,
    ) -> None:
        check_data_type(x)
        if isinstance(x, Iterator):
            raise ConfigurationError(
                f"x is a {type(x).__name__}, which can be read only once. Give arrays, a Dataset, "
                "a DataLoader or a list of batches."
            )
        every = check_count("every", every)
        batch_size = check_count("batch_size", batch_size)
        steps = check_count("steps", steps, optional=True)
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(
                f"name={describe(name)} must be a string, which begins the names in the logs."
            )
        self.data: dict[str, Any] = {
            "x": x, "y": y, "batch_size": batch_size, "sample_weight": sample_weight,
            "steps": steps,
        }  # fmt: skip
        self.every = every
        self.name = name

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        # Tells Monitor which epochs have these values.
        params.setdefault("evaluations", []).append((f"{self.name}_", self.every))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        if (epoch + 1) % self.every == 0:
            names = self.model.metrics_names
            values = self._values()
            self.model._fitkit.log_names = names
            logs.update({f"{self.name}_{name}": value for name, value in values.items()})

    def _values(self) -> dict[str, Any]:
        run = run_of(self.model)
        with contextlib.nullcontext() if run is None else run.as_validated():
            evaluate = verb_of(self.model, "evaluate")
            found: dict[str, Any] = evaluate(**self.data, verbose=0, return_dict=True)
        return found


class MetricCallback(EvaluateEvery):
    """Computes metrics over a whole data set at the ends of epochs, besides those of `compile`.

    Use it for metrics that make no sense batch by batch or cost too much in training: AUROC, a
    confusion matrix, FID. The metrics get probabilities and labels, as in `compile`.

    Args:
        metrics: as for `compile`: names, torchmetrics objects, a `MetricCollection`, callables
            `(prediction, target)`, or a list or dict of them.
        x, y, batch_size, sample_weight, steps, every: as in `EvaluateEvery`.
        name: the prefix of the names in the logs. Default `"val"`.

    Example:
        >>> import torch, fitkit
        >>> model = fitkit.Model(torch.nn.Linear(4, 1))
        >>> model.compile("adam", "mse")
        >>> x = torch.randn(64, 4)
        >>> r2 = fitkit.callbacks.MetricCallback(["r2"], x, x.sum(1))
        >>> history = model.fit(x, x.sum(1), verbose=0, callbacks=[r2])
        >>> list(history.history)
        ['loss', 'val_r2']
    """

    def __init__(
        self, metrics: Any, x: Any, y: Any = None, *, name: str = "val", **options: Any
    ) -> None:
        super().__init__(x, y, name=name, **options)
        self.metrics = metrics
        compiled = CompiledMetrics(metrics)
        if not compiled:
            raise ConfigurationError(f"metrics={describe(metrics)} has no metric.")

    def _values(self) -> dict[str, Any]:
        compilation = self.model._fitkit.compilation
        self.model._fitkit.compilation = dataclasses.replace(
            compilation, metrics=CompiledMetrics(self.metrics)
        ).on(compilation.strategy)
        try:
            values = super()._values()
        finally:
            self.model._fitkit.compilation = compilation
        # The loss, and the losses of several outputs, aren't among these metrics.
        losses = {name for name in values if name == "loss" or name.endswith("_loss")}
        return {name: value for name, value in values.items() if name not in losses}
