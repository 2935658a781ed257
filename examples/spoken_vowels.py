"""Sequences of uneven length: who said this vowel?

    pip install --no-deps aeon                  # for its data alone: see below
    python examples/spoken_vowels.py            # some 10 seconds

Shows a `collate_fn` that pads a batch's sequences and gives their lengths beside them, a recurrent
net that packs them, and a mask that leaves the padding out of a mean. Nine men say two vowels, 640
recordings of 7 to 29 steps with 12 numbers each (Kudo, Toyama and Shimbo 1999). Expect some 97 % of
the 370 test recordings right, where logistic regression on each recording's mean has some 96 %.

The recordings come with aeon. Only the data file is read, so that aeon's own requirements (numba,
an older pandas) don't matter.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import fitkit

Recording = tuple[torch.Tensor, int]  # (steps, 12), and the speaker from 0 to 8


def recordings(part: str) -> list[Recording]:
    """Return the recordings of a part, `"TRAIN"` or `"TEST"`."""
    aeon = importlib.util.find_spec("aeon")
    if aeon is None or aeon.origin is None:
        sys.exit("The recordings come with aeon: pip install --no-deps aeon")
    folder = Path(aeon.origin).parent / "datasets" / "data" / "JapaneseVowels"
    lines = (folder / f"JapaneseVowels_{part}.ts").read_text().partition("@data\n")[2].split()
    found = []
    for line in lines:
        *channels, speaker = line.split(":")
        values = [[float(value) for value in channel.split(",")] for channel in channels]
        found.append((torch.tensor(values).T, int(speaker) - 1))
    return found


def padded(batch: list[Recording]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the net's inputs by name, and the speakers."""
    sequences, speakers = zip(*batch, strict=True)
    inputs = {
        "sequences": pad_sequence(list(sequences), batch_first=True),  # (B, longest, 12)
        "lengths": torch.tensor([len(sequence) for sequence in sequences]),  # (B,)
    }
    return inputs, torch.tensor(speakers)


class Listener(nn.Module):
    """A GRU in both directions, and the mean of its outputs over the steps that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(12, 64, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(128, 9))

    def forward(self, sequences: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            sequences, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        steps, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)  # (B, longest, 128)
        mask = torch.arange(steps.shape[1], device=steps.device) < lengths[:, None]
        mean = (steps * mask[:, :, None]).sum(dim=1) / lengths[:, None]  # (B, 128)
        return self.head(mean)


fitkit.set_seed(0)
train, test = recordings("TRAIN"), recordings("TEST")
steps = torch.cat([sequence for sequence, _ in train])
mean, spread = steps.mean(dim=0), steps.std(dim=0)  # (12,)
train, test = ([((s - mean) / spread, who) for s, who in part] for part in (train, test))

loader: Any = DataLoader(
    train,  # type: ignore[arg-type]
    batch_size=18,
    shuffle=True,
    collate_fn=padded,
)
test_loader: Any = DataLoader(test, batch_size=100, collate_fn=padded)  # type: ignore[arg-type]

model = fitkit.Model(Listener())
model.compile("adam", "cross_entropy", metrics=["accuracy"], learning_rate=3e-3, devices=1)
model.compile(lr_scheduler="cosine")
model.fit(loader, epochs=20)
accuracy = model.evaluate(test_loader, return_dict=True)["accuracy"]

means = [torch.stack([s.mean(dim=0) for s, _ in part]).numpy() for part in (train, test)]
speakers = [[who for _, who in part] for part in (train, test)]
baseline = LogisticRegression(max_iter=1000).fit(means[0], speakers[0]).score(means[1], speakers[1])
print(f"recordings            {len(train)} to learn, {len(test)} to test")
print(f"steps                 {min(len(s) for s, _ in train)} to {max(len(s) for s, _ in train)}")
print(f"test accuracy         {accuracy:.1%}")
print(f"logistic regression   {baseline:.1%}")
