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
    first_users,
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
from dpx.data.newsgroups import load_texts
from dpx.data.shakespeare import load_shakespeare


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
    with pytest.raises(ValueError, match="min_count"):
        from_events(users, items, times, min_count=4)


def test_an_item_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"user 1 has item 3 outside the vocabulary \[0, 3\)"):
        Histories((np.array([0]), np.array([3])), 3)


def test_histories_may_be_lists_and_keep_the_ids_of_their_items():
    histories = Histories([[0, 1], [], [2]], 3, np.array(["a", "b", "c"]))
    assert as_lists(histories) == [[0, 1], [], [2]]
    assert [items.dtype.kind for items in histories.items] == ["i"] * 3
    for wrong in ([[0.5]], [["a"]], [[[0]]], [[True]]):
        with pytest.raises(ValueError, match="whole numbers"):
            Histories(wrong, 3)
    for size in (2.5, float("nan"), -1):
        with pytest.raises(ValueError, match=f"num_items={size} must be a whole number"):
            Histories([[]], size)
    with pytest.raises(ValueError, match="item_ids has 1 entries and num_items=3"):
        Histories([[0]], 3, np.array(["a"]))
    frame = pandas.DataFrame({"who": ["x", "y", "x"], "what": ["tea", "milk", "milk"]})
    made = from_events(frame.who, frame.what, min_count=0)
    assert [made.item_ids[items].tolist() for items in made.items] == [["tea", "milk"], ["milk"]]
    assert leave_last_out(made).train_and_validation.item_ids.tolist() == ["milk", "tea"]


def test_the_first_users_have_a_catalogue_of_their_own():
    histories = Histories([[5, 1], [3], [0]], 7, np.arange(7) * 10)
    first = first_users(histories, 2)
    assert as_lists(first) == [[2, 0], [1]]
    assert first.item_ids.tolist() == [10, 30, 50]
    assert first_users(Histories([[2]], 4), 9).item_ids.tolist() == [2]


