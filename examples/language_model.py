"""A small language model: a transformer learns to write like Python's documentation, byte by byte.

    python examples/language_model.py           # some 40 seconds
    python examples/language_model.py --epochs 1

Shows a net of one's own with attention that sees only the past, training on windows of one long
text, a rate that falls along a cosine, and sampling from what was learned. The text
(the language reference, some 460 kB) comes with Python itself. Expect some 2.2 bits a byte of
held-out text, where counting which byte follows which two has 2.5, and a sample that looks
like documentation but says nothing.
"""

import argparse
import math
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn

import fitkit

LENGTH = 64  # bytes that the net sees at once

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--epochs", type=int, default=3, help="passes over the text")
epochs = parser.parse_args().epochs


class Writer(nn.Module):
    """Bytes (B, LENGTH) to logits of each next byte (B, 256, LENGTH): cross_entropy's order."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        places = torch.arange(length, device=text.device)
        future = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        seen = self.blocks(self.bytes(text) + self.places(places), mask=future, is_causal=True)
        return self.head(seen).transpose(1, 2)


def bits_by_counts(train: np.ndarray, held_out: np.ndarray) -> float:
    """Bits a byte where each byte is guessed by how often it followed the two before."""
    counts = np.full((256, 256, 256), 0.01, dtype=np.float32)
    np.add.at(counts, (train[:-2], train[1:-1], train[2:]), 1)
    before, last, byte = held_out[:-2], held_out[1:-1], held_out[2:]
    chances = counts[before, last, byte] / counts[before, last].sum(axis=1)
    return float(-np.log2(chances).mean())


fitkit.set_seed(0)
text = "\n".join(topics[name] for name in sorted(topics)).encode()
whole = torch.tensor(list(text))  # (bytes,)
train, held_out = whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]
windows = train.unfold(0, LENGTH + 1, LENGTH)
test_windows = held_out.unfold(0, LENGTH + 1, LENGTH)

model = fitkit.Model(Writer())
model.compile("adamw", "cross_entropy", learning_rate=3e-3, lr_scheduler="cosine")
model.compile(gradient_clip_val=1.0, devices=1)
model.fit(windows[:, :-1], windows[:, 1:], batch_size=16, epochs=epochs)
loss = model.evaluate(test_windows[:, :-1], test_windows[:, 1:], batch_size=256)

written = torch.tensor([list(b"The following ")])
for _ in range(300):
    logits = torch.as_tensor(model.predict_on_batch(written[:, -LENGTH:]))[:, :, -1]
    written = torch.cat([written, (logits / 0.7).softmax(dim=1).multinomial(1)], dim=1)

print(bytes(written[0].tolist()).decode(errors="replace"))
print(f"bits a byte of held-out text  {loss / math.log(2):.2f}")
print(f"by counts of three bytes      {bits_by_counts(train.numpy(), held_out.numpy()):.2f}")
