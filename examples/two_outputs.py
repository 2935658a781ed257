"""Several inputs, several outputs: two images of digits in, three answers out.

    pip install scikit-learn
    python examples/two_outputs.py              # some 15 seconds

Shows a dict of inputs, which the net takes by name, and a dict of outputs with a loss, metrics and
a weight for each: which digit is the left one (a class), is it larger than the right one (yes or
no), and what is their sum (a number). Nobody tells the net what the right digit is. Expect some
98 % of the left digits and 93 % of the comparisons right, and a sum that is wrong by 1.1 on
average; always guessing the mean sum is wrong by 3.3.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import fitkit


class Pair(nn.Module):
    """One encoder looks at both images; each question has a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),  # (B, 16, 8, 8)
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 16, 4, 4)
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 64),
            nn.ReLU(),
        )
        self.digit = nn.Linear(64, 10)
        self.larger = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1))
        self.sum = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second = self.encoder(left), self.encoder(right)  # (B, 64) each
        both = torch.cat([first, second], dim=1)
        return {
            "digit": self.digit(first),  # (B, 10)
            "larger": self.larger(both)[:, 0],  # (B,)
            "sum": self.sum(both)[:, 0],  # (B,)
        }


def pairs(
    images: np.ndarray, digits: np.ndarray, count: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Images drawn by chance, two and two, and the answers."""
    left, right = np.random.default_rng(0).integers(len(images), size=(2, count))
    answers = {
        "digit": digits[left],
        "larger": (digits[left] > digits[right]).astype("float32"),
        "sum": (digits[left] + digits[right]).astype("float32"),
    }
    return {"left": images[left], "right": images[right]}, answers


fitkit.set_seed(0)
data = load_digits()
images = data.images[:, None] / 16  # (1797, 1, 8, 8)
train, test = train_test_split(np.arange(len(images)), test_size=0.2, random_state=0)
x, y = pairs(images[train], data.target[train], 8000)
x_test, y_test = pairs(images[test], data.target[test], 2000)

model = fitkit.Model(Pair())
model.compile(
    "adam",
    loss={"digit": "cross_entropy", "larger": "bce_with_logits", "sum": "mse"},
    loss_weights={"digit": 1.0, "larger": 1.0, "sum": 0.1},
    metrics={"digit": "accuracy", "larger": ["accuracy", "auroc"], "sum": "mae"},
    learning_rate=2e-3,
    lr_scheduler="cosine",
    devices=1,
)
model.fit(x, y, batch_size=64, epochs=10, verbose=0)
result = model.evaluate(x_test, y_test, return_dict=True)
answers = model.predict(x_test)  # a dict of arrays, as the net gives tensors
guess = y["sum"].mean()

print("logs              ", *result)
print("predictions       ", {name: array.shape for name, array in answers.items()})
print(f"the left digit     {result['digit_accuracy']:.1%} right")
print(
    f"left is larger     {result['larger_accuracy']:.1%} right, AUROC {result['larger_auroc']:.3f}"
)
print(f"the sum            wrong by {result['sum_mae']:.2f} on average")
print(f"guessing {guess:.1f}       wrong by {np.abs(y_test['sum'] - guess).mean():.2f}")
