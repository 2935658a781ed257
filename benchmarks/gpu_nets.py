"""The nets of `benchmarks.gpu`: a small MLP, ResNets, a GPT of 110 million parameters."""

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
        steps: in an epoch that is timed: half a second of them or so on a large GPU.
    """

    name: str
    net: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    steps: int = 200


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
        lambda: resnet_18(width),
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


def resnet50(*, small: bool = False) -> Task:
    """ResNet-50 as for ImageNet, batches of 64."""
    width, size, side = (8, 4, 32) if small else (64, 64, 224)
    return Task(
        "ResNet-50",
        lambda: resnet_50(width),
        lambda: (torch.randn(size, 3, side, side), torch.randint(0, 1000, (size,))),
        steps=10,
    )


def gpt(*, small: bool = False) -> Task:
    """Twelve layers of width 768 over 512 tokens: 110 million parameters, batches of 8."""
    width, layers, size, length, words = (32, 2, 2, 16, 64) if small else (768, 12, 8, 512, 32768)
    tokens = lambda: torch.randint(0, words, (size, length))  # noqa: E731
    return Task(
        "GPT 110M",
        lambda: GPT(words, width, layers, length),
        lambda: (tokens(), tokens()),
        steps=10,
    )


NETS: dict[str, Callable[..., Task]] = {
    "mlp": mlp,
    "resnet50": resnet50,
    "gpt": gpt,
    "resnet": resnet,
    "transformer": transformer,
}


class Residual(nn.Module):
    """Convolutions beside a shortcut (He et al. 2015, arXiv:1512.03385).

    Args:
        body: (B, inputs, H, W) to (B, outputs, H / stride, W / stride).
        inputs, outputs, stride: of the body.
    """

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the body's outputs, with the shortcut's added."""
        return torch.relu(self.body(x) + self.shortcut(x))


def block(inputs: int, width: int, stride: int) -> Residual:
    """Return two convolutions."""
    body = nn.Sequential(
        nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
    )
    return Residual(body, inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """Return three convolutions, of which the last is four times as wide."""
    body = nn.Sequential(
        nn.Conv2d(inputs, width, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, stride, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, 4 * width, 1, bias=False),
        nn.BatchNorm2d(4 * width),
    )
    return Residual(body, inputs, 4 * width, stride)


class ResNet(nn.Module):
    """Blocks in four widths.

    Args:
        stem: (B, 3, H, W) to (B, width, …).
        make: makes a block from its inputs' channels, its width and its stride.
        width: channels of the first blocks; 64 in the paper.
        counts: the blocks of each width.
        widened: by what a block's outputs are wider than its width.
        classes: how many.
    """

    def __init__(
        self,
        stem: nn.Module,
        make: Callable[[int, int, int], Residual],
        width: int,
        counts: tuple[int, ...],
        widened: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        blocks, inputs = [], width
        for level, count in enumerate(counts):
            for number in range(count):
                stride = 2 if level and not number else 1
                blocks.append(make(inputs, width * 2**level, stride))
                inputs = widened * width * 2**level
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) to (B, classes)."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def resnet_18(width: int) -> ResNet:
    """Return a ResNet-18 for small images."""
    stem = nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )
    return ResNet(stem, block, width, (2, 2, 2, 2), 1, 10)


def resnet_50(width: int) -> ResNet:
    """Return a ResNet-50 as for ImageNet."""
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    return ResNet(stem, bottleneck, width, (3, 4, 6, 3), 4, 1000)


class Layer(nn.Module):
    """Attention to earlier tokens, then two products, each beside its input (GPT-2's order)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, width) to the same."""
        rows, length, width = x.shape
        parts = self.into(self.before(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(x)


class GPT(nn.Module):
    """A decoder whose first and last weights are one.

    Args:
        words: in the vocabulary.
        width: of each token.
        layers: how many.
        length: of a text, in tokens.
    """

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.last = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) tokens to (B, words, T), as `cross_entropy` takes it."""
        known = self.last(self.layers(self.words(x) + self.places))
        return nn.functional.linear(known, self.words.weight).transpose(1, 2)


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
