"""Outputs on their way to the host, with a double of the streams."""

import contextlib

import pytest
import torch

from fitkit.training import evaluate
from fitkit.training.evaluate import HostCopies


class Streams:
    """Copies for real, but only when it is waited for; writes down what it is asked for."""

    def __init__(self, device=None):
        self.events, self.marks, self.waiting = [], 0, []

    @contextlib.contextmanager
    def aside(self, *, after=False):
        self.events.append("aside after what is computed" if after else "aside")
        yield

    def mark(self):
        self.marks += 1
        return self.marks

    def start_copy(self, tensor):
        copy = torch.full_like(tensor, float("nan"))
        self.waiting.append((copy, tensor))
        return copy

    def used_here(self, tensor):
        self.events.append("used")

    def wait_on_host(self, mark):
        self.events.append(f"host waits {mark}")
        for copy, tensor in self.waiting[:2]:  # each output has two tensors
            copy.copy_(tensor)
        del self.waiting[:2]


@pytest.fixture
def copies(monkeypatch):
    monkeypatch.setattr(evaluate, "_gpu_of", lambda output: torch.device("cpu"))
    streams = Streams()
    copies = HostCopies(lambda device: streams)
    copies.streams = streams
    return copies


def output(number):
    return {"a": torch.full((2,), float(number)), "b": torch.full((1,), -float(number)), "c": None}


def test_outputs_come_one_batch_later_in_their_order_and_in_memory_of_their_own(copies):
    for number in range(3):
        copies.add(output(number))
        assert len(copies.outputs) == number
    copies.wait()
    assert [found["a"].tolist() for found in copies.outputs] == [[0, 0], [1, 1], [2, 2]]
    assert [sorted(found) for found in copies.outputs] == [["a", "b"]] * 3


def test_the_host_waits_for_a_batch_only_when_the_next_one_is_on_its_way(copies):
    copies.add(output(0))
    copies.add(output(1))
    assert copies.streams.events == [
        "aside after what is computed", "used", "used",
        "aside after what is computed", "used", "used", "host waits 1",
    ]  # fmt: skip


def test_an_output_on_the_cpu_needs_no_stream():
    copies = HostCopies(lambda device: pytest.fail("asked for streams"))
    copies.add(torch.ones(2))
    copies.add((torch.zeros(1), {"n": 3}))
    copies.wait()
    assert torch.equal(copies.outputs[0], torch.ones(2))
    assert copies.outputs[1][1] == {"n": 3}
