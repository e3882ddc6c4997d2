"""Tables of interactions of one's own: what they may look like, and errors that say what to do."""

import numpy as np
import pandas
import pytest

from dpx.data import load_table

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
        (["007", "7"], ["007", "7"]),
        (["1.5", "2"], ["1.5", "2"]),
        (["é", "7"], ["7", "é"]),
        (["9" * 30, "1"], ["1", "9" * 30]),
        (["-", "--1"], ["-", "--1"]),
        (["²", "1"], ["1", "²"]),
    ],
)
def test_ids_are_whole_numbers_where_all_are_written_so(tmp_path, written, ids):
    path = write(tmp_path / "a.csv", [("u", item) for item in written], header="user,item")
    assert load_table(path).item_ids.tolist() == ids
    assert [type(x) for x in load_table(path).item_ids.tolist()] == [type(ids[0])] * len(ids)


@pytest.mark.parametrize(
    "times",
    [
        ["2", "10", "1e1", "11.5"],
        ["2024-01-31", "2024-02-01", "2024-02-01 00:00:00", "2024-02-01T00:00:01Z"],
        ["2024-02-01T00:00+02:00", "2024-02-01", "2024-02-01", "2024-02-02"],
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


def test_parquet_through_pandas(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    when = pandas.to_datetime([3, 1, 1, 1], unit="D", utc=True)
    frame = pandas.DataFrame({"who": [9, 7, 9, 7], "what": [x[1] for x in ROWS], "when": when})
    monkeypatch.setattr(pandas, "read_parquet", lambda _: frame)
    made = load_table(path, user="who", item="what", time="when")
    assert as_ids(made) == [["milk", "tea"], ["milk", "tea"]]
    for column, value, words in (
        ("what", None, "row 2, column 'what' is empty"),
        ("what", 1.5, "row 2, column 'what' holds 1.5: ids must be text or whole numbers"),
        ("what", 3, "row 2, column 'what' holds 3, and other lines another type"),
        ("what", pandas.NA, "row 2, column 'what' is empty"),
        ("what", float("nan"), "row 2, column 'what' is empty"),
        ("who", 2**63, f"row 2, column 'who' holds {2**63}, which does not fit into 64 bits"),
        ("when", pandas.NaT, "row 2, column 'when' is empty"),
        ("when", pandas.NA, "row 2, column 'when' is empty"),
    ):
        changed = frame.astype({column: object})
        changed.loc[1, column] = value
        monkeypatch.setattr(pandas, "read_parquet", lambda _, changed=changed: changed)
        with pytest.raises(ValueError, match=words):
            load_table(path, user="who", item="what", time="when")
    with pytest.raises(ValueError, match="parquet names its columns"):
        load_table(path, header=False)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("no engine"), "pip install pandas pyarrow"),
        (OSError("bad magic"), "not a parquet file that can be read"),
    ],
)
def test_parquet_that_cannot_be_read_is_named(tmp_path, monkeypatch, error, words):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")

    def fail(_):
        raise error

    monkeypatch.setattr(pandas, "read_parquet", fail)
    with pytest.raises(ValueError, match=words) as raised:
        load_table(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("user,item\n", {}, "holds no interaction"),
        ("", {}, "holds no interaction"),
        ("a;b\n1;2\n", {}, "has no column 'user'.*a;b.*header=False"),
        ("user,item\n1,2\n", {"time": "when"}, "has no column 'when'.*user, item"),
        ("user,item\n1,2\n", {"item": "2"}, "has no column '2'"),
        ("1,2\n", {"header": False}, "column 'user' must be a number from 1 to 2"),
        ("1,2\n", {"header": False, "user": "0"}, "column '0' must be a number from 1 to 2"),
        ("1,2\n", {"header": False, "user": "1", "item": "3"}, "column '3' must be a number"),
        ("user,item\n1,2\n3\n", {}, "line 3 has 1 cells and column 'item' is number 2"),
        ("user,item\n1,2\n\n3, \n", {}, "line 4, column 'item' is empty"),
        ("user,item\n,2\n", {}, "line 2, column 'user' is empty"),
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
    with pytest.raises(ValueError, match=r"ends in \.csv, \.tsv, \.tab or \.parquet"):
        load_table(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_table(tmp_path / "absent.csv")


def test_large_tables_keep_their_order(tmp_path):
    rng = np.random.default_rng(0)
    rows = [(int(u), f"i{i}") for u, i in rng.integers(0, 50, (2000, 2))]
    made = load_table(write(tmp_path / "a.csv", rows, header="user,item"))
    expected = {user: [item for u, item in rows if u == user] for user in sorted(dict(rows))}
    assert as_ids(made) == list(expected.values())
