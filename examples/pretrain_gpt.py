"""A small GPT is pre-trained as large ones are, and learns just what a plain PyTorch loop does.

    python examples/pretrain_gpt.py             # some 20 seconds

Shows Muon for the hidden matrices with AdamW for the rest, a warm-up and a cosine, clipped
gradients, updates of 32 samples whatever the devices are (`effective_batch_size`), and tokens
counted and timed. Then the same training is written out in plain PyTorch: each epoch's loss and all
weights agree to 1e-5, or the exit status is 1. The text (the language reference) comes with
Python itself; a token is a byte.
"""

import math
import sys
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import lr_scheduler

import fitkit
from fitkit.callbacks import LearningRateMonitor, NormMonitor, ThroughputMonitor

LENGTH, SAMPLES, EPOCHS = 64, 2048, 2
UPDATE, AT_ONCE = 32, 16  # samples of an update, and of a batch that is computed at once
UPDATES = SAMPLES // UPDATE * EPOCHS
RATE, CLIP = 5e-3, 1.0
SAME = 1e-5


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        # (N, T, width) to (N, heads, T, width / heads)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes (N, T) to logits of each next byte (N, 256, T): cross_entropy's order."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x = self.blocks(self.tokens(text) + self.places(places))
        return self.head(self.norm(x)).transpose(1, 2)


def new_net() -> GPT:
    torch.manual_seed(0)
    return GPT()


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Return a tenth of the updates up to the full rate, then along a cosine down to nothing."""
    warm = UPDATES // 10

    def part_of_rate(update: int) -> float:
        if update < warm:
            return (update + 1) / warm
        return 0.5 + 0.5 * math.cos(math.pi * (update - warm) / (UPDATES - warm))

    return lr_scheduler.LambdaLR(optimizer, part_of_rate)


def by_fitkit(x: Tensor, y: Tensor) -> tuple[fitkit.Model, dict[str, list[float]]]:
    model = fitkit.Model(new_net())
    model.compile(
        "muon", "cross_entropy", learning_rate=RATE, effective_batch_size=UPDATE,
        lr_scheduler={"scheduler": warm_up_then_cosine, "interval": "step"},
        gradient_clip_val=CLIP, metrics=["perplexity"], accelerator="cpu", devices=1,
    )  # fmt: skip
    logs = [ThroughputMonitor(tokens=True), NormMonitor(), LearningRateMonitor()]
    history = model.fit(
        x, y, batch_size=AT_ONCE, epochs=EPOCHS, shuffle=False, callbacks=logs, verbose=2
    )
    return model, history.history


def by_hand(x: Tensor, y: Tensor) -> tuple[GPT, list[float]]:
    """Return the same in plain PyTorch."""
    net = new_net()
    matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if all(p is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, lr=RATE, fused=True)  # as fitkit makes it
    optimizers = [torch.optim.Muon(matrices, lr=RATE), adamw]
    schedules = [warm_up_then_cosine(optimizer) for optimizer in optimizers]
    parts = UPDATE // AT_ONCE
    losses = []
    for _ in range(EPOCHS):
        total = 0.0
        for start in range(0, SAMPLES, UPDATE):
            net.zero_grad()
            rows = slice(start, start + UPDATE)
            for some, nexts in zip(x[rows].chunk(parts), y[rows].chunk(parts), strict=True):
                loss = cross_entropy(net(some), nexts)
                (loss / parts).backward()
                total += loss.item() * len(some)
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
        losses.append(total / SAMPLES)
    return net, losses


def main() -> int:
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    windows = torch.tensor(list(text)).unfold(0, LENGTH + 1, LENGTH)  # each byte is asked once
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    learned, held_out = windows[:SAMPLES], windows[SAMPLES : SAMPLES + 512]

    model, history = by_fitkit(learned[:, :-1], learned[:, 1:])
    net, losses = by_hand(learned[:, :-1], learned[:, 1:])

    loss = model.evaluate(held_out[:, :-1], held_out[:, 1:], return_dict=True, verbose=0)["loss"]
    apart = max(abs(a / b - 1) for a, b in zip(history["loss"], losses, strict=True))
    weights = zip(model.net.parameters(), net.parameters(), strict=True)
    moved = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in weights)
    print(f"updates                   {model.global_step} of {UPDATE} samples")
    print(f"tokens                    {learned[:, 1:].numel() * EPOCHS}")
    print(f"tokens a second           {history['tokens_per_sec'][-1]:.0f}")
    print("losses                   ", *(f"{loss:.6f}" for loss in history["loss"]))
    print("losses of a plain loop   ", *(f"{loss:.6f}" for loss in losses))
    print(f"held-out text, perplexity {math.exp(loss):.2f} of 256")
    print(f"apart                     losses {apart:.0e}, weights {moved:.0e}")
    return int(max(apart, moved) > SAME)


if __name__ == "__main__":
    sys.exit(main())
