"""Outputs that are lists: one entry per sample, or several outputs."""

import pytest
import torch
from torch import nn

import fitkit

SIZES = (3, 2, 1)
ROWS = [torch.full((1 + i % 3, 2), float(i)) for i in range(sum(SIZES))]


def batches():
    found, start = [], 0
    for size in SIZES:
        found.append((ROWS[start : start + size],))
        start += size
    return found


OUTPUTS = {
    "dicts": (
        lambda rows: [{"boxes": row} for row in rows],
        lambda found: [entry["boxes"] for entry in found],
    ),
    "tensors of unlike rows": (lambda rows: list(rows), lambda found: found),
    "dicts in a dict": (
        lambda rows: {"found": [{"boxes": row} for row in rows]},
        lambda found: [entry["boxes"] for entry in found["found"]],
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_with_an_entry_per_sample_stays_with_its_sample(name):
    make, read = OUTPUTS[name]

    class Detector(fitkit.Model):
        def predict_step(self, batch, batch_idx):
            return make(batch[0])

    model = Detector(nn.Linear(2, 1))
    model.compile(accelerator="cpu", devices=1)
    found = read(model.predict(batches(), verbose=0, as_numpy=False))
    assert len(found) == len(ROWS)
    for own, row in zip(found, ROWS, strict=True):
        assert torch.equal(own, row)


def test_lists_of_outputs_with_rows_for_all_samples_are_joined_by_place():
    class Levels(fitkit.Model):
        def predict_step(self, batch, batch_idx):
            rows = torch.stack([row.mean(0) for row in batch[0]])
            return [rows, {"sum": rows.sum(1)}]

    model = Levels(nn.Linear(2, 1))
    model.compile(accelerator="cpu", devices=1)
    rows, other = model.predict(batches(), verbose=0, as_numpy=False)
    expected = torch.stack([row.mean(0) for row in ROWS])
    assert torch.equal(rows, expected)
    assert torch.equal(other["sum"], expected.sum(1))
