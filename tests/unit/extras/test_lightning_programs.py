"""Programs of LightningModules have the weights and logs that Lightning's own trainer gives."""

import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader

from fitkit.extras.launchers.workers import end_workers

pytest.importorskip("lightning.pytorch")

from tests.lightning_programs import PROGRAMS, by_fitkit, by_trainer, loader


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


@pytest.fixture(scope="module")
def workers():
    """They are started once, by the first test that needs them, and end with the last."""
    yield
    end_workers()


@pytest.mark.parametrize("name", ["classifier", "by_epoch", "metrics", "gan"])
def test_two_processes_train_as_one(name, workers):
    program = PROGRAMS[name]

    def batches_of_both():
        return DataLoader(loader().dataset, batch_size=2 * loader().batch_size)

    one, expected = by_fitkit(dataclasses.replace(program, data=batches_of_both))
    two, found = by_fitkit(program, devices=2)
    assert difference(one, two) <= 1e-6
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
