"""One rank's work, and all ranks' result."""

import pytest

from fitkit.distributed.collectives import Solo, done_by_rank_zero


class Told:
    """The collectives of one rank of two, by what rank 0 has sent."""

    def __init__(self, rank, sent):
        self.rank, self.world_size, self.sent = rank, 2, sent

    def broadcast(self, value):
        if self.rank == 0:
            self.sent.append(value)
        return self.sent[-1]


def test_rank_zero_works_alone_and_all_get_its_result_or_its_error():
    sent, done = [], []

    def work():
        done.append(1)
        return "found"

    def fails():
        raise OSError("the disk is full")

    assert [done_by_rank_zero(Told(rank, sent), work) for rank in (0, 1)] == ["found"] * 2
    assert len(done) == 1
    for rank in (0, 1):
        with pytest.raises(OSError, match="the disk is full"):
            done_by_rank_zero(Told(rank, sent), fails)
    assert done_by_rank_zero(Solo(), work) == "found"
