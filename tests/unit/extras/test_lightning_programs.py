"""Programs of LightningModules have the weights and logs that Lightning's own trainer gives."""

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from tests.lightning_programs import PROGRAMS, by_fitkit, by_trainer


def difference(one, other):
    """The largest difference of two modules' states."""
    states = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    worst = 0.0
    for (name, mine), (their_name, theirs) in states:
        assert name == their_name
        worst = max(worst, (mine.double() - theirs.double()).abs().max().item())
    return worst


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_by_lightnings_trainer(name):
    program = PROGRAMS[name]
    theirs, expected = by_trainer(program)
    ours, found = by_fitkit(program)
    assert difference(ours, theirs) == 0.0
    for value in program.logged:
        assert found[value] == pytest.approx(expected[value], rel=1e-5, abs=1e-6), value


def test_the_programs_learn():
    moved = 0
    for name in ("classifier", "transformer"):
        program = PROGRAMS[name]
        first, _, _ = program.made()
        trained, _ = by_trainer(program)
        moved += difference(first, trained) > torch.finfo().eps
    assert moved == 2
