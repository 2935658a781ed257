"""Where a training is: what each rank continues with, and what is counted."""

import pytest

from fitkit.progress import Progress

SAVED = Progress(
    epoch=2, steps=5, number=3, batches=10, shares=2, began=[{"of": 0}, {"of": 1}],
    noted=[{"rank": 0}, {"rank": 1}], validated={"steps": 3, "updates": 9, "values": {"v": 1.0}},
    random=[{"now": 0}, {"now": 1}],
)  # fmt: skip


@pytest.mark.parametrize(("rank", "shares"), [(1, 2), (0, 1), (3, 4)])
def test_a_rank_continues_with_its_own_part(rank, shares):
    own = SAVED.for_rank(rank, shares)
    # Ten batches are done: as many steps as they need, of which the last may be short.
    assert (own.epoch, own.number, own.batches) == (2, 3, 10)
    assert own.steps == {2: 5, 1: 10, 4: 3}[shares]
    assert own.validated["steps"] == {2: 3, 1: 6, 4: 2}[shares]
    # A new rank draws the data's order as rank 0 does, and has no other numbers to go on with.
    assert own.began == [{"of": 1 if rank == 1 else 0}]
    assert own.random == ([{"now": rank}] if rank < 2 else [])
    assert own.noted == SAVED.noted
    assert own.noted is not SAVED.noted


@pytest.mark.parametrize("ends_pass", [True, False])
def test_the_next_epoch_begins_with_nothing_done(ends_pass):
    progress = SAVED.for_rank(0, 2)
    progress.end_epoch(ends_pass=ends_pass)
    assert (progress.epoch, progress.steps, progress.noted, progress.validated) == (3, 0, [], None)
    assert (progress.number, progress.batches) == ((4, 0) if ends_pass else (3, 10))
    assert (SAVED.epoch, SAVED.steps, len(SAVED.noted)) == (2, 5, 2)
