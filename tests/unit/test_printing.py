"""Trainings whose standard streams nobody reads, as a daemon's, are those that somebody reads."""

import io
import subprocess
import sys
import warnings

import pytest
import torch

from fitkit.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, ProgressBar
from fitkit.errors import warn
from fitkit.printing import say
from tests import reference
from tests.limits import patience
from tests.nets import linear, regression

X, Y = regression(16, 2)


class NobodyReads(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


class Closed(io.StringIO):
    def __init__(self):
        super().__init__()
        self.close()


class Full(io.StringIO):
    def flush(self):
        raise OSError(28, "No space left on device")


def of_few_characters():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


@pytest.mark.parametrize("stream", [NobodyReads, Closed, Full, of_few_characters, lambda: None])
@pytest.mark.parametrize("verbose", [1, 2])
def test_a_training_goes_on(stream, verbose, tmp_path, monkeypatch):
    model = reference.compiled(linear(2, 1), loss="mse")
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.setattr(sys, "stderr", stream())
    said = LambdaCallback(on_epoch_end=lambda epoch, logs: model.print("2 µs …", epoch))
    history = model.fit(
        X, Y, epochs=3, verbose=verbose, shuffle=False, validation_data=(X, Y), callbacks=[
            ModelCheckpoint(tmp_path / "a.h5", verbose=1, save_best_only=True),
            EarlyStopping(patience=1, verbose=1),
            ProgressBar(verbose), said,
        ],
    )  # fmt: skip
    model.evaluate(X, Y, verbose=verbose)
    model.predict(X, verbose=verbose)
    assert len(history.epoch) == 3


def test_a_stream_that_closes_within_a_training_ends_its_bar_alone(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    model = reference.compiled(linear(2, 1), loss="mse")
    closing = LambdaCallback(on_epoch_begin=lambda epoch, logs: file.close() if epoch else None)
    assert len(model.fit(X, Y, epochs=3, verbose=2, callbacks=closing).epoch) == 3


def test_what_a_stream_lacks_is_replaced_and_other_errors_stay(monkeypatch):
    file = of_few_characters()
    monkeypatch.setattr(sys, "stdout", file)
    say("2 µs …", end="|")
    assert file.buffer.getvalue() == b"2 ?s ?|"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="closed file"):
            warn("It mentions a closed file.")


DAEMON = """
import sys, torch, fitkit
x = torch.ones(16, 2)
model = fitkit.Model(torch.nn.Linear(2, 1))
model.compile("sgd", "mse", accelerator="cpu", devices=2)
model.fit(x, x.sum(1, keepdim=True), verbose=1, batch_size=4)
for sys.stderr in (None, open(sys.argv[1] + ".log", "w")):
    fitkit.errors.warn("said to nobody")
    if sys.stderr:
        sys.stderr.close()
        fitkit.errors.warn("said to a closed file")
torch.save(model.history.history, sys.argv[1])
"""


def test_ranks_train_in_a_process_that_began_without_streams(tmp_path):
    path = tmp_path / "history.pt"
    words = [sys.executable, "-c", DAEMON, str(path)]
    shell = ["sh", "-c", 'exec "$0" "$@" >&- 2>&- <&-', *words]
    subprocess.run(shell, check=True, timeout=patience(60))
    assert len(torch.load(path)["loss"]) == 1
