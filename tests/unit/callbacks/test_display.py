"""Where progress is shown: files, notebooks, a real terminal, and which of them is meant."""

import importlib.util
import io
import os
import re
import select
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fitkit.arguments import chosen_verbose
from fitkit.callbacks.display import display_for, encodable, in_notebook
from fitkit.callbacks.progress import ProgressBar
from fitkit.errors import ConfigurationError
from tests.limits import patience

from .progress_runs import CONTROL, Clock, Logs, fit, one_pass, terminal, written

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("CI", "FITKIT_VERBOSE", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    Logs.reads = 0


def test_the_environment_replaces_auto_alone(monkeypatch):
    monkeypatch.setenv("FITKIT_VERBOSE", "0")
    assert chosen_verbose("auto") == 0
    assert chosen_verbose(1) == 1
    assert chosen_verbose(True) == 1
    monkeypatch.setenv("FITKIT_VERBOSE", "loud")
    with pytest.raises(ConfigurationError, match="FITKIT_VERBOSE='loud'"):
        chosen_verbose("auto")


@pytest.mark.parametrize("verbose", [3, -1, "bar", 1.0, None])
def test_another_verbose_is_refused(verbose):
    with pytest.raises(ConfigurationError, match="verbose"):
        chosen_verbose(verbose)


# ------------------------------------------------------------------ no terminal


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_a_file_gets_one_plain_line_an_epoch(verbose, monkeypatch):
    file, clock = io.StringIO(), Clock()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setenv("FORCE_COLOR", "1")
    fit(ProgressBar(verbose, clock=clock), clock, validation=2, epochs=10)
    lines = file.getvalue().splitlines()
    assert lines[0] == (
        "Epoch  1/10 - 600ms - loss 0.2500 - accuracy 0.9500 - val_loss 0.5000 - "
        "val_accuracy 0.8000"
    )
    assert len(lines) == 10
    assert file.getvalue().isascii() and "\x1b" not in file.getvalue()
    assert Logs.reads == 0


def test_a_long_epoch_in_a_file_gives_a_sign_of_life_each_minute(monkeypatch):
    file, clock = io.StringIO(), Clock()
    monkeypatch.setattr(sys, "stdout", file)
    fit(ProgressBar("auto", clock=clock), clock, epochs=1, steps=15, step_s=10)
    first, second, last = file.getvalue().splitlines()
    assert first == "Epoch 1/1 -  6/15 - loss 0.3021 - accuracy 0.9000 - 10 s/step - 1:30 left"
    assert "12/15" in second and last.startswith("Epoch 1/1 - 2:30 - loss 0.2500")
    file.truncate(0)
    fit(ProgressBar(2, clock=clock), clock, epochs=1, steps=15, step_s=10)
    assert len(file.getvalue().splitlines()) == 1


def test_rich_is_not_imported_where_no_bar_is_drawn():
    code = (
        "import sys, fitkit, torch; from fitkit.callbacks import CallbackList, ProgressBar\n"
        "bar, model = ProgressBar(1), fitkit.Model(torch.nn.Identity())\n"
        "with CallbackList(bar).running(model, {'stage': 'fit', 'epochs': 1}):\n"
        "    bar.on_train_begin({}); bar.on_epoch_begin(0, {})\n"
        "    bar.on_epoch_end(0, {'loss': 1.0}); bar.on_train_end({})\n"
        "import fitkit.extras.summary; assert 'rich' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patience(60)
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Epoch 1/1 - ")


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "verbose", "kind"),
    [
        ({}, "auto", "TerminalDisplay"),
        ({"CI": "true"}, "auto", "LinesDisplay"),
        ({"CI": "true"}, 1, "TerminalDisplay"),
        ({"CI": "false"}, "auto", "TerminalDisplay"),
        ({"TERM": "dumb"}, 1, "LinesDisplay"),
        ({}, 2, "LinesDisplay"),
    ],
)
def test_a_bar_appears_where_one_can_be_drawn(environment, verbose, kind, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", FakeTerminal())
    assert type(display_for(verbose)).__name__ == kind


def test_no_stdout_no_display(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert display_for(1) is None


def test_text_that_an_encoding_lacks_is_replaced():
    assert encodable("génie", "ascii") == "g?nie"
    assert encodable("génie", "utf-8") == "génie"
    console, clock = terminal(80, "ascii"), Clock()
    bar = ProgressBar(1, console=console, clock=clock)
    one_pass(bar, clock)
    bar.on_test_begin({})
    bar.on_test_end({"précision": 0.5})
    assert "pr?cision 0.5000" in CONTROL.sub("", written(console))


# ------------------------------------------------------------------ a notebook


@pytest.fixture
def notebook(monkeypatch):
    """An IPython of our own; gives the list of displays, each with all it showed."""
    displays = []

    class Handle(list):
        def update(self, content, raw):
            assert raw
            self.append(content)

    def show(content, raw, display_id):
        assert raw and display_id
        displays.append(Handle([content]))
        return displays[-1]

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = show
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return displays


def test_a_notebook_is_told_from_ipython_in_a_terminal(notebook, monkeypatch):
    assert in_notebook()
    sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace()
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not in_notebook()


def test_a_notebook_has_one_display_that_is_updated_seldom(notebook, capsys):
    clock = Clock()
    fit(ProgressBar("auto", clock=clock), clock, epochs=300, steps=5, step_s=0.001, validation=1)
    (shown,) = notebook
    assert len(shown) < 20  # 1.8 seconds
    assert max(len(content["text/plain"].splitlines()) for content in shown[:-1]) <= 52
    final = shown[-1]["text/plain"].splitlines()
    assert len(final) == 300
    assert final[-1].startswith("Epoch 300/300 • 6ms • loss 0.2500")
    assert shown[-1]["text/html"].startswith("<pre")
    assert capsys.readouterr().out == ""


def test_a_short_evaluate_leaves_nothing_in_a_notebook(notebook):
    clock = Clock()
    one_pass(ProgressBar(clock=clock), clock)
    assert notebook == []


# ------------------------------------------------------------------ a real terminal

SCRIPT = """
import contextlib, sys, time, types
from fitkit.callbacks.progress import ProgressBar
contexts = types.SimpleNamespace(cleanups=[contextlib.ExitStack()])
record = types.SimpleNamespace(hidden_names=set(), contexts=contexts)
ProgressBar.model = types.SimpleNamespace(is_global_zero=True, world_size=1, _fitkit=record)
def evaluate(verbose):
    bar = ProgressBar()
    bar.params = {"stage": "evaluate", "steps": 2, "verbose": verbose}
    bar.on_test_begin({}); bar.on_test_batch_end(0, {}); bar.on_test_end({"loss": 0.5}); bar.close()
bar = ProgressBar()
bar.params = {"stage": "fit", "epochs": 2, "steps": 40, "verbose": "auto"}
try:
    bar.on_train_begin({})
    for epoch in range(2):
        bar.on_epoch_begin(epoch, {})
        for batch in range(40):
            time.sleep(0.1 if epoch and batch > 20 else 0.01)  # a busy machine draws late
            if batch == 20: print("printed"); evaluate("auto"); evaluate(1)
            if epoch == 1 and batch == 30: raise KeyboardInterrupt
            bar.on_train_batch_end(batch, {"loss": 0.25})
        bar.on_epoch_end(epoch, {"loss": 0.25})
except KeyboardInterrupt:
    pass
finally:
    bar.close()
print("end", type(sys.stdout).__name__)
"""


@pytest.mark.skipif(importlib.util.find_spec("pty") is None, reason="needs pseudo-terminals")
def test_in_a_real_terminal_prints_and_nested_calls_leave_the_bar_whole():
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    text = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            text += os.read(ours, 65536)
        except OSError:  # the other end has closed
            break
    os.close(ours)
    assert process.wait(30) == 0
    screen = on_screen(text.decode())
    assert screen[0] == "printed"
    assert re.fullmatch(r"Evaluate - \d+ms - loss 0.5000", screen[1])
    assert re.fullmatch(r"Epoch 1/2 • (\d+ms|[\d.]+s) • loss 0.2500", screen[2])
    assert screen[3] == "printed"
    assert re.fullmatch(r"Epoch 2/2 ━+╸?─+ 30/40 • loss 0.2500 • 0:0\d left", screen[5])
    assert screen[6:] == ["end TextIOWrapper"]
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")


def on_screen(text):
    """What a terminal shows after those bytes: just what rich's live display needs."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\r\n\x1b]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = lines[row].ljust(column)[:column] + part
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]
