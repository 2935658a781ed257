"""Data, nets and plain training loops, from which checkers know what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[..., Tensor]


def classes(samples: int = 100, *, seed: int = 0, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return inputs (N, 8) and labels of three classes (N,)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 8)).astype("float32")
    scores = x[:, :3] + x[:, 3:6] * 0.5 + noise * rng.normal(size=(samples, 3))
    return torch.from_numpy(x), torch.from_numpy(scores.argmax(1))


def numbers(samples: int = 100, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs (N, 8) and a number for each (N, 1)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 8)).astype("float32")
    y = 3 + x[:, :1] - 2 * x[:, 1:2] + rng.normal(size=(samples, 1))
    return torch.from_numpy(x), torch.from_numpy(y.astype("float32"))


def mlp(outputs: int = 3, *, inputs: int = 8, hidden: int = 16, seed: int = 0) -> nn.Sequential:
    """Return a net of two linear layers with a ReLU between them; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def write(folder: Path, start: nn.Module | None = None, **arrays: Any) -> None:
    """Write data.npz, and start.pt if there is a net."""
    plain: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    np.savez(folder / "data.npz", **plain)
    if start is not None:
        torch.save(start.state_dict(), folder / "start.pt")


def train(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    batch: int,
    epochs: int,
    rate: float = 0.1,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss = F.cross_entropy,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
    after_epoch: Callable[[], object] = lambda: None,
) -> nn.Module:
    """Train in the order of the data, by plain torch; plain SGD unless an optimizer is given."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), rate)
    for _ in range(epochs):
        net.train()
        for first in range(0, len(x), batch):
            optimizer.zero_grad()
            loss(net(x[first : first + batch]), y[first : first + batch]).backward()
            before_step()
            optimizer.step()
            after_step()
        net.eval()
        with torch.no_grad():
            after_epoch()
    return net.eval()


def read_json(folder: Path, name: str) -> Any:
    """Return what a JSON file holds."""
    assert (folder / name).is_file(), f"there is no {name}"
    return json.loads((folder / name).read_text())


def read_weights(folder: Path, name: str = "weights.pt") -> dict[str, Tensor]:
    """Return the state dict of a file."""
    assert (folder / name).is_file(), f"there is no {name}"
    found = torch.load(folder / name, map_location="cpu", weights_only=True)
    assert isinstance(found, dict), f"{name} holds no state dict"
    return found


def read_array(folder: Path, name: str) -> np.ndarray:
    """Return the array of a .npy file."""
    assert (folder / name).is_file(), f"there is no {name}"
    return np.load(folder / name)


def near(found: Any, right: Any, what: str, tolerance: float = 1e-4) -> None:
    """Refuse numbers that are further off than the tolerance, absolutely or relatively."""
    found, right = np.asarray(found, dtype=float), np.asarray(right, dtype=float)
    assert found.shape == right.shape, f"{what}: shape {found.shape} instead of {right.shape}"
    off = np.abs(found - right) / np.maximum(1, np.abs(right))
    assert np.isfinite(found).all() and (off <= tolerance).all(), (
        f"{what}: off by up to {off.max():.2g}, which is more than {tolerance}"
    )


def same_weights(
    found: dict[str, Tensor], right: nn.Module, what: str = "weights.pt", tolerance: float = 1e-4
) -> None:
    """Refuse a state dict that isn't that of the net."""
    wanted = right.state_dict()
    assert found.keys() == wanted.keys(), f"{what}: names {sorted(found)}, not {sorted(wanted)}"
    for name, tensor in wanted.items():
        near(found[name].detach().numpy(), tensor.detach().numpy(), f"{what}: {name}", tolerance)


def tensor(array: Any) -> Tensor:
    """Return an array as a tensor."""
    return torch.from_numpy(np.asarray(array))
