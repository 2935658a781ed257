"""`fit(validation_freq=0.2)`: where an epoch is validated, and who sees it, in plain torch."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitkit
from fitkit.callbacks import (
    EMA,
    Callback,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    OptunaPruning,
    ReduceLROnPlateau,
)
from fitkit.errors import ArgumentTypeError, ConfigurationError
from tests.nets import classes_in_turn
from tests.reference import assert_same_weights

torch.manual_seed(0)
X = torch.randn(40, 3)
Y = X.sum(1, keepdim=True)
V = torch.randn(10, 3), torch.randn(10, 1)
HELD = {"validation_data": V}
QUIET = {"batch_size": 4, "shuffle": False, "verbose": 0}


def linear(**options):
    torch.manual_seed(1)
    model = fitkit.Model(nn.Linear(3, 1))
    model.compile("sgd", "mse", learning_rate=0.05, accelerator="cpu", **options)
    return model


def by_hand(places, epochs=1, every=1):
    """The validation's loss after these batches of each epoch, and the last weights."""
    torch.manual_seed(1)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    found = []
    for _ in range(epochs):
        for group in range(0, 10, every):
            rows = slice(4 * group, 4 * (group + every))
            optimizer.zero_grad()
            nn.functional.mse_loss(net(X[rows]), Y[rows]).backward()
            optimizer.step()
            done = min(group + every, 10)
            if done in places:
                with torch.no_grad():
                    found.append(nn.functional.mse_loss(net(V[0]), V[1]).item())
    return found, net


@pytest.mark.parametrize(
    ("frequency", "places"),
    [
        (0.2, [2, 4, 6, 8, 10]),
        (0.25, [3, 5, 8, 10]),
        (0.3, [3, 6, 9, 10]),
        (0.01, list(range(1, 11))),
        (1.0, [10]),
        ({"batches": 4}, [4, 8, 10]),
        ({"batches": 5}, [5, 10]),
        ({"batches": 99}, [10]),
    ],
)
def test_an_epoch_is_validated_at_its_parts_and_at_its_end(frequency, places):
    model = linear()
    history = model.fit(X, Y, epochs=2, validation_freq=frequency, **HELD, **QUIET)
    expected, net = by_hand(places, epochs=2)
    if len(places) > 1:
        seen = [(entry["epoch"], entry["batches"]) for entry in history.validations]
        assert seen == [(epoch, place) for epoch in range(2) for place in places]
        found = [entry["val_loss"] for entry in history.validations]
        assert found == pytest.approx(expected, rel=1e-5)
    # An epoch's row has its last validation's values.
    assert history["val_loss"] == pytest.approx(expected[len(places) - 1 :: len(places)], rel=1e-5)
    torch.testing.assert_close(model.net.weight, net.weight)


def test_training_is_as_if_there_were_no_validation():
    def trained(**options):
        torch.manual_seed(1)
        model = fitkit.Model(
            nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
        )
        model.compile("adam", "mse", metrics=["mae"], accelerator="cpu")
        torch.manual_seed(2)
        history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0, **options)
        return model, history

    plain, expected = trained()
    model, history = trained(validation_freq=0.2, **HELD)
    assert_same_weights(model, plain)
    assert history["loss"] == expected["loss"] and history["mae"] == expected["mae"]
    assert len(history.validations) == 10


def test_callbacks_get_a_validations_values_and_the_modules_train_again():
    seen = []

    class Looks(Callback):
        def on_validation_within_epoch(self, batch, logs):
            seen.append((batch, sorted(logs), self.model.net.training))

    linear(metrics=["mae"]).fit(X, Y, validation_freq=0.5, callbacks=Looks(), **HELD, **QUIET)
    assert seen == [(4, ["val_loss", "val_mae"], True)]


def test_early_stopping_counts_validations_and_ends_an_epoch():
    stop = EarlyStopping(patience=2, restore_best_weights=True)
    model = linear()
    model.compile(learning_rate=0.3)
    history = model.fit(X, Y, epochs=9, validation_freq=0.1, callbacks=stop, **HELD, **QUIET)
    losses = [entry["val_loss"] for entry in history.validations]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 and len(history.epoch) == 1 + (best + 2) // 10
    assert history["val_loss"][-1] == losses[-1]  # of the place where it stopped
    assert model.evaluate(*V, verbose=0) == pytest.approx(min(losses), rel=1e-6)


