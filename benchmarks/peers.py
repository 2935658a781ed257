"""The tasks by other libraries, each as its own documentation writes them.

Their packages are `requirements/peers.txt`, in an environment of their own (`make bench-peers`).
"""

# They aren't there where mypy runs.
# mypy: disable-error-code="import-not-found, import-untyped"
from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loops import Answer, inferred, loader_of, optimizer_of
from benchmarks.tasks import Task


def lightning(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Lightning, with torchmetrics for the accuracy as its documentation has it."""
    import logging
    import warnings

    import lightning as L
    from torchmetrics.classification import MulticlassAccuracy

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.accuracy = MulticlassAccuracy(10, average="micro")

        def step(self, batch: Any) -> Tensor:
            inputs, targets = batch
            outputs = self.net(inputs)
            loss = F.cross_entropy(outputs, targets)
            self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=task.defaults)
            if task.metrics:
                self.accuracy(outputs, targets)
                self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.step(batch)

        def test_step(self, batch: Any, index: int) -> None:
            self.step(batch)

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return optimizer_of(task, net)

    module, loader = Module(), loader_of(task, x, y)

    def run() -> Answer:
        trainer = L.Trainer(
            max_epochs=task.epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=task.defaults,
        )
        if task.verb == "predict":
            return torch.cat(trainer.predict(module, loader))
        if task.verb == "evaluate":
            return trainer.test(module, loader, verbose=False)[0]
        trainer.fit(module, loader)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    return run


def keras(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Keras 3 on torch, around the same net."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras as K

    return _by_keras(task, K.Sequential([K.layers.TorchModuleWrapper(net)]), x, y)


def keras_on_jax(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Keras 3 on JAX: the net in Keras's layers, which learns from the same weights.

    Each run copies the weights into the net, where they are checked: 0.1 ms.
    """
    os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"  # one thread, as the others have
    import keras as K

    layers: list[Any] = []
    for layer in cast("nn.Sequential", net):
        match layer:
            case nn.Linear():
                layers.append(K.layers.Dense(layer.out_features))
            case nn.ReLU():
                layers.append(K.layers.ReLU())
            case nn.Conv2d():
                layers.append(K.layers.Conv2D(layer.out_channels, 3, padding="same"))
            case nn.BatchNorm2d():
                layers.append(K.layers.BatchNormalization(momentum=0.9, epsilon=layer.eps))
            case nn.MaxPool2d():
                layers.append(K.layers.MaxPooling2D(2))
            case nn.Flatten():  # by channels first, as the weights behind it want
                layers += [K.layers.Permute((3, 1, 2)), K.layers.Flatten()]
            case _:
                raise NotImplementedError(f"Keras's layer for {type(layer).__name__}")
    x = x.movedim(1, -1).contiguous() if x.ndim == 4 else x
    model = K.Sequential([K.Input(x.shape[1:]), *layers])
    weights = [value for value in net.state_dict().values() if value.is_floating_point()]
    model.set_weights([value.permute(FROM_TORCH[value.ndim]).numpy() for value in weights])
    by_keras = _by_keras(task, model, x, y)

    def run() -> Answer:
        answer = by_keras()
        for value, learned in zip(weights, model.get_weights(), strict=True):
            value.permute(FROM_TORCH[value.ndim]).copy_(torch.from_numpy(learned))
        return answer

    return run


FROM_TORCH = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}
"""Where Keras has the dimensions of torch's weights, by how many there are."""


