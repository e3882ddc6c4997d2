"""Own texts: each kind of file and record, and what lies outside the alphabet."""

import gzip
import json

import numpy as np
import pandas
import pytest

from dpx.data import records, text


def said(path, **options):
    return [one.text for one in text.load_texts(path, **options)]


def test_kinds_of_files_and_records(tmp_path):
    rows = [("ann", "a b\nc"), ("bob", "d, e"), (" ann\u00a0", "f" * 200_000)]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"who": w, "x": t}) for w, t in rows))
    (tmp_path / "t.csv").write_text("who,x\n" + "\n".join(f'{w},"{t}"' for w, t in rows))
    (tmp_path / "t.tsv").write_text("who\tx\n" + "\n".join(f'{w}\t"{t}"' for w, t in rows))
    for kind in ("jsonl", "csv", "tsv"):
        packed = gzip.compress((tmp_path / f"t.{kind}").read_bytes())
        (tmp_path / f"t.{kind}.gz").write_bytes(packed)
    pandas.DataFrame(rows, columns=["who", "x"]).to_parquet(tmp_path / "t.parquet")
    orange = (tmp_path / "t.tsv").read_text().replace("x\n", "x\nd\ts\n\n", 1)
    (tmp_path / "t.tab").write_text(orange)
    first, second, third = (written for _, written in rows)
    for kind in ("jsonl", "csv", "tsv", "jsonl.gz", "csv.gz", "tsv.gz", "parquet", "tab"):
        path = tmp_path / f"t.{kind}"
        assert said(path, column="x") == [first, second, third]
        assert said(path, column="x", record="line") == ["a b", "c", second, third]
        of_users = list(text.load_texts(path, column="x", user="who"))
        assert [one.user for one in of_users] == ["ann", "bob", "ann"]
        joined = [one.text for one in text.joined(of_users)]
        assert joined == [f"{first}\n{third}", second]


def test_labels_stay_with_their_documents(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("Category,Text,who\nspace,one two,7\n,,\ncars,three,ann\n", encoding="utf-8")
    found = list(text.load_texts(path, user="who", label="Category"))
    assert [one[1:] for one in found] == [("one two", 7, "space"), ("three", "ann", "cars")]
    assert [one.user for one in text.load_texts(path, label="Category")] == [None, None]
    assert [one.label for one in text.load_texts(path, user="who")] == [None, None]


# What `str.splitlines` cuts at, and a newline is not.
NO_ENDS = "\u2028 \u2029 \x85 \v \f \x1c \x1d \x1e"


def test_one_row_is_one_record_and_a_newline_alone_ends_a_line(tmp_path):
    """The rest of a document would be documents of their own, or other authors'."""
    written = f"a {NO_ENDS} bob"
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / f"t.{kind}"
        path.write_text(f"who{separator}x\nann{separator}{written}\nbob{separator}b\n", "utf-8")
        for options in ({"record": "document"}, {"record": "line"}, {"user": "who"}):
            assert said(path, column="x", **options) == [written, "b"]
    lines = f"{written}\r\nb\rtwo\nc\n"
    (tmp_path / "t.txt").write_bytes(lines.encode())
    (tmp_path / "t.jsonl").write_text(json.dumps({"x": lines}, ensure_ascii=False), "utf-8")
    for name, column in (("t.txt", None), ("t.jsonl", "x")):
        assert said(tmp_path / name, record="line", column=column) == [written, "b", "two", "c"]


def test_each_file_of_a_folder_is_read_once_whatever_its_folders_are_called(tmp_path):
    (tmp_path / "old.txt").mkdir()
    (tmp_path / "old.txt" / "a.txt").write_text("first")
    (tmp_path / "B.TXT").write_text("b1\n\nb2\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"c1\n\nc2\n"))
    found = said(tmp_path, record="line")
    assert found == ["b1", "b2", "c1", "c2", "first"]


def test_a_split_is_of_users_and_follows_from_their_number():
    """However many records others have, in whatever order, each user stays in their part with all of them."""
    texts = [text.Text(str(i), "ab", user) for i, user in enumerate(["x", "y", "x", 3, "z", "x"])]
    known = text.Alphabet("ab")
    found = text.encode(texts, known, 3)
    assert found.users.tolist() == [1, 2, 1, 0, 3, 1]  # numbers first, then names
    assert found.num_units == 4
    more = text.encode([*texts[::-1], *[text.Text("", "b", "y")] * 9], known, 3)
    pairs = zip(records.split(found, 2, seed=1), records.split(more, 2, seed=1), strict=True)
    for one, other in pairs:
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
    alone = text.encode(texts[:1], known, 3)
    for few, unit in ((found.take([2]), "user"), (records.Texts(alone.tokens, 2), "record")):
        with pytest.raises(ValueError, match=f"the data hold 1 {unit}: give at least two"):
            records.split(few, 1, seed=0)


def test_alphabets_and_cuts():
    assert text.Alphabet("ab", "drop").encode("a?b").tolist() == [0, 1]
    assert text.Alphabet("ab", "replace").encode("a?b").tolist() == [0, 2, 1]
    assert text.alphabet("bytes").decode(text.alphabet("bytes").encode("né")) == "né"
    found = text.encode([text.Text("1", "abab"), text.Text("2", "b")], text.Alphabet("ab"), 3)
    np.testing.assert_array_equal(found.tokens, [[0, 1, 0, 2], [1, 2, 2, 2]])
    np.testing.assert_array_equal(found.mask, [[1, 1, 1, 1], [1, 1, 0, 0]])
    windows = text.encode_windows([text.Text("1", "ababa")], text.Alphabet("ab"), 2)
    np.testing.assert_array_equal(windows.tokens, [[0, 1], [0, 1]])
    with pytest.raises(ValueError, match=r"line 7, character 3 is 'c', outside the alphabet"):
        text.Alphabet("ab").encode("abc", "f.txt: line 7")
    with pytest.raises(ValueError, match=r"line 7, character 2 is .*half of a character"):
        text.alphabet("bytes").encode("a\ud800", "f.txt: line 7")
