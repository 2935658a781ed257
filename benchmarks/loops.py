"""What people write by hand, in plain PyTorch: the naive, the careful and the tuned loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.tasks import Task

Batch = tuple[Tensor, Tensor]
Answer = Any


def loader_of(task: Task, x: Tensor, y: Tensor) -> DataLoader[Any]:
    """Return a plain loader, shuffling where one trains."""
    return DataLoader(TensorDataset(x, y), task.batch, shuffle=task.verb == "train")


def optimizer_of(task: Task, net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return the task's optimizer."""
    kind: Any = torch.optim.Adam if task.optimizer == "adam" else torch.optim.SGD
    made: torch.optim.Optimizer = kind(net.parameters(), lr=task.rate, **options)
    return made


def collection_of(task: Task) -> Any:
    """Return the task's metrics as a torchmetrics collection; None where plain arithmetic does."""
    if task.metrics in ((), ("accuracy",)):
        return None
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall

    kinds = {
        "accuracy": lambda: MulticlassAccuracy(10, average="micro"),
        "f1": lambda: MulticlassF1Score(10),
        "recall": lambda: MulticlassRecall(10),
    }
    return MetricCollection({name: kinds[name]() for name in task.metrics})


# ---------------------------------------------------------------------- naive


def naive(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """As in many tutorials: numbers are read from the device at every step."""
    loader, device = loader_of(task, x, y), torch.device("cpu")
    if task.verb != "train":
        return lambda: _naive_pass(task, net, loader)
    optimizer, metrics = optimizer_of(task, net), collection_of(task)

    def epoch() -> Answer:
        net.train()
        running, right, seen = 0.0, 0, 0
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()
            optimizer.step()
            running += loss.item() * len(inputs)
            seen += len(inputs)
            if metrics is not None:
                metrics(outputs, targets)
            elif task.metrics:
                right += (outputs.argmax(1) == targets).sum().item()
        found = {"loss": running / seen, "accuracy": right / seen}
        if metrics is not None:
            found.update({k: float(v) for k, v in metrics.compute().items()})
            metrics.reset()
        return found

    return repeated(epoch, task.epochs)


def _naive_pass(task: Task, net: nn.Module, loader: DataLoader[Any]) -> Answer:
    net.eval()
    running, right, seen, outputs = 0.0, 0, 0, []
    with torch.no_grad():
        for inputs, targets in loader:
            logits = net(inputs)
            if task.verb == "predict":
                outputs.append(logits)
                continue
            running += F.cross_entropy(logits, targets).item() * len(inputs)
            right += (logits.argmax(1) == targets).sum().item()
            seen += len(inputs)
    if task.verb == "predict":
        return torch.cat(outputs)
    return {"loss": running / seen, "accuracy": right / seen}


# ---------------------------------------------------------------------- careful


def careful(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Return a good user's: nothing is read before the epoch's end; else as PyTorch comes."""
    loader = loader_of(task, x, y)
    if task.verb != "train":
        return lambda: inferred(task, net, loader)
    optimizer, metrics = optimizer_of(task, net), collection_of(task)

    def epoch() -> Answer:
        return trained(task, net, optimizer, loader, metrics)

    return repeated(epoch, task.epochs)


def trained(
    task: Task,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    metrics: Any = None,
) -> Answer:
    """One epoch of the careful loop."""
    net.train()
    total, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    steps = 0
    for inputs, targets in batches:
        optimizer.zero_grad(set_to_none=True)
        outputs = net(inputs)
        loss = F.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if metrics is not None:
            metrics.update(outputs.detach(), targets)
        elif task.metrics:
            right += (outputs.argmax(1) == targets).sum()
        steps += 1
    found = {"loss": total.item() / steps, "accuracy": right.item() / task.samples}
    if metrics is not None:
        found.update({name: float(value) for name, value in metrics.compute().items()})
        metrics.reset()
    return found


def inferred(task: Task, net: nn.Module, batches: Iterable[Batch]) -> Answer:
    """Return an evaluation or a prediction of the careful loop."""
    net.eval()
    total, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    outputs = []
    with torch.inference_mode():
        for inputs, targets in batches:
            logits = net(inputs)
            if task.verb == "predict":
                outputs.append(logits)
                continue
            total += F.cross_entropy(logits, targets, reduction="sum")
            right += (logits.argmax(1) == targets).sum()
    if task.verb == "predict":
        return torch.cat(outputs)
    return {"loss": total.item() / task.samples, "accuracy": right.item() / task.samples}


# ---------------------------------------------------------------------- tuned


def tuned(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Return what an expert writes who has measured: fused updates, whole batches selected by
    index.
    """
    if task.source == "batches":
        return _own_loop(task, net, x, y)
    if task.verb != "train":

        def slices() -> Iterator[Batch]:
            yield from zip(x.split(task.batch), y.split(task.batch), strict=True)

        return lambda: inferred(task, net, slices())
    loader = loader_of(task, x, y)
    optimizer = optimizer_of(task, net, fused=True)
    parameters, metrics = list(net.parameters()), collection_of(task)

    def batches() -> Iterator[Batch]:
        if task.source == "loader":  # the loader's own order
            assert loader.batch_sampler is not None
            for numbers in loader.batch_sampler:
                chosen = torch.tensor(numbers)
                yield x.index_select(0, chosen), y.index_select(0, chosen)
            return
        for chosen in torch.randperm(len(x)).split(task.batch):
            yield x.index_select(0, chosen), y.index_select(0, chosen)

    def epoch() -> Answer:
        net.train()
        total, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        steps = 0
        kept: list[Batch] = []
        for inputs, targets in batches():
            for parameter in parameters:
                parameter.grad = None
            outputs = net(inputs)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            steps += 1
            if task.metrics:
                kept.append((outputs.detach(), targets))
                if len(kept) == 20:
                    right += counted(kept, metrics)
                    kept.clear()
        if kept:
            right += counted(kept, metrics)
        found = {"loss": total.item() / steps, "accuracy": right.item() / task.samples}
        if metrics is not None:
            found.update({name: float(value) for name, value in metrics.compute().items()})
            metrics.reset()
        return found

    return repeated(epoch, task.epochs)


def _own_loop(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Batches of arrays one by one, each batch's values read."""
    optimizer, parameters = optimizer_of(task, net, fused=True), list(net.parameters())
    arrays = x.numpy(), y.numpy()

    def run() -> Answer:
        net.train(task.verb == "train")
        found, outputs = [], []
        for start in range(0, task.samples, task.batch):
            inputs, targets = (torch.from_numpy(a[start : start + task.batch]) for a in arrays)
            with torch.inference_mode(task.verb != "train"):
                logits = net(inputs)
                if task.verb == "predict":
                    outputs.append(logits.numpy())
                    continue
                loss = F.cross_entropy(logits, targets)
            if task.verb == "train":
                for parameter in parameters:
                    parameter.grad = None
                loss.backward()
                optimizer.step()
            right = (logits.argmax(1) == targets).float().mean()
            found.append((loss.item(), right.item()))
        if task.verb == "predict":
            return np.concatenate(outputs)
        return dict(zip(("loss", "accuracy"), np.mean(found, axis=0).tolist(), strict=True))

    return run


def counted(kept: list[Batch], metrics: Any) -> Tensor | int:
    """Return the right answers among several batches' outputs, looked at together."""
    outputs = torch.cat([pair[0] for pair in kept])
    targets = torch.cat([pair[1] for pair in kept])
    if metrics is not None:
        metrics.update(outputs, targets)
        return 0
    return (outputs.argmax(1) == targets).sum()


def repeated(epoch: Callable[[], Answer], times: int) -> Callable[[], Answer]:
    """So many epochs as one run; the last one's answer."""
    if times == 1:
        return epoch

    def run() -> Answer:
        for _ in range(times - 1):
            epoch()
        return epoch()

    return run
