"""Files at URLs: whole or not at all, checked after the upload, and trusted no more than others."""

import builtins
import os
import re
import sys
from importlib import import_module

import pytest
import torch

import fitkit
from fitkit.callbacks import BackupAndRestore, CSVLogger, JSONLogger, ModelCheckpoint
from fitkit.checkpoint import is_there, remote, remove_checkpoint
from fitkit.errors import CheckpointError, ConfigurationError, MissingPackageError
from fitkit.extras import urls
from fitkit.extras.inspection import convert, print_inspection
from tests.nets import linear, regression

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

X, Y = regression(64, 4)
MEMORY = fsspec.filesystem("memory")


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """The URL of a folder of its own."""
    if request.param == "memory":
        MEMORY.store.clear()
        MEMORY.pseudo_dirs[:] = [""]
        yield "memory://runs"
        MEMORY.store.clear()
    else:
        yield f"file://{tmp_path}"


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path_factory, monkeypatch):
    """Neither a local temporary file nor an unfinished one in the store."""
    folder = tmp_path_factory.mktemp("local")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield
    assert [name for name in os.listdir(folder) if name.startswith("fitkit-")] == []
    assert [name for name in MEMORY.store if "unfinished" in name] == []


def compiled(seed=0):
    model = fitkit.Model(linear(4, 1, seed))
    model.compile("adam", "mse", learning_rate=0.1)
    return model


def names(url):
    return sorted(path.removeprefix(f"{url}/") for path in urls.files_in(url))


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt"])
def test_weights_come_back_and_have_the_bytes_of_a_local_file(url, tmp_path, suffix):
    model, twin = compiled(), compiled(1)
    model.save_weights(f"{url}/w{suffix}")
    model.save_weights(tmp_path / f"local{suffix}")
    with fsspec.open(f"{url}/w{suffix}", "rb") as file:
        assert file.read() == (tmp_path / f"local{suffix}").read_bytes()
    twin.load_weights(f"{url}/w{suffix}")
    assert torch.equal(twin.net.weight, model.net.weight)


def test_checkpoints_replace_each_other_and_come_back(url):
    model = compiled()
    model.save(f"{url}/m.h5")
    model.fit(X, Y, verbose=0)
    model.save(f"{url}/m.h5")
    twin = compiled(1)
    twin.load(f"{url}/m.h5")
    assert torch.equal(twin.net.weight, model.net.weight)
    assert len(twin.optimizer.state) == 2
    again = fitkit.load_model(f"{url}/m.h5", torch.nn.Linear(4, 1))
    assert torch.equal(again.net.weight, model.net.weight)
    assert is_there(f"{url}/m.h5")
    remove_checkpoint(f"{url}/m.h5")
    assert not is_there(f"{url}/m.h5")


def test_what_lacks_is_a_missing_file(url):
    with pytest.raises(FileNotFoundError, match=re.escape(f"There is no file {url}/none.h5")):
        compiled().load(f"{url}/none.h5")
    with pytest.raises(FileNotFoundError):
        compiled().load_weights(f"{url}/none.safetensors")


@pytest.mark.parametrize("suffix", [".h5", ".safetensors", ".pt"])
def test_damage_is_refused_as_in_a_local_file(url, suffix):
    compiled().save_weights(f"{url}/w{suffix}")
    with fsspec.open(f"{url}/w{suffix}", "rb") as file:
        content = file.read()
    for damaged in (content[:-9], content[:300] + b"?" * 40 + content[340:], b"", b"PK\x03\x04"):
        with fsspec.open(f"{url}/w{suffix}", "wb") as file:
            file.write(damaged)
        with pytest.raises(CheckpointError, match=f"{re.escape(url)}/w"):
            compiled().load_weights(f"{url}/w{suffix}")


class Store(MemoryFileSystem):
    """Loses, changes or refuses what it gets, as `fault` asks."""

    protocol = "faulty"
    fault = ""
    cachable = False
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))

    def put_file(self, local, path, **options):
        if self.fault == "cut":
            with open(local, "rb") as file:
                return self.pipe_file(path, file.read()[:-7])
        if self.fault == "changed":
            with open(local, "rb") as file:
                return self.pipe_file(path, file.read()[:-7] + b"changed")
        if self.fault == "gone":
            raise ConnectionResetError("the connection was reset")
        if self.fault == "credentials":
            raise PermissionError("Unable to locate credentials")
        if self.fault == "bucket":
            raise FileNotFoundError("The specified bucket does not exist")
        return super().put_file(local, path, **options)

    def info(self, path, **options):
        if self.fault == "no credentials":
            raise RuntimeError("Unable to locate credentials")
        if self.fault in ("nothing allowed", "only writing allowed"):
            raise PermissionError("Forbidden")
        return super().info(path, **options)

    def pipe_file(self, path, value, **options):
        if self.fault == "nothing allowed":
            raise PermissionError("Forbidden")
        return super().pipe_file(path, value, **options)

    def cp_file(self, one, other, **options):
        if self.fault == "copy":
            raise TimeoutError("took too long")
        if self.fault == "no copies":
            raise NotImplementedError
        return super().cp_file(one, other, **options)


