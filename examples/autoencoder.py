"""A LightningModule ported: an autoencoder that squeezes handwritten digits into eight numbers.

    python examples/autoencoder.py                # some 5 seconds
    python examples/autoencoder.py --epochs 5     # fewer passes over the data

The class is written as for Lightning 1.6. What the port changes:

    -class Autoencoder(pl.LightningModule):
    +class Autoencoder(fitkit.Model):

    -trainer = pl.Trainer(max_epochs=40, accelerator="cpu", devices=1, gradient_clip_val=1.0)
    -trainer.fit(model, train_loader, val_loader)
    +model.compile(accelerator="cpu", devices=1, gradient_clip_val=1.0)
    +model.fit(train_loader, validation_data=val_loader, epochs=40)

The 1,797 images (8 x 8 pixels) come with scikit-learn. What the net loses is compared with what
the best linear squeeze into eight numbers (PCA) loses; the exit status is 1 where it isn't less.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit

CODE_SIZE = 8


class Autoencoder(fitkit.Model):
    """64 pixels to eight numbers and back."""

    def __init__(self, code_size: int = CODE_SIZE, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, code_size))
        self.decoder = nn.Sequential(nn.Linear(code_size, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (B, 64) to images."""
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = F.mse_loss(self(x), x)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.log("val_loss", F.mse_loss(self(x), x), prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        return self.encoder(x)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "monitor": "val_loss"},
        }


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 64) scaled to 0..1: 1,437 for training, 360 held out."""
    images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    train, held_out = train_test_split(images, test_size=0.2, random_state=0)
    return train, held_out


def linear_error(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Return the mean squared error of the best linear squeeze into as many numbers."""
    pca = PCA(CODE_SIZE).fit(train.numpy())
    restored = pca.inverse_transform(pca.transform(held_out.numpy()))
    return float(((restored - held_out.numpy()) ** 2).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training data")
    parser.add_argument("--verbose", type=int, default=2, help="2: a line an epoch; 0: silent")
    arguments = parser.parse_args()

    train, held_out = load_images()
    train_loader = DataLoader(TensorDataset(train), batch_size=64, shuffle=True)
    val_loader = DataLoader(TensorDataset(held_out), batch_size=360)

    fitkit.set_seed(0)
    model = Autoencoder()
    model.compile(accelerator="cpu", devices=1, gradient_clip_val=1.0)
    history = model.fit(
        train_loader,
        validation_data=val_loader,
        epochs=arguments.epochs,
        verbose=arguments.verbose,
    )

    codes = model.predict(val_loader, verbose=0)  # (360, 8), by predict_step
    error, linear = history.history["val_loss"][-1], linear_error(train, held_out)
    rate = model.optimizer.param_groups[0]["lr"]
    print(f"codes                       {codes.shape[0]} images as {codes.shape[1]} numbers each")
    print(f"learning rate               {model.learning_rate:g} at first, {rate:g} in the end")
    print(f"mean squared error          {error:.5f} of held-out images")
    print(f"of PCA with as many numbers {linear:.5f}")
    if error >= linear:
        print("no better than PCA: train longer with --epochs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