def test_data_import_no_mechanism():
    allowed = {"dpx.data", "dpx._validate", "dpx._storage"}
    files = list(Path(dpx_data.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                inside = ".".join((name or "").split(".")[:2])
                assert not inside.startswith("dpx") or inside in allowed, (file.name, name)


def test_leave_last_out_hides_the_test_item():
    histories = Histories(tuple(np.arange(n) for n in (5, 2, 3)), 6)
    split = leave_last_out(histories)
    assert as_lists(split.train) == [[0, 1, 2], [0, 1], [0]]
    assert split.users.tolist() == [0, 2]
    assert split.validation.tolist() == [3, 1]
    assert split.test.tolist() == [4, 2]
    assert as_lists(split.train_and_validation) == [[0, 1, 2, 3], [0, 1], [0, 1]]


def test_left_pad():
    tokens, mask = left_pad([[5, 6, 7, 8], [], [9]], 3)
    assert tokens.tolist() == [[6, 7, 8], [0, 0, 0], [0, 0, 9]]
    assert mask.tolist() == [[True] * 3, [False] * 3, [False, False, True]]


def test_movielens_small_is_the_known_set():
    histories = load_movielens_small()
    assert (len(histories.items), histories.num_items) == (671, 3496)
    assert sum(map(len, histories.items)) == 90_072


def test_movielens_1m_from_text_and_zip(tmp_path):
    lines = "1::10::5::30\n1::20::4::10\n2::10::3::5\n"
    text, archive = tmp_path / "ratings.dat", tmp_path / "ml-1m.zip"
    text.write_text(lines)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ml-1m/ratings.dat", lines)
    for path in (text, archive):
        assert as_lists(load_movielens_1m(path, min_count=0)) == [[1, 0], [0]]
    text.write_text(lines + "3::x::1::1\n")
    with pytest.raises(ValueError, match="line 4"):
        load_movielens_1m(text)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_movielens_1m(tmp_path / "absent.dat")


def test_amazon_in_both_forms(tmp_path):
    pairs, ratings = tmp_path / "games.txt", tmp_path / "ratings.csv"
    pairs.write_text("1 3\n1 1\n2 3\n")
    assert as_lists(load_amazon(pairs)) == [[1, 0], [1]]
    ratings.write_text("b,x,5.0,20\nb,y,4.0,10\na,x,1.0,5\n")
    assert as_lists(load_amazon(ratings, min_count=0)) == [[0], [1, 0]]
    for broken in ("1 3\n1\n", "1 3\n\n0 2\n", "1 3\n1 2 3\n"):
        pairs.write_text(broken)
        with pytest.raises(ValueError, match=r"line [23] is malformed"):
            load_amazon(pairs)
    pairs.write_text("")
    with pytest.raises(ValueError, match="no ratings"):
        load_amazon(pairs)


def test_surnames_are_the_census_list():
    names = load_surnames()
    assert len(names) == 88_799
    assert names[:2] == ["smith", "johnson"]
    encoded = surnames.encode(names[:500])
    assert surnames.decode(encoded.tokens) == names[:500]
    assert encoded.mask.sum() == sum(len(name) + 1 for name in names[:500])


def test_surnames_split_and_errors(tmp_path):
    encoded = surnames.encode(load_surnames()[:100])
    train, test = split(encoded, 30, seed=0)
    together = surnames.decode(train.tokens) + surnames.decode(test.tokens)
    assert sorted(together) == sorted(surnames.decode(encoded.tokens))
    again = split(encoded, 30, seed=0)[1]
    assert np.array_equal(again.tokens, test.tokens)
    with pytest.raises(ValueError, match="held_out"):
        split(encoded, 100, seed=0)
    path = tmp_path / "names.txt"
    path.write_text("SMITH 1.0\nO'NEIL 0.5\n")
    with pytest.raises(ValueError, match="line 2"):
        load_surnames(path)
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
    with pytest.raises(ValueError, match="predictability"):
        synthetic_histories(1, 1, 1, predictability=2)


def _zipped(path, text=b"1::2::5::3\n" * 500, **options):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(options.get("name", "ml-1m/ratings.dat"), text)
    return path


def _no_archive(path):
    path.write_bytes(b"PK\x03\x04 nothing")


def _cut_archive(path):
    content = _zipped(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _flipped_archive(path):
    content = bytearray(_zipped(path).read_bytes())
    content[60] ^= 0xFF
    path.write_bytes(content)


def _encrypted_archive(path):
    content = bytearray(_zipped(path).read_bytes())
    content[6] |= 1  # the flag, in the file's header and in the directory's
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)


def _unknown_compression(path):
    content = bytearray(_zipped(path).read_bytes())
    content[8] = 97
    content[content.rindex(b"PK\x01\x02") + 10] = 97
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("load", "name", "content", "words"),
    [
        (load_surnames, "a.txt", "müller\n".encode("latin-1"), "is not UTF-8"),
        (load_surnames, "a.txt", "smith\n".encode("utf-16"), "is not UTF-8"),
        (load_surnames, "a.txt", b"smith\n\x00\n", "line 2 is malformed"),
        (load_surnames, "a.txt", b"", "holds no names"),
        (load_shakespeare, "a.txt", b"to be \xff", "byte 6 is not UTF-8"),
        (load_amazon, "a.csv", b"u,i,5,3\nu\xe9,i,5,3\n", "is not UTF-8"),
        (load_amazon, "a.csv", b"u,i,5,nan\n", "line 1, column '4' holds 'nan', which stands for"),
        (load_amazon, "a.csv", b"u,i,5,3\nu,i,5,inf\n", "line 2, column '4' holds 'inf', which is no time"),
        (load_amazon, "a.csv", b"u,i,5,3\n,i,5,3\n", "line 2, column '1' is missing"),
        (load_amazon, "a.csv", b"u,x,i,5,3\n", "line 1, column '3' holds 'i', which is no rating"),
        (load_amazon, "a.csv", b"u,i\n", "column '4' must be a number from 1 to 2.*year=2014 is read"),
        (load_amazon, "a.csv", b"user,item,rating,timestamp\n", "line 1.* holds 'rating', which is no"),
        (load_amazon, "a.csv", b"\x1f\x8bdamaged", "cannot be unpacked by gzip"),
        (load_amazon, "a.txt", b"1 2\n1 99999999999999999999\n", "line 2 is malformed"),
        (load_amazon, "a.txt", "1 2\u20283 4\n".encode(), "line 1 is malformed"),
        (load_amazon, "a.csv", b"u,i,5,3\x0cv,i,5,3\n", "line 1, column '4'.*is no time"),
        (load_movielens_1m, "a.dat", b"1::2::5::3\x851::2::5::3\n", "line 1 is malformed"),
        (load_amazon, "a.txt", b"\xff\xfe1\x00 \x002\x00", "is not UTF-8"),
        (load_movielens_1m, "a.dat", b"1::2::5::99999999999999999999\n", "line 1 is malformed"),
        (load_movielens_1m, "a.dat", b"\xff\xfe", "line 1 is malformed"),
        (load_movielens_1m, "a.dat", b"", "holds no ratings"),
        (load_movielens_1m, "a.zip", _no_archive, "not an archive that can be read"),
        (load_movielens_1m, "a.zip", _cut_archive, "not an archive that can be read"),
        (load_movielens_1m, "a.zip", _flipped_archive, "not an archive that can be read"),
        (load_movielens_1m, "a.zip", _encrypted_archive, "not an archive that can be read"),
        (load_movielens_1m, "a.zip", _unknown_compression, "not an archive that can be read"),
        (load_movielens_1m, "a.zip", lambda p: _zipped(p, name="x"), "holds no ratings.dat"),
        (load_texts, "a.csv", b"text\n" + b'"' + b"x" * 2**25, "is malformed"),
        (load_texts, "a.csv", b"text\n", "no row"),
        (load_texts, "a.bin", b"text\n", "give a table whose name ends in"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(tmp_path, load, name, content, words):
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        load(path)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


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
    forms = {
        2014: "".join(f"{user},{item},5.0,{time}\n" for user, item, time in rows),
        2018: "".join(f"{item},{user},5.0,{time}\n" for user, item, time in rows),
        2023: "user_id,parent_asin,rating,timestamp\n"
        + "".join(f"{user},{item},5.0,{time}\n" for user, item, time in rows),
    }
    for written, content in forms.items():
        path = tmp_path / f"{written}.csv.gz"
        path.write_bytes(gzip.compress(content.encode()))
        for read in forms:
            if read == written:
                made = load_amazon(path, year=read, min_count=0)
                assert as_lists(made) == [[0, 1], [1]]
                assert made.item_ids.tolist() == ["0439893577", "B0000000A1"]
            else:
                with pytest.raises(
                    ValueError, match="year=" + ("" if read == 2023 else str(written))
                ):
                    load_amazon(path, year=read, min_count=0)
    with pytest.raises(ValueError, match="year=2016 must be 2014, 2018 or 2023"):
        load_amazon(path, year=2016)


@pytest.mark.parametrize("value", [True, 1.0, decimal.Decimal(1), np.float64(1)])
def test_what_equals_a_number_is_none(value):
    with pytest.raises(
        ValueError, match=r"users: event 1 holds .*: ids must be text or whole numbers"
    ):
        from_events([1, value], [5, 6], min_count=0)
    with pytest.raises(
        ValueError, match=r"items: event 2 holds .*: ids must be text or whole numbers"
    ):
        from_events([1, 2, 3], np.array([1, "a", value], object), min_count=0)


@pytest.mark.parametrize("kind", [np.uint64, np.int8, np.int64, np.uint32])
def test_items_have_the_type_of_the_catalogue_whatever_users_have(kind):
    """NumPy joins int64 and uint64 as floats."""
    for size, expected in ((3, np.int32), (2**40, np.int64)):
        histories = Histories([np.array([0, 1], kind), [2], np.zeros(0, np.int16)], size)
        assert {items.dtype for items in histories.items} == {np.dtype(expected)}


def test_events_have_a_user_and_an_item_each():
    with pytest.raises(ValueError, match=r"\[4, 3\] entries"):
        from_events([1, 1, 2, 2], [5, 6, 5], min_count=0)
    with pytest.raises(ValueError, match="items is a masked array"):
        from_events([1, 1], np.ma.array([5, 6], mask=[True, False]), min_count=0)
