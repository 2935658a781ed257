"""Lines of progress: numbers as people read them, what is left out where it is narrow."""

import pytest

from fitkit.callbacks.display import (
    Moment,
    clock_time,
    duration,
    number,
    short_count,
    shown_metrics,
    speed,
)
from fitkit.extras.live_displays import ResultLines, bar_line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.3021, "0.3021"),
        (0.9, "0.9000"),
        (1.0, "1.000"),
        (12.345, "12.35"),
        (0.0, "0.000"),
        (1e-5, "1e-05"),
        (0.001, "0.001"),
        (0.0123456, "0.01235"),
        (12345.6, "12346"),
        (999.96, "1000"),
        (1234567890.0, "1.235e+09"),
        (-0.5, "-0.5000"),
        (7, "7"),
        (10**9, "1e+09"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_four_significant_digits(value, text):
    assert number(value) == text


def test_times_counts_and_speeds_read_as_people_write_them():
    assert [duration(s) for s in (0.0052, 0.9999, 9.99, 59.9, 62, 3723)] == [
        "5ms", "1.00s", "9.99s", "59.9s", "1:02", "1:02:03",
    ]  # fmt: skip
    assert [clock_time(s) for s in (0, 7, 3600, 200_000)] == [
        "0:00", "0:07", "1:00:00", "2d 07:33:20",
    ]  # fmt: skip
    assert [short_count(n) for n in (7.5, 8, 812, 1312, 26_000, 999_999, 4.1e6)] == [
        "7.5", "8", "812", "1.3k", "26k", "1.0M", "4.1M",
    ]  # fmt: skip
    assert [speed(n) for n in (812, 1.5, 0.25)] == ["812 steps/s", "1.5 steps/s", "4 s/step"]


def test_only_numbers_and_short_words_of_the_logs_are_shown():
    import torch

    logs = {"a": torch.tensor(0.5), "b": [1, 2], "c": "cosine", "d": None, "e": "x" * 30}
    logs["f"] = torch.zeros(3)
    assert shown_metrics(logs.items()) == [("a", "0.5000"), ("c", "cosine")]


MOMENT = Moment(
    "Epoch 3/10", 40, 57, "", [("loss", "0.3021"), ("accuracy", "0.9012")], 812.0, 25984.0, 3.0
)


def test_a_wide_line_says_everything():
    assert bar_line(MOMENT, 200).plain == (
        "Epoch 3/10 ━━━━━━━━━━━━━━━━━━━━━───────── 40/57 • loss 0.3021 • accuracy 0.9012 • "
        "812 steps/s • 26k samples/s • 0:00 left"
    )


def test_a_narrow_line_leaves_out_what_matters_least():
    assert bar_line(MOMENT, 80).plain == (
        "Epoch 3/10 ━━━━━━━─── 40/57 • loss 0.3021 • accuracy 0.9012 • 0:00 left"
    )
    assert bar_line(MOMENT, 50).plain == "Epoch 3/10 40/57 • loss 0.3021 • 0:00 left"
    assert bar_line(MOMENT, 20).plain == "Epoch 3/10 40/57"


def test_an_ascii_line_has_nothing_else():
    assert bar_line(MOMENT, 80, ascii_only=True).plain.isascii()


def test_no_width_is_exceeded():
    for width in range(1, 160):
        assert len(bar_line(MOMENT, width).plain) <= width
        for line in ResultLines().lines("Epoch 3/10", 2.0, [("loss", "0.1")] * 9, width):
            assert len(line.plain) <= width


def test_an_unknown_number_of_steps_shows_a_counter_and_no_time_left():
    line = bar_line(Moment("Epoch 1/2", 40, None, elapsed_s=62), 80).plain
    assert line == "Epoch 1/2 40 steps • 1:02 elapsed"


def test_a_result_that_is_too_wide_keeps_every_number_and_its_style():
    results = ResultLines()
    names = ("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate")
    metrics = [(name, "0.1234") for name in names]
    lines = [line.plain for line in results.lines("Epoch 1/2", 2.1, metrics, 80)]
    assert lines == [
        "Epoch 1/2 • 2.10s • loss 0.1234 (val 0.1234) • accuracy 0.1234 (val 0.1234)",
        "    learning_rate 0.1234",
    ]
    (line,) = results.lines("Epoch 2/2", 2.1, [("loss", "1"), ("val_loss", "2")], 80)
    assert line.plain == "Epoch 2/2 • 2.10s • loss 1 (val 2)"


def test_nan_is_marked():
    line = bar_line(Moment("E", 1, 2, metrics=[("loss", "nan")]), 80)
    assert [line.plain[s.start : s.end] for s in line.spans if s.style == "bold red"] == ["nan"]


@pytest.mark.parametrize("width", range(8, 90))
def test_letters_that_take_two_columns_are_counted_as_two(width):
    from rich.cells import cell_len

    moment = Moment("Epoch 1/2", 3, 64, "", [("损失", "0.3021"), ("平均准确率", "0.9000")], 12.0)
    line = bar_line(moment, width).plain
    assert cell_len(line) <= width
    # Wide letters or others: what fits is the same.
    other = Moment("Epoch 1/2", 3, 64, "", [("loss", "0.3021"), ("accuracy10", "0.9000")], 12.0)
    if width >= 16:
        assert cell_len(line) == len(bar_line(other, width).plain)
    values = [*moment.metrics, ("val_损失", "0.1")]
    for text in ResultLines().lines("Epoch 1/2", 1.0, values, width):
        assert cell_len(text.plain) <= width
