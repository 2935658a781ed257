"""The progress bar: what it shows, how often, and that it leaves the terminal as it was."""

import re
import sys
import types

import pytest
import torch

import fitkit
from fitkit.callbacks.progress import Pace, ProgressBar
from fitkit.errors import ConfigurationError

from .progress_runs import CONTROL, MODEL, Clock, Logs, fit, one_pass, terminal, visible, written


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("CI", "FITKIT_VERBOSE", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    Logs.reads = 0


def test_the_speed_leaves_out_the_step_after_a_pause():
    pace = Pace()
    pace.update(1, 10.0)  # took ten seconds of compiling
    assert pace.steps_per_s is None
    pace.update(11, 11.0)
    assert pace.steps_per_s == pytest.approx(10)
    pace.pause()
    pace.update(1, 500.0)
    assert pace.steps_per_s == pytest.approx(10)


# ------------------------------------------------------------------ a terminal


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_a_terminal_gets_a_bar_that_never_wraps_and_a_line_an_epoch(width, encoding):
    console, clock = terminal(width, encoding), Clock()
    fit(ProgressBar(1, console=console, clock=clock), clock, validation=4)
    text = written(console)
    pieces = visible(text)
    assert max(map(len, pieces)) <= width
    assert any("validating 2/4" in piece for piece in pieces)
    assert any("loss 0.3021" in piece and "/10" in piece for piece in pieces)
    kept = " ".join(pieces[pieces.index(next(p for p in pieces if "0.5000" in p)) - 1 :])
    for word in ("Epoch 1/2", "Epoch 2/2", "700ms", "loss 0.2500", "accuracy 0.9500"):
        assert word in kept
    if width == 200:
        assert "val_accuracy 0.8000" in kept


def test_the_bar_is_drawn_ten_times_a_second_and_logs_are_read_only_then():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    fit(bar, clock, epochs=1, steps=1000, step_s=0.001)
    assert 8 <= Logs.reads <= 11


def test_many_short_epochs_share_the_drawing():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    fit(bar, clock, epochs=200, steps=5, step_s=0.001)
    assert Logs.reads <= 11
    assert sum("accuracy 0.9500" in piece for piece in visible(written(console))) == 200


def test_a_step_costs_one_look_at_the_clock():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    fit(bar, clock, epochs=1, steps=1000, step_s=0.0)
    assert clock.looks < 1020


def test_a_slow_terminal_is_drawn_less_often():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    real = console.file.write

    def slow(text):
        clock.now += 0.05
        return real(text)

    console.file.write = slow
    fit(bar, clock, epochs=1, steps=1000, step_s=0.01)
    assert Logs.reads < 12


def test_waiting_for_a_device_does_not_make_the_bar_rarer():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)

    class SlowLogs(Logs):
        def items(self):
            clock.now += 2.0
            return super().items()

    bar.model = MODEL
    bar.params = {"stage": "fit", "epochs": 1, "steps": 10}
    bar.on_train_begin({})
    bar.on_epoch_begin(0, {})
    for batch in range(10):
        clock.now += 0.2
        bar.on_train_batch_end(batch, SlowLogs(loss=1.0))
    assert SlowLogs.reads == 10
    bar.close()


def test_steps_counted_in_the_first_epoch_are_used_in_the_second():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    fit(bar, clock, steps=10, step_s=0.2, known=False)
    pieces = visible(written(console))
    assert any(p.startswith("Epoch 1/2 4 steps") and "elapsed" in p for p in pieces)
    assert any(p.startswith("Epoch 2/2 ━") and " 4/10 " in p and "left" in p for p in pieces)


def test_resuming_inside_an_epoch_does_not_fake_a_speed():
    console, clock = terminal(200), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    bar.model = MODEL
    bar.params = {"stage": "fit", "epochs": 1, "steps": 1000}
    bar.on_train_begin({})
    bar.on_epoch_begin(0, {})
    for batch in range(900, 920):
        clock.now += 0.1
        bar.on_train_batch_end(batch, Logs(loss=1.0))
    bar.close()
    assert "10 steps/s" in visible(written(console))[-2]


def test_an_interrupted_bar_stays_with_the_last_count_and_close_may_come_twice():
    console, clock = terminal(), Clock()
    stdout = sys.stdout
    bar = ProgressBar(1, console=console, clock=clock)

    def interrupt(epoch, batch):
        if batch == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(bar, clock, steps=10, step_s=0.04, inside=interrupt)
    assert sys.stdout is not stdout
    bar.close()
    bar.close()
    text = written(console)
    assert sys.stdout is stdout
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert " 7/10 " in [piece for piece in visible(text) if piece][-1]


