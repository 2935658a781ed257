"""One language model trained four ways: its losses are the same, however a batch is cut.

    python examples/one_number.py               # some 20 seconds

Texts have unequal lengths, so a batch of them has unequal numbers of labels that count (the padding
is -100). An update sees 16 texts: at once, as 4 accumulated batches of 4, on 2 processes with 8
each, and on 2 processes with 2 accumulated batches of 4. Each part weighs as much as counts in it,
so that all four learn the same. The table has each epoch's loss, and the loss over all texts by
`evaluate` with batches of 1, 16 and 64. The exit status is 1 where they differ.

The net is a small GPT-2 of Hugging Face's, made from its configuration, with its own loss; the
texts (the language reference) come with Python itself.
"""

import sys
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import fitkit

LENGTH, TEXTS, EPOCHS = 48, 64, 3
SAME = 1e-6
CUTS: dict[str, dict[str, int]] = {
    "16": {},
    "4 x 4": {"accumulate_grad_batches": 4},
    "2 processes x 8": {"devices": 2},
    "2 processes x 2 x 4": {"devices": 2, "accumulate_grad_batches": 2},
}


def texts() -> list[dict[str, torch.Tensor]]:
    """Return the beginnings of the reference's topics, as bytes: 3 to 48 of each, padded."""
    samples = []
    for number, topic in enumerate(sorted(topics.values())[:TEXTS]):
        found = list(topic.encode()[: 3 + 7 * number % (LENGTH - 2)])
        padding = LENGTH - len(found)
        samples.append(
            {
                "input_ids": torch.tensor(found + [0] * padding),
                "attention_mask": torch.tensor([1] * len(found) + [0] * padding),
                "labels": torch.tensor(found + [-100] * padding),
            }
        )
    return samples


def trained(cut: dict[str, Any]) -> tuple[fitkit.Model, list[float]]:
    """Return the model, and each epoch's loss."""
    parts = cut.get("devices", 1) * cut.get("accumulate_grad_batches", 1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = fitkit.Model(GPT2LMHeadModel(config))
    model.compile(torch.optim.SGD, learning_rate=0.1, accelerator="cpu", **cut)
    loader: DataLoader[Any] = DataLoader(texts(), batch_size=16 // parts)  # type: ignore[arg-type]
    history = model.fit(loader, epochs=EPOCHS, verbose=0)
    return model, history.history["loss"]


def main() -> int:
    table = Table("an update of 16 texts", *(f"epoch {n + 1}" for n in range(EPOCHS)))
    rows = []
    for name, cut in CUTS.items():
        model, losses = trained(cut)
        rows.append(losses)
        table.add_row(name, *(f"{loss:.6f}" for loss in losses))
    evaluated = [
        model.evaluate(DataLoader(texts(), size), verbose=0)  # type: ignore[arg-type]
        for size in (1, 16, 64)
    ]
    Console().print(table)
    print("evaluate, batches of 1, 16, 64:", *(f"{loss:.6f}" for loss in evaluated))
    apart = max(
        max(abs(a - b) / a for losses in rows for a, b in zip(rows[0], losses, strict=True)),
        max(evaluated) / min(evaluated) - 1,
    )
    print(f"relative differences: at most {apart:.0e}")
    return int(apart > SAME)


if __name__ == "__main__":
    sys.exit(main())
