"""Files that are whole or absent, checked when they are read, and written by one process at a time.

A run's folder outlives the process that fills it. Processes are killed, disks fill up, files are damaged,
and two terminals use one folder. All reads and writes there go through this module, so that each of these
ends in an error that names the file and says what to do. If several processes compute one run, only the
first locks and writes; what the others write is dropped.
"""

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

import filelock

from dpx import _processes

LOCK = ".lock"
LEASE = 120.0  # seconds; a file server may show a file a minute late
PRIVATE = 0o600  # the mode of a file for its owner alone
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
_RESTORE = "restore it from a copy, or use a new workdir"


def of_lock(name: str) -> bool:
    """Whether a file of this name belongs to the lock of its folder."""
    return name == LOCK or name.startswith(f"{LOCK}.")


class StorageError(ValueError):
    """A file that cannot be used as it is."""


class BusyError(StorageError):
    """Another process works in the folder."""


@contextlib.contextmanager
def lock(folder: Path, *, wait: float = 0.0) -> Iterator[Callable[[], None]]:
    """Keeps other processes out of a folder, also those on other hosts that share it.

    The file `.lock` names the process that holds the folder, which renews it meanwhile. If that process is
    killed, others on its host get the folder at once; a process on another host gets it after it has seen
    the file unchanged for two minutes.

    Args:
      folder: The folder, which is made if there is none.
      wait: Seconds to wait for a process that holds it.

    Yields:
      A function that raises BusyError if another process has taken the folder over, which happens when this
      one slept for two minutes or more.

    Raises:
      BusyError: if another process still holds it.
    """
    if not _processes.is_first():
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    lease = _lease(folder.resolve() / LOCK)
    busy = BusyError(
        f"{folder} is in use by another process: wait until that has ended, or use another workdir; if its "
        f"host has died, remove {folder / LOCK}"
    )
    if lease.is_locked:  # by this very thread, which the library would let in again
        raise busy
    try:
        with naming(folder / LOCK):
            lease.acquire(timeout=wait, poll_interval=0.05)
    except filelock.Timeout:
        raise busy from None

    def check() -> None:
        if not lease.is_lock_held_by_us:
            raise BusyError(f"{folder} was taken over while this process slept: wait for the other")

    try:
        yield check
    finally:
        lease.release()


@functools.cache
def _lease(path: Path) -> filelock.SoftFileLease:
    """The claim on a folder. One object serves all calls: it remembers since when the file is unchanged."""
    return filelock.SoftFileLease(path, lease_duration=LEASE, heartbeat_interval=LEASE / 8)


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/dpx`, by default `~/.cache/dpx`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpx"


# ---------------------------------------------------------------------------------------------------------
# Whole files


@contextlib.contextmanager
def replacing(
    path: Path, *, mode: int = 0o666, place: Callable[[Path, Path], None] = os.replace
) -> Iterator[IO[bytes]]:
    """Opens a file of a new name, which becomes `path` once it is complete, and is removed otherwise.

    Args:
      path: The file.
      mode: The permissions of the file, which the user's umask restricts further.
      place: Gives the complete file its name; by default in place of what has that name.

    Raises:
      OSError: naming `path`, if it cannot be written.
    """
    if not _processes.is_first():
        yield io.BytesIO()
        return
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # No other file has that name, and a link that somebody put there is not followed.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            place(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Writes a file completely or not at all."""
    with replacing(path, mode=mode) as file:
        file.write(text.encode())


def appending(path: Path) -> TextIO:
    """Opens a log that its owner alone can read: training losses and errors may show private data."""
    with naming(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.fdopen(os.open(path, flags, PRIVATE), "a", buffering=1, encoding="utf-8")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
      StorageError: if the file is missing or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{path} is missing: {_RESTORE}") from None
    except UnicodeDecodeError:
        raise damaged(path) from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file with a checksum of its content, completely or not at all."""
    write_text(path, _with_checksum(content))


def read_json(path: Path) -> dict[str, Any]:
    """The content that `write_json` wrote.

    Raises:
      StorageError: if the file is missing or changed.
    """
    return _verified(read_text(path), path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a log of JSON lines. A last line that was cut off while it was written is left out.

    Raises:
      StorageError: for any other line that is not a JSON object.
    """
    objects = []
    for line in read_text(path).splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            objects.append(dict(json.loads(line).items()))
        except (ValueError, AttributeError):
            raise damaged(path, "delete it, and only the progress of the run is lost") from None
    return objects


def damaged(path: Path, remedy: str = _RESTORE) -> StorageError:
    """The error for a file whose content is not what was written."""
    return StorageError(f"{path} is damaged: {remedy}")


def _with_checksum(content: dict[str, Any]) -> str:
    return json.dumps({**content, "sha256": _checksum(content)}, indent=2) + "\n"


def _verified(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
        stated = content.pop("sha256")
    except (ValueError, TypeError, AttributeError, KeyError):
        raise damaged(path) from None
    if not isinstance(content, dict) or stated != _checksum(content):
        raise damaged(path)
    return content


def _checksum(content: dict[str, Any]) -> str:
    # JSON turns tuples into lists and keys into strings, so that both sides have to pass through it.
    plain = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds a file's name to an OSError raised inside; a full disk, for example, is reported without one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


# ---------------------------------------------------------------------------------------------------------
# Secret files


def create_private(path: Path, content: dict[str, Any]) -> bool:
    """Creates a file that its owner alone can read, in a folder of the same kind, unless the file exists.

    Returns:
      Whether this call created the file. Of several processes that try, exactly one does, and the file is
      complete. On a file system without hard links this needs the lock of the run's folder, which the caller
      holds.

    Raises:
      StorageError: if the folder is a link, another user's, or open to others.
      OSError: naming `path`, if it cannot be written.
    """
    folder = path.parent
    with naming(path):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        _check_private(folder, os.lstat(folder), stat.S_ISDIR)
    try:
        with replacing(path, mode=PRIVATE, place=_link) as file:
            file.write(_with_checksum(content).encode())
    except FileExistsError:
        return False
    return True


def _link(partial: Path, path: Path) -> None:
    """Gives a file its name. Unlike a rename, that never takes the place of a file that is there."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.rename(partial, path)


def delete_private(path: Path) -> None:
    """Deletes what `create_private` wrote, and the copies of processes that were killed as they wrote it."""
    for copy in path.parent.glob("*.partial"):
        copy.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def read_private(path: Path) -> dict[str, Any]:
    """The content that `create_private` wrote.

    Raises:
      StorageError: if the file is damaged, a link, or not the user's own alone.
    """
    try:
        _check_private(path.parent, os.lstat(path.parent), stat.S_ISDIR)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise StorageError(f"{path} is missing: {_RESTORE}") from None
    except OSError:
        raise _not_private(path) from None
    with os.fdopen(descriptor, "rb") as file:
        _check_private(path, os.fstat(descriptor), stat.S_ISREG)
        content = file.read()
    return _verified(content.decode("utf-8", errors="replace"), path)


def _check_private(path: Path, status: os.stat_result, is_right_kind) -> None:
    own = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not (is_right_kind(status.st_mode) and own):
        raise _not_private(path)


def _not_private(path: Path) -> StorageError:
    return StorageError(
        f"{path} is a link, or others own it or can read it, so that it keeps no secret: remove it, and use "
        "a new workdir"
    )
