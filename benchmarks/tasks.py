"""The work that contenders do: nets, data, and how their answers are checked."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of work, done again in each run.

    Attributes:
        name: in tables.
        verb: `"train"`, `"evaluate"` or `"predict"`: one pass over the data a run.
        net: `"mlp 32 64 10"` (widths), `"deep 50"` (linear layers of width 32), `"blocks 6"` (of a
            linear layer of width 64, a normalisation and an activation written out), `"cnn"`, or
            `"transformer 4 128"` (layers, width) of 64 tokens with 16 numbers each;
            `"transformer 4 128 written"` has blocks written out instead of torch's layer.
        samples, batch: of the data.
        source: `"loader"` (a shuffling `DataLoader` of a plain `TensorDataset`) or `"arrays"`
            (NumPy arrays, for whoever takes them), or `"batches"`: one's own loop over arrays'
            parts, in which each batch's values are read.
        optimizer: `"adam"` or `"sgd"`, with a rate of 1e-3 or 1e-2.
        metrics: fitkit's names, or torchmetrics' classes by the same names.
        defaults: whether each shows what it shows unasked (a progress bar), in a terminal.
        callbacks: how many callbacks look at each step's end, where the contender has any.
        monitors: names of fitkit's callbacks that log; a sample counts as 64 tokens.
        epochs: of a run.
        options: further ones of fitkit's and Keras's `compile`.
        recipe: the name of transforms of fitkit's batches, in `with_fitkit`.
    """

    name: str
    verb: str = "train"
    net: str = "mlp 32 64 10"
    samples: int = 9600
    batch: int = 32
    source: str = "loader"
    optimizer: str = "adam"
    metrics: tuple[str, ...] = ("accuracy",)
    defaults: bool = False
    callbacks: int = 0
    monitors: tuple[str, ...] = ()
    epochs: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    recipe: str = ""

    @property
    def steps(self) -> int:
        """Of a run."""
        return -(-self.samples // self.batch) * self.epochs

    @property
    def rate(self) -> float:
        """The learning rate."""
        return 1e-3 if self.optimizer == "adam" else 1e-2


class WrittenOut(nn.Module):
    """GELU by its formula: seven operations, for which compilers make one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the values' own shape."""
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


TOKENS, TOKEN_WIDTH = 64, 16


class Pooled(nn.Module):
    """The mean over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, tokens, width) → (N, width)."""
        return x.mean(1)


class Attending(nn.Module):
    """A transformer's block as most nets write it: torch has no fused evaluation for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, tokens, width) → (N, tokens, width)."""
        parts = self.project(self.before(x)).unflatten(-1, (3, 4, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.join(attended)
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


def encoder(width: int) -> nn.Module:
    """Return a transformer's block by torch."""
    return nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)


def net_of(task: Task) -> nn.Sequential:
    """Return the task's net, the same weights each time."""
    torch.manual_seed(0)
    kind, *numbers = task.net.split()
    if kind == "mlp":
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(map(int, numbers)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
    if kind == "deep":
        hidden = [nn.Linear(32, 32) for _ in range(int(numbers[0]) - 1)]
        return nn.Sequential(*hidden, nn.Linear(32, 10))
    if kind == "blocks":
        blocks = [
            layer
            for _ in range(int(numbers[0]))
            for layer in (nn.Linear(64, 64), nn.LayerNorm(64), WrittenOut())
        ]
        return nn.Sequential(*blocks, nn.Linear(64, 10))
    if kind == "transformer":
        count, width = map(int, numbers[:2])
        block = Attending if numbers[2:] == ["written"] else encoder
        encoders = [block(width) for _ in range(count)]
        return nn.Sequential(
            nn.Linear(TOKEN_WIDTH, width), *encoders, Pooled(), nn.Linear(width, 10)
        )
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 64, 10),
    )  # fmt: skip


def data_of(task: Task) -> tuple[Tensor, Tensor]:
    """Seeded data that can be learned: the class is the largest of ten random projections."""
    kind, *numbers = task.net.split()
    width = int(numbers[0]) if kind == "mlp" else 0
    features = {
        "mlp": width, "deep": 32, "blocks": 64, "cnn": 3 * 32 * 32, "transformer": TOKEN_WIDTH
    }[kind]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(task.samples, features, generator=generator)
    y = (x @ torch.randn(features, 10, generator=generator)).argmax(1)
    if kind == "transformer":  # tokens whose mean says the class
        x = x[:, None] + torch.randn(task.samples, TOKENS, TOKEN_WIDTH, generator=generator)
    return (x.reshape(-1, 3, 32, 32) if kind == "cnn" else x), y


@torch.no_grad()
def judged(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the loss and accuracy of a net, by plain arithmetic over all samples at once."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    logits = torch.cat([net(part) for part in x.split(2000)])
    for module, training in modes:
        module.training = training
    return {
        "loss": F.cross_entropy(logits, y).item(),
        "accuracy": (logits.argmax(1) == y).double().mean().item(),
    }


def fault_of(task: Task, net: nn.Module, x: Tensor, y: Tensor, before: float, answer: Any) -> str:
    """Return what is wrong with a contender's answers; empty where nothing is.

    Args:
        before: the net's loss before the first run.
        answer: of the last run: a dict of `loss` and `accuracy` (what isn't known left out), or
            the outputs of `predict`.
    """
    after = judged(net, x, y)
    if task.verb == "predict":
        net.eval()
        with torch.no_grad():
            wanted = torch.cat([net(part) for part in x.split(2000)])
        given = torch.as_tensor(answer)
        right = given.shape == wanted.shape and torch.allclose(given, wanted, atol=1e-4)
        return "" if right else "predicts wrongly"
    if task.verb == "evaluate":
        wrong = [
            f"{name} {answer[name]:.5f} for {after[name]:.5f}"
            for name in ("loss", "accuracy")
            if name in answer and not math.isclose(answer[name], after[name], rel_tol=1e-4)
        ]
        return f"evaluates wrongly ({', '.join(wrong)})" if wrong else ""
    if not after["loss"] < 0.98 * before and not task.net.startswith("deep"):
        return f"doesn't learn (loss {before:.3f} to {after['loss']:.3f})"
    loss = answer.get("loss")
    if loss is not None and not 0.5 * after["loss"] < loss < 1.5 * before:
        return f"reports a loss of {loss:.3f} (it is {after['loss']:.3f})"
    return ""