class Rises(Callback):
    """Puts rising values in the place of a validation's."""

    def __init__(self):
        self.number = 0

    def on_test_end(self, logs):
        self.number += 1
        logs["loss"] = float(self.number)


@pytest.mark.parametrize("kind", ["callback", "scheduler"])
def test_plateaus_count_validations(kind):
    model, rates = linear(), []
    callbacks = [Rises(), LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(model.optimizer.param_groups[0]["lr"])
    )]  # fmt: skip
    if kind == "callback":
        callbacks.append(ReduceLROnPlateau(factor=0.5, patience=2))
    else:

        def factory(optimizer):
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

        model.compile(lr_scheduler={"scheduler": factory, "monitor": "val_loss"})
    model.fit(X, Y, epochs=2, validation_freq=0.2, callbacks=callbacks, **HELD, **QUIET)
    # The best is the first, after 2 batches; two worse ones are after 4 and 6, 8 and 10, 12 and 14.
    halvings = [0] * 6 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 2
    assert rates == pytest.approx([0.05 * 0.5**number for number in halvings])


def test_the_best_file_is_that_of_the_best_validation(tmp_path):
    saves = ModelCheckpoint(
        tmp_path / "{epoch}-{batch}-{val_loss:.3f}.h5", "val_loss", save_top_k=2
    )
    model = linear()
    history = model.fit(X, Y, epochs=2, validation_freq=0.2, callbacks=saves, **HELD, **QUIET)
    ranked = sorted(history.validations, key=lambda entry: entry["val_loss"])
    names = [f"{e['epoch'] + 1}-{e['batches']}-{e['val_loss']:.3f}.h5" for e in ranked[:2]]
    assert [path.rsplit("/")[-1] for path in saves.best_k_models] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    again = linear()
    again.load(saves.best_model_path)
    assert again.evaluate(*V, verbose=0) == pytest.approx(ranked[0]["val_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "options", [{"save_best_only": True}, {"save_top_k": 1}, {"save_top_k": 3}]
)
def test_an_epochs_file_keeps_its_best_validation(tmp_path, options):
    saves = ModelCheckpoint(tmp_path / "{epoch}.h5", "val_loss", **options)
    model = linear()
    model.fit(X, Y, validation_freq=0.2, callbacks=[Rises(), saves], **HELD, **QUIET)
    expected, _ = by_hand([2])
    again = linear()
    again.load(tmp_path / "1.h5")
    assert saves.best == 1 and again.evaluate(*V, verbose=0) == pytest.approx(expected[0], rel=1e-5)


def test_groups_of_steps_are_validated_at_their_ends():
    model = linear(steps_per_execution=4)
    history = model.fit(X, Y, validation_freq=0.3, **HELD, **QUIET)
    expected, _ = by_hand([4, 8, 10])
    assert [entry["batches"] for entry in history.validations] == [4, 8, 10]
    assert [e["val_loss"] for e in history.validations] == pytest.approx(expected, rel=1e-5)


def test_validations_wait_for_the_update_that_is_due(tmp_path):
    saves = ModelCheckpoint(tmp_path / "{batch}.h5", "val_loss", save_top_k=-1)
    model = linear(accumulate_grad_batches=3)
    history = model.fit(X, Y, validation_freq=0.2, callbacks=saves, **HELD, **QUIET)
    expected, net = by_hand([3, 6, 9, 10], every=3)
    assert [entry["batches"] for entry in history.validations] == [3, 6, 9, 10]
    assert [e["val_loss"] for e in history.validations] == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(model.net.weight, net.weight)
    assert len(list(tmp_path.iterdir())) == 4


def test_an_epoch_that_a_validation_ends_counts_its_value_once():
    """A stream's length isn't known: its last batches' validation may be the epoch's, too."""

    def stream():
        return zip(X.split(4), Y.split(4), strict=True)

    class Endless:
        def __iter__(self):
            return stream()

    model, stop = linear(), EarlyStopping(patience=7, min_delta=1e9)
    model.compile(learning_rate=1e-9)
    history = model.fit(
        Endless(), epochs=9, validation_freq={"batches": 5}, callbacks=stop, verbose=0, **HELD
    )
    # 2 validations an epoch: the first is the best, seven more end it after the fourth epoch's.
    assert len(history.validations) == 8 and len(history.epoch) == 4 and stop.stopped_epoch == 3
    assert history["val_loss"] == [entry["val_loss"] for entry in history.validations[1::2]]
    with pytest.raises(ConfigurationError, match=r'write|Write validation_freq=\{"batches": 100\}'):
        model.fit(Endless(), validation_freq=0.5, verbose=0, **HELD)
    model.fit(Endless(), validation_freq=0.5, verbose=0)  # nothing to validate on
    history = model.fit(Endless(), steps_per_epoch=6, validation_freq=0.5, verbose=0, **HELD)
    assert [entry["batches"] for entry in history.validations] == [3, 6]


def test_validation_data_are_read_several_times():
    once = zip(V[0].split(2), V[1].split(2), strict=True)
    with pytest.raises(
        ConfigurationError, match=r"validation_freq=0.5 validates several times.*validation_steps"
    ):
        linear().fit(X, Y, validation_freq=0.5, validation_data=once, **QUIET)
    model = linear()
    history = model.fit(
        X, Y, validation_freq=0.5, validation_data=once, validation_steps=2, **QUIET
    )
    assert len(history.validations) == 2


@pytest.mark.parametrize(
    ("frequency", "error"),
    [(0.0, ConfigurationError), (-0.2, ConfigurationError), (1.5, ConfigurationError),
     (float("nan"), ConfigurationError), ({"batches": 0}, ConfigurationError),
     ({"batches": 0.5}, ArgumentTypeError), ({"steps": 3}, ConfigurationError),
     ({}, ConfigurationError), ("0.2", ArgumentTypeError), (True, ArgumentTypeError)],
)  # fmt: skip
def test_other_frequencies_are_refused(frequency, error):
    with pytest.raises(error, match="validation_freq"):
        linear().fit(X, Y, validation_freq=frequency, **HELD, **QUIET)


def test_averaged_weights_leave_the_model_after_a_validation():
    def fit(**options):
        model = linear()
        model.fit(X, Y, **options, **QUIET)
        return model

    plain = fit()
    weights = []
    looks = LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(
        {name: value.clone() for name, value in looks.model.state_dict().items()}
    ))  # fmt: skip
    for swap in (False, True):
        ema = EMA(decay=0.5, swap_on_epoch=swap)
        fit(validation_freq=0.2, callbacks=[looks, ema], **HELD)
    torch.testing.assert_close(weights[0]["net.weight"], plain.net.weight)


