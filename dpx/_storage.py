"""Files that are whole or absent, checked when they are read, and written by one process at a time.

A run's folder outlives the process that fills it: processes are killed, disks fill up, files are damaged,
and two terminals are pointed at one folder. All that is read or written there goes through this module,
so that each of these ends in an error that names the file and says what to do. Where several processes
compute one run, the first locks and writes, and what the others write goes nowhere.
"""

import contextlib
import errno
import functools
import hashlib
import io
import json
import os
import stat
import tempfile
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
    """Whether a file of this name in a folder is a lock's."""
    return name == LOCK or name.startswith(f"{LOCK}.")


class StorageError(ValueError):
    """A file that cannot be used as it is."""


class BusyError(StorageError):
    """Another process works in the folder."""


@contextlib.contextmanager
def lock(folder: Path, *, wait: float = 0.0) -> Iterator[Callable[[], None]]:
    """Keeps other processes out of a folder, also those on other hosts that share it.

    The file `.lock` names who has the folder, and is renewed while it is held. A process that is killed
    loses the folder to others on its host at once, and to one on another host that has watched the file for
    two minutes.

    Args:
      folder: Made where there is none.
      wait: Seconds to wait for a process that is in it.

    Yields:
      A function that raises BusyError where another process has taken the folder over, because this one
      slept for two minutes or more.

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
    if lease.is_locked:  # by this very thread, for which the library would count
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
    """The claim on a folder: one object for all calls, which knows since when it saw the file unchanged."""
    return filelock.SoftFileLease(path, lease_duration=LEASE, heartbeat_interval=LEASE / 8)


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/dpx`, by default `~/.cache/dpx`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpx"


# ---------------------------------------------------------------------------------------------------------
# Whole files


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` once it is complete, and is removed if that never happens.

    Args:
      path: The file.
      mode: Who may read and write it, as far as the user's umask lets them.

    Raises:
      StorageError: if what lies where it is written is no leftover of our own.
      OSError: naming `path`, if it cannot be written.
    """
    if not _processes.is_first():
        yield io.BytesIO()
        return
    partial = path.with_name(path.name + ".partial")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftover(partial)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(partial, flags, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Writes a whole file, or none."""
    with replacing(path, mode=mode) as file:
        file.write(text.encode())


def appending(path: Path) -> TextIO:
    """A log, for its owner alone: training losses and errors may show private data."""
    with naming(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.fdopen(os.open(path, flags, PRIVATE), "a", buffering=1, encoding="utf-8")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
      StorageError: if it is missing or no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{path} is missing: {_RESTORE}") from None
    except UnicodeDecodeError:
        raise damaged(path) from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a whole file of JSON with a checksum of its content, or none."""
    write_text(path, _with_checksum(content))


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote.

    Raises:
      StorageError: if the file is missing or changed.
    """
    return _verified(read_text(path), path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a log of JSON lines, without a last line that was cut off while it was written.

    Raises:
      StorageError: for any other line that is none.
    """
    found = []
    for line in read_text(path).splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            found.append(dict(json.loads(line).items()))
        except (ValueError, AttributeError):
            raise damaged(path, "delete it, and only the progress of the run is lost") from None
    return found


def damaged(path: Path, remedy: str = _RESTORE) -> StorageError:
    """The error for a file that is not what was written."""
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
    # Through JSON once more: what is read back has lists for tuples and strings for keys.
    plain = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


def _remove_leftover(partial: Path) -> None:
    try:
        found = os.lstat(partial)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise StorageError(f"{partial} is no file that a run of yours left: remove it")
    partial.unlink()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts a file's name into an OSError: a full disk is reported without one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


# ---------------------------------------------------------------------------------------------------------
# Secret files


def create_private(path: Path, content: dict[str, Any]) -> bool:
    """Creates a file for its owner alone in a folder for its owner alone, unless there is one.

    Returns:
      Whether this call made it, complete: of several processes that try, one does. On a file system without
      links that rests on the lock of the run's folder, which the caller has.

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
        return _create(path, _with_checksum(content))


def _create(path: Path, text: str) -> bool:
    """Makes a whole file, for its owner alone, unless there is one: of several that try, one does."""
    descriptor, partial = tempfile.mkstemp(suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never takes the place of a file that is there.
        os.link(partial, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            return False
        os.rename(partial, path)
        return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def read_private(path: Path) -> dict[str, Any]:
    """What `create_private` wrote.

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


def _check_private(path: Path, found: os.stat_result, is_right_kind) -> None:
    own = found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not (is_right_kind(found.st_mode) and own):
        raise _not_private(path)


def _not_private(path: Path) -> StorageError:
    return StorageError(
        f"{path} is a link, or others own it or can read it, so that it keeps no secret: remove it, and use "
        "a new workdir"
    )
