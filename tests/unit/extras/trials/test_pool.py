"""Jobs on worker processes: results, failures, deaths, and shared data."""

import os
import signal

import numpy as np
import pytest
import torch

from fitkit.errors import ConfigurationError
from fitkit.extras.trials.pool import outcomes, places

DATA = np.arange(300_000, dtype=np.float64)  # 2.4 MB: in shared memory


def work_with(data):
    def work(job, ask):
        number = job["number"]
        if number == 1:
            raise ValueError("one is none")
        if number == 2 and os.getpid() != job["parent"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return {
            "data": float(data[number]),
            "answer": ask(number),
            "threads": torch.get_num_threads(),
            "drawn": torch.rand(1).item() if number == 9 else 0,
        }

    return work


def all_of(count, jobs, **job):
    made = ({"number": number, "parent": os.getpid(), **job} for number in jobs)
    work = work_with(DATA)
    found = outcomes(work, made, places(count, 1), 1, lambda job, asked: [job["number"], asked])
    return {one.job["number"]: one for one in found}


@pytest.mark.timeout(120)
def test_two_processes_do_jobs_report_failures_and_replace_one_that_dies():
    found = all_of(2, range(6))
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    for number in (0, 3, 4, 5):
        wanted = {"data": float(number), "answer": [number, number], "threads": 1, "drawn": 0}
        assert found[number].value == wanted
    assert found[1].error == "ValueError: one is none" and "raise ValueError" in found[1].trace
    assert "SIGKILL" in found[2].error and found[2].value is None


def test_one_place_does_them_here_and_leaves_threads_and_random_numbers():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    found = all_of(1, [0, 1, 9])
    assert found[0].value["answer"] == [0, 0] and found[0].value["threads"] == 1
    assert found[1].error == "ValueError: one is none"
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


@pytest.mark.timeout(120)
def test_closing_ends_the_processes():
    def work(job, ask):
        import time

        ask(os.getpid())
        time.sleep(100 * job["number"])

    told = []
    running = outcomes(
        work, iter([{"number": 0}, {"number": 1}]), places(2, 1), 1, lambda _, pid: told.append(pid)
    )
    next(running)
    running.close()
    for process in told:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_what_cannot_be_sent_is_named():
    lock = torch.multiprocessing.Lock()
    with pytest.raises(ConfigurationError) as error:
        next(outcomes(lambda job, ask: lock, iter([{}]), places(2, 1), 1, lambda *_: None))
    assert error.value.code == "FK046" and "workers=1" in str(error.value)


def test_each_gpu_gets_a_worker(monkeypatch):
    from fitkit.seams.machines import Machine

    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: Machine(cuda_count=2)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in places("auto", 1)] == ["5", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in places(3, 1)] == ["0", "1", "0"]
