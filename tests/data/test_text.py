"""Own texts: each kind of file and record, what lies outside the alphabet, and errors that name the place."""

import gzip
import json

import numpy as np
import pandas
import pytest

from dpx.data import records, text


def test_kinds_of_files_and_records(tmp_path):
    rows = [("ann", "a b\nc"), ("bob", "d, e"), ("ann", "f")]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"who": w, "x": t}) for w, t in rows))
    (tmp_path / "t.csv").write_text("who,x\n" + "\n".join(f'{w},"{t}"' for w, t in rows))
    (tmp_path / "t.tsv").write_text("who\tx\n" + "\n".join(f'{w}\t"{t}"' for w, t in rows))
    for kind in ("jsonl", "csv", "tsv"):
        packed = gzip.compress((tmp_path / f"t.{kind}").read_bytes())
        (tmp_path / f"t.{kind}.gz").write_bytes(packed)
    pandas.DataFrame(rows, columns=["who", "x"]).to_parquet(tmp_path / "t.parquet")
    (tmp_path / "t.tab").write_text(
        (tmp_path / "t.tsv").read_text().replace("x\n", "x\nd\ts\n\n", 1)
    )
    for kind in ("jsonl", "csv", "tsv", "jsonl.gz", "csv.gz", "tsv.gz", "parquet", "tab"):
        load = lambda kind=kind, **more: [  # noqa: E731
            t.text for t in text.load_texts(tmp_path / f"t.{kind}", column="x", **more)
        ]
        assert load() == ["a b\nc", "d, e", "f"]
        assert load(record="line") == ["a b", "c", "d, e", "f"]
        of_users = list(text.load_texts(tmp_path / f"t.{kind}", column="x", user="who"))
        assert [(t.user, t.text) for t in of_users] == rows
        assert [t.text for t in text.joined(of_users)] == ["a b\nc\nf", "d, e"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_text("b1\n\nb2\n")
    (tmp_path / "folder" / "a.txt.gz").write_bytes(gzip.compress(b"a1\n\na2\n"))
    found = [t.text for t in text.load_texts(tmp_path / "folder", record="line")]
    assert found == ["a1", "a2", "b1", "b2"]


def test_labels_stay_with_their_documents(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("Category,Text,who\nspace,one two,7\n,,\ncars,three,ann\n", encoding="utf-8")
    found = list(text.load_texts(path, user="who", label="Category"))
    assert [one[1:] for one in found] == [("one two", 7, "space"), ("three", "ann", "cars")]
    assert [one.user for one in text.load_texts(path, label="Category")] == [None, None]
    assert [one.label for one in text.load_texts(path, user="who")] == [None, None]
    with pytest.raises(ValueError, match="no column 'Group'"):
        list(text.load_texts(path, label="Group"))


# What `str.splitlines` cuts at, and a newline is not.
NO_ENDS = "\u2028 \u2029 \x85 \v \f \x1c \x1d \x1e"


def test_one_row_is_one_record_and_a_newline_alone_ends_a_line(tmp_path):
    """The rest of a document would be documents of their own, or other authors'."""
    written = f"a {NO_ENDS} bob"
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / f"t.{kind}"
        path.write_text(f"who{separator}x\nann{separator}{written}\nbob{separator}b\n", "utf-8")
        for options in ({"record": "document"}, {"record": "line"}, {"user": "who"}):
            assert [t.text for t in text.load_texts(path, column="x", **options)] == [written, "b"]
    path = tmp_path / "t.txt"
    path.write_bytes(f"{written}\r\nb\n".encode())
    assert [t.text for t in text.load_texts(path, record="line")] == [written, "b"]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"x": f"{written}\r\nb"}, ensure_ascii=False), "utf-8")
    assert [t.text for t in text.load_texts(path, record="line", column="x")] == [written, "b"]


