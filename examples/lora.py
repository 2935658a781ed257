"""A Hugging Face model is fine-tuned by LoRA on two processes, cut in the middle, and goes on.

    pip install transformers
    python examples/lora.py                     # some 40 seconds

A small Llama, made from its configuration, first learns Python's language reference. Then it is
tuned to NumPy's docstrings: its own weights stay, and beside each projection of its attention two
narrow matrices learn (Hu et al., LoRA, 2021, arXiv:2106.09685; the `peft` package makes them for
large models, and trains the same way). Docstrings of uneven length are packed into rows, in which
they don't see each other.

The training is cut in the middle of an epoch, as by a crash; the same call, made again, goes on
from the last backup, and ends with the weights of one that was never cut, bit for bit. The
adapter's file has only what was learned, and goes onto the base again. The exit status is 1 where
any of this fails, or the held-out docstrings are not foretold better than by the base.
"""

import copy
import math
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fitkit
from fitkit.callbacks import BackupAndRestore, Callback

LENGTH = 256  # bytes of a row
EPOCHS, CUT_AFTER = 2, 17  # steps of a rank


class LoRA(nn.Module):
    """A layer that stays as it is, and a narrow one beside it that learns."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # so that the net begins as the base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def with_adapters(base: nn.Module) -> Any:
    """Return a copy of a Hugging Face model of which only adapters of its attention learn."""
    torch.manual_seed(0)
    net: Any = copy.deepcopy(base).requires_grad_(False)
    for layer in net.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, name, LoRA(getattr(attention, name)))
    return net


def packed(documents: list[str], batch_size: int = 16, **options: Any) -> DataLoader[Any]:
    """Texts as bytes, several in each row of a batch."""
    samples = [{"input_ids": list(text.encode()[:LENGTH])} for text in documents]
    return DataLoader(samples, batch_size, collate_fn=fitkit.data.pack(LENGTH), **options)  # type: ignore[arg-type]


def texts() -> tuple[list[str], list[str], list[str]]:
    """Pieces of the language reference; NumPy's docstrings, to learn and held out."""
    reference = "\n".join(topics[name] for name in sorted(topics))
    pieces = [reference[i : i + LENGTH] for i in range(0, 512 * LENGTH, LENGTH)]
    found = [str(getattr(np, name).__doc__) for name in sorted(np.__all__)]
    docstrings = sorted({text for text in found if len(text) > 100})
    return pieces, docstrings[::2], docstrings[1::4]


class Crash(Callback):
    """Lets the second process fail in the middle of a training."""

    def __init__(self, after: int) -> None:
        self.steps, self.after = 0, after

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.steps += 1
        if self.steps == self.after and self.model.global_rank == 1:
            raise RuntimeError(f"step {self.steps} went wrong")


def tuned(base: nn.Module, documents: list[str], *callbacks: Callback) -> fitkit.Model:
    """Return the base with adapters that learned the documents on two processes."""
    model = fitkit.Model(with_adapters(base))
    model.compile("adamw", learning_rate=1e-2, lr_scheduler="cosine", gradient_clip_val=1.0)
    model.compile(accelerator="cpu", devices=2)
    loader = packed(documents, 4, shuffle=True, generator=torch.Generator().manual_seed(0))
    model.fit(loader, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return model


def bits(net: nn.Module, documents: list[str]) -> float:
    """Bits a byte of some texts."""
    model = net if isinstance(net, fitkit.Model) else fitkit.Model(net)
    model.compile(accelerator="cpu", devices=1)
    return model.evaluate(packed(documents), verbose=0) / math.log(2)


def main() -> int:
    reference, documents, held_out = texts()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    model = fitkit.Model(base)
    model.compile("adamw", learning_rate=3e-3, gradient_clip_val=1.0, accelerator="cpu", devices=1)
    model.fit(packed(reference, 8), epochs=1, verbose=0)

    whole = tuned(base, documents)
    with tempfile.TemporaryDirectory() as folder:
        backup = BackupAndRestore(f"{folder}/backups", save_freq=5)
        try:
            tuned(base, documents, backup, Crash(CUT_AFTER))
        except fitkit.WorkerError as error:
            print(str(error).splitlines()[0])
        resumed = tuned(base, documents, backup)
        file = Path(folder, "adapter.safetensors")
        resumed.save_weights(file, trainable_only=True)
        fresh = fitkit.Model(with_adapters(base))
        fresh.load_weights(file)
        size, all_sizes = file.stat().st_size, sum(p.nbytes for p in whole.parameters())

    expected = whole.net.state_dict()
    apart = [
        max(float((found - expected[name]).abs().max()) for name, found in state.items())
        for state in (resumed.net.state_dict(), fresh.net.state_dict())
    ]
    before, after = bits(base, held_out), bits(fresh, held_out)
    print(f"adapter's file          {size / 1024:.0f} KiB, all weights {all_sizes / 1024:.0f} KiB")
    print(f"cut and gone on         {apart[0]:g} apart from never cut")
    print(f"loaded onto the base    {apart[1]:g} apart from what was tuned")
    print(f"held-out docstrings     {before:.2f} bits a byte by the base, tuned {after:.2f}")
    return int(any(apart) or after > before - 0.1)


if __name__ == "__main__":
    sys.exit(main())
