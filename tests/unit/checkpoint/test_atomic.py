"""A save that fails leaves what was there, and nothing else."""

import contextlib
import errno
import os
import resource
import signal
import stat
import tempfile
import threading
from pathlib import Path

import h5py
import pytest
import torch

from fitkit.checkpoint import (
    atomic,
    container,
    load_weights,
    save_weights,
)
from fitkit.checkpoint.atomic import UNFINISHED_SUFFIX, replacing
from fitkit.errors import CheckpointError


def only_file(path):
    assert os.listdir(path.parent) == [path.name]
    return path.read_bytes()


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


def test_a_block_that_ends_well_replaces_the_file(path, old):
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == old
    assert only_file(path) == b"new"


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left"), "the disk is full.*free in"),
        (OSError(errno.EDQUOT, "Quota"), "the disk is full or a quota is reached"),
        (OSError(errno.EROFS, "Read-only file system"), "can't be written to"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
    ids=["full", "quota", "read-only", "hardware"],
)
def test_a_failure_at_the_end_keeps_the_old_file(path, old, monkeypatch, call, error, reason):
    monkeypatch.setattr(os, call, raising(error))
    with pytest.raises(CheckpointError, match=f"(?s){path}.*{reason}.*Nothing was changed"):
        save_weights(path, {"a": torch.ones(3)})
    assert only_file(path) == old


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), SystemExit()])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_interruption_keeps_the_old_file_and_goes_on_up(path, old, monkeypatch, call, error):
    monkeypatch.setattr(os, call, raising(error))
    with pytest.raises(type(error)):
        save_weights(path, {"a": torch.ones(3)})
    assert only_file(path) == old


def test_a_failure_of_a_first_save_leaves_nothing(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(CheckpointError):
        save_weights(path, {"a": torch.ones(3)})
    assert not os.listdir(path.parent)


def test_a_disk_that_is_full_at_any_byte_keeps_the_old_file_and_closes_the_new_one(path, old):
    # A limit on the size of files fails where a full disk does, inside libhdf5's own writing.
    state = {f"a{index}": torch.ones(size) for index, size in enumerate((3, 9_000, 5, 700, 70_000))}
    complete = path.with_name("complete.h5")
    save_weights(complete, state)
    size_bytes = complete.stat().st_size
    complete.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room_bytes in (*range(0, 3_000, 50), *range(3_000, size_bytes, 9_973), size_bytes - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="0.3 MB are needed, more than the system"):
                save_weights(path, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert only_file(path) == old
        open_objects = h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_GROUP | h5py.h5f.OBJ_DATASET
        assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, open_objects) == 0
    save_weights(path, state)
    assert path.stat().st_size == size_bytes


def test_the_file_is_on_the_disk_before_it_gets_its_name(path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.fstat(fd).st_mode), fsync(fd)))
    monkeypatch.setattr(
        os,
        "replace",
        lambda *names, **folders: (events.append("replace"), replace(*names, **folders)),
    )
    save_weights(path, {"a": torch.ones(3)})
    assert stat.S_ISREG(events[0])
    assert events[1] == "replace"
    assert stat.S_ISDIR(events[2])


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no folder .*missing.*makedirs"):
        save_weights(tmp_path / "missing" / "file.h5", {})


def test_a_path_below_a_file_is_refused(path, old):
    with pytest.raises(CheckpointError, match="FK059"):
        save_weights(path / "file.h5", {})
    assert only_file(path) == old


def test_a_folder_is_not_replaced(path):
    path.mkdir()
    with pytest.raises(CheckpointError, match="it is a folder"):
        save_weights(path, {})
    assert path.is_dir()


def test_a_device_or_pipe_is_not_replaced(path):
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not an ordinary file"):
        save_weights(path, {})
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_read_only_file_is_not_replaced(path, old, monkeypatch):
    # The superuser may write to any file, so ask as if someone else ran this.
    monkeypatch.setattr(os, "access", lambda name, mode: not mode & os.W_OK)
    with pytest.raises(CheckpointError, match="it is read-only"):
        save_weights(path, {})
    assert only_file(path) == old


