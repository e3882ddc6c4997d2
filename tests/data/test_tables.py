"""Tables and other files of one's own: what they may look like, and errors that say what to do."""

import sys
import zipfile

import numpy as np
import pandas
import pytest

from dpx import release
from dpx.data import (
    Histories,
    from_events,
    load_amazon,
    load_movielens_1m,
    load_surnames,
    load_table,
    newsgroups,
)
from dpx.data import text as own
from dpx.data.arrays import load_array
from dpx.data.friends import load_friends
from dpx.data.sentences import load_sentences
from dpx.data.shakespeare import load_shakespeare

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
    found = load_table(path).item_ids.tolist()
    assert [(type(x), x) for x in found] == [(type(x), x) for x in ids]


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


def test_min_count_is_the_core_and_large_tables_keep_their_order(tmp_path):
    path = write(tmp_path / "a.csv", [*ROWS, ("eve", "tea", 1), ("ann", "rum", 1)])
    assert as_ids(load_table(path, min_count=2)) == [["tea", "milk"], ["milk", "tea"]]
    rng = np.random.default_rng(0)
    rows = [(int(u), f"i{i}") for u, i in rng.integers(0, 50, (2000, 2))]
    made = load_table(write(path, rows, header="user,item"))
    expected = {user: [item for u, item in rows if u == user] for user in sorted(dict(rows))}
    assert as_ids(made) == list(expected.values())


WHEN = pandas.to_datetime([3, 1, 1, 1], unit="D", utc=True)
FRAME = pandas.DataFrame({"who": [9, 7, 9, 7], "what": [x[1] for x in ROWS], "when": WHEN})


@pytest.mark.parametrize(
    "frame",
    [
        FRAME,
        FRAME.set_index("who"),
        FRAME.assign(when=WHEN.date),
        FRAME.astype({"what": "category"}),
    ],
)
def test_parquet_of_any_type_is_the_same_table(tmp_path, frame):
    frame.to_parquet(tmp_path / "a.parquet")
    found = load_table(tmp_path / "a.parquet", user="who", item="what", time="when")
    assert as_ids(found) == [["milk", "tea"], ["milk", "tea"]]


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"what": ["a", None, "b", "c"]}, {}, "row 2, column 'what' is missing"),
        ({"what": [1.0, 1.5, 2.0, 3.0]}, {}, "row 1, column 'what' holds 1.0: ids must be text or whole"),
        ({"what": [True] * 4}, {}, "row 1, column 'what' holds True: ids must be"),
        ({"who": pandas.array([1, None, 2, 2], "Int64")}, {}, "row 2, column 'who' is missing"),
        ({"when": [WHEN[0], None, WHEN[1], WHEN[2]]}, {}, "row 2, column 'when' is missing"),
        ({"when": [1.0, np.inf, 1.0, 1.0]}, {}, "row 2, column 'when' holds 'inf', which is no time"),
        ({"when": [1.0, 2.0**53, 1.0, 1.0]}, {}, "row 2, column 'when' holds .* a float to which other"),
        ({"when": [WHEN[0].time()] * 4}, {}, "row 1, column 'when' .*, which is no time"),
        ({"what": [[1], [2], [3], [4]]}, {}, "column 'what' holds list<element: int64>, .*explode"),
        ({}, {"header": False}, "parquet names its columns"),
        ({}, {"separator": ";"}, "parquet names its columns"),
        ({}, {"user": "user"}, "has no column 'user': it has who, what, when"),
    ],
)  # fmt: skip
def test_parquet_names_what_it_cannot_read(tmp_path, change, options, words):
    path = tmp_path / "a.parquet"
    FRAME.assign(**change).to_parquet(path)
    with pytest.raises(ValueError, match=words) as raised:
        load_table(path, **({"user": "who", "item": "what", "time": "when"} | options))
    assert str(path) in str(raised.value)


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


def test_one_row_never_decides_how_wide_the_ids_of_all_are():
    made = from_events(["a"] * 3000, [*map(str, range(2999)), "x" * 10**6], min_count=0)
    assert made.item_ids.nbytes < 10**5


