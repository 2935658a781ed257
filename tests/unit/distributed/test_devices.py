"""The devices table, with pretended machines."""

import pytest
import torch

from fitkit.accelerators import device_for
from fitkit.distributed.devices import (
    Machine,
    choose_kind,
    older_spelling,
    parse_devices,
)
from fitkit.distributed.resolve import resolve_strategy
from fitkit.errors import ConfigurationError

FOUR = Machine(cuda_count=4)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("auto", [0, 1, 2, 3]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        (" -1 ", [0, 1, 2, 3]),
        (3, [0, 1, 2]),
        ("3", [0, 1, 2]),
        (" 3 ", [0, 1, 2]),
        (1, [0]),
        ("3,", [3]),
        ([3], [3]),
        ([0], [0]),
        ("0,", [0]),
        ([1, 3], [1, 3]),
        ((1, 3), [1, 3]),
        ("1, 3", [1, 3]),
        ("1,3,", [1, 3]),
        ([3, 1], [3, 1]),
    ],
)
def test_devices_are_understood(devices, expected):
    assert list(parse_devices(devices, "cuda", FOUR)) == expected


@pytest.mark.parametrize(
    "devices",
    [
        0,
        "0",
        [],
        (),
        "",
        " ",
        ",",
        True,
        False,
        None,
        1.0,
        -2,
        "-2",
        5,
        "5",
        [4],
        [-1],
        "-1,",
        [0, 0],
        "0,0",
        [True],
        [1.0],
        ["0"],
        "cuda:1",
        "0-2",
        "all",
        "[0, 1]",
        "0x1",
        "1.0",
        {0},
        range(2),
    ],
)
def test_everything_else_is_refused_with_what_is_visible(devices):
    with pytest.raises(ConfigurationError, match=r"Visible cuda devices: 4") as caught:
        parse_devices(devices, "cuda", FOUR)
    assert repr(devices) in str(caught.value)


@pytest.mark.parametrize("devices", [1, "1", "auto"])
def test_on_a_cpu_a_number_is_a_number_of_processes(devices):
    assert parse_devices(devices, "cpu", Machine()) == (0,)


@pytest.mark.parametrize("devices", [[0], "0,", [0, 1], -1, 0, True, 1.5])
def test_on_a_cpu_indices_are_refused(devices):
    with pytest.raises(ConfigurationError, match="number of processes"):
        parse_devices(devices, "cpu", Machine())


@pytest.mark.parametrize(
    ("word", "machine", "kind"),
    [
        ("auto", Machine(), "cpu"),
        ("auto", FOUR, "cuda"),
        ("auto", Machine(0, True), "mps"),
        ("gpu", FOUR, "cuda"),
        ("GPU", Machine(0, True), "mps"),
        ("cuda", FOUR, "cuda"),
        ("cpu", FOUR, "cpu"),
        ("mps", Machine(0, True), "mps"),
    ],
)
def test_accelerators(word, machine, kind):
    assert choose_kind(word, machine) == kind


@pytest.mark.parametrize(
    ("word", "machine"),
    [
        ("gpu", Machine()),
        ("cuda", Machine(0, True)),
        ("mps", FOUR),
        ("tpu", Machine(4, False, 0)),
        ("gpus", FOUR),
        (None, FOUR),
        (1, FOUR),
    ],
)
def test_an_accelerator_that_is_not_there_is_refused(word, machine):
    with pytest.raises(ConfigurationError, match="accelerator"):
        choose_kind(word, machine)


def test_the_older_spelling():
    assert older_spelling("0,1") == {"accelerator": "gpu", "devices": "0,1"}
    assert older_spelling([1, 3]) == {"accelerator": "gpu", "devices": [1, 3]}
    assert older_spelling(-1)["devices"] == -1
    for nothing in (None, 0, [], "0", ""):
        assert older_spelling(nothing)["accelerator"] == "cpu"
    assert older_spelling(True)["accelerator"] == "gpu"  # and then refused as a bool


def test_one_device_resolves_to_a_strategy_on_it():
    strategy = resolve_strategy([2], "gpu", "auto", 32, machine=FOUR)
    assert strategy.device == torch.device("cuda", 2)
    assert strategy.device_ids == (2,)
    assert device_for("cpu", 0) == torch.device("cpu")
