"""A claim on a folder that processes on other hosts respect, and that no dead process keeps.

The system's file lock is exact on one host, but on a shared file system it may hold on each host for itself,
or not exist at all. Whoever has a folder therefore also has the file `.lock.N` of the highest number there,
which is made by a link: of several processes that try, on whatever hosts, one succeeds. Its holder renews
the time of the file every `BEAT` seconds and empties it at the end. A file that was not renewed for `LEASE`
seconds is a dead process's, and number N + 1 may be taken. The highest number is never removed, so that no
number is given out twice: a process that only slept finds a higher one than its own, and stops.
"""

import _thread
import contextlib
import errno
import json
import os
import platform
import tempfile
import threading
import uuid
from pathlib import Path

BEAT, LEASE = 15.0, 120.0  # seconds; a file server may show the time of a file a minute late
PREFIX = ".lock."
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


class Lease:
    """A claim that is renewed in the background until it is released."""

    def __init__(self, folder: Path, number: int):
        self._folder, self._number = folder, number
        self._from_main = threading.current_thread() is threading.main_thread()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether another process has taken the folder over, because this one was thought dead."""
        return _highest(self._folder) > self._number

    def release(self) -> None:
        """Lets the next process in."""
        self._end.set()
        self._thread.join()
        # Where this fails, the claim ends when it is old.
        with contextlib.suppress(OSError):
            os.truncate(_path(self._folder, self._number), 0)

    def _renew(self) -> None:
        while not self._end.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(_path(self._folder, self._number))
            with contextlib.suppress(OSError):
                if self.lost:
                    if self._from_main:
                        _thread.interrupt_main()
                    return


def take(folder: Path, *, lock: Path, locked: bool | None) -> Lease | None:
    """Claims a folder, unless a living process has it.

    Args:
      folder: What is claimed.
      lock: The file of the system's lock.
      locked: Whether this process holds that lock; None where the file system has no such locks.

    Returns:
      The claim, or None where another process has the folder. On a file system without links it is empty,
      and the system's lock alone counts.
    """
    number = _highest(folder)
    if number and not _free(_path(folder, number), _now(lock), locked):
        return None
    if not number and locked is False:
        return None  # its holder is about to claim the folder, or could not
    # Who held the system's lock on this host is dead once another process has it.
    claim = json.dumps({"host": _host() if locked else None})
    try:
        if not create(_path(folder, number + 1), claim):
            return None
    except OSError as error:
        if error.errno in _NO_LINKS and locked:
            return Lease(folder, number)
        raise
    if _highest(folder) > number + 1:
        # The number had been given out before, and was removed behind a higher one.
        _path(folder, number + 1).unlink(missing_ok=True)
        return None
    for older in _numbers(folder):
        if older <= number:
            _path(folder, older).unlink(missing_ok=True)
    return Lease(folder, number + 1)


def create(path: Path, text: str, *, alone: bool = False) -> bool:
    """Makes a whole file, for its owner alone, unless there is one: of several that try, one does.

    Args:
      path: The file.
      text: What it holds.
      alone: Nobody else tries, since the caller keeps others out: a file system without links will do.
    """
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
        if not (alone and error.errno in _NO_LINKS):
            raise
        if os.path.lexists(path):
            return False
        os.rename(partial, path)
        return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _free(path: Path, now: float, locked: bool | None) -> bool:
    """Whether the holder of a claim has released it or is dead."""
    try:
        # Opening a file asks a file server anew; stat may answer from memory.
        with path.open() as file:
            content, renewed = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return False  # it has just been taken over
    except PermissionError:
        content, renewed = "another user's", path.stat().st_mtime
    if now - renewed > LEASE:
        return True
    if locked is False:
        return False
    return not content or (locked is True and content == json.dumps({"host": _host()}))


def _now(lock: Path) -> float:
    """The clock that the times of files come from, which on a shared file system is the server's."""
    lock.touch()
    return lock.stat().st_mtime


def _host() -> str:
    """This start of this system as one view of the file system sees it, so that containers differ."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/mnt').st_ino}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def _path(folder: Path, number: int) -> Path:
    return folder / f"{PREFIX}{number}"


def _numbers(folder: Path) -> list[int]:
    names = (name.removeprefix(PREFIX) for name in os.listdir(folder) if name.startswith(PREFIX))
    return [int(name) for name in names if name.isdigit()]


def _highest(folder: Path) -> int:
    return max(_numbers(folder), default=0)
