"""What was monitored is what is saved and restored, whoever swaps weights for the validation."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import fitkit
from fitkit import callbacks
from tests.nets import linear, normal

X = normal(32, 3)
Y = X.sum(1, keepdim=True)
HELD_OUT = X[:16], 0.7 * Y[:16]  # the weights pass their best on the way
EPOCHS = 6

SWAPS = {
    "EMA": lambda: callbacks.EMA(0.8),
    "EMA in epochs": lambda: callbacks.EMA(0.8, swap_on_epoch=True),
    "EMA from the second": lambda: callbacks.EMA(0.8, update_starting_at_epoch=1),
    "SwapEMAWeights": lambda: callbacks.SwapEMAWeights(decay=0.8),
    "SWA": lambda: callbacks.StochasticWeightAveraging(0.03, 2),
    "two": lambda: [callbacks.EMA(0.8), callbacks.StochasticWeightAveraging(0.03, 2)],
}
orders = pytest.mark.parametrize("swaps_first", [True, False], ids=["swaps first", "swaps last"])
swappers = pytest.mark.parametrize("swap", SWAPS)


def compiled():
    model = fitkit.Model(linear(3, 1))
    model.compile("sgd", "mse", learning_rate=0.03, accelerator="cpu", devices=1)
    return model


def fit(model, swap, *others, swaps_first=True, epochs=EPOCHS, **options):
    together = [swap, *others] if swaps_first else [*others, swap]
    torch.manual_seed(0)
    return model.fit(
        X, Y, batch_size=8, epochs=epochs, verbose=0, validation_data=HELD_OUT,
        callbacks=together, **options,
    ).history  # fmt: skip


def held_out_loss(net):
    with torch.no_grad():
        return F.mse_loss(net(HELD_OUT[0]), HELD_OUT[1]).item()


def loss_of(path):
    net = linear(3, 1, seed=9)
    fitkit.Model(net).load_weights(path)
    return held_out_loss(net)


@orders
@swappers
@pytest.mark.parametrize(
    ("validation_freq", "options"),
    [
        (1, {"save_best_only": True, "asynchronous": True}),
        (2, {"save_best_only": True, "save_weights_only": True}),
        (0.5, {"save_top_k": 1, "save_last": True}),
    ],
    ids=str,
)
def test_the_best_file_has_what_was_validated(
    tmp_path, swap, swaps_first, options, validation_freq
):
    saves = callbacks.ModelCheckpoint(tmp_path / "{epoch}-{val_loss:.8f}.h5", "val_loss", **options)
    history = fit(
        compiled(), SWAPS[swap](), saves, swaps_first=swaps_first, validation_freq=validation_freq
    )
    assert loss_of(saves.best_model_path) == pytest.approx(saves.best, rel=1e-5)
    assert min(value for value in history["val_loss"] if value is not None) >= saves.best


@orders
@swappers
@pytest.mark.parametrize("validation_freq", [1, 0.5])
def test_the_restored_weights_are_those_that_were_validated(swap, swaps_first, validation_freq):
    model, stop = compiled(), callbacks.EarlyStopping(patience=9, restore_best_weights=True)
    fit(model, SWAPS[swap](), stop, swaps_first=swaps_first, validation_freq=validation_freq)
    assert stop.best_epoch < EPOCHS - 1
    assert held_out_loss(model.net) == pytest.approx(stop.best, rel=1e-5)
    assert model.evaluate(*HELD_OUT, verbose=0) == pytest.approx(stop.best, rel=1e-5)


@orders
@swappers
def test_values_of_the_training_belong_to_the_weights_that_train(tmp_path, swap, swaps_first):
    class Own(callbacks.Callback):
        weights = None

        def on_epoch_begin(self, epoch, logs=None):
            self.weights = self.model.net.weight.detach().clone() if epoch == 1 else self.weights

    path, own = tmp_path / "{epoch}.h5", Own()
    saves = callbacks.ModelCheckpoint(path, "loss", save_best_only=True, save_weights_only=True)
    fit(compiled(), SWAPS[swap](), saves, own, swaps_first=swaps_first)
    if swap != "EMA in epochs":  # it asks for the averages at each epoch's end
        net = linear(3, 1, seed=9)
        fitkit.Model(net).load_weights(tmp_path / "1.h5")
        assert own.weights is None or torch.equal(net.weight, own.weights)


@orders
@swappers
@pytest.mark.parametrize("validation_freq", [1, 0.5])
def test_a_training_goes_on_from_the_best_file_as_if_it_werent_cut(
    tmp_path, swap, swaps_first, validation_freq
):
    def saves():
        return callbacks.ModelCheckpoint(tmp_path / "best.h5", "val_loss", save_best_only=True)

    def end_of(model, history):
        return [p.tolist() for p in model.parameters()], history

    whole = compiled()
    options = {"swaps_first": swaps_first, "validation_freq": validation_freq}
    expected = end_of(whole, fit(whole, SWAPS[swap](), saves(), **options))
    again = compiled()
    found = fit(again, SWAPS[swap](), saves(), resume_from=tmp_path / "best.h5", **options)
    assert end_of(again, found) == expected


@orders
@pytest.mark.parametrize("swap", ["EMA", "SWA"])
def test_further_data_are_evaluated_with_the_same_weights(tmp_path, swap, swaps_first):
    more = callbacks.EvaluateEvery(*HELD_OUT, name="more")
    path = tmp_path / "best.h5"
    saves = callbacks.ModelCheckpoint(path, "more_loss", save_best_only=True)
    history = fit(compiled(), SWAPS[swap](), more, saves, swaps_first=swaps_first)
    assert history["more_loss"] == pytest.approx(history["val_loss"], rel=1e-6)
    assert loss_of(path) == pytest.approx(saves.best, rel=1e-5)


@orders
def test_ray_gets_the_weights_that_were_validated(monkeypatch, swaps_first, tmp_path):
    reported = []
    train = SimpleNamespace(
        report=lambda values, checkpoint=None: reported.append(
            (values["val_loss"], loss_of(f"{checkpoint}/model.h5"))
        ),
        get_checkpoint=lambda: None,
        Checkpoint=SimpleNamespace(from_directory=str),
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    fit(compiled(), SWAPS["EMA"](), callbacks.RayTrainReport(), swaps_first=swaps_first, epochs=2)
    assert len(reported) == 2
    for validated, saved in reported:
        assert saved == pytest.approx(validated, rel=1e-5)
