"""The tasks by fitkit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

import fitkit
from benchmarks.loops import Answer, loader_of
from benchmarks.tasks import Task
from fitkit.transforms import CutMix, MixUp, RandomErasing
from fitkit.typing import MetricName, Name

MONITORS: dict[str, Callable[[], Any]] = {
    "throughput": lambda: fitkit.callbacks.ThroughputMonitor(tokens=64, peak_flops=1e12),
    "rates": fitkit.callbacks.LearningRateMonitor,
    "norms": fitkit.callbacks.NormMonitor,
}


class Looks(fitkit.callbacks.Callback):
    """A callback that does next to nothing after each step."""

    stops_alike = True

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.last = batch


RECIPES: dict[str, list[Callable[..., Any]]] = {
    "MixUp": [MixUp(0.2)],
    "CutMix": [CutMix(1.0)],
    "RandomErasing": [RandomErasing(0.25)],
}
"""Transforms of whole batches, by the name in a task."""


def runner(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Return a run of the task."""
    model = fitkit.Model(net)
    names: dict[str, MetricName] = {"f1": "f1", "recall": "recall", "accuracy": "accuracy"}
    model.compile(
        optimizer=Name(task.optimizer),
        learning_rate=task.rate,
        loss="cross_entropy",
        metrics=[names[name] for name in task.metrics] or None,
        accelerator="cpu",
        batch_transforms=RECIPES.get(task.recipe),
        **task.options,
    )
    verbose: Any = "auto" if task.defaults else 0
    arrays = x.numpy(), y.numpy()
    if task.source == "batches":
        return lambda: _own_loop(task, model, *arrays)
    if task.verb == "predict":
        return lambda: model.predict(arrays[0], batch_size=task.batch, verbose=verbose)
    if task.verb == "evaluate":
        return lambda: model.evaluate(
            *arrays, batch_size=task.batch, verbose=verbose, return_dict=True
        )
    options: dict[str, Any] = {"epochs": task.epochs, "verbose": verbose}
    callbacks: list[Any] = [Looks() for _ in range(task.callbacks)]
    callbacks += [MONITORS[name]() for name in task.monitors]
    if callbacks:
        options["callbacks"] = callbacks
    if task.source == "arrays":
        options["batch_size"] = task.batch
    data = arrays if task.source == "arrays" else (loader_of(task, x, y),)

    def run() -> Answer:
        history = model.fit(*data, **options).history
        return {name: float(values[-1]) for name, values in history.items()}

    return run


def _own_loop(task: Task, model: fitkit.Model, x: Any, y: Any) -> Answer:
    """Return a pass over the data by the verbs of single batches."""
    places = [slice(start, start + task.batch) for start in range(0, len(x), task.batch)]
    if task.verb == "predict":
        return np.concatenate([model.predict_on_batch(x[place]) for place in places])
    verb = model.train_on_batch if task.verb == "train" else model.test_on_batch
    found = [verb(x[place], y[place]) for place in places]
    return dict(zip(("loss", "accuracy"), np.mean(found, axis=0).tolist(), strict=True))
