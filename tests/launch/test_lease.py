"""Claims on a folder that several hosts share, each with file locks of its own."""

import contextlib
import errno
import json
import os
import signal
import threading
import time

import pytest

from dpx import _lease
from dpx import _storage as storage
from dpx.launch import records
from dpx.training import keys


class _NoLock:
    """The system's lock of a host where nobody else is."""

    def __init__(self, path):
        self._path = path

    def acquire(self, timeout):
        self._path.touch()

    def release(self):
        pass


@pytest.fixture
def hosts(monkeypatch):
    """Every thread is a host of its own."""
    monkeypatch.setattr(storage.filelock, "FileLock", _NoLock)
    monkeypatch.setattr(_lease, "_host", lambda: str(threading.get_ident()))


def claim_of_another(folder, host, age=0.0):
    folder.mkdir(exist_ok=True)
    path = folder / f"{_lease.PREFIX}7"
    path.write_text(json.dumps({"host": host}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def claims(folder):
    return sorted(path.name for path in folder.glob(f"{_lease.PREFIX}*"))


def test_a_claim_of_another_host_is_respected_until_it_is_old(tmp_path):
    claim_of_another(tmp_path, "elsewhere", age=0.9 * _lease.LEASE)
    with pytest.raises(storage.BusyError, match="in use by another"), storage.lock(tmp_path):
        pass
    claim_of_another(tmp_path, "elsewhere", age=1.1 * _lease.LEASE)
    with storage.lock(tmp_path):
        assert claims(tmp_path) == [".lock.8"]
    with storage.lock(tmp_path):  # a released claim is free at once
        assert claims(tmp_path) == [".lock.9"]


def test_a_process_that_died_on_this_host_is_followed_at_once(tmp_path):
    claim_of_another(tmp_path, _lease._host())
    with storage.lock(tmp_path) as still_mine:
        still_mine()


def test_the_systems_lock_keeps_others_on_this_host_out_until_the_claim_is_old(tmp_path):
    """An old claim beside a held lock: its host is gone, and the file server does not know."""
    held = storage.filelock.FileLock(tmp_path / storage.LOCK)
    held.acquire()
    with pytest.raises(storage.BusyError), storage.lock(tmp_path):
        pass
    claim_of_another(tmp_path, "elsewhere")
    with pytest.raises(storage.BusyError), storage.lock(tmp_path):
        pass
    claim_of_another(tmp_path, "elsewhere", age=2 * _lease.LEASE)
    with storage.lock(tmp_path):
        held.release()
        # Whoever holds the folder went without the system's lock, which says nothing about it then.
        with pytest.raises(storage.BusyError), storage.lock(tmp_path):
            pass


def test_who_slept_is_told_and_frees_nothing(tmp_path, hosts):
    with storage.lock(tmp_path) as still_mine:
        still_mine()
        os.utime(tmp_path / ".lock.1", (0, 0))
        successor = storage.lock(tmp_path)
        successor.__enter__()
        with pytest.raises(storage.BusyError, match="taken over"):
            still_mine()
    assert (tmp_path / ".lock.2").read_text()
    successor.__exit__(None, None, None)
    assert claims(tmp_path) == [".lock.2"]
    assert not (tmp_path / ".lock.2").read_text()


def test_who_slept_is_interrupted(tmp_path, hosts, monkeypatch):
    monkeypatch.setattr(_lease, "BEAT", 0.02)
    # Tests that a script starts in the background ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def sleep():
        with storage.lock(tmp_path):
            claim_of_another(tmp_path, "elsewhere")
            for _ in range(1000):
                time.sleep(0.01)

    try:
        with pytest.raises(storage.BusyError, match="taken over"):
            sleep()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_claim_is_renewed_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(_lease, "BEAT", 0.02)
    with storage.lock(tmp_path):
        claim = tmp_path / ".lock.1"
        os.utime(claim, (0, 0))
        deadline = time.monotonic() + 10
        while claim.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert claim.stat().st_mtime > time.time() - 60


@pytest.mark.parametrize("left", ["nothing", "a dead claim", "a released claim"])
def test_of_many_hosts_one_has_a_folder(tmp_path, hosts, left):
    for race in range(20):
        folder, barrier, had = tmp_path / str(race), threading.Barrier(6), []
        folder.mkdir()
        if left != "nothing":
            claim = claim_of_another(folder, "elsewhere", age=2 * _lease.LEASE)
            if left == "a released claim":
                claim.write_text("")

        def take(folder=folder, barrier=barrier, had=had):
            barrier.wait()
            with contextlib.suppress(storage.BusyError), storage.lock(folder) as still_mine:
                had.append(still_mine)
                barrier.wait()
                still_mine()
                return
            barrier.wait()

        threads = [threading.Thread(target=take) for _ in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(had) == 1, race
        assert len(claims(folder)) == 1


@pytest.mark.parametrize("without", ["links", "locks"])
def test_a_file_system_without_links_or_locks_has_the_other(tmp_path, monkeypatch, without):
    def refuse(*arguments, **options):
        raise OSError(errno.EPERM if without == "links" else errno.ENOLCK, "planted")

    if without == "links":
        monkeypatch.setattr(os, "link", refuse)
    else:
        monkeypatch.setattr(_NoLock, "acquire", refuse)
        monkeypatch.setattr(storage.filelock, "FileLock", _NoLock)
    with storage.lock(tmp_path) as still_mine:
        still_mine()
        with pytest.raises(storage.BusyError), storage.lock(tmp_path):
            pass
    with storage.lock(tmp_path):
        secret = tmp_path / "secret" / "keys.json"
        assert storage.create_private(secret, {"key": 1})
        assert not storage.create_private(secret, {"key": 2})
        assert storage.read_private(secret) == {"key": 1}
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_that_finished_while_this_process_slept_gets_no_second_key(tmp_path, monkeypatch):
    config = records.load_config("configs/quickstart.py:tiny")
    create = storage.create_private

    def slow(path, content):
        (tmp_path / "privacy.json").write_text("{}")  # another process runs it, and deletes its key
        return create(path, content)

    monkeypatch.setattr(storage, "create_private", slow)
    with pytest.raises(keys.CannotResumeError, match="pay once"):
        keys.open_keys(config, tmp_path)
    assert not (tmp_path / keys.FOLDER / "keys.json").exists()


@pytest.mark.parametrize(
    ("content", "age", "locked", "free"),
    [
        ("", 0, True, True),  # released
        ("", 0, None, True),
        ("", 0, False, False),  # whoever holds the system's lock is about to take the next number
        ("this host", 0, True, True),  # its holder would still have the system's lock, so it died
        ("this host", 0, None, False),  # where there are no such locks, that says nothing
        ("this host", 0, False, False),
        ("elsewhere", 0, True, False),
        ("elsewhere", 0.9, True, False),
        ("elsewhere", 1.1, True, True),
        ("elsewhere", 1.1, False, True),
        ("elsewhere", 1.1, None, True),
    ],
)
def test_a_claim_is_free_once_it_is_released_or_its_holder_is_dead(
    tmp_path, monkeypatch, content, age, locked, free
):
    host = _lease._host() if content == "this host" else content
    path = claim_of_another(tmp_path, host, age * _lease.LEASE)
    if not content:
        path.write_text("")
    assert _lease._free(path, time.time(), locked) is free

    def refuse(*arguments, **options):
        raise PermissionError

    # A claim of another user cannot be read: its age alone says whether that user's process is dead.
    monkeypatch.setattr(type(path), "open", refuse)
    assert _lease._free(path, time.time(), locked) is (age > 1)


def test_a_claim_that_has_just_been_followed_is_not_free(tmp_path):
    assert not _lease._free(tmp_path / ".lock.1", time.time(), True)


def test_a_number_that_was_given_out_before_is_given_back(tmp_path, monkeypatch):
    """Between the look and the link, two others took the next two numbers, and the first of them is gone."""
    lock, create = tmp_path / ".lock", _lease.create
    lock.touch()

    def late(path, text):
        (tmp_path / ".lock.2").write_text("claimed")
        return create(path, text)

    monkeypatch.setattr(_lease, "create", late)
    assert _lease.take(tmp_path, lock=lock, locked=True) is None
    assert claims(tmp_path) == [".lock.2"]
