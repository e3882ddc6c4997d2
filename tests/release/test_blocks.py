"""Releases over blocks on workers: the same release for any number of them, and when one of them dies."""

import functools
import os
import signal
import sys
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from command_line import python
from release_cases import BUDGET, COUNT, KEY, made, same
from release_cases import RELEASES as CASES

from dpx import ngram, noisy_head, release
from dpx.data import Histories
from dpx.recommend import transitions
from dpx.release import Blocks, Partial, blocks
from dpx.release.executors import Here, Processes, WorkerDiedError

NUM_ITEMS = 9
FIT = functools.partial(transitions.fit, KEY, num_kept=5, rounds=2, **BUDGET)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Seven files of events, in which users are whole but not in order, and all of their histories."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    paths, walks = [], []
    for shard in range(7):
        users = rng.integers(0, 5, 40) + 5 * shard
        items, times = rng.integers(0, NUM_ITEMS, 40), rng.permutation(40)
        paths.append(folder / f"{shard}.npz")
        np.savez(paths[-1], user=users, item=items, time=times)
        order = np.argsort(times)
        walks += [items[order][users[order] == user] for user in np.unique(users)]
    return paths, Histories(tuple(walks), NUM_ITEMS)


READ = functools.partial(release.read_histories, num_items=NUM_ITEMS, time="time")


@pytest.mark.slow
def test_shards_make_the_release_of_the_one_call(shards):
    paths, everything = shards
    expected = FIT(everything)
    for order in (paths, paths[::-1]):
        same(FIT(Blocks(order, read=READ)), expected)
    named = {str(i): READ(path) for i, path in enumerate(paths)}
    same(FIT(Blocks(named)), expected)


def read_and_die_once(path, marker):
    """Kills the worker that reads the fourth shard first."""
    if path.stem == "3" and os.getpid() != int(os.environ["DPX_TEST_DRIVER"]):
        try:
            marker.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    return READ(path)


def die_always(path):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_dies_costs_time_only(shards, tmp_path, monkeypatch):
    paths, everything = shards
    monkeypatch.setenv("DPX_TEST_DRIVER", str(os.getpid()))
    read = functools.partial(read_and_die_once, marker=tmp_path / "died")
    found = FIT(Blocks(paths, read=read, workers=3))
    assert (tmp_path / "died").exists()
    same(found, FIT(everything))
    with pytest.raises(RuntimeError, match="workers died 1 times over the blocks"):
        FIT(Blocks(paths, read=die_always, workers=2, retries=0))


class Mortal(Here):
    """Workers that die in calls on the group that holds a block, as often as `deaths` says."""

    def __init__(self, **deaths):
        self.deaths = deaths

    def submit(self, fn, group):
        ((name, _),) = group
        self.deaths[name] = self.deaths.get(name, 0) - 1
        return super().submit(die if self.deaths[name] >= 0 else fn, group)


def die(group):
    raise WorkerDiedError("the worker ended with status -9")


def part_of(group):
    ((name, value),) = group
    return Partial("s", {}, (np.array([value]),), 1, 1).as_block(name)


def test_a_group_whose_worker_dies_is_summed_again_and_given_up_after_the_retries():
    groups = [[("a", 1)], [("b", 2)], [("c", 4)]]
    assert blocks._sum_up(Mortal(a=2, c=1), part_of, groups, retries=2).sums[0] == 7
    with pytest.raises(RuntimeError, match=r"died 2 times over the blocks \['c'\].* status -9"):
        blocks._sum_up(Mortal(a=1, c=2), part_of, groups, retries=1)


@pytest.mark.slow
def test_processes_make_calls_and_are_replaced_when_they_die():
    with Processes(2) as pool:
        one, two = (pool.submit(os.getpid).result() for _ in range(2))
        assert {one, two} & {pool.submit(os.getpid).result() for _ in range(4)}
        assert os.getpid() not in (one, two)
        with pytest.raises(WorkerDiedError, match="the worker ended with status -9"):
            pool.submit(die_always, None).result()
        with pytest.raises(ValueError, match="invalid literal") as raised:
            pool.submit(int, "x").result()
        assert "_answer" in raised.value.__notes__[0]  # where it was raised
        assert pool.submit(int, "7").result() == 7
        begun = pool.submit(time.sleep, 600)
    with pytest.raises((WorkerDiedError, CancelledError)):
        begun.result()
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(os.getpid)


