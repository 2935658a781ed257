"""What killed savers leave: a whole file, and an unfinished one until the next save."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fitkit.checkpoint import (
    atomic,
    link_checkpoint,
    open_checkpoint,
    remove_abandoned,
    remove_checkpoint,
    save_weights,
)
from fitkit.checkpoint.atomic import UNFINISHED_SUFFIX, replacing
from fitkit.extras.dcp import unfinished_folder


def only_file(path):
    assert os.listdir(path.parent) == [path.name]
    return path.read_bytes()


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


def run(script, *arguments):
    """A Python process that runs `script`; it is killed by its end at the latest."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


HOLD = """
import sys, time
from fitkit.checkpoint.atomic import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"unfinished")
    print("writing", flush=True)
    time.sleep(60)
"""


def unfinished(path):
    return [name for name in os.listdir(path.parent) if name.endswith(UNFINISHED_SUFFIX)]


@pytest.mark.timeout(60)
def test_what_a_killed_saver_left_is_removed_by_the_next_save_and_not_before(path, old):
    saver = run(HOLD, path)
    try:
        assert saver.stdout.readline() == b"writing\n"
        (left,) = unfinished(path)
        save_weights(path, {"a": torch.ones(3)})
        assert unfinished(path) == [left]  # its writer lives
        save_weights(path.with_name("another.h5"), {})
    finally:
        saver.kill()
        saver.communicate()
    save_weights(path.with_name("another.h5"), {})
    assert unfinished(path) == [left]  # it belongs to another path
    save_weights(path, {"a": torch.ones(3)})
    assert not unfinished(path)
    assert sorted(os.listdir(path.parent)) == ["another.h5", path.name]


def test_a_folder_can_be_freed_of_all_that_was_abandoned_in_it(path, old):
    names = [f".epoch-{index}.h5.0123456789ab{UNFINISHED_SUFFIX}" for index in range(3)]
    for name in names:
        path.with_name(name).touch()
    with replacing(path.with_name("epoch-3.h5")) as file:
        remove_abandoned(path.parent)
        (left,) = unfinished(path)
        file.write(b"new")
    assert left not in names
    assert sorted(os.listdir(path.parent)) == ["epoch-3.h5", path.name]
    remove_abandoned(path.parent / "missing")


def test_a_second_name_that_is_being_given_is_not_taken_for_abandoned(path, old, monkeypatch):
    link = os.link

    def link_and_clean(*names, **options):
        link(*names, **options)
        remove_abandoned(path.parent)

    monkeypatch.setattr(os, "link", link_and_clean)
    link_checkpoint(path, path.with_name("last.h5"))
    assert sorted(os.listdir(path.parent)) == [path.name, "last.h5"]
    assert path.with_name("last.h5").read_bytes() == old


def test_a_folder_that_is_being_removed_is_not_taken_for_abandoned_and_a_killed_ones_is(
    tmp_path, monkeypatch
):
    path = tmp_path / "w.dcp"
    save_weights(path, {"a": torch.ones(3)})
    monkeypatch.setattr(unfinished_folder.shutil, "rmtree", raising(SystemExit()))
    with pytest.raises(SystemExit):
        remove_checkpoint(path)
    monkeypatch.undo()
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".w.dcp.")
    remove_abandoned(tmp_path, "another.dcp")
    assert os.listdir(tmp_path) == [left]
    remove_abandoned(tmp_path)
    assert not os.listdir(tmp_path)


def test_links_and_pipes_that_resemble_unfinished_files_stay(tmp_path, path, old):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").touch()
    for number, target in enumerate((path, tmp_path / "theirs")):
        link = path.with_name(f".a.h5.{number:012x}{UNFINISHED_SUFFIX}")
        link.symlink_to(target)
    os.mkfifo(path.with_name(f".a.h5.{9:012x}{UNFINISHED_SUFFIX}"))
    remove_abandoned(path.parent)
    assert len(os.listdir(path.parent)) == 4
    assert (tmp_path / "theirs" / "thesis.txt").exists()


def test_files_that_only_resemble_unfinished_ones_stay(path):
    names = [
        f".file.h5{UNFINISHED_SUFFIX}",
        f".file.h5.0123456789ab{UNFINISHED_SUFFIX}.txt",
        f"file.h5.0123456789ab{UNFINISHED_SUFFIX}",
    ]
    for name in names:
        path.with_name(name).touch()
    path.with_name(f".file.h5.0123456789ab{UNFINISHED_SUFFIX}").mkdir()
    save_weights(path, {})
    assert len(os.listdir(path.parent)) == len(names) + 2


def test_a_saver_whose_new_file_was_taken_for_abandoned_makes_another(path, monkeypatch):
    flock, taken = atomic.fcntl.flock, []

    def remove_first(descriptor, operation):
        if not taken:
            taken.extend(unfinished(path))
            path.with_name(taken[0]).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(atomic.fcntl, "flock", remove_first)
    with replacing(path) as file:
        file.write(b"new")
    assert taken
    assert only_file(path) == b"new"


def test_files_are_written_where_there_are_no_locks(path, old, monkeypatch):
    monkeypatch.setattr(atomic.fcntl, "flock", raising(OSError(errno.ENOLCK, "No locks")))
    with replacing(path) as file:
        file.write(b"new")
    monkeypatch.setattr(atomic, "fcntl", None)  # as on Windows
    with replacing(path) as file:
        file.write(b"newer")
    assert only_file(path) == b"newer"


# One process imports torch; each of its children saves once, says how long that took, and saves
# on until it is killed, or for half a minute.
SAVERS = """
import os, sys, time, torch
from fitkit.checkpoint import save_checkpoint

def save(number):
    started = time.monotonic()
    values = {f"w{index}": torch.full((20_000,), float(number)) for index in range(10)}
    save_checkpoint(sys.argv[1], values, {"number": number})
    return time.monotonic() - started

for line in sys.stdin:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    number, end = int(line) + 1, time.monotonic() + 30
    print(os.getpid(), save(number), flush=True)
    while time.monotonic() < end:
        number += 1
        save(number)
    os._exit(0)
"""


@pytest.mark.timeout(100)
def test_a_saver_killed_at_any_moment_leaves_a_whole_file(path):
    number, left = 0, 0
    savers = run(SAVERS, path)
    try:
        for attempt in range(10):
            savers.stdin.write(b"%d\n" % number)
            savers.stdin.flush()
            child, seconds = savers.stdout.readline().split()
            time.sleep(float(seconds) * attempt / 7)
            os.kill(int(child), signal.SIGKILL)
            assert savers.stdout.readline() == b"dead\n"
            with open_checkpoint(path) as checkpoint:
                assert checkpoint.state["number"] > number
                number = checkpoint.state["number"]
                for name in checkpoint.weights.describe():
                    assert (checkpoint.weights.read(name) == number).all()
            left = max(left, len(unfinished(path)))
    finally:
        savers.stdin.close()
        savers.kill()
        savers.wait()
        savers.stdout.close()
    assert left <= 1  # the next saver removes what the one before left
