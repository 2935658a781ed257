"""Reading and writing of files at URLs (`s3://`, `gs://`, `memory://`, …), through fsspec.

A file is written whole or not at all. It is first written to a private local file, then uploaded
beside its place under a temporary name. It gets its own name only after it was read back and
compared. A read first downloads the file to a private local file, which is checked like any other.
So a file in a store is trusted no more than a file on a disk. A store's errors are raised as a
`CheckpointError` that names the URL.
"""

from __future__ import annotations

import contextlib
import os
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

_PACKAGES = {
    "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"),
    "abfs": ("adlfs", "azure"), "abfss": ("adlfs", "azure"), "az": ("adlfs", "azure"),
}  # fmt: skip
"""The package that each scheme needs besides fsspec, and the extra that installs it."""
_WITH_BUCKETS = ("s3://", "s3a://", "gs://", "gcs://")
_REFUSED = ("credential", "auth", "forbidden", "denied", "anonymous")
_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def uploading(url: str) -> Iterator[BinaryIO]:
    """Open a private local file to write; upload it to `url` if the block ends without an error.

    Raises:
        ConfigurationError: fsspec doesn't know this kind of URL, or it chains several stores.
        MissingPackageError: the package for this kind of URL isn't installed.
        CheckpointError: the file can't be written; what was at `url` is still there.
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
                f"{url} can't be written: the store returned {found[0]} bytes that differ from "
                f"the {size_bytes} bytes sent. The file there is unchanged. Save again."
            )
        # A store with folders renames in one step. Other stores copy in one step.
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
    """Make an unused name in the target's folder; a killed process leaves such a file behind.

    The name doesn't contain the target's own name. TensorBoard, for example, finds its files by
    parts of their names.
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
    """Return the size of a whole file in bytes, and its XXH3-128 digest."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    file.seek(0)
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
        size_bytes += len(block)
    return size_bytes, digest.hexdigest()


@contextlib.contextmanager
def downloaded(url: str) -> Iterator[str]:
    """Download the file at a URL for the length of a block; give the local copy's path.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file can't be read completely.
    """
    with tempfile.TemporaryDirectory(prefix="fitkit-", ignore_cleanup_errors=True) as folder:
        local = os.path.join(folder, "file")
        with _reached(url, "read") as (store, path):
            info = store.info(path)
            if info.get("type") != "file":
                raise CheckpointError(
                    f"{url} can't be read: it isn't a file. Give the URL of a file."
                )
            with store.open(path, "rb") as source, open(local, "xb") as target:
                shutil.copyfileobj(source, target, _BLOCK_BYTES)
                count = target.tell()
            if info.get("size") not in (count, None):
                raise CheckpointError(
                    f"{url} can't be read: only {count} of its {info['size']} bytes arrived. Try "
                    "again."
                )
        yield local


def exists(url: str) -> bool:
    """Return whether there is a file at a URL."""
    with _reached(url, "read") as (store, path):
        try:  # not isfile, which takes a refusal for a missing file
            return bool(store.info(path).get("type") == "file")
        except FileNotFoundError:
            return False


def size(url: str) -> int:
    """Return the size of a file in bytes."""
    with _reached(url, "read") as (store, path):
        return int(store.size(path) or 0)


def written_at(url: str) -> int | None:
    """Return when a file was written, in ns; None if it doesn't exist or the store can't say."""
    with _reached(url, "read") as (store, path):
        try:
            return int(store.modified(path).timestamp() * 1e9)
        except (FileNotFoundError, NotImplementedError):
            return None


def remove(url: str) -> None:
    """Remove a file.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file can't be removed.
    """
    with _reached(url, "removed") as (store, path):
        store.info(path)
        store.rm_file(path)


def copy(url: str, twin: str) -> None:
    """Copy a file to a second URL in the same store; replace any file there."""
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
    """Create a missing folder in a store that has folders; other stores need none."""
    with _reached(url, "written") as (store, path):
        # Only paths in a tree begin with "/". Elsewhere this could create a bucket by accident.
        if path.startswith("/"):
            store.makedirs(path, exist_ok=True)


def check_writable(folder: str) -> None:
    """Check, before a training begins, that its first save can succeed.

    This finds a missing package, missing credentials, no connection, or a bucket that doesn't
    exist. Nothing is left in the store. So if the credentials allow reading but not writing, the
    error comes only at the first save.

    Args:
        folder: the URL of the folder that will be written to; it needn't exist.

    Raises:
        ConfigurationError, MissingPackageError, CheckpointError: the folder can't be written to.
    """
    with _reached(folder, "written") as (store, path):
        try:
            try:
                store.info(path)
            except FileNotFoundError:
                if folder.startswith(_WITH_BUCKETS):
                    store.info(path.partition("/")[0])
        except PermissionError:
            # Credentials may allow writing but not reading. Only writing a file shows it.
            trial = _beside(f"{path.rstrip('/')}/trial")
            store.pipe_file(trial, b"trial")
            store.rm_file(trial)


def files_in(url: str, depth: int = 1) -> list[str]:
    """Return the URLs of the files in a folder, down to `depth` levels; 1 is the folder alone."""
    with _reached(url, "read") as (store, path):
        path = path.rstrip("/")
        try:
            found = store.find(path, maxdepth=depth)
        except FileNotFoundError:
            return []
    names = [name[len(path) :].lstrip("/") for name in found if name.startswith(path)]
    return [os.path.join(url, name) for name in names]


def remove_folder(url: str) -> None:
    """Remove an empty folder, if the store has folders."""
    store, path = _store(url)
    with contextlib.suppress(Exception):
        if not store.find(path):
            store.rmdir(path)


def _store(url: str) -> tuple[Any, str]:
    """Return the store of a URL, and the path in it.

    Raises:
        MissingPackageError, ConfigurationError, CheckpointError: the store can't be reached.
    """
    if "::" in url:
        raise ConfigurationError(
            f"{url!r} chains several stores, whose caches may return older files. Give a plain URL."
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
def _reached(url: str, what: str) -> Iterator[tuple[Any, str]]:
    """Give the store of a URL, as it is now, and the path in it, with its errors as `_failures`.

    Raises:
        MissingPackageError, ConfigurationError, CheckpointError: the store can't be reached.
    """
    store, path = _store(url)
    with _failures(url, what):
        store.invalidate_cache()
        yield store, path


@contextlib.contextmanager
def _failures(url: str, what: str) -> Iterator[None]:
    """Turn a store's errors, which can be of any type, into CheckpointErrors that name the URL."""
    try:
        yield
    except FitkitError:
        raise
    except FileNotFoundError as error:
        if what == "written":
            raise CheckpointError(
                f"{url} can't be written: the folder or bucket doesn't exist ({error}). Create it "
                "first. Nothing was changed."
            ) from error
        raise FileNotFoundError(f"There is no file {url}.") from error
    except Exception as error:
        raise _failed(url, what, error) from error


def _failed(url: str, what: str, error: Exception) -> CheckpointError:
    kind = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason'}"
    if isinstance(error, PermissionError) or any(word in kind.lower() for word in _REFUSED):
        return CheckpointError(
            f"{url} can't be {what}: credentials are missing or don't allow it ({kind}). Set them "
            "in the environment variables or the configuration file that the store's package "
            "reads."
        )
    return CheckpointError(f"{url} can't be {what}: {kind}.")
