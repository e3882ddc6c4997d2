"""Tables of interactions of one's own: what they may look like, and errors that say what to do."""

import sys

import numpy as np
import pandas
import pytest

from dpx import release
from dpx.data import Histories, from_events, load_table

ROWS = [("ann", "tea", 3), ("bob", "milk", 1), ("ann", "milk", 1), ("bob", "tea", 1)]


def as_ids(histories):
    return [histories.item_ids[items].tolist() for items in histories.items]


def write(path, rows, separator=",", header="user,item,time"):
    lines = [separator.join(map(str, row)) for row in rows]
    if header:
        lines.insert(0, header.replace(",", separator))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t"), (".TAB", "\t")])
def test_columns_by_name_and_by_number(tmp_path, suffix, separator):
    path = write(tmp_path / f"a{suffix}", ROWS, separator)
    assert as_ids(load_table(path, time="time")) == [["milk", "tea"], ["milk", "tea"]]
    assert as_ids(load_table(path)) == [["tea", "milk"], ["milk", "tea"]]
    plain = write(tmp_path / f"b{suffix}", ROWS, separator, header=None)
    made = load_table(plain, user="1", item="2", time="3", header=False)
    assert as_ids(made) == [["milk", "tea"], ["milk", "tea"]]


def test_cells_may_be_quoted_and_lines_blank_and_a_mark_may_come_first(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ufeff"user", item \n"a, b","x\ny"\n\n"a, b", z\n', encoding="utf-8")
    assert as_ids(load_table(path)) == [["x\ny", "z"]]


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (["10", "9"], [9, 10]),
        (["-1", "0"], [-1, 0]),
        (["007", "7"], [7, "007"]),
        (["1.5", "2"], [2, "1.5"]),
        (["é", "7", "e\u0301"], [7, "é"]),
        (["9" * 30, "1", str(2**63), str(2**63 - 1)], [1, 2**63 - 1, str(2**63), "9" * 30]),
        (["-", "--1", "-0"], ["-", "--1", "-0"]),
        (["²", "1"], [1, "²"]),
    ],
)
def test_each_id_is_a_whole_number_if_it_is_written_so(tmp_path, written, ids):
    path = write(tmp_path / "a.csv", [("u", item) for item in written], header="user,item")
    assert load_table(path).item_ids.tolist() == ids
    assert [type(x) for x in load_table(path).item_ids.tolist()] == [type(x) for x in ids]


@pytest.mark.parametrize(
    "times",
    [
        ["2", "10", "1e1", "11.5"],
        ["2024-01-31", "2024-02-01", "2024-02-01 00:00:00", "2024-02-01T00:00:01Z"],
        ["2024-02-01T00:00+02:00", "2024-02-01", "2024-02-01", "2024-02-02"],
        ["2024-02-01T00:00:00.123456788Z", *["2024-02-01T00:00:00.123456789"] * 2, "2024-02-02"],
        ["999999999", "1000000000", "1000000000.0", "1000000000.000000001"],
        [str(2**62), str(2**62 + 1), f"{2**62 + 1}.0", str(2**62 + 2)],
        ["-1.5", "-1.25", "-1.25", ".5"],
    ],
)
def test_times_are_numbers_or_dates(tmp_path, times):
    # The second and the third are the same time: they stay in the order of the file.
    rows = [("u", item, time) for item, time in zip("abcd", times, strict=True)]
    path = write(tmp_path / "a.csv", [rows[3], rows[1], rows[0], rows[2]])
    assert as_ids(load_table(path, time="time")) == [["a", "b", "c", "d"]]


def test_min_count_is_the_core(tmp_path):
    path = write(tmp_path / "a.csv", [*ROWS, ("eve", "tea", 1), ("ann", "rum", 1)])
    made = load_table(path, min_count=2)
    assert as_ids(made) == [["tea", "milk"], ["milk", "tea"]]


