"""Programs of LightningModules of different kinds, each run by Lightning's own `Trainer` too.

They are written as users write them: nothing in them knows fitkit.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit

ROWS, SIZE, CLASSES = 96, 16, 3


def rows(count=ROWS, seed=0):
    """A set of points in three classes that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    y = x[:, :CLASSES].argmax(1)
    return x, y


def loader(count=ROWS, seed=0, **options):
    return DataLoader(TensorDataset(*rows(count, seed)), batch_size=SIZE, **options)


def held_out(seed=1):
    return loader(40, seed)  # the last batch is short


def sentences():
    """Sequences of tokens with the class of each, as a loader of dicts."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 20, (64, 6), generator=generator)
    entries = [{"tokens": row, "labels": row.sum() % CLASSES} for row in tokens]
    return DataLoader(entries, batch_size=SIZE)


# ---------------------------------------------------------------------- modules


class Classifier(pl.LightningModule):
    """A net with a loss and an accuracy for each stage."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        values = {
            "val_loss": F.cross_entropy(scores, y),
            "val_accuracy": (scores.argmax(1) == y).float().mean(),
        }
        self.log_dict(values, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Autoencoder(pl.LightningModule):
    """Encoder and decoder, with what Lightning's first page has."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 8))

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch):
        x, _ = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class GAN(pl.LightningModule):
    """Two networks that learn by turns, by manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, noise):
        return self.generator(noise)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        noise = torch.sin(real[:, :4] * 7)
        of_generator, of_critic = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(of_generator)
        made = self(noise)
        loss = F.binary_cross_entropy_with_logits(self.critic(made), ones)
        self.log("generator_loss", loss, on_step=False, on_epoch=True)
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_critic)
        told = F.binary_cross_entropy_with_logits(self.critic(real), ones)
        fake = F.binary_cross_entropy_with_logits(self.critic(self(noise).detach()), zeros)
        self.log("critic_loss", (told + fake) / 2, on_step=False, on_epoch=True)
        of_critic.zero_grad()
        self.manual_backward((told + fake) / 2)
        of_critic.step()
        self.untoggle_optimizer(of_critic)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        second = torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return [first, second], []


class OneCycle(Classifier):
    """A schedule that moves with each update, as long as the trainer says the training is."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class EverySecondBatch(Classifier):
    """A schedule that moves after every second batch of an epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        config = {"scheduler": schedule, "interval": "step", "frequency": 4}
        return {"optimizer": optimizer, "lr_scheduler": config}