LEFT = """
import os, signal, sys
from dpx.release.executors import Processes

if __name__ == "__main__":
    pool = Processes(1)
    print(pool.submit(os.getpid).result(), flush=True)
    if "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ended", "killed"])
def test_processes_end_with_the_one_that_started_them(tmp_path, how):
    (tmp_path / "left.py").write_text(LEFT)
    ended = python(tmp_path / "left.py", how)
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 0), ended.stderr
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(int(ended.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the worker is still there")


@pytest.mark.slow
def test_ray_makes_the_release_of_the_one_call(shards, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed")
    paths, everything = shards
    monkeypatch.setenv("DPX_TEST_DRIVER", str(os.getpid()))
    # Workers import this file for its functions.
    folders = [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    read = functools.partial(read_and_die_once, marker=tmp_path / "died")
    found = FIT(Blocks(paths, read=read, executor="ray", workers=2))
    assert (tmp_path / "died").exists()
    same(found, FIT(everything))


def test_without_ray_it_is_named(shards, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match="pip install ray"):
        FIT(Blocks(shards[0], read=READ, executor="ray"))


def test_a_block_that_is_lost_or_comes_twice_ends_the_release(shards, monkeypatch):
    paths, _ = shards
    monkeypatch.setattr("dpx.noise.release_integers", lambda *_, **__: pytest.fail("released"))
    submit = Here.submit
    for broken, said in (
        (lambda groups: groups[1:], "must be in the total"),
        (lambda groups: [*groups, groups[0]], "must be in one of the two parts"),
    ):
        monkeypatch.setattr(
            Here, "submit", lambda self, job, group, cut=broken: submit(self, job, cut(group))
        )
        with pytest.raises((RuntimeError, ValueError), match=said):
            FIT(Blocks(paths, read=READ))


def test_an_error_names_its_block(shards):
    paths, _ = shards
    with pytest.raises(ValueError, match="outside the vocabulary") as raised:
        FIT(Blocks(paths, read=functools.partial(release.read_histories, num_items=2)))
    assert raised.value.__notes__ == [f"in block {paths[0].resolve()}"]


def test_wrong_calls_are_named(shards, tmp_path):
    paths, _ = shards
    for source, options, said in (
        ([], {}, "source has no blocks"),
        (str(paths[0]), {}, "must be several files"),
        ([*paths, paths[2].parent / ".." / paths[2].parent.name / "2.npz"], {}, "2 times"),
        (paths, {"executor": "spark"}, "executor='spark'"),
        (paths, {"workers": 0}, "workers=0"),
        (paths, {"retries": -1}, "retries=-1"),
    ):
        with pytest.raises(ValueError, match=said):
            Blocks(source, read=READ, **options)
    with pytest.raises(ValueError, match=r"must end in \.npz or \.parquet"):
        release.read_arrays(tmp_path / "events.csv", ["user"])
    with pytest.raises(ValueError, match="name='K' must be in"):
        release.read_arrays(paths[0], ["K"])


def test_arrays_and_tables_are_read_by_name(tmp_path):
    tokens, mask = np.arange(12).reshape(3, 4) % 5, np.ones((3, 4), bool)
    np.savez(tmp_path / "a.npz", tokens=tokens, mask=mask)
    options = {"order": 1, "vocab_size": 5, "start": 0, "unit": "row", **BUDGET}
    read = functools.partial(release.read_arrays, names=("tokens", "mask"))
    found = ngram.fit(KEY, Blocks([tmp_path / "a.npz"], read=read), None, **options)
    same(found, ngram.fit(KEY, tokens, mask, **options))


def features_of(path):
    return noisy_head.Features(*release.read_arrays(path, ["0", "1", "2"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trees", "NoisyHead"])
@pytest.mark.parametrize("workers", [1, 2])
def test_trees_and_the_one_shot_head_from_shards_are_those_of_the_one_call(tmp_path, name, workers):
    block, paths = CASES[name][1], []
    for shard, chosen in enumerate(np.array_split(np.random.default_rng(1).permutation(COUNT), 4)):
        paths.append(tmp_path / f"{shard}.npz")
        np.savez(paths[-1], **{str(i): part for i, part in enumerate(block(chosen))})
    read = functools.partial(release.read_arrays, names=("0", "1"))
    read = features_of if name == "NoisyHead" else read
    expected = made(name, block(list(range(COUNT))), **BUDGET)
    same(made(name, Blocks(paths, read=read, workers=workers), **BUDGET), expected)


@pytest.fixture
def parquet(tmp_path):
    """Writes a table, and returns its path."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(**table):
        parquet.write_table(pa.table(table), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    return write


def test_parquet_is_read_by_column(parquet):
    path = parquet(user=[1, 0, 1], item=[2, 3, 1], time=[5, 1, 2])
    read = release.read_histories(path, num_items=4, time="time")
    assert [walk.tolist() for walk in read.items] == [[3], [1, 2]]


@pytest.mark.parametrize(("column", "values", "words"), [
    ("user", [1, None, 2], "row 2, 'user' is missing"),
    ("user", ["a", None, "b"], "row 2, 'user' is missing"),
    ("user", [1.0, 2.0, 2.5], "row 1, 'user' holds 1.0: ids must be text or whole numbers"),
    ("user", ["ann", "nan", "bob"], "row 2, 'user' holds 'nan', which stands for a missing value"),
    ("item", [0, None, 1], "row 2, 'item' is missing"),
    ("item", ["0", "x", "1"], "row 2, 'item' holds 'x': items must be numbers"),
    ("time", [1, None, 3], "row 2, 'time' is missing"),
    ("time", ["1", "2020-01-01", "2"], "row 2, 'time' holds '2020-01-01', and .* a number"),
])  # fmt: skip
def test_an_event_that_cannot_be_read_is_named(parquet, column, values, words):
    table = {"user": [0, 0, 0], "item": [0, 1, 2], "time": [1, 2, 3]} | {column: values}
    with pytest.raises(ValueError, match=rf"a\.parquet: {words}"):
        release.read_histories(parquet(**table), num_items=3, time="time")


def test_arrays_keep_the_type_of_the_file_and_have_no_gaps(parquet):
    table = {"n": [2**60 + 1, 5], "x": [0.5, 1.0], "b": [True, False], "t": ["a", "b"]}
    found = release.read_arrays(parquet(**table), list(table))
    assert [column.dtype.kind for column in found] == ["i", "f", "b", "O"]
    assert [column.tolist() for column in found] == list(table.values())
    with pytest.raises(ValueError, match="row 2, column 'n' is missing"):
        release.read_arrays(parquet(n=[2**60 + 1, None]), ["n"])


@pytest.mark.parametrize("content", [b"", b"PK\3\4xxx", b"text", "objects"])
def test_files_that_cannot_be_read_are_named(tmp_path, content):
    for name in ("a.npz", "a.parquet"):
        path = tmp_path / name
        if content == "objects":
            np.savez(tmp_path / "a.npz", user=np.array([None, "a"]), item=np.arange(2))
        else:
            path.write_bytes(content)
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            release.read_histories(path, num_items=2)
        assert str(path) in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"absent\.npz"):
        release.read_histories(tmp_path / "absent.npz", num_items=2)


def test_arrays_have_one_length_and_may_have_none(tmp_path):
    for user, item in ((np.array([1]), np.array([0, 1])), (np.zeros((2, 2), int),) * 2):
        np.savez(tmp_path / "a.npz", user=user, item=item)
        with pytest.raises(ValueError, match="must have one length and one dimension"):
            release.read_histories(tmp_path / "a.npz", num_items=3)
    np.savez(tmp_path / "a.npz", user=np.zeros(0, int), item=np.zeros(0, int))
    assert release.read_histories(tmp_path / "a.npz", num_items=3).items == ()
