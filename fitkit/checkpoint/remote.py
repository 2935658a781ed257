"""Files at URLs (`s3://`, `gs://`, `memory://`, …), through fsspec: whole or not at all.

A file is written to a private local one, uploaded under another name beside its own, read back
and compared, and only then given its name. What is read comes into a private local file, which is
checked as any file is. So nothing in a store is trusted more than a file on a disk, and a store's
own errors come up as a `CheckpointError` with the URL.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import xxhash

from fitkit.errors import (
    CheckpointError,
    ConfigurationError,
    FitkitError,
    MissingPackageError,
    missing_package,
)

# Two letters and more: `C://` is a drive.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://")
_COLLAPSED = re.compile(r"(?:s3|gs|gcs|az|abfs|abfss|adl|hdfs|sftp|ssh|https?|memory|file):/[^/]")
_PACKAGES = {
    "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"),
    "abfs": ("adlfs", "azure"), "abfss": ("adlfs", "azure"), "az": ("adlfs", "azure"),
}  # fmt: skip
"""What stores of a scheme need beside fsspec, and the extra that brings it."""
_WITH_BUCKETS = ("s3://", "s3a://", "gs://", "gcs://")
_REFUSED = ("credential", "auth", "forbidden", "denied", "anonymous")
_BLOCK_BYTES = 1 << 20


def is_url(path: object) -> bool:
    """Whether a path is a URL.

    Raises:
        ConfigurationError: it was one, before `pathlib` took one of its slashes.
    """
    if isinstance(path, os.PathLike) and _COLLAPSED.match(os.fspath(path)):
        raise ConfigurationError(
            f"{os.fspath(path)!r} was a URL before pathlib.Path took one of its slashes. Give URLs "
            "as strings."
        )
    return isinstance(path, str) and _URL.match(path) is not None


def refuse_url(path: object, what: str, instead: str) -> None:
    """Refuse a URL where none can be.

    Raises:
        ConfigurationError: with what to write instead.
    """
    if is_url(path):
        raise ConfigurationError(
            f"{path!r} is a URL, and {what} can't be written to one. {instead}"
        )


def parent(path: str) -> str:
    """The folder of a path or URL, to which `os.path.join` puts another name."""
    if not is_url(path):
        return os.path.dirname(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rpartition('/')[0]}"


@contextlib.contextmanager
def uploading(url: str) -> Iterator[BinaryIO]:
    """A private local file to write, which is at `url` when the block ends without error.

    Raises:
        ConfigurationError, MissingPackageError: nothing is known for such URLs, or not installed.
        CheckpointError: it can't be written; what was at `url` is still there.
    """
    store, target = _store(url)
    try:
        with tempfile.TemporaryDirectory(prefix="fitkit-", ignore_cleanup_errors=True) as folder:
            local = os.path.join(folder, "file")
            with open(local, "x+b") as file:
                yield file
                file.flush()
                size_bytes, digest = _measured(file)
            with _failures(url, "written"):
                _put(url, store, local, target, size_bytes, digest)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{url} can't be written: {error.strerror or error} (in {tempfile.gettempdir()}, from "
            "where it would be uploaded; TMPDIR names another folder). Nothing was changed."
        ) from error


def _put(url: str, store: Any, local: str, target: str, size_bytes: int, digest: str) -> None:
    beside = _beside(target)
    try:
        store.put_file(local, beside)
        with store.open(beside, "rb") as file:
            found = _measured(file)
        if found != (size_bytes, digest):
            raise CheckpointError(
                f"{url} can't be written: the store gave back {found[0]} bytes that aren't the "
                f"{size_bytes} that it got. What was there is as it was; save again."
            )
        # Where a store has folders, it renames in one step; elsewhere a copy is made in one.
        if _renames(store):
            store.mv(beside, target)
        else:
            try:
                store.cp_file(beside, target)
            except NotImplementedError:
                store.put_file(local, target)
            store.rm_file(beside)
    except BaseException:
        with contextlib.suppress(Exception):
            store.rm_file(beside)
        raise
    _check_size(url, store, target, size_bytes)


def _beside(target: str) -> str:
    """A name beside a file's that is nobody's yet; a killed process leaves it behind.

    Without the file's own: by parts of names TensorBoard, for one, finds what it reads.
    """
    folder, slash, _ = target.rpartition("/")
    return f"{folder}{slash}.{secrets.token_hex(6)}.fitkit-unfinished"


def _renames(store: Any) -> bool:
    from fsspec import AbstractFileSystem

    return type(store).mv is not AbstractFileSystem.mv


def _check_size(url: str, store: Any, target: str, size_bytes: int | None) -> None:
    store.invalidate_cache()
    there = store.info(target).get("size")
    if None not in (there, size_bytes) and there != size_bytes:
        raise CheckpointError(
            f"{url} was written, but the store has {there} of its {size_bytes} bytes. Save again."
        )


def _measured(file: Any) -> tuple[int, str]:
    """A file's size and its XXH3-128, from its begin."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    file.seek(0)
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
        size_bytes += len(block)
    return size_bytes, digest.hexdigest()


@contextlib.contextmanager
def downloaded(url: str) -> Iterator[str]:
    """A private local copy of the file at a URL, meanwhile: its path.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it can't be read whole.
    """
    store, path = _store(url)
    with tempfile.TemporaryDirectory(prefix="fitkit-", ignore_cleanup_errors=True) as folder:
        local = os.path.join(folder, "file")
        with _failures(url, "read"):
            store.invalidate_cache()
            info = store.info(path)
            if info.get("type") != "file":
                raise CheckpointError(f"{url} can't be read: it isn't a file. Give one's URL.")
            with store.open(path, "rb") as source, open(local, "xb") as target:
                shutil.copyfileobj(source, target, _BLOCK_BYTES)
                count = target.tell()
            if info.get("size") not in (count, None):
                raise CheckpointError(
                    f"{url} can't be read: {count} of its {info['size']} bytes came. Try again."
                )
        yield local