NUMBERED = {"user": "1", "item": "2"}
TIMED = {"time": "t"}


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("user,item\n", {}, "holds no row"),
        ("", {}, "holds no row"),
        ("a;b\n1;2\n", {}, "has no column 'user'.*a;b.*header=False.*separator=';'"),
        ("user,item\n1,2\n", {"time": "when"}, "has no column 'when'.*user, item"),
        ("user,item\n1,2\n", {"item": "2"}, "has no column '2'"),
        ("1,2\n3,4\n", NUMBERED, "first line, 1, 2, can be the names.*or a row"),
        ("1::2\n", NUMBERED | {"header": False}, "--config.data.separator=::"),
        ("user|item\n", {}, r"--config.data.separator='\|'"),
        ("1,2\n", {"header": False}, "column 'user' must be a number from 1 to 2"),
        ("1,2\n", {"header": False, "user": "0"}, "column '0' must be a number from 1 to 2"),
        ("1,2\n", NUMBERED | {"header": False, "item": "3"}, "column '3' must be a number"),
        ("user,item\n1,2\n3\n", {}, "line 3 has 1 cells and column 'item' is number 2"),
        ("user,item\n1,2\n\n3, \n", {}, "line 4, column 'item' is missing"),
        ("user,item\n,2\n", {}, "line 2, column 'user' is missing"),
        ("user,item\nann,2\nnan,3\nnan,4\n", {}, "line 3, column 'user' holds 'nan', which stands for"),
        ("user,item,t\n1,2,3\n1,3,x\n", TIMED, "line 3, column 't' holds 'x'.*no time"),
        ("user,item,t\n1,2,3\n1,3,2024-01-01\n", TIMED, "line 3, column 't'.* a number"),
        ("user,item,t\n1,2,2024-01-01\n1,3,7\n", TIMED, "line 3, column 't'.* a date"),
        ("user,item,t\n1,2,nan\n", TIMED, "line 2, column 't'"),
        ("user,item,t\n1,2,\n", TIMED, "line 2, column 't'"),
        # Each would otherwise give one user's row to another, or hide it in another's.
        ("item,user\ntea,ann\nred, big,ann\n", {}, "line 3 has more cells than the first line"),
        ('user,item\nann,"tea\nbob,milk\n', {}, "line 2 is malformed"),
        ('user,item\nann,"tea\nbob,"milk\n', {}, "line 2 is malformed"),
        ("user,user,item\nann,bob,tea\n", {}, "has 2 columns 'user'"),
        ("user,item\n1,2\n", {"min_count": 2}, "min_count=2"),
        ("user,item\n1,2\n", {"min_count": "3"}, "min_count='3' must be a number"),
        ("user,item\n1,2\n", {"min_count": -3}, "min_count=-3 must be a whole number, at least 0"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_used_is_named(tmp_path, content, options, words):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=words) as error:
        load_table(path, **options)
    assert len(str(error.value).splitlines()) == 1
    assert str(path) in str(error.value) or "min_count" in options


def texts(**options):
    return lambda path: list(own.load_texts(path, **options))


def zipped(name="ml-1m/ratings.dat", **bits):
    """Writes an archive with some bits set in the header of its file, and in the directory's."""

    def written(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, b"1::2::5::3\n" * 500)
        content = bytearray(path.read_bytes())
        for place in (0, content.rindex(b"PK\x01\x02") + 2):
            content[place + 6] |= bits.get("encrypted", 0)
            content[place + 8] |= bits.get("compression", 0)
        content[60] ^= bits.get("flipped", 0)
        path.write_bytes(content[: bits.get("cut")])

    return written


