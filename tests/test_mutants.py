"""The mutants' places are in the tree, and a handful is found (`make mutants` plants all)."""

import dataclasses

import pytest

from tests.mutants import ENDS, HANDFUL, MUTANTS, run


def test_the_place_of_each_mutant_is_there_once():
    """Who changes such a line changes its mutant, too: `Mutant.old` in tests/mutants.py."""
    faults = [fault for mutant in MUTANTS if (fault := mutant.fault())]
    assert not faults, "\n".join(faults)


def test_a_place_that_is_gone_or_twice_is_told():
    gone = dataclasses.replace(ENDS[0], old="no such line")
    twice = dataclasses.replace(ENDS[0], old="import")
    assert "has 0 times" in gone.fault() and "not once: 'import'" in twice.fault()
    assert "no file" in dataclasses.replace(ENDS[0], file="gone.py").fault()
    assert "no tests/gone.py" in dataclasses.replace(ENDS[0], tests=("tests/gone.py",)).fault()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_handful_is_found_and_what_breaks_nothing_lives():
    harmless = dataclasses.replace(HANDFUL[1], new=HANDFUL[1].old)
    outcomes = run([*HANDFUL, harmless], at_once=2)
    assert [outcomes[mutant].found for mutant in HANDFUL] == [True] * len(HANDFUL)
    assert outcomes[harmless].found is False