def test_parquet_names_what_it_cannot_read(tmp_path):
    path = tmp_path / "a.parquet"
    when = pandas.to_datetime([3, 1, 1, 1], unit="D", utc=True)
    frame = pandas.DataFrame({"who": [9, 7, 9, 7], "what": [x[1] for x in ROWS], "when": when})
    columns = {"user": "who", "item": "what", "time": "when"}

    def read(frame):
        frame.to_parquet(path)
        return as_ids(load_table(path, **columns))

    assert read(frame) == [["milk", "tea"], ["milk", "tea"]]
    assert read(frame.set_index("who")) == [["milk", "tea"], ["milk", "tea"]]
    assert read(frame.assign(when=when.date)) == [["milk", "tea"], ["milk", "tea"]]
    assert read(frame.astype({"what": "category"})) == [["milk", "tea"], ["milk", "tea"]]
    for column, values, words in (
        ("what", ["a", None, "b", "c"], "row 2, column 'what' is missing"),
        (
            "what",
            [1.0, 1.5, 2.0, 3.0],
            "row 1, column 'what' holds 1.0: ids must be text or whole numbers",
        ),
        ("what", [True] * 4, "row 1, column 'what' holds True: ids must be"),
        ("who", pandas.array([1, None, 2, 2], "Int64"), "row 2, column 'who' is missing"),
        ("when", [when[0], None, when[1], when[2]], "row 2, column 'when' is missing"),
        ("when", [1.0, np.inf, 1.0, 1.0], "row 2, column 'when' holds 'inf', which is no time"),
        ("when", [1.0, 2.0**53, 1.0, 1.0], "row 2, column 'when' holds .* a float to which other"),
        ("when", [when[0].time()] * 4, "row 1, column 'when' .*, which is no time"),
        ("what", [[1], [2], [3], [4]], "column 'what' holds list<element: int64>, .*explode"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            read(frame.assign(**{column: values}))
        assert str(path) in str(raised.value)
    for options in ({"header": False}, {"header": True}, {"separator": ";"}):
        with pytest.raises(ValueError, match="parquet names its columns"):
            load_table(path, **options)
    frame.to_parquet(path)
    with pytest.raises(ValueError, match="has no column 'user': it has who, what, when"):
        load_table(path)


def test_parquet_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet: not a parquet file that can be read"):
        load_table(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"a\.parquet: .*pip install pyarrow"):
        load_table(path)


def test_the_same_table_has_the_same_users_in_every_format(tmp_path):
    users = ["ann", "ann ", " ann", "bob", "7", "007", " 7", "jose\u0301", "jos\xe9", str(2**63)]
    frame = pandas.DataFrame({"user": users, "item": [f"i{n}" for n in range(len(users))]})
    expected = [["i4", "i6"], ["i5"], ["i9"], ["i0", "i1", "i2"], ["i3"], ["i7", "i8"]]
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "a.tsv.gz", index=False, sep="\t")
    frame.to_csv(tmp_path / "a.dat", index=False, sep=";")
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_json(tmp_path / "a.jsonl.gz", orient="records", lines=True)
    numbers = [7 if user.strip() == "7" else user for user in users]
    read = [load_table(tmp_path / f"a.{kind}") for kind in ("csv", "tsv.gz", "parquet", "jsonl.gz")]
    read.append(load_table(tmp_path / "a.dat", separator=";"))
    for given in (users, numbers, frame.user, np.array(users), pandas.Series(numbers)):
        read.append(from_events(given, frame.item, min_count=0))
    np.savez(tmp_path / "a.npz", user=np.array(users), item=np.arange(len(users)))
    frame.assign(item=range(len(users))).to_parquet(tmp_path / "b.parquet")
    for path in ("a.npz", "b.parquet"):
        found = release.read_histories(tmp_path / path, num_items=99)
        read.append(Histories(found.items, 99, np.array([f"i{n}" for n in range(99)])))
    for made in read:
        assert as_ids(made) == expected


def test_one_row_never_decides_how_wide_the_ids_of_all_are(tmp_path):
    made = from_events(["a"] * 3000, [*map(str, range(2999)), "x" * 10**6], min_count=0)
    assert made.item_ids.nbytes < 10**5


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("user,item\n", {}, "holds no row"),
        ("", {}, "holds no row"),
        ("a;b\n1;2\n", {}, "has no column 'user'.*a;b.*header=False.*separator=';'"),
        ("user,item\n1,2\n", {"time": "when"}, "has no column 'when'.*user, item"),
        ("user,item\n1,2\n", {"item": "2"}, "has no column '2'"),
        ("1,2\n3,4\n", {"user": "1", "item": "2"}, "first line, 1, 2, can be the names.*or a row"),
        ("1::2\n", {"user": "1", "item": "2", "header": False}, "--config.data.separator=::"),
        ("user|item\n", {}, r"--config.data.separator='\|'"),
        ("1,2\n", {"header": False}, "column 'user' must be a number from 1 to 2"),
        ("1,2\n", {"header": False, "user": "0"}, "column '0' must be a number from 1 to 2"),
        ("1,2\n", {"header": False, "user": "1", "item": "3"}, "column '3' must be a number"),
        ("user,item\n1,2\n3\n", {}, "line 3 has 1 cells and column 'item' is number 2"),
        ("user,item\n1,2\n\n3, \n", {}, "line 4, column 'item' is missing"),
        ("user,item\n,2\n", {}, "line 2, column 'user' is missing"),
        (
            "user,item\nann,2\nnan,3\nnan,4\n",
            {},
            "line 3, column 'user' holds 'nan', which stands for",
        ),
        ("user,item,t\n1,2,3\n1,3,x\n", {"time": "t"}, "line 3, column 't' holds 'x'.*no time"),
        ("user,item,t\n1,2,3\n1,3,2024-01-01\n", {"time": "t"}, "line 3, column 't'"),
        ("user,item,t\n1,2,2024-01-01\n1,3,7\n", {"time": "t"}, "line 3, column 't'"),
        ("user,item,t\n1,2,nan\n", {"time": "t"}, "line 2, column 't'"),
        ("user,item,t\n1,2,\n", {"time": "t"}, "line 2, column 't'"),
        # Each would otherwise give one user's row to another, or hide it in another's.
        ("item,user\ntea,ann\nred, big,ann\n", {}, "line 3 has more cells than the first line"),
        ('user,item\nann,"tea\nbob,milk\n', {}, "line 2 is malformed"),
        ('user,item\nann,"tea\nbob,"milk\n', {}, "line 2 is malformed"),
        ("user,user,item\nann,bob,tea\n", {}, "has 2 columns 'user'"),
        ("user,item\n1,2\n", {"min_count": 2}, "min_count=2"),
        ("user,item\n1,2\n", {"min_count": "3"}, "min_count='3' must be a number"),
        ("user,item\n1,2\n", {"min_count": -3}, "min_count=-3 must be a whole number, at least 0"),
    ],
)
def test_a_table_that_cannot_be_used_is_named(tmp_path, content, options, words):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=words) as error:
        load_table(path, **options)
    assert len(str(error.value).splitlines()) == 1
    assert str(path) in str(error.value) or "min_count" in options


@pytest.mark.parametrize("name", ["a.txt", "a"])
def test_another_kind_of_file_is_refused(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    with pytest.raises(
        ValueError, match=r"ends in \.csv, \.tsv, \.tab, \.jsonl, \.parquet .*data\.separator"
    ):
        load_table(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_table(tmp_path / "absent.csv")


def test_large_tables_keep_their_order(tmp_path):
    rng = np.random.default_rng(0)
    rows = [(int(u), f"i{i}") for u, i in rng.integers(0, 50, (2000, 2))]
    made = load_table(write(tmp_path / "a.csv", rows, header="user,item"))
    expected = {user: [item for u, item in rows if u == user] for user in sorted(dict(rows))}
    assert as_ids(made) == list(expected.values())
