"""A training that was cut anywhere and resumed ends as the whole one, with each callback."""

import math

import pytest
import torch

from fitkit import callbacks, loggers
from fitkit.callbacks import Callback, EarlyStopping, ModelCheckpoint
from tests.nets import DropPath, dense, regression
from tests.reference import assert_same_weights, compiled

from .test_all_callbacks import NEEDED, SHIPPED, _in_a_folder  # noqa: F401

X, Y = regression(24, 2)
BATCHES, EPOCHS = 4, 3

LEFT_OUT = ("TensorBoard", "LambdaCallback", "History", "OptunaPruning")
MORE = {
    "EMA of every third update": lambda: callbacks.EMA(0.5, update_every_n_steps=3),
    "LearningRateMonitor of steps": lambda: callbacks.LearningRateMonitor("step"),
    "DetectLossSpike that is sensitive": lambda: callbacks.DetectLossSpike(
        0.1, window=4, check_every=3
    ),
    "tokens": lambda: callbacks.ThroughputMonitor(tokens=7),
    "Profiler that logs": lambda: callbacks.Profiler(0, log=True),
}
KINDS = [*(name for name in SHIPPED if name not in LEFT_OUT), *MORE]


def made(kind):
    return MORE[kind]() if kind in MORE else getattr(callbacks, kind)(**NEEDED.get(kind, {}))


def fit(*given, resume_from=None, epochs=EPOCHS, **options):
    torch.manual_seed(0)
    model = compiled(dense(2, 4, 1).append(DropPath()), "adam", "mse", learning_rate=0.05)
    history = model.fit(
        X, Y, batch_size=6, epochs=epochs, validation_data=(X, Y), verbose=0,
        callbacks=list(given), resume_from=resume_from, **options,
    )  # fmt: skip
    return model, history


TIMES = ("seconds/", "cpu", "gpu", "batches_per", "samples_per", "tokens_per")


def timeless(history):
    """The values, and of times only how many there are."""
    return {
        name: len(values) if name.startswith(TIMES) else values
        for name, values in history.history.items()
    }


def attributes(callback):
    """The public attributes, which a resumed training has as the whole one."""
    return {
        name: value
        for name, value in vars(callback).items()
        if not name.startswith(("_", "on_")) and name not in ("model", "params", "data")
        and isinstance(value, (int, float, str, list)) and not callable(value)
    }  # fmt: skip


PATHS = ("last_model_path", "best_model_path", "filepath", "filename", "backup_dir")
OF_TIMES = ("epochs", "callbacks", "seconds", "ranks", "wall_s")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_resumed_from_any_batch_is_the_whole_one(kind, tmp_path):
    whole = made(kind)
    by_step = ModelCheckpoint(str(tmp_path / "s{step}-{batch}.h5"), save_freq=1)
    if kind == "BackupAndRestore":
        whole = made("Timer")  # it saves; a file of another callback wouldn't be used
    of_epochs = ModelCheckpoint(str(tmp_path / "e{epoch}.h5"))
    expected, history = fit(whole, by_step, of_epochs)
    files = sorted(tmp_path.glob("*-*.h5")) + sorted(tmp_path.glob("e*.h5"))
    assert len(files) > len(history.epoch)
    # Each kind goes on from every fourth place, all kinds together from each.
    for path in files[KINDS.index(kind) % 4 :: 4]:
        again = made("Timer" if kind == "BackupAndRestore" else kind)
        model, resumed = fit(again, resume_from=path)
        assert resumed.epoch == history.epoch, path.name
        assert timeless(resumed) == timeless(history), path.name
        assert_same_weights(expected, model)
        found = attributes(again)
        for name, value in attributes(whole).items():
            if name not in (*PATHS, *OF_TIMES):
                assert found[name] == value, (path.name, name)