@pytest.fixture
def faulty(monkeypatch):
    fsspec.register_implementation("faulty", Store, clobber=True)
    Store.store.clear()
    compiled().save_weights("faulty://bucket/w.h5")
    before = bytes(Store.store["/bucket/w.h5"].getbuffer())

    def fail(kind):
        monkeypatch.setattr(Store, "fault", kind)

    yield fail
    monkeypatch.undo()
    assert bytes(Store.store["/bucket/w.h5"].getbuffer()) == before
    assert list(Store.store) == ["/bucket/w.h5"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("cut", "the store returned .* bytes that differ from the"),
        ("changed", "the store returned"),
        ("gone", "can't be written: ConnectionResetError: the connection was reset"),
        ("copy", "can't be written: TimeoutError"),
        ("credentials", "credentials are missing or .*PermissionError: Unable to locate"),
        ("bucket", "the folder or bucket doesn't exist"),
    ],
)
def test_an_upload_that_fails_leaves_the_old_file(faulty, kind, said):
    faulty(kind)
    with pytest.raises(CheckpointError, match=said) as caught:
        compiled(1).save_weights("faulty://bucket/w.h5")
    assert "\n" not in str(caught.value)


def test_a_store_without_copies_gets_the_file_at_once(faulty):
    faulty("no copies")
    compiled().save_weights("faulty://bucket/w.h5")


