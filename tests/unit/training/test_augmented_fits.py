"""Fits on data that draw are those of a loop that seeds by hand, however they are made."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fitkit
from fitkit.callbacks import Callback
from fitkit.progress import Progress
from tests.augmented import SAMPLES, Augmented, WithOwn, key_of, seeded_by_hand
from tests.reference import assert_same_weights

EPOCHS = 3


def net(width=4, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 1))


def fitted(
    data, *, batch_size=8, width=4, dropout=0.0, callbacks=(), fit=None, loader=None, **given
):
    model = fitkit.Model(net(width, dropout))
    model.compile("sgd", "mse", learning_rate=0.05, accelerator="cpu", **given)
    fitkit.set_seed(5)
    loader = DataLoader(data, batch_size, shuffle=True, **(loader or {}))
    model.history = model.fit(
        loader, epochs=EPOCHS, verbose=0, callbacks=list(callbacks), **(fit or {})
    )
    return model


def seeded_sample(key, number, index):
    seeded_by_hand(key, number, index)
    return Augmented()[index]


def by_hand(dropout=0.0):
    """A plain loop. Orders follow one another, whatever the net draws, as if it were quiet."""
    trained = net(dropout=dropout)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    fitkit.set_seed(5)
    key = key_of(torch.get_rng_state())
    orders = [list(DataLoader(range(SAMPLES), 8, shuffle=True))]
    nets_own = torch.get_rng_state()
    orders += [list(DataLoader(range(SAMPLES), 8, shuffle=True)) for _ in range(EPOCHS - 1)]
    for number, order in enumerate(orders):
        if number:  # what a pass of a loader draws moves the net's numbers on
            torch.set_rng_state(nets_own)
            list(DataLoader(range(SAMPLES), 8, shuffle=True))
            nets_own = torch.get_rng_state()
        for indices in order:
            samples = [seeded_sample(key, number, int(index)) for index in indices]
            x, y = (torch.stack(part) for part in zip(*samples, strict=True))
            torch.set_rng_state(nets_own)
            loss = nn.functional.mse_loss(trained(x), y)
            nets_own = torch.get_rng_state()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return trained


class Cut(Callback):
    def __init__(self, path, epoch, batch):
        self.path, self.moment = path, (epoch, batch)

    def on_train_batch_end(self, batch, logs=None):
        if (self.model.current_epoch, batch) == self.moment:
            self.model.save(self.path)
            raise KeyboardInterrupt


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_is_the_loop_that_seeds_by_hand(workers, dropout):
    loader = {"num_workers": workers, "persistent_workers": workers > 0}
    model = fitted(Augmented(), dropout=dropout, loader=loader)
    assert_same_weights(model.net, by_hand(dropout))


def test_accumulated_parts_draw_as_the_whole():
    model = fitted(Augmented(), batch_size=2, accumulate_grad_batches=4, loader={"num_workers": 1})
    assert_same_weights(model.net, by_hand(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "then"), [(0, 0), (2, 0), (0, 2)], ids=["alone", "by workers", "with workers later"]
)
def test_a_fit_that_was_cut_draws_what_the_whole_one_draws(tmp_path, first, then):
    path = tmp_path / "cut.h5"
    with pytest.raises(KeyboardInterrupt):
        fitted(Augmented(), dropout=0.5, callbacks=[Cut(path, 1, 2)], loader={"num_workers": first})
    resumed = fitted(
        Augmented(), dropout=0.5, fit={"resume_from": path}, loader={"num_workers": then}
    )
    assert_same_weights(resumed.net, by_hand(0.5))


def test_own_generators_and_parts_of_passes_go_on_too(tmp_path):
    """An epoch of 7 batches begins within a pass of 5."""
    fit, path = {"steps_per_epoch": 7}, tmp_path / "cut.h5"
    whole = fitted(WithOwn(), width=10, dropout=0.3, fit=fit)
    with pytest.raises(KeyboardInterrupt):
        fitted(WithOwn(), width=10, dropout=0.3, fit=fit, callbacks=[Cut(path, 1, 4)])
    resumed = fitted(
        WithOwn(),
        width=10,
        dropout=0.3,
        fit={**fit, "resume_from": path},
        loader={"num_workers": 1},
    )
    assert_same_weights(resumed, whole)


def test_another_seed_draws_other_numbers():
    one = fitted(Augmented())
    fitkit.set_seed(6)
    other = fitkit.Model(net())
    other.compile("sgd", "mse", learning_rate=0.05, accelerator="cpu")
    other.fit(Augmented(), epochs=EPOCHS, shuffle=False, verbose=0)
    assert not torch.allclose(one.net[0].weight, other.net[0].weight)


class Drawing(Callback):
    """Draws between batches."""

    def on_train_batch_end(self, batch, logs=None):
        np.random.rand(batch), torch.rand(batch)


def test_validations_draw_the_same_each_time():
    values = []
    for workers in (0, 1):
        held_out = DataLoader(WithOwn(), 5, num_workers=workers)
        frozen = net(10)
        model = fitkit.Model(frozen.requires_grad_(False))
        frozen[0].bias.requires_grad_(True)
        model.compile("sgd", "mse", learning_rate=0.0, accelerator="cpu")
        fitkit.set_seed(5)
        fit = {"validation_data": {"day": held_out, "night": held_out}, "validation_freq": 0.5}
        history = model.fit(
            WithOwn(), verbose=0, epochs=2, batch_size=4, **fit, callbacks=[Drawing()]
        )
        days, nights = (history.history[f"val_{name}_loss"] for name in ("day", "night"))
        assert len({*days}) == len({*nights}) == 1
        assert days != nights
        values.append((days, nights))
    assert values[0] == values[1]


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_other_verbs_draw_by_the_seed_alone(verb):
    model = fitkit.Model(net(10))
    model.compile("sgd", "mse", accelerator="cpu")
    found = []
    for options in ({"batch_size": 8}, {"batch_size": 5, "num_workers": 2}):
        fitkit.set_seed(5)
        found.append(getattr(model, verb)(DataLoader(WithOwn(), **options), verbose=0))
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_files_of_earlier_versions_have_no_key():
    saved = Progress(random=[{}]).as_dict()
    del saved["key"], saved["orders"]
    read = Progress.from_dict(saved, "a.h5").for_rank(0, 1)
    assert (read.key, read.orders) == (None, [])
