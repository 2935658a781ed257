"""Runs for the tests of progress: hooks called by hand, a clock that they move, a terminal."""

import contextlib
import io
import re
from types import SimpleNamespace

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


RECORD = SimpleNamespace(
    hidden_names=set(), contexts=SimpleNamespace(cleanups=[contextlib.ExitStack()])
)
MODEL = SimpleNamespace(is_global_zero=True, world_size=1, _fitkit=RECORD)
"""What a bar asks its model for."""


class Clock:
    """A clock that somebody else moves; every look at it is counted."""

    def __init__(self):
        self.now = 100.0
        self.looks = 0

    def __call__(self):
        self.looks += 1
        return self.now


class Logs(dict):
    """Logs that count how often they are read."""

    reads = 0

    def items(self):
        type(self).reads += 1
        return super().items()


def terminal(width=80, encoding="utf-8"):
    from rich.console import Console

    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    return Console(file=file, force_terminal=True, width=width, force_jupyter=False)


def written(console):
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.encoding)


def visible(text):
    """All that was drawn, a piece for each time the cursor went back or down."""
    return [piece.rstrip() for piece in re.split(r"[\r\n]+", CONTROL.sub("", text))]


def fit(bar, clock, *, epochs=2, steps=10, validation=0, step_s=0.05, known=True, inside=None):
    """The hooks of a fit."""
    bar.model = getattr(bar, "model", MODEL)
    bar.params = {
        "stage": "fit",
        "epochs": epochs,
        "steps": steps if known else None,
        "validation_steps": validation or None,
        "batch_size": 32,
        "samples": None,
        "verbose": "auto",
    }
    bar.on_train_begin({})
    for epoch in range(epochs):
        bar.on_epoch_begin(epoch, {})
        for batch in range(steps):
            clock.now += step_s
            if inside is not None:
                inside(epoch, batch)
            bar.on_train_batch_end(batch, Logs(loss=0.3021, accuracy=0.9))
        logs = {"loss": 0.25, "accuracy": 0.95}
        if validation:
            bar.on_test_begin({})
            for batch in range(validation):
                clock.now += step_s
                bar.on_test_batch_end(batch, Logs(loss=0.5))
            bar.on_test_end({"loss": 0.5})
            logs |= {"val_loss": 0.5, "val_accuracy": 0.8}
        bar.on_epoch_end(epoch, logs)
    bar.on_train_end({})


def one_pass(bar, clock, *, stage="evaluate", steps=10, step_s=0.05, verbose="auto"):
    """The hooks of an evaluate or a predict."""
    bar.model = MODEL
    bar.params = {"stage": stage, "steps": steps, "batch_size": 32, "verbose": verbose}
    name = "test" if stage == "evaluate" else "predict"
    getattr(bar, f"on_{name}_begin")({})
    for batch in range(steps):
        clock.now += step_s
        getattr(bar, f"on_{name}_batch_end")(batch, Logs(loss=0.5))
    getattr(bar, f"on_{name}_end")({"loss": 0.5})
