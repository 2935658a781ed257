"""From Lightning: a module with callbacks and loggers.

    pip install scikit-learn torchmetrics tensorboard
    python examples/from_lightning_module.py    # some 10 seconds

The class is a `LightningModule` in which one word has changed, its base class; callbacks and
loggers have the arguments that they have there. What the `Trainer` was given stands in comments
beside the line that says it here. Expect some 94 % of the held-out digits right.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import fitkit
from fitkit.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from fitkit.loggers import CSVLogger, TensorBoardLogger

Batch = list[torch.Tensor]  # x, y


class Digits(fitkit.Model):  # L.LightningModule
    def __init__(self, hidden: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc, on_epoch=True, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        self.test_acc(self(x), y)
        self.log("test_acc", self.test_acc)

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"},
        }


fitkit.set_seed(42)  # L.seed_everything(42)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, val, test = random_split(data, [1200, 297, 300])
train_loader = DataLoader(train, batch_size=32, shuffle=True)
val_loader, test_loader = DataLoader(val, batch_size=64), DataLoader(test, batch_size=64)

model = Digits(hidden=32)
model.compile(accelerator="cpu", devices=1)  # Trainer(accelerator="cpu", devices=1, …)
with tempfile.TemporaryDirectory() as folder:
    checkpoint = ModelCheckpoint(
        dirpath=f"{folder}/checkpoints",
        filename="digits-{epoch:02d}-{val_loss:.3f}",
        monitor="val_loss",
        mode="min",
        save_top_k=2,
        save_last=True,
    )
    stopping = EarlyStopping(monitor="val_loss", mode="min", patience=4)
    logger = CSVLogger(folder, name="digits")
    history = model.fit(  # trainer.fit(model, train_loader, val_loader)
        train_loader,
        validation_data=val_loader,
        epochs=40,  # Trainer(max_epochs=40)
        verbose=0,  # Trainer(enable_progress_bar=False)
        callbacks=[  # Trainer(callbacks=…, logger=…)
            checkpoint,
            stopping,
            LearningRateMonitor(logging_interval="epoch"),
            logger,
            TensorBoardLogger(folder, name="board"),
        ],
    )
    assert checkpoint.best_model_path is not None
    again = Digits(hidden=32)  # Digits.load_from_checkpoint(checkpoint.best_model_path)
    again.load_weights(checkpoint.best_model_path)
    again.compile(accelerator="cpu", devices=1)
    result = again.evaluate(test_loader, return_dict=True, verbose=0)  # trainer.test(again, …)
    digits = again.predict(test_loader, verbose=0)  # trainer.predict(again, test_loader)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    kept = sorted(file.name for file in (Path(folder) / "checkpoints").iterdir())

print("history         ", *history.history)
print("epochs          ", len(history.epoch))
print("learning rates  ", *sorted(set(history.history["learning_rate"]), reverse=True))
print("kept            ", *kept)
print(f"best val_loss    {checkpoint.best_model_score:.4f}")
print("rows of the CSV ", len(rows))
print("predictions     ", *digits[:10])
print(f"held-out digits  {result['test_acc']:.1%} right")
