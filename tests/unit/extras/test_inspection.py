"""`python -m fitkit inspect FILE`."""

import io
import random

import numpy as np
import pytest
import torch
from rich.console import Console

from fitkit.__main__ import main
from fitkit.checkpoint import save_checkpoint, save_weights
from fitkit.extras.inspection import print_inspection


def shown(path):
    console = Console(file=io.StringIO(), width=100)
    print_inspection(path, console)
    lines = console.file.getvalue().splitlines()
    return "\n".join(" ".join(line.replace("│", " ").split()) for line in lines)


@pytest.fixture
def module():
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt", ".pth"])
def test_a_file_of_weights_is_listed_with_shapes_dtypes_and_sizes(tmp_path, module, suffix):
    path = tmp_path / f"w{suffix}"
    save_weights(path, module.state_dict())
    text = shown(path)
    assert "kind weights" in text
    assert "0.weight (40, 30) float32 4.7 KiB" in text
    assert "1.num_batches_tracked () int64 8 B" in text
    assert "7 tensors, 1,401 numbers, 5.5 KiB" in text


def test_a_checkpoint_is_listed_with_versions_and_its_state_in_short(tmp_path, module):
    path = tmp_path / "run.h5"
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(5, 30)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "random": random.getstate(),
        "epoch": 3,
        "losses": [0.5] * 1000,
        "keys": {(1, 2): "x", 3: {"deep": {"er": [None]}}},
    }
    save_checkpoint(path, module.state_dict(), state)
    text = shown(path)
    assert "kind checkpoint" in text
    assert "format version 1" in text
    assert f"torch {torch.__version__}" in text
    assert "exp_avg: tensor float32 (40, 30)" in text
    assert "betas: [0.9, 0.999]" in text
    assert "epoch: 3" in text
    assert "1000 in all]" in text
    assert len(text.splitlines()) < 100


def test_every_kind_of_data_can_be_shown(tmp_path):
    from collections import Counter

    state = {
        "a": [(), [], {}, set(), {1}, Counter("a"), {1: []}],
        "b": [b"x", 2**70, np.arange(3), np.float32(1)],
        "many": {str(index): {"x": index} for index in range(50)},
        "control \x1b[31m": "\x1b]0;title\x07",
    }
    save_checkpoint(tmp_path / "s.h5", {}, state)
    text = shown(tmp_path / "s.h5")
    assert "kind checkpoint" in text
    assert "… and 38 more" in text
    assert "\x1b" not in text


def deep(levels, width):
    """Lists in lists, each of which has the same one `width` times: few bytes, an endless text."""
    found = []
    for _ in range(levels):
        found = [found] * width
    return found


@pytest.mark.parametrize(
    "value",
    [deep(60, 2), {"a": deep(9, 1000)}, [{"x": deep(200, 2)}] * 3, "x" * 10**6, list(range(10**5))],
    ids=["doubled", "wide", "deep", "long", "list"],
)
def test_nested_hyperparameters_take_no_more_than_they_show(tmp_path, value):
    path = tmp_path / "hostile.ckpt"
    content = {"state_dict": {}, "epoch": value, "hyper_parameters": {"layers": value, "rate": 0.1}}
    torch.save({**content, "pytorch-lightning_version": "2.6"}, path)
    text = shown(path)
    assert "hparams.layers" in text and "hparams.rate 0.1" in text
    assert len(text) < 1500


def test_a_name_cannot_command_the_terminal(tmp_path):
    save_weights(tmp_path / "w.h5", {"\x1b[31mred": torch.ones(1), "[bold]x[/bold]": torch.ones(1)})
    text = shown(tmp_path / "w.h5")
    assert "'\\x1b[31mred'" in text
    assert "[bold]x[/bold]" in text


def test_the_command_prints_and_ends_with_0(tmp_path, module, capsys):
    save_weights(tmp_path / "w.h5", module.state_dict())
    assert main(["inspect", str(tmp_path / "w.h5")]) == 0
    assert "0.weight" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt"])
def test_a_file_that_cannot_be_read_is_one_line_and_status_1(tmp_path, module, capsys, suffix):
    path = tmp_path / f"w{suffix}"
    assert main(["inspect", str(path)]) == 1
    assert capsys.readouterr().err == f"There is no file {path}.\n"
    save_weights(path, module.state_dict())
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["inspect", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{path} is damaged: ")
    assert captured.err.count("\n") == 1


def test_another_suffix_is_one_line_too(tmp_path, capsys):
    path = tmp_path / "w.npz"
    path.write_bytes(b"x")
    assert main(["inspect", str(path)]) == 1
    assert ".safetensors" in capsys.readouterr().err
