"""The nets of `benchmarks.gpu`: a small MLP, a ResNet-18 for small images, a small transformer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn


@dataclasses.dataclass
class Task:
    """A net and its batches.

    Attributes:
        name: as the table has it.
        net: makes the net.
        batch: makes a batch of random numbers, `(x, y)`.
    """

    name: str
    net: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def mlp(*, small: bool = False) -> Task:
    """784-256-256-10, batches of 128: a step is launches more than arithmetic."""

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    size = 16 if small else 128
    return Task("MLP", net, lambda: (torch.randn(size, 784), torch.randint(0, 10, (size,))))


def resnet(*, small: bool = False) -> Task:
    """ResNet-18 as for CIFAR-10, batches of 128."""
    width, size = (8, 8) if small else (64, 128)
    return Task(
        "ResNet-18",
        lambda: ResNet18(width),
        lambda: (torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))),
    )


def transformer(*, small: bool = False) -> Task:
    """Four layers of width 256 over 128 tokens, batches of 32."""
    width, layers, size = (32, 2, 4) if small else (256, 4, 32)
    return Task(
        "transformer",
        lambda: Transformer(width, layers),
        lambda: (torch.randint(0, 1000, (size, 128)), torch.randint(0, 10, (size,))),
    )


NETS: dict[str, Callable[..., Task]] = {
    "mlp": mlp,
    "resnet": resnet,
    "transformer": transformer,
}


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """Eight blocks in four widths.

    Args:
        width: channels of the first; 64 in the paper.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks, inputs = [], width
        for level in range(4):
            for number in range(2):
                stride = 2 if level and not number else 1
                blocks.append(Block(inputs, width * 2**level, stride))
                inputs = width * 2**level
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) to (B, 10)."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Transformer(nn.Module):
    """An encoder whose tokens' mean is classified.

    Args:
        width: of each token.
        layers: how many.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.places = nn.Parameter(torch.randn(128, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 128) tokens to (B, 10)."""
        return self.head(self.encoder(self.tokens(x) + self.places).mean(1))
