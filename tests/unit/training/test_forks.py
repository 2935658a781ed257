"""A process that never begins, since it was forked beside other threads, is replaced."""

import gc
import glob
import multiprocessing
import os
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fitkit
from fitkit.training.forks import FORK, TRIES, Begun
from tests.stuck import after_forks, never_begins

WARNING = "Process-.* was forked and never began"

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings(f"ignore:{WARNING}")]


class Rows(Dataset):
    """Each sample is drawn by the worker that reads it."""

    offset = 0.0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(4) + index + self.offset, index % 3


class OwnLoader(DataLoader):
    """Counts its passes, and doesn't give each pass's last batch."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        batches = list(super().__iter__())
        yield from batches[:-1]


def in_each_worker(number):
    torch.utils.data.get_worker_info().dataset.offset = 100.0 * number


def loader(kind=DataLoader, **arguments):
    return kind(Rows(), batch_size=4, num_workers=2, **arguments)


def generator():
    yield from loader()


class Within(fitkit.callbacks.Callback):
    """Predicts within an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.predicted = self.model.predict(loader(), verbose=0)


def fit_twice(model):
    data = loader(persistent_workers=True)
    return [model.fit(data, verbose=0, epochs=2).history["loss"] for _ in range(2)]


def fit_within(model):
    within = Within()
    return model.fit(loader(), verbose=0, callbacks=[within]).history["loss"], within.predicted


VERBS = {
    "fit": lambda m: m.fit(loader(), validation_data=loader(), epochs=2, verbose=0).history,
    "persistent workers": fit_twice,
    "init": lambda m: m.fit(loader(worker_init_fn=in_each_worker), verbose=0).history,
    "context": lambda m: m.fit(loader(multiprocessing_context="fork"), verbose=0).history,
    "subclass": lambda m: m.fit(loader(OwnLoader), verbose=0).history,
    "generator": lambda m: m.fit(generator(), verbose=0).history,
    "evaluate": lambda m: m.evaluate(loader(), verbose=0),
    "predict": lambda m: m.predict(loader(), verbose=0),
    "predict_batches": lambda m: list(m.predict_batches(loader(), verbose=0)),
    "predict in fit": fit_within,
}


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setenv("FITKIT_FORK_PATIENCE", "0.25")
    yield
    after_forks.clear()


def numbers(verb):
    torch.manual_seed(0)
    model = fitkit.Model(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1, learning_rate=0.01)
    return VERBS[verb](model), torch.rand(3)


def pipes_and_processes():
    """How many this process has open. Libraries may open files of their own at their first use."""
    gc.collect()
    links = (os.path.realpath(link) for link in glob.glob("/proc/self/fd/*"))
    return sum("pipe:" in link for link in links), len(multiprocessing.active_children())


def has_only(before):
    """Whether no more are left than before. What threads of a call hold goes in a moment."""
    end = time.monotonic() + 10
    while pipes_and_processes() > before and time.monotonic() < end:
        time.sleep(0.1)
    return pipes_and_processes() <= before


# The others begin their processes as these do.
OFTEN = ("fit", "generator", "predict in fit")


@pytest.mark.parametrize(
    "verb", [pytest.param(v, marks=() if v in OFTEN else pytest.mark.slow) for v in VERBS]
)
def test_every_verb_gives_the_numbers_that_it_gives_where_all_workers_begin(verb):
    expected, before = numbers(verb), pipes_and_processes()
    after_forks[:] = [lambda: None, never_begins]
    with pytest.warns(UserWarning, match=WARNING):
        found = numbers(verb)
    assert after_forks == []
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert has_only(before)


def test_a_worker_that_never_begins_however_often_ends_the_call_by_its_name():
    before = pipes_and_processes()
    after_forks[:] = [never_begins] * TRIES
    with pytest.raises(fitkit.FitkitError, match="Process-.* was forked") as raised:
        numbers("evaluate")
    assert raised.value.code == "FK064"
    del raised
    assert has_only(before)
    numbers("evaluate")


def busy():
    end = time.process_time() + 1
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(("act", "code"), [(busy, 0), (lambda: os._exit(7), 7)])
def test_a_process_that_computes_or_ends_before_it_begins_is_none_that_never_does(act, code):
    after_forks[:] = [act]
    with FORK.held(Begun), warnings.catch_warnings():
        warnings.simplefilter("error")
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join(30)
    assert process.exitcode == code


def test_after_the_call_processes_are_forked_as_before_it():
    before = multiprocessing.context.ForkProcess._Popen
    numbers("predict_batches")
    assert multiprocessing.context.ForkProcess._Popen is before


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_patience_that_is_no_number_of_seconds_is_refused_by_name(text, monkeypatch):
    monkeypatch.setenv("FITKIT_FORK_PATIENCE", text)
    with pytest.raises(fitkit.ConfigurationError, match="FITKIT_FORK_PATIENCE"):
        numbers("evaluate")