def test_authors_are_compared_without_the_space_around_them(tmp_path):
    (tmp_path / "t.csv").write_text("who,x\nann,a\n ann\u00a0,b\nbob,c\n", "utf-8")
    rows = [{"who": 7, "x": "a"}, {"who": "7 ", "x": "b"}, {"who": "bob", "x": "c"}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for kind in ("csv", "jsonl"):
        found = text.load_texts(tmp_path / f"t.{kind}", column="x", user="who")
        assert [t.text for t in text.joined(found)] == ["a\nb", "c"]


@pytest.mark.parametrize("author", ["", " ", None, float("nan"), 1.0, True, ["ann"]])
def test_what_is_no_author_is_refused(tmp_path, author):
    (tmp_path / "t.jsonl").write_text(json.dumps({"who": author, "x": "a"}))
    with pytest.raises(ValueError, match=r"t\.jsonl: line 1, column 'who' (is missing|holds)"):
        list(text.load_texts(tmp_path / "t.jsonl", column="x", user="who"))


def test_cells_may_be_long(tmp_path):
    (tmp_path / "t.csv").write_text("x\n" + "a" * 200_000 + "\n")
    assert [len(t.text) for t in text.load_texts(tmp_path / "t.csv", column="x")] == [200_000]


def test_one_record_cannot_be_split():
    with pytest.raises(ValueError, match="the data hold 1 record: give at least two"):
        records.split(text.encode([text.Text("1", "ab")], text.Alphabet("ab"), 3), 1, seed=0)


def test_a_split_is_of_users_and_follows_from_their_number():
    """However many records others have, in whatever order, each user stays in their part with all of them."""
    texts = [text.Text(str(i), "ab", user) for i, user in enumerate(["x", "y", "x", 3, "z", "x"])]
    known = text.Alphabet("ab")
    found = text.encode(texts, known, 3)
    assert found.users.tolist() == [1, 2, 1, 0, 3, 1]  # numbers first, then names
    assert found.num_units == 4
    more = text.encode([*texts[::-1], *[text.Text("", "b", "y")] * 9], known, 3)
    for one, other in zip(
        records.split(found, 2, seed=1), records.split(more, 2, seed=1), strict=True
    ):
        assert one.num_units == other.num_units == 2
        assert set(one.users) == set(other.users) == {0, 1}
    parts = records.split(found, 2, seed=0)
    assert sum(map(len, parts)) == 6
    order = np.random.default_rng(0).permutation(4)
    sizes = [[np.sum(part.users == u) for u in range(2)] for part in parts]
    assert sizes == [[[1, 3, 1, 1][u] for u in half] for half in (order[2:], order[:2])]
    windows = text.encode_windows([text.Text("", "abab", "b"), text.Text("", "bbb", "a")], known, 2)
    assert windows.users.tolist() == [1, 1, 0]
    assert found.take(np.array([3, 1])).users.tolist() == [1, 1, 0, 1]
    with pytest.raises(ValueError, match="the data hold 1 user: give at least two"):
        records.split(found.take([2]), 1, seed=0)


def test_alphabets_and_cuts():
    assert text.Alphabet("ab", "drop").encode("a?b").tolist() == [0, 1]
    assert text.Alphabet("ab", "replace").encode("a?b").tolist() == [0, 2, 1]
    assert text.alphabet("bytes").decode(text.alphabet("bytes").encode("né")) == "né"
    found = text.encode([text.Text("1", "abab"), text.Text("2", "b")], text.Alphabet("ab"), 3)
    np.testing.assert_array_equal(found.tokens, [[0, 1, 0, 2], [1, 2, 2, 2]])
    np.testing.assert_array_equal(found.mask, [[1, 1, 1, 1], [1, 1, 0, 0]])
    windows = text.encode_windows([text.Text("1", "ababa")], text.Alphabet("ab"), 2)
    np.testing.assert_array_equal(windows.tokens, [[0, 1], [0, 1]])


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("t.csv", b"a,b\n1,2\n", {"column": "c"}, "has no column 'c': it has a, b"),
        ("t.csv", b"a,b\n1,2\n", {}, "say which column .*data.column=NAME, one of a, b"),
        ("t.jsonl", b'{"text": "b"}', {}, "say which column holds the text: .*data.column=NAME$"),
        (
            "t.jsonl",
            b'{"a": "b"}\n{"b": "c"}',
            {"column": "a"},
            "line 2 has no column 'a': it has b",
        ),
        ("t.jsonl", b"", {"column": "a"}, "holds no row"),
        ("t.csv", b"a;b\n1;2\n", {"column": "b"}, "separated by ';': save the table with commas"),
        ("t.csv", b"a,b\n1,nan\n", {"column": "a", "user": "b"}, "line 2, column 'b' holds 'nan'"),
        ("t.txt", b"\n \n", {"record": "line"}, "holds no text"),
        ("t.txt", b"ab\xff", {}, "byte 2 is not UTF-8"),
        ("t.txt", b"ab", {"user": "who"}, "has no columns"),
        ("t.doc", b"ab", {}, "give a table .* or a folder of .txt files"),
        ("t.jsonl", b'{"a": "b"}\n[1]\n', {"column": "a"}, "line 2 is no JSON object"),
        ("t.jsonl", b'{"a": null}\n', {"column": "a"}, "line 1, column 'a' is empty"),
        ("t.jsonl", b'{"a": 5}\n', {"column": "a"}, "line 1, column 'a' holds 5: write it as text"),
        ("t.jsonl", b'{"a": "b\\ud800"}', {"column": "a"}, "line 1, column 'a', character 2 is"),
        (
            "t.csv",
            b"a,b\nann,x\nbob\n",
            {"column": "b"},
            "line 3 has 1 cells and column 'b' is number 2",
        ),
        (
            "t.csv",
            b"a,b\n1, no,ann\n",
            {"column": "a"},
            "line 2 has more cells than the first line",
        ),
        ("t.csv", b'a,b\n"hi,ann\nho,bob\n', {"column": "a"}, "line 2 is malformed"),
        ("t.csv", b"a,b,b\n1,ann,bob\n", {"column": "a", "user": "b"}, "has 2 columns 'b'"),
    ],
)
def test_errors_name_the_place(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(text.load_texts(tmp_path / name, **options))


def test_a_character_outside_a_strict_alphabet_is_named():
    with pytest.raises(ValueError, match=r"line 7, character 3 is 'c', outside the alphabet"):
        text.Alphabet("ab").encode("abc", "f.txt: line 7")
    with pytest.raises(ValueError, match=r"line 7, character 2 is .*half of a character"):
        text.alphabet("bytes").encode("a\ud800", "f.txt: line 7")


def test_each_file_of_a_folder_is_read_once_whatever_its_folders_are_called(tmp_path):
    (tmp_path / "old.txt").mkdir()
    (tmp_path / "old.txt" / "a.txt").write_text("first")
    (tmp_path / "B.TXT").write_text("second")
    found = [document.text for document in text.load_texts(tmp_path)]
    assert sorted(found) == ["first", "second"]


def test_a_carriage_return_ends_a_line_in_every_kind_of_file(tmp_path):
    lines = ["one", "two", "three", "four\x0cfive"]
    written = "one\rtwo\nthree\r\nfour\x0cfive"
    (tmp_path / "a.txt").write_bytes(written.encode())
    (tmp_path / "a.jsonl").write_text(json.dumps({"t": written}))
    for name, column in (("a.txt", None), ("a.jsonl", "t")):
        found = text.load_texts(tmp_path / name, record="line", column=column)
        assert [line.text for line in found] == lines
