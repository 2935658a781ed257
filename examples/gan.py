"""A LightningModule ported: a GAN with two optimizers that draws handwritten digits.

    python examples/gan.py                 # some 15 seconds
    python examples/gan.py --epochs 20     # fewer passes over the data

The class is written as for Lightning 1.6. What the port changes:

    -class GAN(pl.LightningModule):
    +class GAN(fitkit.Model):

    -trainer = pl.Trainer(max_epochs=60, accelerator="cpu", devices=1)
    -trainer.fit(model, train_loader)
    +model.compile(accelerator="cpu", devices=1)
    +model.fit(train_loader, epochs=60)

The 1,797 images (8 x 8 pixels) come with scikit-learn. What the generator draws is judged as usual:
by the Fréchet distance between its images and real ones, taken here between the activations of a
small digit classifier, and by which digits that classifier sees. The exit status is 1 where the
images are not much nearer to real ones than an untrained generator's.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fitkit

NOISE_SIZE = 24


class GAN(fitkit.Model):
    """A generator of images and a discriminator that learns to tell them from real ones."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.generator = nn.Sequential(
            nn.Linear(NOISE_SIZE, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 128),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(128, 128),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(128, 1),
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Noise (B, NOISE_SIZE) to images (B, 64)."""
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> torch.Tensor:
        # The other way, for steps that two turns a batch don't describe: set
        # automatic_optimization = False in __init__, take generator_optimizer,
        # discriminator_optimizer = self.optimizers(), and call manual_backward and step yourself.
        (real,) = batch
        noise = torch.randn(len(real), NOISE_SIZE, device=self.device)
        if optimizer_idx == 0:
            loss = self.adversarial_loss(self(noise), are_real=True)
            self.log("generator_loss", loss, prog_bar=True)
            return loss
        drawn = self(noise).detach()
        loss = (
            self.adversarial_loss(real, are_real=True)
            + self.adversarial_loss(drawn, are_real=False)
        ) / 2
        self.log("discriminator_loss", loss, prog_bar=True)
        return loss

    def adversarial_loss(self, images: torch.Tensor, *, are_real: bool) -> torch.Tensor:
        """How far the discriminator is from taking images for what is said of them."""
        logits = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, are_real))

    def configure_optimizers(self) -> Any:
        betas = (0.5, 0.999)
        return [
            torch.optim.Adam(net.parameters(), lr=self.learning_rate, betas=betas)
            for net in (self.generator, self.discriminator)
        ], []


class Judge:
    """A classifier of real digits, and the distance between images as it sees them."""

    def __init__(self, images: np.ndarray, digits: np.ndarray) -> None:
        self.classifier = MLPClassifier((32,), learning_rate_init=0.01, random_state=0)
        self.classifier.fit(images, digits)

    def seen(self, images: np.ndarray) -> np.ndarray:
        """Which digits it sees."""
        return self.classifier.predict(images)

    def distance(self, images: np.ndarray, others: np.ndarray) -> float:
        """Return the Fréchet distance between two sets of images: 0 where they are alike."""
        one, two = (self._activations(each) for each in (images, others))
        covariances = [np.cov(each, rowvar=False) for each in (one, two)]
        # The trace of a matrix's root is the sum of its eigenvalues' roots.
        roots = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).real.clip(min=0))
        between = np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * roots.sum()
        return float(((one.mean(0) - two.mean(0)) ** 2).sum() + between)

    def _activations(self, images: np.ndarray) -> np.ndarray:
        weights, biases = self.classifier.coefs_[0], self.classifier.intercepts_[0]
        return np.maximum(images @ weights + biases, 0)


def sketch(images: np.ndarray) -> str:
    """Images (N, 64) side by side in characters."""
    shades = np.array(list(" .:-=+*#"))
    pixels = shades[(images.reshape(-1, 8, 8) * 7.99).astype(int)]
    return "\n".join("  ".join("".join(image[row]) for image in pixels) for row in range(8))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training data")
    parser.add_argument("--verbose", type=int, default=0, help="2: a line an epoch; 0: silent")
    arguments = parser.parse_args()

    digits = load_digits()
    images = (digits.data / 16.0).astype(np.float32)  # (1797, 64)
    train_loader = DataLoader(
        TensorDataset(torch.from_numpy(images)), batch_size=64, shuffle=True, drop_last=True
    )

    fitkit.set_seed(0)
    model = GAN()
    noise = torch.randn(1000, NOISE_SIZE)
    untrained = model.predict(noise, verbose=0)
    model.compile(accelerator="cpu", devices=1)
    history = model.fit(train_loader, epochs=arguments.epochs, verbose=arguments.verbose).history
    drawn = model.predict(noise, verbose=0)

    judge = Judge(images, digits.target)
    before, after = (judge.distance(each, images) for each in (untrained, drawn))
    counts = np.bincount(judge.seen(drawn), minlength=10)
    print(sketch(drawn[:8]))
    print(
        f"losses            generator {history['generator_loss'][-1]:.3f}, "
        f"discriminator {history['discriminator_loss'][-1]:.3f}"
    )
    print(f"Fréchet distance  {after:.2f} from real digits; untrained {before:.2f}")
    print(f"digits seen       {', '.join(f'{n} x {count}' for n, count in enumerate(counts))}")
    if after > before / 10 or counts.min() == 0:
        print("not yet like real digits: train longer with --epochs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
