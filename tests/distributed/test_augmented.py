"""Data that draw, and nets that draw, on two ranks: the numbers are those of one process."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import fitkit
from fitkit.callbacks import Callback
from fitkit.seams.callbacks import from_all_ranks
from tests.augmented import SAMPLES, Augmented, WithOwn
from tests.reference import assert_same_weights

pytestmark = pytest.mark.timeout(120)


class Watched(nn.Module):
    """Draws in its forward, other numbers on each rank, and keeps which samples come when."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(10, 1), nn.Dropout(0.5)
        self.seen, self.step = [], 0

    def forward(self, x):
        self.seen += [(self.step, round(float(row[0]) * SAMPLES)) for row in x.detach()]
        self.step += 1
        np.random.rand(len(x))
        return self.layer(self.dropout(x))


class Order(Callback):
    """Logs a number that follows from which samples all ranks saw in which step."""

    def on_epoch_end(self, epoch, logs):
        seen = itertools.chain.from_iterable(from_all_ranks(self.model, self.model.net.seen))
        logs["order"] = float(hash(tuple(sorted(seen))) % 9973)
        self.model.net.seen.clear()


def shuffled(size, **options):
    return DataLoader(WithOwn(), size, shuffle=True, **options)


def weighted(size):
    sampler = WeightedRandomSampler([1.0 + i for i in range(SAMPLES)], SAMPLES)
    return DataLoader(WithOwn(), size, sampler=sampler)


@pytest.mark.parametrize("data", [shuffled, weighted])
def test_what_a_net_draws_moves_no_order(data):
    orders = []
    for devices in (1, 2):
        torch.manual_seed(0)
        model = fitkit.Model(Watched())
        model.compile("sgd", "mse", accelerator="cpu", devices=devices, strategy="auto")
        fitkit.set_seed(5)
        fit = {"epochs": 3, "verbose": 0, "callbacks": [Order()]}
        orders.append(model.fit(data(8 // devices), **fit).history["order"])
    assert orders[0] == orders[1]
    assert len(set(orders[0])) == 3


def trained(devices, *, workers=0, accumulate=1, cut=None, resume=None):
    torch.manual_seed(0)
    model = fitkit.Model(nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 1)))
    model.compile(
        "sgd", "mse", learning_rate=0.05, accelerator="cpu", devices=devices,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    fitkit.set_seed(5)
    data = shuffled(8 // devices // accumulate, num_workers=workers)
    fit = {"epochs": 2, "verbose": 0, "validation_data": DataLoader(WithOwn(), 5)}
    callbacks = [] if cut is None else [Cut(cut)]
    history = model.fit(data, **fit, callbacks=callbacks, resume_from=resume).history
    fitkit.set_seed(5)
    own = model.evaluate(WithOwn(), verbose=0), model.predict(WithOwn(), verbose=0)
    return model, history, own


class Cut(Callback):
    """Saves within the second epoch, and ends the run."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, batch, logs=None):
        if self.model.current_epoch == 1 and batch == 2:
            self.model.save(self.path)
            self.model.stop_training = True

    stops_alike = True


def test_augmented_samples_are_those_of_one_process(tmp_path):
    one, history, own = trained(1)
    path = tmp_path / "cut.h5"
    trained(2, cut=path)
    for given in ({"workers": 1}, {"accumulate": 2}, {"resume": path}):
        other, others, values = trained(2, **given)
        assert_same_weights(other, one, rtol=1e-5, atol=1e-6)
        for name, numbers in history.items():
            assert others[name] == pytest.approx(numbers, rel=1e-5)
        assert values[0] == pytest.approx(own[0], rel=1e-5)
        np.testing.assert_allclose(values[1], own[1], rtol=1e-4, atol=1e-6)


def test_a_file_of_two_processes_goes_on_in_one(tmp_path):
    path = tmp_path / "cut.h5"
    trained(2, cut=path)
    with pytest.warns(match="1 ranks instead of 2"):
        resumed, _, _ = trained(1, accumulate=2, resume=path)
    one, _, _ = trained(1)
    assert_same_weights(resumed, one, rtol=1e-5, atol=1e-6)


def test_augmented_data_alone_are_those_of_one_process():
    found = []
    for devices in (1, 2):
        model = fitkit.Model(nn.Identity())
        model.compile(accelerator="cpu", devices=devices)
        fitkit.set_seed(5)
        x = model.predict(DataLoader(Augmented(), 3), verbose=0)
        found.append(x)
    np.testing.assert_array_equal(*found)