SERIES = "Season\tAuthor\tQuote\nd\td\tstring\n\t\tinclude=True\n10\tMonica\tOk.\n01\tJoey\tHey.\n"
UNPACKED = "not an archive, or cannot be unpacked"
SAID = {"column": "a", "user": "b"}
FILES = [
    (load_surnames, "a.txt", "müller\n".encode("latin-1"), "is not UTF-8"),
    (load_surnames, "a.txt", b"smith\n\x00\n", "line 2 is malformed"),
    (load_surnames, "a.txt", b"SMITH 1.0\nO'NEIL 0.5\n", "line 2 is malformed"),
    (load_surnames, "a.txt", b"", "holds no names"),
    (load_shakespeare, "a.txt", b"to be \xff", "byte 6 is not UTF-8"),
    (load_shakespeare, "a.txt", b"", "is empty"),
    (load_amazon, "a.csv", b"u,x,i,5,3\n", "line 1, column '3' holds 'i', which is no rating"),
    (load_amazon, "a.csv", b"u,i\n", "column '4' must be a number from 1 to 2.*year=2014 is read"),
    (load_amazon, "a.csv", b"user,item,rating,timestamp\n", "line 1.* holds 'rating', which is no"),
    (load_amazon, "a.csv", b"\x1f\x8bdamaged", "cannot be unpacked by gzip"),
    (load_amazon, "a.csv", b"u,i,5,3\x0cv,i,5,3\n", "line 1, column '4'.*is no time"),
    (load_amazon, "a.txt", b"1 2\n1 99999999999999999999\n", "line 2 is malformed"),
    (load_amazon, "a.txt", "1 2\u20283 4\n".encode(), "line 1 is malformed"),
    (load_amazon, "a.txt", b"1 3\n1\n", "line 2 is malformed"),
    (load_amazon, "a.txt", b"1 3\n\n0 2\n", "line 3 is malformed"),
    (load_amazon, "a.txt", b"1 3\n1 2 3\n", "line 2 is malformed"),
    (load_amazon, "a.txt", b"", "no ratings"),
    (load_movielens_1m, "a.dat", b"1::2::5::3\x851::2::5::3\n", "line 1 is malformed"),
    (load_movielens_1m, "a.dat", b"1::2::5::99999999999999999999\n", "line 1 is malformed"),
    (load_movielens_1m, "a.dat", b"1::2::5::3\n3::x::1::1\n", "line 2 is malformed"),
    (load_movielens_1m, "a.dat", b"10::2::5::3\n1_0::3::1::1\n", "line 2 is malformed"),
    (load_movielens_1m, "a.dat", b"", "holds no ratings"),
    (load_movielens_1m, "a.zip", b"PK\x03\x04 nothing", UNPACKED),
    (load_movielens_1m, "a.zip", zipped(cut=80), UNPACKED),
    (load_movielens_1m, "a.zip", zipped(flipped=255), UNPACKED),
    (load_movielens_1m, "a.zip", zipped(encrypted=1), UNPACKED),
    (load_movielens_1m, "a.zip", zipped(compression=97), UNPACKED),
    (load_movielens_1m, "a.zip", zipped(name="x"), "holds no ratings.dat"),
    (load_sentences, "a.txt", b"1\t0.5\tgood\n2\tnan\tbad\n", "line 2 is malformed"),
    (load_sentences, "a.tar.gz", b"\x1f\x8b no", UNPACKED),
    (load_friends, "a.tab", SERIES + "02\t\tHi.\n", "line 6, column 'Author' is missing"),
    (load_friends, "a.tab", SERIES + "02\tN/A\tHi.\n", "column 'Author' holds 'N/A'"),
    (load_friends, "a.tab", SERIES.replace("10", "01"), "must hold lines of season 10 and of"),
    (newsgroups.load_texts, "a.csv", 'text\n"' + "x" * 2**25, "is malformed"),
    (newsgroups.load_texts, "a.csv", "text\n", "no row"),
    (newsgroups.load_texts, "a.bin", "text\n", "give a table whose name ends in.* or a folder"),
    (
        load_table,
        "a",
        "user,item\n1,2\n",
        r"ends in \.csv, \.tsv, \.tab, \.jsonl, \.parquet .*separator",
    ),
    (texts(), "a.csv", "a,b\n1,2\n", "say which column .*data.column=NAME, one of a, b"),
    (texts(), "a.jsonl", '{"text": "b"}', "say which column holds the text: .*data.column=NAME$"),
    (texts(column="a"), "a.jsonl", '{"a": "b"}\n{"b": "c"}', "line 2 has no column 'a': it has b"),
    (texts(column="a"), "a.jsonl", "", "holds no row"),
    (texts(column="b"), "a.csv", "a;b\n1;2\n", "separated by ';': save the table with commas"),
    (texts(**SAID), "a.csv", "a,b\n1,nan\n", "line 2, column 'b' holds 'nan'"),
    (texts(**SAID), "a.jsonl", '{"a": "x", "b": 1.0}', "line 1, column 'b' holds 1.0"),
    (texts(**SAID), "a.jsonl", '{"a": "x", "b": ["c"]}', "line 1, column 'b' holds"),
    (texts(record="line"), "a.txt", "\n \n", "holds no text"),
    (texts(), "a.txt", b"ab\xff", "byte 2 is not UTF-8"),
    (texts(user="who"), "a.txt", "ab", "has no columns"),
    (texts(), "a.doc", "ab", "give a table .* or a folder of .txt files"),
    (texts(column="a"), "a.jsonl", '{"a": "b"}\n[1]\n', "line 2 is no JSON object"),
    (texts(column="a"), "a.jsonl", '{"a": ' + "[" * 10**5, "line 1 is no JSON object"),
    (texts(column="a"), "a.jsonl", '{"a": null}\n', "line 1, column 'a' is empty"),
    (texts(column="a"), "a.jsonl", '{"a": 5}\n', "line 1, column 'a' holds 5: write it as text"),
    (texts(column="a"), "a.jsonl", '{"a": "b\\ud800"}', "line 1, column 'a', character 2 is"),
    (load_array, "a.csv", "5,2\n3,x\n", "line 2, column 2 is 'x'"),
    (load_array, "a.csv", "5,2\n3,\n", "line 2, column 2 is ''"),
    (load_array, "a.csv", "a;b\n3;4\n", "separated by ';': --config.data.separator=';'"),
    (load_array, "a.csv", "1,b\n3,4\n", "line 1, column 2 is 'b'"),
    (load_array, "a.csv", "a,b\n1,2\n3\n", "line 3 has 1 columns where the first has 2"),
    (load_array, "a.csv", "1,2\u20288,8\n3,4\n", r"line 1, column 2 is '2\\u20288'"),
    (load_array, "a.csv", "a,b\n", "holds no row of numbers"),
    (load_array, "a.npy", "1,2\n", "cannot be read as .npy"),
    (load_array, "a.npz", "1,2\n", "cannot be read as .npz"),
    (load_array, "a.xlsx", "", "must be a .csv, .tsv, .npy or .npz file"),
]


@pytest.mark.parametrize(("load", "name", "content", "words"), FILES)
def test_a_file_that_cannot_be_read_is_named(tmp_path, load, name, content, words):
    path = tmp_path / name
    with pytest.raises(FileNotFoundError, match=r"no such file|absent"):
        load(tmp_path / f"absent{path.suffix}")
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words) as error:
        load(path)
    assert str(error.value).count(str(path)) == 1
    assert len(str(error.value).splitlines()) == 1