@pytest.mark.parametrize("kind", ["no credentials", "nothing allowed"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_credentials_that_lack_are_found_before_the_first_batch(faulty, kind, asynchronous):
    faulty(kind)
    model, given = compiled(), {"asynchronous": asynchronous}
    saves = ModelCheckpoint("faulty://bucket/{epoch}.h5", **given)
    with pytest.raises(CheckpointError, match="written: credentials are missing") as caught:
        model.fit(X, Y, verbose=0, callbacks=saves)
    assert "\n" not in str(caught.value) and model.global_step == 0
    with pytest.raises(CheckpointError, match="credentials are missing"):
        model.fit(X, Y, verbose=0, callbacks=BackupAndRestore("faulty://bucket/run", **given))
    assert model.global_step == 0


def test_who_may_write_need_not_be_allowed_to_look(faulty):
    faulty("only writing allowed")
    urls.check_writable("faulty://bucket/run")


def test_a_check_writes_nothing_that_stays(url, tmp_path):
    before = list(MEMORY.store), list(MEMORY.pseudo_dirs)
    for folder in (url, f"{url}/a/b", "memory://"):
        urls.check_writable(folder)
    assert (list(MEMORY.store), list(MEMORY.pseudo_dirs)) == before
    assert not list(tmp_path.iterdir())


class Buckets(MemoryFileSystem):
    """Has one bucket, `there`."""

    protocol = "s3"
    cachable = False

    def info(self, path, **options):
        if path != "there":
            raise FileNotFoundError(path)
        return {"name": path, "type": "directory"}

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("s3://")


def test_a_bucket_that_lacks_is_found_before_the_first_batch(monkeypatch):
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "s3", Buckets)
    urls.check_writable("s3://there/run/1")
    with pytest.raises(CheckpointError, match=r"the folder or bucket doesn't exist \(gone\)"):
        compiled().fit(X, Y, verbose=0, callbacks=ModelCheckpoint("s3://gone/run/{epoch}.h5"))


def test_a_save_that_fails_itself_uploads_nothing(url):
    model = compiled()
    model.net.register_module("odd", OddState())
    with pytest.raises(ConfigurationError):
        model.save_weights(f"{url}/w.h5")
    assert names(url) == []


class OddState(torch.nn.Module):
    def get_extra_state(self):
        return object()

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("asynchronous", [False, True])
def test_model_checkpoints_at_a_url(url, asynchronous):
    saves = ModelCheckpoint(
        f"{url}/run/{{epoch}}.h5",
        monitor="loss",
        save_top_k=2,
        save_last=True,
        asynchronous=asynchronous,
    )
    model = compiled()
    model.fit(X, Y, epochs=4, batch_size=16, verbose=0, callbacks=saves)
    losses = model.history.history["loss"]
    best = sorted(range(4), key=losses.__getitem__)[:2]
    assert names(f"{url}/run") == [*sorted(f"{epoch + 1}.h5" for epoch in best), "last.h5"]
    assert saves.best_model_path == f"{url}/run/{best[0] + 1}.h5"
    again = compiled()
    fresh = ModelCheckpoint(f"{url}/run/{{epoch}}.h5")
    again.fit(X, Y, epochs=4, verbose=0, callbacks=fresh, resume_from="last")
    assert torch.equal(again.net.weight, model.net.weight)
    assert len(again.history.epoch) == 4


def test_names_with_fields_in_folders_are_found_again(url):
    saves = ModelCheckpoint(f"{url}/{{epoch}}/w.h5")
    compiled().fit(X, Y, epochs=2, verbose=0, callbacks=saves)
    assert ModelCheckpoint(f"{url}/{{epoch}}/w.h5").last_path() == f"{url}/2/w.h5"


class Cut(fitkit.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def test_a_backup_at_a_url_is_gone_on_from_and_deleted(url):
    def trained(*callbacks):
        model = compiled()
        model.fit(X, Y, epochs=4, batch_size=16, verbose=0, callbacks=list(callbacks))
        return model

    def backup():
        return BackupAndRestore(f"{url}/backup", keep=2)

    uncut = trained()
    with pytest.raises(KeyboardInterrupt):
        trained(backup(), Cut())
    assert names(f"{url}/backup") == ["backup-000001.h5", "backup-000002.h5"]
    with fsspec.open(f"{url}/backup/backup-000002.h5", "wb") as file:
        file.write(b"damaged")
    with pytest.warns(UserWarning, match="continues from .*backup-000001"):
        again = trained(backup())
    assert torch.equal(again.net.weight, uncut.net.weight)
    assert names(f"{url}/backup") == []


@pytest.mark.parametrize("kind", [CSVLogger, JSONLogger])
def test_logs_at_a_url_are_those_of_a_local_file(url, tmp_path, kind):
    for append in (False, True):
        both = [kind(f"{url}/log.txt", append=append), kind(tmp_path / "local", append=append)]
        compiled().fit(X, Y, epochs=2, verbose=0, callbacks=both)
        with fsspec.open(f"{url}/log.txt", "rb") as file:
            assert file.read() == (tmp_path / "local").read_bytes()


@pytest.mark.parametrize("kind", [fitkit.loggers.CSV, fitkit.loggers.JSONLines])
def test_loggers_files_at_a_url(url, tmp_path, kind):
    both = [kind(f"{url}/log.txt"), kind(tmp_path / "local.txt")]
    compiled().fit(X, Y, epochs=2, verbose=0, callbacks=both)
    with fsspec.open(f"{url}/log.txt", "rb") as file:
        assert file.read() == (tmp_path / "local.txt").read_bytes()


def test_inspection_and_conversion(url, tmp_path):
    from rich.console import Console

    compiled().save(f"{url}/m.h5")
    assert convert(f"{url}/m.h5", f"{url}/w.safetensors") == "weights"
    console = Console(record=True, width=120)
    with console.capture():
        print_inspection(f"{url}/w.safetensors", console)
    compiled(1).load_weights(f"{url}/w.safetensors")


def test_without_fsspec_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("fsspec"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=r"pip install 'torch-fitkit\[cloud\]'"):
        compiled().save_weights("memory://w.h5")


def test_a_stores_missing_package_is_named(monkeypatch):
    for scheme, package, extra in (("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")):
        monkeypatch.setitem(sys.modules, package, None)  # whether it is there or not
        with pytest.raises(MissingPackageError, match=rf"'{package}'.*torch-fitkit\[{extra}\]"):
            compiled().save_weights(f"{scheme}://bucket/w.h5")
    with pytest.raises(MissingPackageError, match="ocifs"):
        compiled().save_weights("oci://bucket/w.h5")
    model = compiled()
    with pytest.raises(MissingPackageError, match="ocifs"):
        model.fit(X, Y, verbose=0, callbacks=ModelCheckpoint("oci://bucket/{epoch}.h5"))
    assert model.global_step == 0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nonsense://bucket/w.h5", "Protocol not known"),
        ("simplecache::memory://w.h5", "chains several stores|folder"),
        ("memory://run.dcp", "a folder of shards can't be written to one"),
    ],
)
def test_other_urls_are_refused(path, said):
    with pytest.raises((ConfigurationError, CheckpointError), match=said):
        compiled().save(path if path.endswith((".h5", ".dcp")) else f"{path}.h5")


def test_a_url_that_went_through_pathlib_is_refused():
    from pathlib import Path

    for make in (
        lambda path: ModelCheckpoint(path / "{epoch}.h5"),
        BackupAndRestore,
        CSVLogger,
        lambda path: compiled().save_weights(path / "w.h5"),
    ):
        with pytest.raises(ConfigurationError, match="Give URLs as strings"):
            make(Path("s3://bucket/run"))


def test_what_writes_folders_takes_no_url():
    with pytest.raises(ConfigurationError, match="a folder of shards"):
        ModelCheckpoint("s3://bucket/{epoch}.dcp")
    with pytest.raises(ConfigurationError, match="Write sharded=False"):
        BackupAndRestore("s3://bucket/run", sharded=True)
    with pytest.raises(ConfigurationError, match="is a URL"):
        fitkit.loggers.MLFlowLogger(save_dir="s3://bucket/logs")


def test_the_folder_of_a_url():
    assert remote.parent("s3://bucket/a/b.h5") == "s3://bucket/a"
    assert remote.parent("s3://bucket/b.h5") == "s3://bucket"
    assert remote.parent("memory://b.h5") == "memory://"
    assert remote.parent("a/b.h5") == "a"
    assert not remote.is_url("C:\\w.h5")
    assert not remote.is_url("C://w.h5")