class ByEpoch(Classifier):
    """A schedule by epochs, whose length is the trainer's number of epochs."""

    def configure_optimizers(self):
        groups = [
            {"params": self.net[0].parameters(), "lr": 0.05},
            {"params": self.net[2].parameters(), "weight_decay": 0.01},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR
        return [optimizer], [cosine(optimizer, self.trainer.max_epochs)]


class Plateau(Classifier):
    """A schedule that watches a logged value."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        schedule = plateau(optimizer, factor=0.3, patience=0, threshold=0.2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class OwnClipping(Classifier):
    """Clips in its own hook, harder in the first epoch."""

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        limit = 0.01 if self.current_epoch == 0 else 0.1
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


class WithMetrics(Classifier):
    """Metrics that are objects, of which the epoch's value isn't a mean over batches."""

    def __init__(self):
        super().__init__()
        macro = {"num_classes": CLASSES, "average": "macro"}
        self.train_f1 = torchmetrics.classification.MulticlassF1Score(**macro)
        self.val_f1 = torchmetrics.classification.MulticlassF1Score(**macro)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.train_f1(scores, y)
        self.log("train_f1", self.train_f1, on_step=False, on_epoch=True)
        return F.cross_entropy(scores, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.val_f1.update(scores, y)
        self.mean.update(scores.std())
        self.log("val_f1", self.val_f1)

    def on_validation_epoch_end(self):
        self.log("val_spread", self.mean.compute())
        self.mean.reset()


class SeveralSets(Classifier):
    """Two loaders to validate on; the second one's values have names of their own, too."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("val_loss", loss)
        if dataloader_idx == 1:
            self.log("second_loss", 2 * loss, add_dataloader_idx=False)


class FrozenBackbone(Classifier):
    """A backbone with statistics that neither learns nor moves."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.backbone.eval().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        return self.net(x)

    def configure_optimizers(self):
        learning = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(learning, lr=0.1, momentum=0.9, nesterov=True)


class OwnBackward(Classifier):
    """Hooks around the gradients, and an update whose rate it sets itself."""

    def backward(self, loss):
        (2 * loss).backward()

    def on_after_backward(self):
        for parameter in self.net[2].parameters():
            parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer):
        squares = [p.grad.pow(2).sum() for p in self.parameters()]
        self.log("norm", torch.stack(squares).sum().sqrt(), on_step=False, on_epoch=True)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnLoaders(Classifier):
    """Brings its data."""

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return held_out()


class Hparams(pl.LightningModule):
    """Built from hyperparameters, which it keeps."""

    def __init__(self, width=8, lr=0.1, activation="relu"):
        super().__init__()
        self.save_hyperparameters()
        layer = {"relu": nn.ReLU, "tanh": nn.Tanh}[activation]()
        self.net = nn.Sequential(nn.Linear(8, width), layer, nn.Linear(width, CLASSES))
        self.example_input_array = torch.zeros(1, 8)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), batch_size=len(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class ByLBFGS(Classifier):
    """An optimizer that computes a batch's loss several times."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.02, max_iter=3)


class Transformer(pl.LightningModule):
    """Reads tokens, from batches that are dicts; the rate warms up."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["tokens"]), batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 6))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class DictSteps(Classifier):
    """Steps that return dicts, which a later hook reads."""

    def on_train_epoch_start(self):
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        return {"loss": F.cross_entropy(scores, y), "right": (scores.argmax(1) == y).sum()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["right"])
        self.log("last_loss", outputs["loss"], on_step=False, on_epoch=True, batch_size=len(batch))

    def on_train_epoch_end(self):
        self.log("right", torch.stack(self.seen).sum().float())


class NoneSteps(Classifier):
    """Leaves out batches by returning None."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 3 == 1:
            return None
        return super().training_step(batch, batch_idx)


class MovingAverage(Classifier):
    """Keeps a moving average of its weights, by which it validates."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.average(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.2)


class ManualAccumulation(Classifier):
    """Accumulates, clips and moves its schedule by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss / 2)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        self.log("train_loss", loss, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class ShortEpochs(Classifier):
    """Ends its epochs before the data end."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None


class SAM(torch.optim.Optimizer):
    """Steps by the gradients at a point near by, by its closure (Foret et al., 2021)."""

    def __init__(self, parameters, lr=0.1, rho=0.05):
        super().__init__(parameters, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        learning = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p, _ in learning]).norm()
        moves = [p.grad * (group["rho"] / (norm + 1e-12)) for p, group in learning]
        for (p, _), move in zip(learning, moves, strict=True):
            p.add_(move)
        closure()
        for (p, group), move in zip(learning, moves, strict=True):
            p.sub_(move).sub_(p.grad, alpha=group["lr"])
        return loss


class BySAM(Classifier):
    def configure_optimizers(self):
        return SAM(self.parameters())


class Noisy(Classifier):
    """Dropout and batch normalization; seeds its noise by the batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
        )

    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(1000 * self.current_epoch + batch_idx)


class LastLayer(Classifier):
    """Only its last layer has an optimizer, and the others have gradients all the same."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.5)


class MetricLoss(Classifier):
    """A torchmetrics object gives the loss, so it keeps a batch's graph."""

    def __init__(self):
        super().__init__()
        self.hinge = torchmetrics.HingeLoss("multiclass", num_classes=CLASSES)
        self.scores = torchmetrics.CosineSimilarity("mean")  # its state is a list

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        loss = self.hinge(scores, y) - self.scores(scores, F.one_hot(y, CLASSES))
        self.log("train_loss", self.hinge, on_epoch=True)
        self.log("likeness", self.scores, on_step=False, on_epoch=True)
        return loss


class Points(pl.LightningDataModule):
    """Splits, scales and serves points."""

    def __init__(self, size=SIZE):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        self.was_prepared = True

    def setup(self, stage):
        x, y = rows(ROWS + 40)
        self.mean, self.scale = x[:ROWS].mean(0), x[:ROWS].std(0)
        self.train = TensorDataset(x[:ROWS], y[:ROWS])
        self.rest = TensorDataset(x[ROWS:], y[ROWS:])

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x - self.mean) / self.scale, y

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.size)

    def val_dataloader(self):
        return DataLoader(self.rest, batch_size=self.hparams.size)

    test_dataloader = predict_dataloader = val_dataloader


# ---------------------------------------------------------------------- programs


