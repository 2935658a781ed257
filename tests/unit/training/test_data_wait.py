"""How long the first epoch waits for data, and what is advised: by a clock of the test's own."""

import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fitkit
from fitkit.data.sources import LoaderSource
from fitkit.extras import data_advice
from fitkit.training import data_wait
from fitkit.training.data_wait import DataWait

BATCHES, BATCH = 200, 10


class Rows(Dataset):
    def __init__(self, s=0.0):
        self.s = s

    def __len__(self):
        return BATCHES * BATCH

    def __getitem__(self, index):
        time.sleep(self.s)
        return torch.ones(4), 1


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def read(clock, load_s, workers, jitter):
    """Batches as so many workers make them, each ahead by two."""
    free, ready = [5.0] * max(workers, 1), {}  # workers take seconds to begin
    for number in range(BATCHES):
        took = load_s * (1 + jitter * (-1) ** number)
        if not workers:
            clock.now += took
        else:
            for ahead in range(number, min(number + 2 * workers, BATCHES)):
                if ahead not in ready:
                    at = max(free[ahead % workers], clock.now)
                    ready[ahead] = free[ahead % workers] = at + took
            clock.now = max(clock.now, ready[number])
        yield number


def measured(monkeypatch, load_s, step_s, workers=0, jitter=0.0):
    clock = Clock()
    monkeypatch.setattr(data_wait, "perf_counter", clock)
    source = LoaderSource(DataLoader(Rows(), batch_size=BATCH))
    source.loader.num_workers = workers  # of another machine: torch would warn
    wait = DataWait(torch.device("cpu"), source)
    for _ in wait.timed(read(clock, load_s, workers, jitter)):
        clock.now += step_s
    return wait


@pytest.mark.parametrize(
    ("load_s", "step_s", "workers", "jitter"),
    [
        (0.132, 0.024, 0, 0.0), (0.030, 0.024, 0, 0.5), (0.5, 0.02, 0, 0.0), (0.2, 0.2, 0, 0.3),
        (0.132, 0.024, 1, 0.0), (0.132, 0.024, 2, 0.0), (0.132, 0.024, 3, 0.5),
        (0.5, 0.02, 8, 0.2), (0.06, 0.02, 1, 0.9), (0.9, 0.1, 4, 0.0),
    ],
)  # fmt: skip
def test_the_number_of_workers_is_right_within_a_factor_of_two(
    load_s, step_s, workers, jitter, monkeypatch
):
    monkeypatch.setattr(data_advice, "usable_cores", lambda: 99)
    wait = measured(monkeypatch, load_s, step_s, workers, jitter)
    period = max(step_s, load_s / workers) if workers else step_s + load_s
    assert wait.share == pytest.approx(1 - step_s / period, abs=0.1)
    advised = int(re.search(r"num_workers=(\d+)", wait.line())[1])
    needed = math.ceil(load_s / step_s)
    assert needed / 2 <= advised <= needed * 2
    sample_ms = float(re.search(r"a sample takes ([\d.]+) ms", wait.line())[1])
    assert load_s * 1000 / BATCH / 2 <= sample_ms <= load_s * 1000 / BATCH * 2


def test_short_waits_are_no_line_and_begins_of_workers_do_not_count(monkeypatch):
    assert measured(monkeypatch, 0.006, 0.024).line() is None
    quick = measured(monkeypatch, 0.06, 0.024, workers=4)
    assert quick.line() is None and quick.share < 0.05
    assert measured(monkeypatch, 0.003, 0.001).line() is None  # less than a second in all


def test_more_workers_than_cores_are_not_advised(monkeypatch):
    monkeypatch.setattr(data_advice, "usable_cores", lambda: 4)
    advice = measured(monkeypatch, 0.5, 0.02).line()
    assert "num_workers=4)" in advice and "25 would be needed" in advice
    assert "all 4 cores" in measured(monkeypatch, 0.5, 0.02, workers=4).line()
    stream = data_advice.advice(SimpleNamespace(num_workers=0), 9, 10, 10, None, True)
    assert "a batch takes 900 ms, a step 100 ms" in stream


def fit(data, verbose=2, **options):
    model = fitkit.Model(torch.nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1)
    return model.fit(data, epochs=2, verbose=verbose, **options).params["data_wait"]


def test_fit_says_it_once_and_never_of_data_in_memory(monkeypatch, capsys):
    monkeypatch.setattr(data_advice, "LEAST_S", 0.0)
    monkeypatch.setattr(data_advice, "SHARE", 0.0)
    slow = DataLoader(Rows(0.001), batch_size=BATCH, sampler=range(100))
    assert 0 < fit(slow) < 1
    assert capsys.readouterr().out.count("of the first epoch waited for data: a sample takes") == 1
    assert 0 < fit(slow, verbose=0) < 1
    assert 0 < fit(Rows(0.001), verbose=0, steps_per_epoch=9) < 1
    memory = TensorDataset(torch.ones(100, 4), torch.ones(100, dtype=torch.long))
    assert 0 < fit(DataLoader(memory, batch_size=BATCH)) < 1
    assert "waited for data" not in capsys.readouterr().out
