"""Claims on a folder that several processes share, on one host and on many."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time

import filelock
import pytest

from dpx import _storage as storage
from dpx.runs import records
from dpx.training import keys

HOLDER = """
import sys, time
from pathlib import Path
from dpx import _storage as storage
with storage.lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holder(folder):
    """A process that has the folder, until it is killed."""
    given = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def claim_of_another_host(folder):
    """What a process elsewhere leaves: a claim of a host whose processes cannot be looked at."""
    folder.mkdir(exist_ok=True)
    with holder(folder):
        pass
    text = (folder / storage.LOCK).read_text()
    host = filelock.SoftFileLease(folder / storage.LOCK).owner.hostname
    text = text.replace(host, "elsewhere").replace("120.0", str(storage.LEASE))
    (folder / storage.LOCK).write_text(text)


@pytest.fixture
def quick(monkeypatch):
    """Leases of half a second."""
    monkeypatch.setattr(storage, "LEASE", 0.5)
    storage._lease.cache_clear()
    yield
    storage._lease.cache_clear()


@pytest.mark.slow
def test_a_folder_is_one_processes_until_that_is_killed(tmp_path):
    with (
        holder(tmp_path),
        pytest.raises(storage.BusyError, match="in use by another"),
        storage.lock(tmp_path),
    ):
        pass
    with storage.lock(tmp_path) as still_mine:
        still_mine()
        with pytest.raises(storage.BusyError), storage.lock(tmp_path):
            pass
    with storage.lock(tmp_path):
        pass


@pytest.mark.slow
def test_a_claim_of_another_host_ends_when_it_was_watched_for_long_enough(tmp_path, quick):
    claim_of_another_host(tmp_path)
    began = time.monotonic()
    with pytest.raises(storage.BusyError), storage.lock(tmp_path):
        pass
    while True:
        try:
            with storage.lock(tmp_path):
                break
        except storage.BusyError:
            time.sleep(0.05)
    assert time.monotonic() - began >= storage.LEASE


@pytest.mark.slow
def test_a_claim_is_renewed_while_it_is_held(tmp_path, quick):
    with storage.lock(tmp_path) as still_mine:
        other = filelock.SoftFileLease(tmp_path / storage.LOCK, lease_duration=storage.LEASE)
        with pytest.raises(filelock.Timeout):
            other.acquire(timeout=4 * storage.LEASE)
        still_mine()


@pytest.mark.slow
def test_who_slept_is_told_and_frees_nothing(tmp_path):
    with storage.lock(tmp_path) as still_mine:
        still_mine()
        os.unlink(tmp_path / storage.LOCK)
        with holder(tmp_path) as process:
            with pytest.raises(storage.BusyError, match="taken over"):
                still_mine()
            assert f"{process.pid}" in (tmp_path / storage.LOCK).read_text()


def test_of_many_threads_one_has_a_folder(tmp_path):
    for race in range(20):
        folder, barrier, had = tmp_path / str(race), threading.Barrier(6), []

        def take(folder=folder, barrier=barrier, had=had):
            barrier.wait()
            try:
                with storage.lock(folder):
                    had.append(folder)
                    barrier.wait()
            except storage.BusyError:
                barrier.wait()

        threads = [threading.Thread(target=take) for _ in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(had) == 1, race


def test_a_file_system_without_links_keeps_a_key_once(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.EPERM, "planted")

    monkeypatch.setattr(os, "link", refuse)
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
