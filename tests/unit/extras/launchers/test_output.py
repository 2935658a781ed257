"""Lines of other ranks: whole, with the rank before them, however they are written."""

import os
import subprocess
import sys
import textwrap

import pytest

from fitkit.errors import ConfigurationError
from fitkit.extras.launchers.other_ranks import shows_all
from fitkit.extras.launchers.process import LONGEST_LINE, ShownOutput
from fitkit.strategies import (
    BaguaStrategy,
    DDPShardedStrategy,
    DDPSpawnStrategy,
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    HorovodStrategy,
    XLAStrategy,
)

KINDS = (
    BaguaStrategy, DDPShardedStrategy, DDPSpawnStrategy, DDPStrategy, DeepSpeedStrategy,
    FSDPStrategy, HorovodStrategy, XLAStrategy,
)  # fmt: skip


def shown(code, capsys):
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    lines = ShownOutput(3, process.stdout, process.stderr)
    assert process.wait(60) == 0
    lines.wait_for_end()
    return capsys.readouterr(), lines


def test_each_line_has_its_rank_and_each_stream_is_its_own(capsys):
    said, lines = shown(
        r"""
        import sys
        print("one", 2)
        print("tief im Ärger", file=sys.stderr)
        print()
        print("without an end", end="")
        """,
        capsys,
    )
    assert said.out == "[rank 3] one 2\n[rank 3] \n[rank 3] without an end\n"
    assert said.err == "[rank 3] tief im Ärger\n"
    assert lines.words() == "tief im Ärger\n"


def test_of_a_bar_that_draws_itself_again_the_last_drawing_is_shown(capsys):
    said, _ = shown(r'print("\r 10 %\r 20 %", end=""); print("\r100 %"); print("dos\r")', capsys)
    assert said.out == "[rank 3] 100 %\n[rank 3] dos\n"


def test_a_rank_that_prints_much_is_shown_whole_and_lines_stay_whole(capsys):
    said, _ = shown("for i in range(40_000): print(i, 'x' * 60)", capsys)
    assert said.out.splitlines() == [f"[rank 3] {i} {'x' * 60}" for i in range(40_000)]


def test_a_line_without_an_end_takes_bounded_memory(capsys):
    said, lines = shown("import sys; sys.stdout.write('x' * 3_000_000)", capsys)
    assert said.out.count("x") == 3_000_000
    assert max(map(len, said.out.splitlines())) <= 2 * LONGEST_LINE + 10
    assert not lines._parts["stdout"]


def test_a_rank_goes_on_although_rank_zero_has_closed_its_streams(monkeypatch, capsys):
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    shown("for i in range(40_000): print(i)", capsys)


@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_that_starts_processes_takes_output(kind):
    assert kind(output="all").output == "all"
    assert kind().output is None
    with pytest.raises(ConfigurationError, match="rank_zero"):
        kind(output="each")


def test_the_argument_goes_before_the_environment():
    assert not shows_all(None, {})
    assert shows_all(None, {"FITKIT_RANK_OUTPUT": "all"})
    assert not shows_all("rank_zero", {"FITKIT_RANK_OUTPUT": "all"})
    assert shows_all("all", {"FITKIT_RANK_OUTPUT": "rank_zero"})
    with pytest.raises(ConfigurationError, match="FITKIT_RANK_OUTPUT='yes'"):
        shows_all(None, {"FITKIT_RANK_OUTPUT": "yes"})
