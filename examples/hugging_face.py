"""A Hugging Face model learns to write like Python's documentation.

    python examples/hugging_face.py                 # about 40 seconds on a CPU
    python examples/hugging_face.py --epochs 1      # fewer passes over the text

A small GPT-2 is made from a configuration, so nothing is downloaded; the text (the language
reference, some 700 kB) comes with Python itself. A batch is a dict as Hugging Face's models want
it, the loss is the one that the model computes from its labels, and the data are a `datasets`
Dataset where that package is installed, else a torch Dataset of the same dicts.

    pip install transformers                        # and datasets, if you like

The exit status is 1 where the held-out text costs more bits a byte than by counts of byte pairs.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import fitkit

LENGTH = 64
"""Bytes in a sample."""


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Rows of bytes, each as what the model takes: itself is what it has to predict."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = torch.as_tensor(rows)  # (N, LENGTH) int64

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def dataset_of(rows: np.ndarray) -> Any:
    """Return the samples as a `datasets` Dataset where that is installed, else as a torch
    Dataset.
    """
    if importlib.util.find_spec("datasets") is None:
        return Samples(rows)
    import datasets

    columns = {"input_ids": rows, "labels": rows}
    return datasets.Dataset.from_dict(columns).with_format("torch")


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Python's documentation in rows of bytes: what is learned, and a tenth that is held out."""
    text = "\n".join(str(topics[name]) for name in sorted(topics)).encode()
    whole = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    rows = whole[: len(whole) // LENGTH * LENGTH].reshape(-1, LENGTH)
    held_out = np.arange(len(rows)) % 10 == 0
    return rows[~held_out], rows[held_out]


def bits_by_pairs(training: np.ndarray, held_out: np.ndarray) -> float:
    """Bits a byte where each byte is guessed by how often it followed the one before."""
    counts = np.full((256, 256), 0.01)
    np.add.at(counts, (training[:, :-1].ravel(), training[:, 1:].ravel()), 1.0)
    chances = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log2(chances[held_out[:, :-1], held_out[:, 1:]]).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description="GPT-2 on Python's documentation.")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the text (2)")
    epochs = parser.parse_args().epochs
    fitkit.set_seed(0)
    training, held_out = samples()
    shape: dict[str, Any] = {
        "vocab_size": 256,
        "n_positions": LENGTH,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    tokens: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**shape, **tokens, use_cache=False)
    net = GPT2LMHeadModel(config)
    net.loss_type = "ForCausalLM"  # transformers 5.23 doesn't tell it from GPT-2's class name
    model = fitkit.Model(net)
    model.compile("adamw", learning_rate=3e-3, lr_scheduler="cosine", gradient_clip_val=1.0)
    model.fit(dataset_of(training), validation_data=dataset_of(held_out), epochs=epochs)
    learned = model.evaluate(dataset_of(held_out), batch_size=64, verbose=0) / math.log(2)
    counted = bits_by_pairs(training, held_out)
    print(f"bits a byte of held-out text: {learned:.2f}; by counts of byte pairs: {counted:.2f}")
    return int(learned >= counted)


if __name__ == "__main__":
    sys.exit(main())