def exists(url: str) -> bool:
    """Whether there is a file at a URL."""
    store, path = _store(url)
    with _failures(url, "read"):
        store.invalidate_cache()
        try:  # not isfile, for which a refusal is an absence
            return bool(store.info(path).get("type") == "file")
        except FileNotFoundError:
            return False


def size(url: str) -> int:
    """The size of a file in bytes."""
    store, path = _store(url)
    with _failures(url, "read"):
        return int(store.size(path) or 0)


def written_at(url: str) -> int | None:
    """The time of a file's writing in ns; None where there is none, or the store doesn't say."""
    store, path = _store(url)
    with _failures(url, "read"):
        store.invalidate_cache()
        try:
            return int(store.modified(path).timestamp() * 1e9)
        except (FileNotFoundError, NotImplementedError):
            return None


def remove(url: str) -> None:
    """Remove a file.

    Raises:
        FileNotFoundError, CheckpointError: there is none, or it can't be removed.
    """
    store, path = _store(url)
    with _failures(url, "removed"):
        store.invalidate_cache()
        store.info(path)
        store.rm_file(path)


def copy(url: str, twin: str) -> None:
    """Give a file's content a second name in the same store, replacing what has it."""
    (store, path), (_, target) = _store(url), _store(twin)
    with _failures(twin, "written"):
        size_bytes = store.info(path).get("size")
        beside = _beside(target) if _renames(store) else target
        try:
            store.cp_file(path, beside)
            if beside != target:
                store.mv(beside, target)
        except BaseException:
            if beside != target:
                with contextlib.suppress(Exception):
                    store.rm_file(beside)
            raise
        _check_size(twin, store, target, size_bytes)


def make_folder(url: str) -> None:
    """Make a folder where it lacks, in stores that have folders; others need none."""
    store, path = _store(url)
    with _failures(url, "written"):
        # A bucket is nothing to be made by the way: elsewhere than in a tree, none is.
        if path.startswith("/"):
            store.makedirs(path, exist_ok=True)


def check_writable(folder: str) -> None:
    """Find before a training what would end it at its first save: a package or credentials that
    lack, no connection, no such bucket.

    Nothing that stays is written. So where credentials allow to look, but not to write, only the
    save tells.

    Args:
        folder: the URL of the folder that will be written to, whether it is there or not.

    Raises:
        ConfigurationError, MissingPackageError, CheckpointError: it can't be written to.
    """
    store, path = _store(folder)
    with _failures(folder, "written"):
        store.invalidate_cache()
        try:
            try:
                store.info(path)
            except FileNotFoundError:
                if folder.startswith(_WITH_BUCKETS):
                    store.info(path.partition("/")[0])
        except PermissionError:
            # Whoever may write need not be allowed to look. Only a file tells.
            trial = _beside(f"{path.rstrip('/')}/trial")
            store.pipe_file(trial, b"trial")
            store.rm_file(trial)


def files_in(url: str, depth: int = 1) -> list[str]:
    """The URLs of the files in a folder, and below it down to some depth."""
    store, path = _store(url)
    path = path.rstrip("/")
    with _failures(url, "read"):
        store.invalidate_cache()
        try:
            found = store.find(path, maxdepth=depth)
        except FileNotFoundError:
            return []
    names = [name[len(path) :].lstrip("/") for name in found if name.startswith(path)]
    return [os.path.join(url, name) for name in names]


def remove_folder(url: str) -> None:
    """Remove an empty folder, where a store has folders."""
    store, path = _store(url)
    with contextlib.suppress(Exception):
        if not store.find(path):
            store.rmdir(path)


def _store(url: str) -> tuple[Any, str]:
    """The store that a URL means, and the path in it.

    Raises:
        MissingPackageError, ConfigurationError, CheckpointError: it can't be reached.
    """
    if "::" in url:
        raise ConfigurationError(
            f"{url!r} chains several stores, whose caches may give older files. Give a plain URL."
        )
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise missing_package("fsspec", "cloud", f"The URL {url!r}") from None
    try:
        store, path = url_to_fs(url)
    except ImportError as error:
        scheme = url.partition("://")[0].lower()
        if scheme in _PACKAGES:
            raise missing_package(*_PACKAGES[scheme], f"The URL {url!r}") from error
        raise MissingPackageError(
            f"The URL {url!r} needs a package that isn't installed: {error}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"The URL {url!r} can't be used: {error}.") from error
    except Exception as error:
        raise _failed(url, "reached", error) from error
    return store, path


@contextlib.contextmanager
def _failures(url: str, what: str) -> Iterator[None]:
    """Turn a store's errors, which are of any kind, into CheckpointErrors with the URL."""
    try:
        yield
    except FitkitError:
        raise
    except FileNotFoundError as error:
        if what == "written":
            raise CheckpointError(
                f"{url} can't be written: there is no such folder or bucket ({error}). Create it "
                "first. Nothing was changed."
            ) from error
        raise FileNotFoundError(f"There is no file {url}.") from error
    except Exception as error:
        raise _failed(url, what, error) from error


def _failed(url: str, what: str, error: Exception) -> CheckpointError:
    kind = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}"
    if isinstance(error, PermissionError) or any(word in kind.lower() for word in _REFUSED):
        return CheckpointError(
            f"{url} can't be {what}: credentials are missing or don't allow it ({kind}); set them "
            "in the environment variables or the configuration file that the store's package reads."
        )
    return CheckpointError(f"{url} can't be {what}: {kind}.")