def test_a_misspelt_name_is_told_at_the_epochs_end():
    with pytest.raises(ConfigurationError, match="Did you mean 'val_loss'"):
        linear().fit(
            X,
            Y,
            validation_freq=0.5,
            callbacks=EarlyStopping("val_lost", mode="min"),
            **HELD,
            **QUIET,
        )


# ---------------------------------------------------------------------- going on

A, B = classes_in_turn(44, 4)


class Cut(Callback):
    """Saves at a moment, and ends the run."""

    comes_last = True

    def __init__(self, path, moment):
        self.path, self.moment = path, moment

    def on_train_batch_end(self, batch, logs):
        self.cut(("batch", self.model.current_epoch, batch))

    def on_validation_within_epoch(self, batch, logs):
        self.cut(("validation", self.model.current_epoch, batch))

    def on_epoch_end(self, epoch, logs):
        self.cut(("epoch", epoch))

    def cut(self, moment):
        if moment == self.moment:
            self.model.save(self.path)
            raise KeyboardInterrupt


def with_dropout(optimizer="adam", **options):
    torch.manual_seed(1)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    model = fitkit.Model(nn.Sequential(*layers))
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], accelerator="cpu", **options)
    return model


MOMENTS = [
    ("batch", 1, 1), ("batch", 1, 2), ("validation", 1, 2), ("batch", 1, 3), ("epoch", 0),
]  # fmt: skip
"""11 batches, validated after 3, 6, 9 and 11."""


