"""The first loss that isn't finite, named with its samples: against what the net was given."""

import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fitkit
from fitkit.callbacks import LambdaCallback
from fitkit.training.running_values import READ_AT_ONCE, RunningMean

SAMPLES, BATCH, BAD = 48, 8, 17
SAID = re.compile(r"loss is (?:nan|inf), first in batch (\d+) \(samples ([\d, ]+)\)")


class Seen(nn.Module):
    """A layer that notes which samples it gets: the first column has their indices."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows = nn.Linear(3, 1), []

    def forward(self, x):
        self.rows.append(x[:, 0].long().tolist())
        return self.layer(x[:, 1:])


def log_loss(outputs, y):
    return (outputs - y.log()).square().mean()


def data(fault):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    x[:, 0] = torch.arange(SAMPLES)
    y = x[:, 1:2].abs() + 1
    if fault == "a nan row":
        x[BAD, 2] = math.nan
    if fault == "an inf label":
        y[BAD] = math.inf
    if fault == "a log of 0":
        y[BAD] = 0.0
    return x, y


class Rows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


READERS = {
    "arrays": lambda x, y: (x, y),
    "a loader": lambda x, y: (DataLoader(Rows(x, y), BATCH, shuffle=True),),
    "tensors": lambda x, y: (DataLoader(TensorDataset(x, y), BATCH, shuffle=True),),
}


def said(
    fault, reader="arrays", callbacks=None, steps=None, epochs=1, kind=fitkit.Model, **options
):
    """The net, and the warnings of losses."""
    torch.manual_seed(3)
    model = kind(Seen())
    loss = log_loss if fault == "a log of 0" else "mse"
    model.compile("sgd", loss, **{"accelerator": "cpu", "devices": 1, **options})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(
            *READERS[reader](*data(fault)), batch_size=BATCH, verbose=0, callbacks=callbacks,
            steps_per_epoch=steps, epochs=epochs,
        )  # fmt: skip
    return model.net, [str(one.message) for one in found if "loss is" in str(one.message)]


def check(net, words, first=0):
    """The words name the first batch that had the bad sample."""
    number, samples = SAID.search(words).groups()
    expected = next(n for n, rows in enumerate(net.rows) if BAD in rows)
    assert int(number) == expected - first
    assert [int(sample) for sample in samples.split(", ")] == net.rows[expected]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("fault", "where"),
    [("a nan row", "x of sample 17 is nan at column 2"), ("an inf label", "y of sample 17 is inf"),
     ("a log of 0", None)],
)  # fmt: skip
def test_the_samples_are_named_without_a_callback(fault, where, reader):
    net, (words,) = said(fault, reader)
    check(net, words)
    assert ("In the data" in words) == (where is not None) and (where or "") in words
    if reader == "arrays":
        net, (words,) = said(fault, reader, accumulate_grad_batches=2)
        check(net, words)


def test_at_once_where_values_are_read_within_the_epoch():
    state = []
    read = LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            state.append(torch.get_rng_state()), logs["loss"], state.append(torch.get_rng_state())
        )
    )  # fmt: skip
    net, (words,) = said("a log of 0", "a loader", read)
    check(net, words)
    assert f"by batch {SAID.search(words)[1]}," in words
    assert all(map(torch.equal, state[::2], state[1::2]))


class RootOfZero(torch.autograd.Function):
    """Its value is finite, its gradient isn't, where the target is 0."""

    @staticmethod
    def forward(context, outputs, y):
        context.save_for_backward(y)
        return outputs.square().mean()

    @staticmethod
    def backward(context, gradient):
        (y,) = context.saved_tensors
        return gradient / y, None


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("place", [2, 5])
def test_a_gradient_that_is_bad_is_said_with_the_samples_of_its_batch(place, devices):
    x, y = data("a log of 0")
    y[BAD], y[place * BATCH] = 1.0, 0.0
    model = fitkit.Model(nn.Linear(4, 1))
    model.compile("sgd", RootOfZero.apply, accelerator="cpu", devices=devices)
    with pytest.warns(UserWarning, match="a gradient wasn't") as found:
        model.fit(x, y, batch_size=BATCH // devices, shuffle=False, verbose=0)
    (words,) = (str(one.message) for one in found if "a gradient wasn't" in str(one.message))
    named = re.search(r"batch (?:before \(|had )samples ([\d, ]+)", words)[1]
    assert sorted(map(int, named.split(", "))) == [*range(place * BATCH, (place + 1) * BATCH)]


def test_epochs_of_steps_count_in_the_pass():
    net, (words,) = said("a log of 0", steps=4, epochs=2)
    at = next(n for n, rows in enumerate(net.rows) if BAD in rows)
    check(net, words, first=at // 4 * 4)


def test_a_batch_without_a_loss_is_not_taken_for_another():
    class Skips(fitkit.Model):
        def training_step(self, batch, batch_idx):
            skips = batch_idx < 2 and BAD not in batch[0][:, 0]
            return None if skips else super().training_step(batch, batch_idx)

    _, (words,) = said("an inf label", kind=Skips)
    assert "first in" not in words and "In the data, y of sample 17 is inf" in words


def test_batches_without_rows_keep_their_numbers():
    def collate(rows):
        has_third = any(x[0] == 3 for x, _ in rows)
        return None if has_third else torch.utils.data.default_collate(rows)

    model = fitkit.Model(Seen())
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    loader = DataLoader(Rows(*data("an inf label")), 4, collate_fn=collate)
    with pytest.warns(UserWarning, match=r"first in batch 4 \(samples 16, 17, 18, 19\)"):
        model.fit(loader, verbose=0)


@pytest.mark.parametrize("key", [str, lambda index: (index, 64)])
def test_indices_that_are_no_numbers_name_the_batch_only(key):
    class Keyed(Rows):
        def __getitem__(self, key):
            return super().__getitem__(int(key) if isinstance(key, str) else key[0])

    model = fitkit.Model(Seen())
    model.compile("sgd", "mse", accelerator="cpu", devices=1)
    loader = DataLoader(Keyed(*data("a nan row")), BATCH, sampler=list(map(key, range(SAMPLES))))
    with pytest.warns(UserWarning, match=r"first in batch 2\. "):
        model.fit(loader, verbose=0)


def test_two_ranks_name_the_one_that_had_it():
    _, (words,) = said("a log of 0", "a loader", devices=2)
    number, samples = SAID.search(words).groups()
    assert "17" in samples.split(", ") and re.search(r"\) on rank [01]\.", words)
    torch.manual_seed(3)
    net, _ = said("a log of 0", "a loader")
    place = next(n for n, rows in enumerate(net.rows) if BAD in rows)
    assert (int(number), int(words.split("on rank ")[1][0])) == divmod(place, 2)


@pytest.mark.parametrize("at_once", [True, False])
def test_the_first_bad_value_is_found_where_they_are_kept_too(at_once, monkeypatch):
    monkeypatch.setattr(READ_AT_ONCE, "is_on", at_once)
    for bad in (None, 0, 150, 299):
        mean = RunningMean()
        for number in range(300):
            value = math.nan if number in (bad, 7) else 1.0
            mean.add(torch.tensor(value), 0 if number == 7 else 4)
            if number == 200:
                mean.result()
        assert mean.first_bad() == bad
        mean.add_each(torch.tensor([math.inf, 1.0]), 4)
        assert mean.first_bad() == (300 if bad is None else bad)