@dataclasses.dataclass
class Program:
    """A module and what it is trained with.

    Attributes:
        module: makes it.
        data: makes the training data, or a data module; None for the module's own loaders.
        validation: makes the validation data, if the data say nothing of them.
        logged: the values of an epoch that must be there.
        settings: the trainer's, by Lightning's names.
    """

    module: Callable[[], Any]
    data: Callable[[], Any] | None = loader
    validation: Callable[[], Any] | None = held_out
    logged: tuple[str, ...] = ("train_loss", "val_loss", "val_accuracy")
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def made(self):
        """The module with its first weights, and its data."""
        torch.manual_seed(7)
        module = self.module()
        data = None if self.data is None else self.data()
        return module, data, None if self.validation is None else self.validation()


PROGRAMS = {
    "classifier": Program(Classifier),
    "autoencoder": Program(Autoencoder, validation=None, logged=("train_loss_epoch",)),
    "gan": Program(GAN, validation=None, logged=("generator_loss", "critic_loss")),
    "one_cycle": Program(OneCycle),
    "every_second_batch": Program(EverySecondBatch),
    "by_epoch": Program(ByEpoch),
    "plateau": Program(Plateau),
    "accumulation": Program(Classifier, settings={"accumulate_grad_batches": 3}),
    "clipping": Program(Classifier, settings={"gradient_clip_val": 0.05}),
    "clipping_values": Program(
        Classifier, settings={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "clipping_a_part": Program(LastLayer, settings={"gradient_clip_val": 0.05}),
    "own_clipping": Program(OwnClipping),
    "metrics": Program(WithMetrics, logged=("train_f1", "val_f1", "val_spread")),
    "several_sets": Program(
        SeveralSets,
        validation=lambda: [held_out(), held_out(5)],
        logged=("val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1", "second_loss"),
    ),
    "frozen_backbone": Program(FrozenBackbone),
    "own_backward": Program(OwnBackward, logged=("train_loss", "norm", "val_loss")),
    "own_loaders": Program(OwnLoaders, data=None, validation=None),
    "hparams": Program(lambda: Hparams(12, activation="tanh"), logged=("val_loss",)),
    "lbfgs": Program(ByLBFGS, logged=("val_loss", "val_accuracy")),
    "transformer": Program(Transformer, sentences, None, ("loss_epoch",)),
    "data_module": Program(Classifier, Points, None),
    "dict_steps": Program(DictSteps, logged=("last_loss", "right", "val_loss")),
    "none_steps": Program(NoneSteps),
    "moving_average": Program(MovingAverage, logged=("train_loss", "val_loss")),
    "manual_accumulation": Program(ManualAccumulation),
    "short_epochs": Program(ShortEpochs, validation=None, logged=("train_loss",)),
    "noisy": Program(Noisy),
    "sam": Program(BySAM, logged=("val_loss", "val_accuracy")),
    "metric_loss": Program(MetricLoss, logged=("train_loss_epoch", "likeness", "val_loss")),
    "double": Program(Classifier, settings={"precision": "64-true"}),
    "bfloat16": Program(Classifier, settings={"precision": "bf16-mixed"}),
}


class Logged(pl.loggers.logger.Logger):
    """Collects what a trainer logs, by name."""

    name, version = "logged", 0

    def __init__(self):
        super().__init__()
        self.values: dict[str, list[float]] = {}

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.values.setdefault(name, []).append(float(value))

    def log_hyperparams(self, *arguments, **more):
        """Nothing: only values are compared."""


def by_trainer(program: Program, epochs: int = 3) -> tuple[Any, dict[str, list[float]]]:
    """Train by Lightning's own trainer.

    Returns:
        The trained module, and the logged values by name.
    """
    module, data, validation = program.made()
    logged = Logged()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=logged,
        log_every_n_steps=math.inf,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **program.settings,
    )
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data, validation)
    return module, logged.values


def by_fitkit(
    program: Program, epochs: int = 3, devices: int = 1
) -> tuple[Any, dict[str, list[float]]]:
    """Train by fitkit's verbs; the trained module, and the logged values by name."""
    module, data, validation = program.made()
    model = fitkit.Model(module)
    model.compile(accelerator="cpu", devices=devices, **program.settings)
    if isinstance(validation, list):
        validation = {f"dataloader_idx_{n}": one for n, one in enumerate(validation)}
    history = model.fit(data, epochs=epochs, validation_data=validation, verbose=0)
    return module, history.history
