"""A training that was cut and resumed is the whole one, with callbacks that have a state."""

import inspect

import pytest
import torch

import fitkit
from fitkit.callbacks import (
    EMA,
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    GradualUnfreezing,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
    StochasticWeightAveraging,
)
from tests.nets import regression
from tests.reference import assert_same_weights

X, Y = regression(40, 3)

CASES = {
    "ema": lambda: EMA(0.9),
    "ema on epoch": lambda: EMA(0.9, swap_on_epoch=True),
    "plateau": lambda: ReduceLROnPlateau("loss", min_delta=1, patience=2),
    "stopping": lambda: EarlyStopping("loss", 10, patience=3, restore_best_weights=True),
    "swa": lambda: StochasticWeightAveraging(0.02, 1, annealing_epochs=2),
    "scheduler": lambda: LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    "backbone": lambda: BackboneFinetuning(1),
    "backbone later": lambda: BackboneFinetuning(3),
    "backbone in stages": lambda: GradualUnfreezing(
        {1: "norm", 2: {"backbone": 0.003}, 3: {"norm": 0.002, "backbone": 0.001}}
    ),
    "backbone with held norm": lambda: GradualUnfreezing(
        {0: {"head": 0.02}, 1: {"backbone": 0.003}, 3: "norm"}, train_bn=False
    ),
}


class Cuts(Callback):
    def on_epoch_end(self, epoch, logs):
        self.model.stop_training = epoch == 1


def compiled():
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("backbone", torch.nn.Linear(3, 4))
    net.add_module("norm", torch.nn.BatchNorm1d(4))
    net.add_module("head", torch.nn.Linear(4, 1))
    model = fitkit.Model(net)
    model.compile("adam", "mse", learning_rate=0.01)
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_training_is_the_whole_one(case, tmp_path):
    if "backbone" in case and "prepare_optimizers" not in inspect.getsource(fitkit.Model.fit):
        pytest.skip("needs prepare_optimizers in Model.fit")
    make, options = CASES[case], {"epochs": 5, "batch_size": 8, "verbose": 0}
    path = tmp_path / "model.h5"
    whole = compiled()  # seeds the order of samples, too
    expected = whole.fit(X, Y, callbacks=make(), **options)
    cut = compiled()
    cut.fit(X, Y, callbacks=[make(), ModelCheckpoint(path, monitor="loss"), Cuts()], **options)
    resumed = compiled()
    found = resumed.fit(X, Y, callbacks=make(), resume_from=path, **options)
    assert (found.epoch, found.history) == (expected.epoch, expected.history)
    assert_same_weights(whole, resumed)
