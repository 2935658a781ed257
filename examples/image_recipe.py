"""A recipe for images: shifts, MixUp, label smoothing and a warm-up, by fitkit and by hand.

    python examples/image_recipe.py

A small convolutional network learns handwritten digits from 150 images of scikit-learn's, three
times without the recipe and three times with it. Then the same recipe is written as a loop of plain
PyTorch, and the exit status is 1 where its weights differ from fitkit's.
"""

from __future__ import annotations

import math
import statistics
import sys
from typing import Any

import numpy as np
import torch
import xxhash
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import fitkit
from fitkit.transforms import MixUp

ALPHA, SMOOTHING, RATE, DECAY = 0.2, 0.05, 1e-2, 0.05
EPOCHS, BATCH, SEEDS = 30, 32, (0, 1, 2)


def build_net() -> nn.Module:
    """Return a network for images of shape (B, 1, 8, 8), with ten logits."""
    return nn.Sequential(
        nn.Conv2d(1, 24, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 24, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24 * 4 * 4, 10),
    )


def load_data() -> tuple[torch.Tensor, ...]:
    """Return 150 images with their digits to learn from, and the others to test with."""
    digits = load_digits()
    images, labels = digits.images[:, None].astype(np.float32) / 16.0, digits.target
    parts = train_test_split(images, labels, train_size=150, random_state=0, stratify=labels)
    x, x_test, y, y_test = map(torch.from_numpy, parts)
    return x, y, x_test, y_test


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Return a batch's images moved by up to a pixel: a transform of your own."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return images.roll((down, right), (2, 3))


def fitted(
    seed: int, x: torch.Tensor, y: torch.Tensor, *, recipe: bool, **given: Any
) -> fitkit.Model:
    """Return a trained model. Without the recipe it is Adam at a constant rate."""
    fitkit.set_seed(seed)
    model = fitkit.Model(build_net())
    if recipe:
        model.compile(
            {"name": "adamw", "weight_decay": DECAY},
            nn.CrossEntropyLoss(label_smoothing=SMOOTHING),
            learning_rate=RATE,
            lr_scheduler={"scheduler": "warmup_cosine", "warmup": 0.1},
            batch_transforms=[shifted, MixUp(ALPHA)],
            **given,
        )
    else:
        model.compile("adam", "cross_entropy", learning_rate=4e-3)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return model


def by_hand(seed: int, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Return a network trained with the recipe by a loop of plain PyTorch."""
    torch.manual_seed(seed)
    net = build_net().to(x.dtype)
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=DECAY)
    updates = EPOCHS * math.ceil(len(x) / BATCH)
    warmup = round(0.1 * updates)

    def share(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (updates - warmup)))

    # The key of a fit, by the state of torch's generator where it begins.
    state = torch.get_rng_state().numpy().tobytes()
    key = xxhash.xxh3_64_intdigest(state) % 2**63
    done = 0
    for epoch in range(EPOCHS):
        for index, (images, labels) in enumerate(zip(x.split(BATCH), y.split(BATCH), strict=True)):
            optimizer.param_groups[0]["lr"] = RATE * share(done)
            images = shifted(images)
            # A batch's draws: by the key, the updates before the fit, and its place.
            place = np.random.Philox(key=[key, 0], counter=[0, index, epoch, 0])
            ratio = np.random.Generator(place).beta(ALPHA, ALPHA)
            mixed = ratio * images + (1 - ratio) * images.roll(1, 0)
            outputs, before = net(mixed), labels.roll(1, 0)
            losses = [
                nn.functional.cross_entropy(outputs, target, label_smoothing=SMOOTHING)
                for target in (labels, before)
            ]
            optimizer.zero_grad()
            (ratio * losses[0] + (1 - ratio) * losses[1]).backward()
            optimizer.step()
            done += 1
    return net


def main() -> int:
    x, y, x_test, y_test = load_data()
    for recipe in (False, True):
        scores = []
        for seed in SEEDS:
            model = fitted(seed, x, y, recipe=recipe)
            model.compile(metrics=["accuracy"])
            found = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
            scores.append(found["accuracy"])
        name = "with the recipe" if recipe else "without"
        each = ", ".join(f"{score:.1%}" for score in scores)
        print(f"{name}: {statistics.mean(scores):.1%} of held-out digits ({each})")
    # In float64, so that 150 updates don't magnify what float32 rounds off.
    ours = fitted(0, x, y, recipe=True, precision="64-true").net
    theirs = by_hand(0, x.double(), y)
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    print(f"largest difference from the loop by hand: {difference:.1e}")
    return int(difference > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
