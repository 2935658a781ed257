"""Where a stack is, in words: read from frames, without ranks."""

import os
import queue
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fitkit
from fitkit.callbacks import Callback
from fitkit.extras.whereabouts import (
    Frame,
    Standing,
    frame_of,
    frames_above,
    lines,
    place,
    report,
    same_place,
    wait_for_each_other,
    worker_stack,
)
from tests.limits import patience

OURS = Path(fitkit.__file__).parent
TORCHS = Path(torch.__file__).parent
LIBRARY = Path(threading.__file__).parent


def ours(name, function, line=1, owner=None):
    return Frame(str(OURS / name), line, function, owner)


def torchs(name, function):
    return Frame(str(TORCHS / name), 1, function)


def library(name, function):
    return Frame(str(LIBRARY / name), 1, function)


class Slow(Callback):
    pass


class Rows(Dataset):
    pass


class Net(torch.nn.Module):
    pass


def users(function, owner=None, line=9):
    return Frame("/home/me/train.py", line, function, owner)


BEGIN = (
    users("<module>"),
    ours("model.py", "fit"),
    ours("extras/launchers/ranks.py", "_together"),
)
LOOP = (*BEGIN, ours("training/fit.py", "run_epoch", 368))
REDUCE = (
    torchs("distributed/c10d_logger.py", "wrapper"),
    torchs("distributed/distributed_c10d.py", "all_reduce"),
)
LOADER = (ours("data/batches.py", "marked"), torchs("utils/data/dataloader.py", "__next__"))
PLACES = {
    "a callback": (
        [users("on_epoch_end", Slow())],
        "other",
        "is in callback Slow.on_epoch_end, train.py:9",
    ),
    "a data set": (
        [*LOADER, torchs("utils/data/_utils/fetch.py", "fetch"), users("__getitem__", Rows())],
        "other",
        "is in data set Rows.__getitem__, train.py:9",
    ),
    "a function": ([users("batches")], "other", "is in batches, train.py:9"),
    "a net": (
        [
            torchs("nn/modules/module.py", "_call_impl"),
            users("forward", Net()),
            torchs("nn/functional.py", "linear"),
        ],
        "other",
        "is in Net.forward, train.py:9",
    ),
    "an exchange of fitkit's": (
        [
            ours("training/stopping.py", "agreed", 58),
            ours("extras/launchers/process_group.py", "sums"),
            *REDUCE,
        ],
        "exchange",
        "waits for the other ranks (all_reduce) in fitkit training/stopping.py:58 agreed",
    ),
    "an exchange in a callback": (
        [
            users("on_epoch_end", Slow()),
            ours("model.py", "evaluate"),
            ours("extras/launchers/process_group.py", "gather"),
            *REDUCE,
        ],
        "exchange",
        "waits for the other ranks (all_reduce) in callback Slow.on_epoch_end, train.py:9",
    ),
    "an exchange of the user's": (
        [users("f"), *REDUCE],
        "exchange",
        "waits for the other ranks (all_reduce) in f, train.py:9",
    ),
    "DDP's forward": (
        [
            ours("training/step.py", "forward_of", 7),
            torchs("nn/parallel/distributed.py", "_pre_forward"),
        ],
        "exchange",
        "waits for the other ranks (_pre_forward) in fitkit training/step.py:7 forward_of",
    ),
    "a net within DDP": (
        [torchs("nn/parallel/distributed.py", "forward"), users("forward", Net())],
        "other",
        "is in Net.forward, train.py:9",
    ),
    "a net of torch's within DDP": (
        [
            ours("training/step.py", "forward_of", 7),
            torchs("nn/parallel/distributed.py", "forward"),
            torchs("nn/modules/linear.py", "forward"),
        ],
        "other",
        "is in fitkit training/step.py:7 forward_of",
    ),
    "backward": (
        [
            ours("training/update.py", "_add", 5),
            torchs("autograd/graph.py", "_engine_run_backward"),
        ],
        "backward",
        "is in backward (computes, or exchanges gradients) in fitkit training/update.py:5 _add",
    ),
    "a loader's worker": (
        [
            *LOADER,
            torchs("utils/data/dataloader.py", "_try_get_data"),
            library("multiprocessing/queues.py", "get"),
            library("selectors.py", "select"),
        ],
        "loader",
        "waits for a DataLoader worker",
    ),
    "a compiler": (
        [
            users("forward", Net()),
            torchs("_dynamo/convert_frame.py", "_compile"),
            torchs("_inductor/compile_fx.py", "compile_fx"),
            users("<module>"),  # code that the compiler has written
            library("subprocess.py", "communicate"),
        ],
        "compiler",
        "compiles in Net.forward, train.py:9",
    ),
    "compiled code": (
        [
            ours("training/step.py", "forward_of", 7),
            torchs("_dynamo/eval_frame.py", "compile_wrapper"),
            torchs("_inductor/output_code.py", "__call__"),
        ],
        "other",
        "is in fitkit training/step.py:7 forward_of",
    ),
    "a queue in a callback": (
        [
            users("on_epoch_end", Slow()),
            library("queue.py", "get"),
            library("threading.py", "wait"),
        ],
        "other",
        "waits (wait) in callback Slow.on_epoch_end, train.py:9",
    ),
    "a package in a callback": (
        [
            users("on_epoch_end", Slow()),
            library("site-packages/requests/api.py", "post"),
            library("ssl.py", "read"),
        ],
        "other",
        "waits (read) in callback Slow.on_epoch_end, train.py:9",
    ),
    "a loop over predictions": (
        [ours("extras/predictions.py", "take"), library("threading.py", "wait")],
        "reader",
        "waits for the loop over predict_batches in fitkit extras/predictions.py:1 take",
    ),
    "what Python writes": (
        [
            ours("optimizers.py", "build", 2),
            Frame("<string>", 0, "<module>"),
            Frame("<frozen importlib._bootstrap>", 1, "_load"),
        ],
        "other",
        "is in fitkit optimizers.py:2 build",
    ),
}


