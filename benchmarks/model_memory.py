"""Memory that a training takes: what `fitkit.plan` says, and what was measured.

    python benchmarks/model_memory.py           # five nets on one CPU
    python benchmarks/model_memory.py --lora    # a LoRA model under FSDP on two processes

Measured is the most that torch had allocated during an update, by its profiler, together with
what was there before: parameters, buffers, the optimizer's state. It is the second update, as
the first one makes that state. The batch isn't counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fitkit
from fitkit.strategies import FSDPStrategy
from fitkit.trees import tensor_bytes


class Classifier(nn.Module):
    """The last step's state of an LSTM decides."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Decoder(nn.Module):
    """A small GPT: (N, T) tokens to (N, V, T) scores."""

    def __init__(self, width: int = 128, layers: int = 4, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.layers(self.embed(tokens), mask=mask, is_causal=True)
        return self.head(x).transpose(1, 2)


class LoRA(nn.Module):
    """A frozen layer beside which a product of two narrow matrices learns."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def with_lora(width: int = 256) -> Decoder:
    """Return the decoder, frozen, with adapters beside the two matrices of each MLP."""
    net = Decoder(width).requires_grad_(False)
    for layer in net.layers.layers:
        layer.linear1, layer.linear2 = LoRA(layer.linear1), LoRA(layer.linear2)
    return net


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def cnn() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def labels(*shape: int, classes: int = 10) -> torch.Tensor:
    return torch.randint(classes, shape)


def pair_of_tokens(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return labels(rows, length, classes=1000), labels(rows, length, classes=1000)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, torch.Tensor]]]] = {
    "MLP": (mlp, lambda: (torch.randn(256, 784), labels(256))),
    "CNN": (cnn, lambda: (torch.randn(64, 3, 32, 32), labels(64))),
    "transformer": (Decoder, lambda: pair_of_tokens(16, 64)),
    "LSTM": (Classifier, lambda: (torch.randn(64, 50, 64), labels(64))),
    "LoRA": (with_lora, lambda: pair_of_tokens(16, 64)),
}


def planned(net: nn.Module, batch: Any) -> float:
    """Return the bytes that `fitkit.plan` says."""
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", accelerator="cpu", devices=1)
    with contextlib.redirect_stdout(io.StringIO()):
        plan = fitkit.plan(model, 1, "single_device", batch)
    return plan.costs["single_device"].memory


def measured(net: nn.Module, batch: Any) -> float:
    """Return the most bytes that a training by `fit` held at one time, without the batch."""
    model = fitkit.Model(net)
    model.compile("adam", "cross_entropy", accelerator="cpu", devices=1)
    model.fit(iter([batch]), verbose=0)
    state = [list(one.values()) for one in model.optimizer.state.values()]
    held = tensor_bytes([*model.parameters(), *model.buffers(), *state])
    for parameter in model.parameters():
        parameter.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model.fit(iter([batch]), verbose=0)
    return held + most_allocated(found)


def most_allocated(found: profile) -> int:
    """Return the most bytes that were allocated at one time while the profiler ran."""
    results: Any = found.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def five_nets() -> None:
    """Print both for each net."""
    print(f"{'net':12} {'plan':>9} {'measured':>9} {'plan / measured':>16}")
    for name, (make, batch) in NETS.items():
        torch.manual_seed(0)
        said, found = planned(make(), batch()), measured(make(), batch())
        print(f"{name:12} {said / 1e6:6.1f} MB {found / 1e6:6.1f} MB {said / found:16.3f}")


def under_fsdp() -> None:
    """Print what a rank holds of a LoRA model between two updates."""
    torch.manual_seed(0)
    net = with_lora(512)
    learns = (False, True)
    sizes = [sum(p.nbytes for p in net.parameters() if p.requires_grad is it) for it in learns]
    print(f"the whole: base {sizes[0] / 1e6:.2f} MB, adapters {sizes[1] / 1e6:.2f} MB")
    model = fitkit.Model(net)
    strategy = FSDPStrategy(wrap=nn.TransformerEncoderLayer)
    model.compile("adam", "cross_entropy", accelerator="cpu", devices=2, strategy=strategy)

    def look(epoch: int, logs: Any) -> None:
        def of(tensors: Any) -> float:
            return sum(getattr(t, "to_local", lambda t=t: t)().nbytes for t in tensors) / 1e6

        base = of(p for p in model.parameters() if not p.requires_grad)
        adapters = of(p for p in model.parameters() if p.requires_grad)
        state = of(
            value
            for one in model.optimizer.state.values()
            for value in one.values()
            if isinstance(value, torch.Tensor)
        )
        print(f"rank 0: base {base:.2f} MB, adapters {adapters:.2f} MB, state {state:.2f} MB")

    watch = fitkit.callbacks.LambdaCallback(on_epoch_end=look)
    x, y = pair_of_tokens(8, 32)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=watch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lora", action="store_true")
    under_fsdp() if parser.parse_args().lora else five_nets()
