"""compile(out_of_memory="split") with a real allocator's errors: the process has a cap."""

import contextlib
import gc

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from fitkit.errors import OutOfMemoryError

pytestmark = pytest.mark.filterwarnings("ignore:.*FK069")

MIB = 2**20
LENGTHS = (40, 700, 60, 1000, 30, 500)


def sentences():
    """Return batches of 16 padded sentences, one batch much longer than another."""
    draw = torch.Generator().manual_seed(0)
    for length in LENGTHS:
        words = torch.randint(1, 50, (16, length), generator=draw)
        ends = torch.randint(1, length + 1, (16, 1), generator=draw)
        words[torch.arange(length) >= ends] = 0
        yield words, words.masked_fill(words == 0, -100)


class Words(nn.Module):
    """Some 2 kB for each word in the forward, and as much in the backward."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 50)
        self.embedding, self.layers = nn.Embedding(50, 16), nn.Sequential(*layers)

    def forward(self, words):
        return self.layers(self.embedding(words)).transpose(1, 2)


class Heavy(torch.autograd.Function):
    """Takes 8 MiB for each row, for a moment: in the backward, and where asked in the forward."""

    @staticmethod
    def forward(context, x, everywhere):
        if everywhere:
            x.new_empty(len(x), 2 * MIB).fill_(0)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        gradient.new_empty(len(gradient), 2 * MIB).fill_(0)
        return gradient, None


class Rows(nn.Module):
    """A net that needs much memory for each row."""

    def __init__(self, *, forward=False):
        super().__init__()
        self.body, self.head, self.everywhere = nn.Linear(6, 16), nn.Linear(16, 3), forward

    def forward(self, x):
        return self.head(Heavy.apply(self.body(x), self.everywhere).relu())


@contextlib.contextmanager
def capped(most):
    """Let this process have so many bytes more on device 0 than it has now; all for None."""
    if most is not None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + most) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def trained(net, batches, most=None, **arguments):
    """Return what a training gives: the net, its history, and the most bytes it had."""
    fitkit.set_seed(1)
    model = fitkit.Model(net())
    given = {"accelerator": "gpu", "devices": 1, "learning_rate": 0.1, **arguments}
    model.compile("sgd", "cross_entropy", **given)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    with capped(most):
        history = model.fit(list(batches), epochs=2, verbose=0)
    return model.net, history, torch.cuda.max_memory_allocated(0) - before


def assert_same(cut, uncut):
    (net, history, _), (expected, logs, _) = cut, uncut
    for name, value in expected.named_parameters():
        torch.testing.assert_close(net.get_parameter(name), value, rtol=1e-6, atol=1e-6)
    for name, values in logs.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-6)


def test_long_batches_are_cut_and_the_weights_are_the_uncapped_run_s():
    uncut = trained(Words, sentences())
    cut = trained(Words, sentences(), int(uncut[2] * 0.5), out_of_memory="split")
    assert cut[2] < uncut[2] * 0.5
    assert_same(cut, uncut)
    parts = cut[1].params["parts"]
    assert set(parts) < {f"16 x {length}, 16 x {length}" for length in LENGTHS}
    assert parts[f"16 x {max(LENGTHS)}, 16 x {max(LENGTHS)}"] > 1


def rows():
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(32, 6, generator=draw), torch.randint(3, (32,), generator=draw))
        for _ in range(3)
    ]


def test_a_batch_that_fails_in_its_backward_is_cut():
    with pytest.raises(OutOfMemoryError, match="FK040"):
        trained(Rows, rows(), 200 * MIB)
    cut = trained(Rows, rows(), 200 * MIB, out_of_memory="split", accumulate_grad_batches=2)
    assert_same(cut, trained(Rows, rows(), accumulate_grad_batches=2))
    assert cut[1].params["parts"] == {"32 x 6, 32": 2}


def test_a_row_that_does_not_fit_is_the_explained_error_and_leaves_the_memory():
    net = Rows(forward=True)
    held = torch.cuda.memory_allocated(0)
    with pytest.raises(OutOfMemoryError, match="FK040"):
        trained(lambda: net, rows(), 4 * MIB, out_of_memory="split")
    assert torch.cuda.memory_allocated(0) - held < MIB
    trained(lambda: net, rows())


class Cap(fitkit.callbacks.Callback):
    """Gives each rank a cap of its own."""

    stops_alike = True

    def on_train_begin(self, logs=None):
        rank = self.model.global_rank
        total = torch.cuda.get_device_properties(rank).total_memory
        torch.cuda.set_per_process_memory_fraction([400, 110][rank] * MIB / total, rank)
        self.add_cleanup(torch.cuda.set_per_process_memory_fraction, 1.0, rank)


def test_each_rank_is_cut_by_its_own_allocator():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    runs = []
    for caps, option in (([], {}), ([Cap()], {"out_of_memory": "split"})):
        fitkit.set_seed(1)
        model = fitkit.Model(Rows())
        model.compile("sgd", "cross_entropy", learning_rate=0.1, accelerator="gpu", devices=2,
                      **option)  # fmt: skip
        history = model.fit(rows(), epochs=2, verbose=0, callbacks=caps)
        runs.append((model.net.cpu(), history, 0))
    assert_same(runs[1], runs[0])
    assert runs[1][1].params["parts"] == {"rank 1: 32 x 6, 32": 4}