@pytest.mark.parametrize("which", PLACES)
def test_a_place_is_named_by_the_users_line_and_by_what_is_done_there(which):
    frames, kind, text = PLACES[which]
    found = place([*LOOP, *frames])
    assert (found.kind, found.text) == (kind, text)


def test_places_are_compared_from_the_call_on_whatever_leads_there():
    worker = (
        Frame("<string>", 1, "<module>"),
        ours("extras/launchers/workers.py", "main"),
        *BEGIN[2:],
    )
    inner = (
        ours("training/fit.py", "run_epoch", 368),
        ours("training/stopping.py", "agreed", 58),
        *REDUCE,
    )
    assert place([*BEGIN, *inner]).key == place([*worker, *inner]).key != ""
    assert place([*BEGIN, *inner]).key != place([*BEGIN, users("on_epoch_end"), *inner]).key
    assert place([]).key == "" and place(BEGIN[:1]).text == "is in <module>, train.py:9"


def waiting(place="a", batch=2, share=0.0, kind="exchange"):
    return Standing("fit, epoch 1", batch, 60.0, share, kind, f"waits at {place}", place)


COMPUTES, LEFT = waiting(share=0.5), waiting("b", kind="other")


@pytest.mark.parametrize(
    ("found", "ends"),
    [
        ((waiting("a"), waiting("b")), True),
        ((waiting("a"), waiting("b", kind="backward")), True),
        ((waiting("a"), waiting("a", batch=3)), True),
        ((waiting("a"), waiting("a")), False),
        ((waiting("b"), COMPUTES), False),
        ((waiting("a"), waiting("b"), LEFT), False),
        ((waiting("a"), waiting("b"), None), False),
        ((waiting("a"), waiting("b", share=None)), False),
    ],
)  # fmt: skip
def test_ranks_wait_for_each_other_only_if_all_wait_at_different_places(found, ends):
    assert wait_for_each_other(dict(enumerate(found))) is ends


def test_each_rank_has_a_line_and_many_at_one_place_share_one():
    few = report({0: waiting("here", share=0.004), 1: None}, 61)
    assert few.splitlines() == [
        "fitkit: no batch for 61 s (fit, epoch 1). Each rank's place:",
        "  rank 0, batch 2: waits at here (0% of a core)",
        "  rank 1: doesn't answer (ended, stopped, or in code that keeps Python's lock)",
    ]
    many = {rank: waiting("there" if rank == 5 else "here") for rank in range(64)}
    assert [line.partition(",")[0] for line in lines(many).splitlines()] == [
        "  ranks 0-4",
        "  rank 5",
    ]
    assert lines(many).splitlines()[0].startswith("  ranks 0-4, 6-63, batch 2: waits at here")
    assert report({0: waiting("here")}, 61).startswith(
        "fitkit: no batch for 61 s (fit, epoch 1), batch 2:"
    )


def test_an_answer_travels_as_text_and_places_that_arent_known_are_equal_to_none():
    one = waiting()
    assert Standing.from_text(one.as_text()) == one
    assert same_place([one, one]) is True and same_place([one, COMPUTES, LEFT]) is False
    assert same_place([one, Standing()]) is None


def test_a_running_thread_is_found_at_its_line():
    go, ready = queue.Queue(), threading.Event()

    class Waits(Slow):
        def on_epoch_end(self):
            ready.set()
            go.get()  # here

    thread = threading.Thread(target=Waits().on_epoch_end)
    thread.start()
    assert ready.wait(patience(10))
    deadline = time.monotonic() + patience(10)
    while "waits" not in (found := place(frames_above(frame_of(thread.ident)))).text:
        assert time.monotonic() < deadline
    go.put(None)
    thread.join()
    assert found.text == "waits (wait) in callback Waits.on_epoch_end, " + (
        f"{os.path.relpath(__file__)}:{line_of('go.get()')}: go.get()  # here"
    )
    assert frame_of(thread.ident) is None


def line_of(text):
    rows = Path(__file__).read_text().splitlines()
    return next(number for number, row in enumerate(rows, 1) if text in row)


class Stuck(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(600)  # stuck


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux")
def test_a_loaders_worker_says_where_it_is():
    from fitkit.training.forks import FORK, Begun

    with FORK.held(Begun):
        batches = iter(DataLoader(Stuck(), num_workers=1))
    worker = batches._workers[0]
    deadline = time.monotonic() + patience(20)
    while not (stack := worker_stack(worker.pid)) or stack[-1].function != "__getitem__":
        assert time.monotonic() < deadline
    worker.kill()
    assert (stack[-1].file, stack[-1].line) == (__file__, line_of("time.sleep(600)"))
    assert worker_stack(os.getpid()) == []  # it asks no process that couldn't answer
