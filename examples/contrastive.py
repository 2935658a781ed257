"""A LightningModule ported: contrastive learning whose loss is over the whole batch, under `dp`.

    python examples/contrastive.py                # some 10 seconds
    python examples/contrastive.py --epochs 5     # fewer passes over the data

Each image is seen twice, rotated, scaled and shifted by chance; the net learns to find an image's
other view among those of all images of the batch (SimCLR's loss). Under `dp` each replica has only
a part of the batch, so the loss is computed in `training_step_end`, which gets all parts'
embeddings. The class is written as for Lightning 1.6. What the port changes:

    -class Contrastive(pl.LightningModule):
    +class Contrastive(fitkit.Model):

    -trainer = pl.Trainer(max_epochs=50, strategy="dp", accelerator="gpu", devices=2)
    -trainer.fit(model, loader)
    +model.compile(strategy="dp", accelerator="gpu", devices=2)
    +model.fit(loader, epochs=50)

The 1,797 images (8 x 8 pixels) come with scikit-learn. The embeddings are judged by how well a
nearest neighbour among a few labelled images tells the digit of the others. The exit status is 1
where two replicas don't learn what one device learns, or the embeddings tell no more than the
pixels.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fitkit

LABELLED_PER_DIGIT = 10


class Contrastive(fitkit.Model):
    """An encoder of images, and a head that projects for the loss alone."""

    def __init__(self, temperature: float = 0.1, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.temperature = temperature
        self.learning_rate = learning_rate
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),  # (B, 16, 8, 8)
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2),  # (B, 32, 4, 4)
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (B, 1, 8, 8) to embeddings (B, 64)."""
        return self.encoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        one, two = batch
        return {"one": self.head(self(one)), "two": self.head(self(two))}

    def training_step_end(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = contrastive_loss(outputs["one"], outputs["two"], self.temperature)
        self.log("train_loss", loss, prog_bar=True)
        self.log("views", float(2 * len(outputs["one"])), reduce_fx="max")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def contrastive_loss(one: torch.Tensor, two: torch.Tensor, temperature: float) -> torch.Tensor:
    """How badly each view (N, D) is told to belong to its other view, among 2N - 1."""
    views = F.normalize(torch.cat([one, two]), dim=1)
    likeness = views @ views.T / temperature
    likeness.fill_diagonal_(-math.inf)  # nobody is compared with itself
    partners = torch.arange(len(views), device=views.device).roll(len(one))
    return F.cross_entropy(likeness, partners)


def two_views(images: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch's images (1, 8, 8), each rotated, scaled and shifted by chance in two ways."""
    stacked = torch.stack(images)
    return distorted(stacked), distorted(stacked)


def distorted(images: torch.Tensor) -> torch.Tensor:
    """Images (B, 1, 8, 8), each rotated, scaled and shifted by chance, with some noise."""
    count = len(images)
    angle = (torch.rand(count) - 0.5) * 0.6  # up to 17 degrees to either side
    scale = 1 + (torch.rand(count) - 0.5) * 0.4
    shift = (torch.rand(count, 2) - 0.5) * 0.5  # up to one pixel
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    rows = torch.stack([cosine, -sine, shift[:, 0], sine, cosine, shift[:, 1]], dim=1)
    grid = F.affine_grid(rows.view(count, 2, 3), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    return moved + 0.1 * torch.randn_like(moved)


def trained(
    images: torch.Tensor, epochs: int, verbose: int, **hardware: Any
) -> tuple[Contrastive, dict[str, list[float]]]:
    """Return a net trained from the same first weights on the same batches, and its history."""
    fitkit.set_seed(0)
    model = Contrastive()
    loader: Any = DataLoader(
        images,  # type: ignore[arg-type]
        batch_size=256,
        shuffle=True,
        collate_fn=two_views,
        drop_last=True,
    )
    model.compile(accelerator="cpu", **hardware)
    return model, model.fit(loader, epochs=epochs, verbose=verbose).history


def neighbours_accuracy(
    features: np.ndarray, digits: np.ndarray, labelled: np.ndarray, tested: np.ndarray
) -> float:
    """How often the nearest labelled image has the digit of a tested one."""
    scaled = features / np.linalg.norm(features, axis=1, keepdims=True)
    judge = KNeighborsClassifier(1).fit(scaled[labelled], digits[labelled])
    return float(judge.score(scaled[tested], digits[tested]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=50, help="passes over the training data")
    parser.add_argument("--verbose", type=int, default=0, help="2: a line an epoch; 0: silent")
    arguments = parser.parse_args()

    data = load_digits()
    images = torch.tensor(data.images[:, None] / 16.0, dtype=torch.float32)  # (1797, 1, 8, 8)

    # The learning sees no label. A thousand images teach, the others are told apart afterwards.
    teaching = images[:1000]
    model, history = trained(
        teaching, arguments.epochs, arguments.verbose, strategy="dp", devices=2
    )
    _, alone = trained(teaching, 1, 0, devices=1)
    difference = abs(history["train_loss"][0] - alone["train_loss"][0])

    labelled = np.concatenate(
        [np.flatnonzero(data.target[:1000] == digit)[:LABELLED_PER_DIGIT] for digit in range(10)]
    )
    tested = np.arange(1000, len(images))
    embeddings = model.predict(images, verbose=0)  # (1797, 64)
    by_pixels, by_embeddings = (
        neighbours_accuracy(each, data.target, labelled, tested) for each in (data.data, embeddings)
    )
    print(f"views compared in a batch     {history['views'][0]:.0f}, by two replicas")
    print(f"first epoch's loss            {history['train_loss'][0]:.6f}")
    print(f"of one device                 {alone['train_loss'][0]:.6f}")
    print(f"last epoch's loss             {history['train_loss'][-1]:.6f}")
    print(f"accuracy with {len(labelled)} labelled    {by_embeddings:.1%} by embeddings")
    print(f"                              {by_pixels:.1%} by pixels")
    if difference > 1e-5 or by_embeddings <= by_pixels:
        print("not what was to be shown: train longer with --epochs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