def _by_keras(task: Task, model: Any, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    import keras as K

    kind = K.optimizers.Adam if task.optimizer == "adam" else K.optimizers.SGD
    model.compile(
        optimizer=kind(task.rate),
        loss=K.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"] if task.metrics else None,
        **task.options,
    )
    verbose: Any = "auto" if task.defaults else 0
    arrays = x.numpy(), y.numpy()
    if task.verb == "predict":
        return lambda: model.predict(arrays[0], batch_size=task.batch, verbose=verbose)
    if task.verb == "evaluate":
        return lambda: model.evaluate(
            *arrays, batch_size=task.batch, verbose=verbose, return_dict=True
        )
    if task.source == "arrays":
        options: dict[str, Any] = {"x": arrays[0], "y": arrays[1], "batch_size": task.batch}
    else:
        options = {"x": loader_of(task, x, y)}

    def run() -> Answer:
        history = model.fit(epochs=task.epochs, verbose=verbose, **options).history
        return {name: float(values[-1]) for name, values in history.items()}

    return run


def skorch(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """skorch's classifier on arrays."""
    from skorch import NeuralNetClassifier
    from skorch.callbacks import EpochScoring

    score = EpochScoring("accuracy", name="accuracy", lower_is_better=False, on_train=True)
    classifier = NeuralNetClassifier(
        net,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam if task.optimizer == "adam" else torch.optim.SGD,
        lr=task.rate,
        max_epochs=task.epochs,
        batch_size=task.batch,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=int(task.defaults),
        callbacks=[score] if task.metrics else None,
    )
    classifier.initialize()
    arrays = x.numpy(), y.numpy()
    if task.verb == "predict":
        return lambda: classifier.forward(arrays[0])
    if task.verb == "evaluate":
        return lambda: {"accuracy": float((classifier.predict(arrays[0]) == arrays[1]).mean())}

    def run() -> Answer:
        classifier.partial_fit(*arrays)
        return {"loss": classifier.history[-1, "train_loss"]}

    return run


def poutyne(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Poutyne."""
    from poutyne import Model

    metrics = ["accuracy"] if task.metrics else []
    model = Model(net, optimizer_of(task, net), "cross_entropy", batch_metrics=metrics)
    arrays = x.numpy(), y.numpy()
    if task.verb == "predict":
        return lambda: model.predict(arrays[0], batch_size=task.batch, verbose=task.defaults)
    if task.verb == "evaluate":

        def evaluate() -> Answer:
            given = model.evaluate(*arrays, batch_size=task.batch, verbose=task.defaults)
            loss, accuracy = given if task.metrics else (given, 0.0)
            return {"loss": loss, **({"accuracy": accuracy / 100} if task.metrics else {})}

        return evaluate
    loader = loader_of(task, x, y)

    def run() -> Answer:
        if task.source == "arrays":
            logs = model.fit(
                *arrays, batch_size=task.batch, epochs=task.epochs, verbose=task.defaults
            )
        else:
            logs = model.fit_generator(loader, epochs=task.epochs, verbose=task.defaults)
        return {"loss": logs[-1]["loss"]}

    return run


def ignite(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Ignite's engines."""
    from ignite.engine import create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import ProgressBar
    from ignite.metrics import Accuracy, Average, Loss

    loader = loader_of(task, x, y)
    if task.verb == "train":
        trainer = create_supervised_trainer(
            net,
            optimizer_of(task, net),
            F.cross_entropy,
            output_transform=lambda x, y, output, loss: (output, y, loss.detach()),
        )
        Average(output_transform=lambda output: output[2]).attach(trainer, "loss")
        if task.metrics:
            Accuracy(output_transform=lambda output: output[:2]).attach(trainer, "accuracy")
        if task.defaults:
            ProgressBar().attach(trainer)
        return lambda: dict(trainer.run(loader, max_epochs=task.epochs).metrics)
    if task.verb == "evaluate":
        metrics = {"loss": Loss(F.cross_entropy), "accuracy": Accuracy()}
        evaluator = create_supervised_evaluator(net, metrics)
        return lambda: dict(evaluator.run(loader).metrics)
    from ignite.handlers.stores import EpochOutputStore

    evaluator = create_supervised_evaluator(net)
    store = EpochOutputStore(output_transform=lambda output: output[0])
    store.attach(evaluator)

    def predict() -> Answer:
        evaluator.run(loader)
        return torch.cat(store.data)

    return predict


def accelerate(task: Task, net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Answer]:
    """Accelerate around the loop that its users write, with tqdm by default as in its examples."""
    from accelerate import Accelerator
    from tqdm.auto import tqdm

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(task, x, y))
    if task.verb != "train":
        return lambda: inferred(task, net, loader)
    prepared, optimizer = accelerator.prepare(net, optimizer_of(task, net))

    def epoch() -> Answer:
        prepared.train()
        total, right, steps = torch.zeros(()), torch.zeros((), dtype=torch.int64), 0
        for inputs, targets in tqdm(loader) if task.defaults else loader:
            optimizer.zero_grad()
            outputs = prepared(inputs)
            loss = F.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
            if task.metrics:
                right += (outputs.argmax(1) == targets).sum()
            steps += 1
        return {"loss": total.item() / steps, "accuracy": right.item() / task.samples}

    return lambda: [epoch() for _ in itertools.repeat(None, task.epochs)][-1]


PEERS = {
    "Lightning": lightning,
    "Keras": keras,
    "Keras on JAX": keras_on_jax,
    "skorch": skorch,
    "Poutyne": poutyne,
    "Ignite": ignite,
    "Accelerate": accelerate,
}