def test_an_epoch_without_batches_leaves_no_bar():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    bar.model = MODEL
    bar.params = {"stage": "fit", "epochs": 3, "steps": 4}
    bar.on_train_begin({})
    bar.on_epoch_begin(1, {})
    bar.on_train_end({})
    assert written(console).endswith("\x1b[1A\x1b[2K")


def test_what_is_printed_meanwhile_comes_above_the_bar():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    fit(bar, clock, epochs=1, inside=lambda epoch, batch: batch == 5 and print("hello [b]you"))
    assert "hello [b]you" in visible(written(console))


def test_a_terminal_that_has_gone_does_not_end_the_training(monkeypatch):
    console, clock = terminal(), Clock()
    stdout = sys.stdout
    bar = ProgressBar(1, console=console, clock=clock)

    def gone(epoch, batch):
        if batch == 5:
            monkeypatch.setattr(console, "print", broken)

    def broken(*args, **kwargs):
        raise OSError(5, "Input/output error")

    fit(bar, clock, inside=gone)
    assert sys.stdout is stdout


@pytest.mark.parametrize("verbose", [1, 2])
def test_one_bar_serves_several_calls(verbose):
    console, clock = terminal(), Clock()
    bar = ProgressBar(verbose, console=console, clock=clock)
    fit(bar, clock)
    one_pass(bar, clock)
    fit(bar, clock)
    kept = visible(written(console))
    assert sum("accuracy 0.9500" in piece for piece in kept) == 4
    assert any(re.match(r"Evaluate . 500ms", piece) for piece in kept)


# ------------------------------------------------------------------ evaluate, predict, verbose


@pytest.mark.parametrize("stage", ["evaluate", "predict"])
def test_auto_says_nothing_within_a_second(stage):
    console, clock = terminal(), Clock()
    one_pass(ProgressBar(console=console, clock=clock), clock, stage=stage)
    assert written(console) == ""


def test_auto_shows_a_long_evaluate_and_keeps_its_result():
    console, clock = terminal(), Clock()
    one_pass(ProgressBar(console=console, clock=clock), clock, steps=40)
    pieces = [piece for piece in visible(written(console)) if piece]
    assert pieces[0].startswith("Evaluate ━") and "21/40" in pieces[0]
    assert pieces[-1] == "Evaluate • 2.00s • loss 0.5000"


def test_auto_shows_a_long_predict_and_takes_the_bar_away():
    console, clock = terminal(), Clock()
    one_pass(ProgressBar(console=console, clock=clock), clock, stage="predict", steps=40)
    assert "Predict ━" in CONTROL.sub("", written(console))
    assert written(console).endswith("\x1b[1A\x1b[2K")
    assert Logs.reads == 0  # a prediction's logs are its outputs


def test_one_shows_short_calls_too_and_zero_none():
    console, clock = terminal(), Clock()
    one_pass(ProgressBar(1, console=console, clock=clock), clock, stage="predict", steps=2)
    assert "Predict • 100ms" in visible(written(console))
    console = terminal()
    fit(ProgressBar(0, console=console, clock=clock), clock)
    assert written(console) == ""


def test_the_call_s_verbose_counts_where_the_bar_has_none():
    console, clock = terminal(), Clock()
    one_pass(ProgressBar(console=console, clock=clock), clock, verbose=2)
    assert written(console) == "Evaluate - 500ms - loss 0.5000\n"


def test_only_rank_0_shows_anything():
    console, clock = terminal(), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    bar.model = types.SimpleNamespace(**{**vars(MODEL), "is_global_zero": False})
    fit(bar, clock)
    assert written(console) == ""


def test_a_bar_refuses_a_wrong_rate():
    with pytest.raises(ConfigurationError, match="refresh_per_second"):
        ProgressBar(refresh_per_second=0)


def test_a_value_logged_with_prog_bar_false_is_in_the_history_and_not_on_the_line(capsys):
    class Own(fitkit.Model):
        def training_step(self, batch):
            loss = self(batch).square().mean()
            self.log("shown_here", loss)
            self.log("kept_apart", loss, prog_bar=False, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch):
            self.log("kept_apart", 1.0, prog_bar=False)

    model = Own(torch.nn.Linear(3, 1))
    model.compile("sgd")
    data = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=4)
    history = model.fit(data, validation_data=data, verbose=2)
    line = capsys.readouterr().out
    assert "shown_here" in line and "kept_apart" not in line
    assert {"kept_apart_epoch", "val_kept_apart"} <= set(history.history)