@pytest.mark.parametrize(
    ("moment", "options"),
    [(moment, {}) for moment in MOMENTS]
    + [(moment, {"accumulate_grad_batches": 3}) for moment in MOMENTS if moment[2:] in ((), (2,))],
    ids=str,
)
@pytest.mark.parametrize("loads", [False, True], ids=["arrays", "loader"])
def test_a_run_that_goes_on_validates_at_the_same_places_with_the_same_numbers(
    tmp_path, moment, options, loads
):
    def fitted(callbacks=(), **more):
        model = with_dropout(**options)
        torch.manual_seed(2)
        # A loader that draws from torch's generator as it begins to be read.
        held = DataLoader(TensorDataset(A[:20], B[:20]), 7, shuffle=True)
        watches = [
            EarlyStopping(patience=30),
            ModelCheckpoint(tmp_path / "best.h5", "val_loss", save_best_only=True),
        ]
        # So does one to train on: an order is drawn after all validations before it.
        shuffled = DataLoader(TensorDataset(A, B), 4, shuffle=True)
        data = {"x": shuffled} if loads else {"x": A, "y": B, "batch_size": 4}
        history = model.fit(
            **data, epochs=3, validation_data=held, validation_freq=0.25, verbose=0,
            callbacks=[*watches, *callbacks], **more,
        )  # fmt: skip
        return model, history, watches

    whole, expected, watches = fitted()
    with pytest.raises(KeyboardInterrupt):
        fitted([Cut(tmp_path / "cut.h5", moment)])
    again, found, others = fitted(resume_from=tmp_path / "cut.h5")
    assert_same_weights(again, whole)
    assert found.validations == expected.validations
    assert found["val_loss"] == expected["val_loss"]
    assert found["val_accuracy"] == expected["val_accuracy"]
    for watch, other in zip(watches, others, strict=True):
        assert watch.best == other.best
    assert watches[0].wait == others[0].wait


def test_a_run_cut_at_the_validation_that_stops_it_stops(tmp_path):
    def fitted(callbacks=(), **more):
        model = linear()
        stop = EarlyStopping(patience=1)
        history = model.fit(
            X, Y, epochs=3, validation_freq=0.2, callbacks=[Rises(), stop, *callbacks], **HELD,
            **QUIET, **more,
        )  # fmt: skip
        return history, model

    expected, whole = fitted()
    with pytest.raises(KeyboardInterrupt):
        fitted([Cut(tmp_path / "cut.h5", ("batch", 0, 3))])
    found, again = fitted(resume_from=tmp_path / "cut.h5")
    assert [e["batches"] for e in expected.validations] == [2, 4]
    assert [e["batches"] for e in found.validations] == [2, 4]
    assert_same_weights(again, whole)


def test_the_history_of_a_loaded_model_has_its_validations(tmp_path):
    model = linear()
    model.fit(X, Y, validation_freq=0.5, **HELD, **QUIET)
    model.save(tmp_path / "m.h5")
    again = linear()
    again.load(tmp_path / "m.h5")
    assert again.history.validations == model.history.validations


def test_optuna_gets_a_value_an_epoch():
    reported = []

    class Trial:
        def report(self, value, step):
            reported.append(step)

        def should_prune(self):
            return False

    linear().fit(
        X, Y, epochs=2, validation_freq=0.5, callbacks=OptunaPruning(Trial()), **HELD, **QUIET
    )
    assert reported == [0, 1]


def test_the_progress_bar_shows_the_training_again_after_a_validation(capsys):
    linear().fit(X, Y, batch_size=4, validation_freq=0.2, verbose=1, **HELD)
    shown = capsys.readouterr().out
    assert "val" in shown and list(itertools.islice(shown.splitlines(), 1))