class Logs(Callback):
    """Logs `v`, which improves once."""

    def on_epoch_end(self, epoch, logs):
        logs["v"] = [5.0, 6.0, 6.0, 6.0, 6.0][epoch]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping("v", patience=2, mode="min", restore_best_weights=True),
        lambda: EarlyStopping("v", patience=9, mode="min", divergence_threshold=5.5),
        lambda: EarlyStopping("v", patience=9, mode="max", stopping_threshold=5.5),
    ],
    ids=["patience", "divergence", "threshold"],
)
def test_one_that_ended_in_the_epoch_of_the_checkpoint_has_ended(make, tmp_path):
    stop = make()
    saves = ModelCheckpoint(str(tmp_path / "e{epoch}.h5"))
    whole, history = fit(Logs(), stop, saves, epochs=5)
    assert 1 < len(history.epoch) < 5
    ended = []

    class Ends(Callback):
        def on_train_end(self, logs=None):
            ended.append(logs["v"])

    for path in sorted(tmp_path.glob("e*.h5")):
        again = make()
        model, resumed = fit(Logs(), again, Ends(), resume_from=path, epochs=5)
        assert (resumed.epoch, resumed.history) == (history.epoch, history.history)
        assert (again.stopped_epoch, again.best) == (stop.stopped_epoch, stop.best)
        assert_same_weights(whole, model)
    assert ended == [6.0] * len(history.epoch)


def test_it_goes_on_with_more_patience(tmp_path):
    path = tmp_path / "last.h5"
    fit(Logs(), EarlyStopping("v", patience=2, mode="min"), ModelCheckpoint(path), epochs=5)
    stop = EarlyStopping("v", patience=3, mode="min")
    assert fit(Logs(), stop, resume_from=path, epochs=5)[1].epoch == [0, 1, 2, 3]


class Breaks(Callback):
    """Makes the loss NaN after an update."""

    def on_train_batch_end(self, batch, logs):
        if self.model.global_step == 6:
            with torch.no_grad():
                next(iter(self.model.parameters())).fill_(math.nan)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: callbacks.TerminateOnNaN(check_every=1),
        lambda: callbacks.DetectNonFinite("stop", check_every=2),
        lambda: callbacks.DetectLossSpike(action="stop", check_every=1),
    ],
)
def test_so_has_one_that_ended_within_an_epoch(make, tmp_path):
    saves = ModelCheckpoint(str(tmp_path / "s{step}.h5"), save_freq=1)
    _, history = fit(Breaks(), make(), saves)
    assert history.epoch == [0, 1]
    last = max(int(path.stem[1:]) for path in tmp_path.glob("s*.h5"))
    assert last < BATCHES * EPOCHS
    model, resumed = fit(make(), resume_from=tmp_path / f"s{last}.h5")
    assert resumed.epoch == history.epoch
    assert model.global_step == last


def test_a_timer_has_ended_unless_it_has_more_time(tmp_path):
    class Late(callbacks.Timer):
        def __init__(self, limit):
            super().__init__({"seconds": limit}, verbose=False)
            self._clock = iter(range(10_000)).__next__

    fit(Late(6), ModelCheckpoint(str(tmp_path / "s{step}.h5"), save_freq=1))
    last = max(int(path.stem[1:]) for path in tmp_path.glob("s*.h5"))
    path = tmp_path / f"s{last}.h5"
    assert fit(Late(6), resume_from=path)[0].global_step == last < BATCHES * EPOCHS
    assert fit(Late(10_000), resume_from=path)[0].global_step == BATCHES * EPOCHS


@pytest.mark.parametrize("update_freq", ["batch", 3])
def test_a_logger_continues_with_the_losses_that_it_had_not_written(update_freq, tmp_path):
    def logger(name):
        return loggers.CSV(tmp_path / name, update_freq=update_freq)

    saves = ModelCheckpoint(str(tmp_path / "s{step}.h5"), save_freq=5)
    fit(logger("whole.csv"), saves)
    for step in (5, 10):
        fit(logger("cut.csv"), resume_from=tmp_path / f"s{step}.h5")
        rows = [(tmp_path / name).read_text().splitlines() for name in ("whole.csv", "cut.csv")]
        # What was written before the cut is in another file here.
        assert rows[1][1:] == rows[0][-len(rows[1]) + 1 :]
        (tmp_path / "cut.csv").unlink()