def test_a_folder_without_the_right_to_write_is_named(path, monkeypatch):
    monkeypatch.setattr(os, "open", raising(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(CheckpointError, match=f"the folder {path.parent} can't be written to"):
        save_weights(path, {})


def test_an_existing_files_permissions_are_kept_and_nobody_else_reads_the_new_one(path, old):
    path.chmod(0o640)
    with replacing(path) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_gets_the_permissions_that_open_would_give(path):
    save_weights(path, {})
    reference = path.with_name("reference")
    reference.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(reference.stat().st_mode)


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path, path, old):
    link = tmp_path / "latest.h5"
    link.symlink_to(path)
    save_weights(link, {"a": torch.ones(3)})
    assert link.is_symlink()
    assert only_file(path) != old
    assert sorted(os.listdir(tmp_path)) == ["folder", "latest.h5"]


def test_a_link_to_nothing_creates_its_target(tmp_path, path):
    link = tmp_path / "latest.h5"
    link.symlink_to(path)
    save_weights(link, {})
    assert only_file(path)


def test_a_name_of_the_greatest_length_can_be_saved(path):
    longest = path.with_name("ä" * 126 + ".h5")
    save_weights(longest, {})
    assert os.listdir(path.parent) == [longest.name]


def test_an_unfinished_file_is_hidden_and_named_after_its_target(path):
    with replacing(path) as file:
        (unfinished,) = os.listdir(path.parent)
        file.write(b"new")
    assert unfinished.startswith(".file.h5.")
    assert unfinished.endswith(UNFINISHED_SUFFIX)


@contextlib.contextmanager
def without_privileges():
    """As nobody where this is the superuser, who may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_named_and_its_file_stays():
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "file.h5"
        save_weights(path, {"a": torch.ones(3)})
        path.chmod(0o666)
        old = path.read_bytes()
        path.parent.chmod(0o555)
        refusal = pytest.raises(CheckpointError, match=f"the folder {name} can't be written to")
        with without_privileges(), refusal:
            save_weights(path, {})
        path.parent.chmod(0o755)
        assert path.read_bytes() == old
        assert os.listdir(name) == [path.name]


def state_of(path):
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode), path.read_bytes()


@pytest.fixture
def private(tmp_path):
    """A file of the saver's own, which nobody else may read."""
    private = tmp_path / "private"
    private.write_bytes(b"secret")
    private.chmod(0o600)
    return private


@pytest.mark.parametrize("swap", ["link", "hard link", "file", "removed"])
@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt"])
def test_who_replaces_an_unfinished_file_changes_no_other(path, private, monkeypatch, suffix, swap):
    path = path.with_suffix(suffix)
    save_weights(path, {"a": torch.zeros(3)})
    path.chmod(0o666)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    before, saved = state_of(private), state_of(path)
    finish, swapped = atomic._finish, []

    def swap_first(*arguments):
        (name,) = (name for name in os.listdir(path.parent) if name.endswith(UNFINISHED_SUFFIX))
        unfinished = path.with_name(name)
        unfinished.unlink()
        if swap == "link":
            unfinished.symlink_to(private)
        elif swap == "hard link":
            os.link(private, unfinished)
        elif swap == "file":
            unfinished.write_bytes(b"forged")
        swapped.append(unfinished)
        finish(*arguments)

    monkeypatch.setattr(atomic, "_finish", swap_first)
    with pytest.raises(CheckpointError, match="removed or replaced the unfinished file"):
        save_weights(path, {"a": torch.ones(3)})
    assert state_of(private) == before
    assert state_of(path) == saved
    # What somebody else put there isn't ours to remove.
    assert os.path.lexists(swapped[0]) == (swap != "removed")
    monkeypatch.undo()
    if swap != "removed":
        swapped[0].unlink()
    save_weights(path, {"a": torch.ones(3)})
    assert state_of(path)[:3] == saved[:3]


def test_a_link_put_in_the_place_of_the_file_amid_a_save_is_not_followed(
    path, old, private, monkeypatch
):
    before, check = state_of(private), atomic._check_target

    def swap_first(*arguments):
        path.unlink()
        path.symlink_to(private)
        return check(*arguments)

    monkeypatch.setattr(atomic, "_check_target", swap_first)
    with pytest.raises(CheckpointError, match="not an ordinary file"):
        save_weights(path, {"a": torch.ones(3)})
    assert state_of(private) == before


def test_a_folder_put_in_the_place_of_the_files_folder_gets_nothing(
    tmp_path, path, old, monkeypatch
):
    other, finish = tmp_path / "other", atomic._finish
    other.mkdir()

    def swap_first(*arguments):
        path.parent.rename(tmp_path / "moved")
        path.parent.symlink_to(other)
        finish(*arguments)

    monkeypatch.setattr(atomic, "_finish", swap_first)
    save_weights(path, {"a": torch.ones(3)})
    assert not os.listdir(other)
    assert os.listdir(tmp_path / "moved") == [path.name]
    assert (tmp_path / "moved" / path.name).read_bytes() != old


def test_savers_at_the_same_time_do_not_mix(path):
    module = torch.nn.Linear(50, 50)
    states = [{k: torch.full_like(v, i) for k, v in module.state_dict().items()} for i in range(4)]

    def save(state):
        for _ in range(10):
            save_weights(path, state)

    threads = [threading.Thread(target=save, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            load_weights(path, module)
            assert len({*module.weight.flatten().tolist(), *module.bias.tolist()}) == 1
    for thread in threads:
        thread.join()
    assert only_file(path)
    load_weights(path, module)


@pytest.fixture
def at_array_1(monkeypatch):
    """Calls a function while the second array is being written."""

    def install(function):
        written = []
        write_array = container.write_array

        def wrapped(file, offset, tensor):
            written.append(tensor)
            if len(written) == 2:
                function()
            write_array(file, offset, tensor)

        monkeypatch.setattr(container, "write_array", wrapped)
        return written

    return install


def test_ctrl_c_takes_effect_after_the_array_that_is_being_written(path, old, at_array_1):
    handler = signal.getsignal(signal.SIGINT)
    written = at_array_1(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        save_weights(path, {f"a{index}": torch.ones(3) for index in range(9)})
    assert len(written) == 2
    assert only_file(path) == old
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_once_the_file_is_complete_comes_after_it_is_in_place(path, old, monkeypatch):
    replace = os.replace

    def interrupted(*names, **folders):
        signal.raise_signal(signal.SIGINT)
        replace(*names, **folders)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_weights(path, {"a": torch.ones(3)})
    assert only_file(path) != old


def test_a_handler_that_only_takes_note_does_not_stop_the_save(path, at_array_1):
    noted = []
    handler = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        at_array_1(lambda: signal.raise_signal(signal.SIGTERM))
        save_weights(path, {f"a{index}": torch.ones(3) for index in range(3)})
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert noted == [signal.SIGTERM]
    assert only_file(path)
