"""Objects between ranks: checked before they are unpickled."""

import os

import numpy as np
import pytest
import torch

from fitkit.errors import WorkerError
from fitkit.extras.launchers.process_group import DIGEST, ProcessGroup, pack, unpack

KEY, EXCHANGE = b"k" * 32, "gather 3 of rank 1"


class RunsCode:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_values_come_back_as_they_were_also_with_bytes_after_them():
    whole = torch.arange(12.0).view(3, 4)
    value = {
        "tensors": [whole, whole.t(), whole[:, 1], torch.tensor(3), torch.empty(0, 2)],
        "kinds": [torch.tensor([True]), torch.ones(3, dtype=torch.bfloat16)],
        "learns": torch.ones(2, requires_grad=True),
        "arrays": [np.arange(5), np.arange(6).reshape(2, 3).T, np.arange(8)[::2], np.array("a")],
        "plain": (1, "text", None, b"bytes"),
    }
    packed = pack(value, KEY, EXCHANGE)
    found = unpack(torch.nn.functional.pad(packed, (0, 77)), KEY, EXCHANGE, 1)
    for key in ("tensors", "kinds"):
        for one, other in zip(value[key], found[key], strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    assert found["learns"].requires_grad and found["plain"] == value["plain"]
    for one, other in zip(value["arrays"], found["arrays"], strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    found["tensors"][0].add_(1)  # they are the receiver's own
    assert whole[0, 0] == 0


def test_with_another_key_nothing_is_unpickled(tmp_path):
    packed = pack(RunsCode(tmp_path / "ran"), b"another", EXCHANGE)
    with pytest.raises(WorkerError, match="rank 1's message was refused and not unpickled"):
        unpack(packed, KEY, EXCHANGE, 1)
    assert not (tmp_path / "ran").exists()
    unpack(packed, b"another", EXCHANGE, 1)
    assert (tmp_path / "ran").exists()  # it would have run


def test_each_byte_of_the_digest_the_lengths_and_the_pickle_counts():
    packed = pack({"a": 1, "b": "text"}, KEY, EXCHANGE)
    for position in range(len(packed)):
        changed = packed.clone()
        changed[position] ^= 1
        with pytest.raises(WorkerError, match="not unpickled"):
            unpack(changed, KEY, EXCHANGE, 1)
    for length in range(len(packed)):
        with pytest.raises(WorkerError, match="not unpickled"):
            unpack(packed[:length], KEY, EXCHANGE, 1)


def test_lengths_beyond_the_message_are_refused():
    packed = pack([torch.arange(3)], KEY, EXCHANGE)
    for position in range(DIGEST, DIGEST + 32):
        changed = packed.clone()
        changed[position] = 255
        with pytest.raises(WorkerError, match="not unpickled"):
            unpack(changed, KEY, EXCHANGE, 1)


def test_a_rank_s_message_of_another_exchange_is_refused_as_that():
    packed = pack(1, KEY, "gather 2 of rank 1")
    with pytest.raises(WorkerError, match="different exchanges .gather 3 of rank 1 here, gather 2"):
        unpack(packed, KEY, EXCHANGE, 1)


def test_an_exchange_is_named_by_the_function_that_asks_for_it():
    ranks = [object.__new__(ProcessGroup) for _ in range(2)]
    for group in ranks:
        group._count = 0

    def gather(group):
        return group._next("gather")

    def one():
        return gather(ranks[0])

    def other():
        return gather(ranks[1])

    assert one() == "gather 1 in one of rank " and other() == "gather 1 in other of rank "
