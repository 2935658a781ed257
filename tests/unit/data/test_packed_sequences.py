"""A loader of bare `PackedSequence`s, as taggers predict from."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

import fitkit

SEQUENCES = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in range(1, 12)]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, packed):
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=11)
        return self.head(hidden)


def packed(sequences):
    return pack_sequence(sequences, enforce_sorted=False)


def paired(sequences):
    return packed(sequences), torch.stack([s.mean() > 0 for s in sequences]).long()


@pytest.mark.parametrize("wrap", [packed, lambda s: (packed(s),), paired])
@pytest.mark.parametrize("devices", [1, 2])
def test_predict_takes_a_loader_of_bare_packed_sequences(wrap, devices):
    model = fitkit.Model(Tagger())
    model.compile(accelerator="cpu", devices=devices)
    loader = DataLoader(SEQUENCES, batch_size=4, collate_fn=wrap)
    expected = model.net(packed(SEQUENCES)).detach()
    if devices == 2 and wrap is packed:
        loader = DataLoader(SEQUENCES, batch_size=2, collate_fn=wrap)
    found = torch.as_tensor(model.predict(loader, verbose=0))
    assert torch.allclose(found, expected, atol=1e-6)
    assert found.shape == (11, 11, 3)
