"""Own texts: each kind of file and record, what lies outside the alphabet, and errors that name the place."""

import json

import numpy as np
import pytest

from dpx.data import text


def test_kinds_of_files_and_records(tmp_path):
    rows = [("ann", "a b\nc"), ("bob", "d, e"), ("ann", "f")]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"who": w, "x": t}) for w, t in rows))
    (tmp_path / "t.csv").write_text("who,x\n" + "\n".join(f'{w},"{t}"' for w, t in rows))
    (tmp_path / "t.tsv").write_text("who\tx\n" + "\n".join(f'{w}\t"{t}"' for w, t in rows))
    for kind in ("jsonl", "csv", "tsv"):
        load = lambda kind=kind, **more: [  # noqa: E731
            t for _, t in text.load_texts(tmp_path / f"t.{kind}", column="x", **more)
        ]
        assert load() == ["a b\nc", "d, e", "f"]
        assert load(record="line") == ["a b", "c", "d, e", "f"]
        assert load(user="who") == ["a b\nc\nf", "d, e"]
    (tmp_path / "folder").mkdir()
    for name in ("b", "a"):
        (tmp_path / "folder" / f"{name}.txt").write_text(f"{name}1\n\n{name}2\n")
    found = [t for _, t in text.load_texts(tmp_path / "folder", record="line")]
    assert found == ["a1", "a2", "b1", "b2"]


def test_alphabets_and_cuts():
    assert text.Alphabet("ab", "drop").encode("a?b").tolist() == [0, 1]
    assert text.Alphabet("ab", "replace").encode("a?b").tolist() == [0, 2, 1]
    assert text.alphabet("bytes").decode(text.alphabet("bytes").encode("né")) == "né"
    records = text.encode([("1", "abab"), ("2", "b")], text.Alphabet("ab"), 3)
    np.testing.assert_array_equal(records.tokens, [[0, 1, 0, 2], [1, 2, 2, 2]])
    np.testing.assert_array_equal(records.mask, [[1, 1, 1, 1], [1, 1, 0, 0]])
    windows = text.encode_windows([("1", "ababa")], text.Alphabet("ab"), 2)
    np.testing.assert_array_equal(windows.tokens, [[0, 1], [0, 1]])


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("t.csv", b"a,b\n1,2\n", {"column": "c"}, "line 2 has no column 'c': it has a, b"),
        ("t.csv", b"a,b\n1,2\n", {}, "data.column"),
        ("t.txt", b"\n \n", {"record": "line"}, "holds no text"),
        ("t.txt", b"ab\xff", {}, "byte 2 is not UTF-8"),
        ("t.txt", b"ab", {"user": "who"}, "has no columns"),
        ("t.doc", b"ab", {}, "must be a folder or one of"),
        ("t.jsonl", b'{"a": "b"}\n[1]\n', {"column": "a"}, "line 2 is no JSON object"),
    ],
)
def test_errors_name_the_place(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(text.load_texts(tmp_path / name, **options))


def test_a_character_outside_a_strict_alphabet_is_named():
    with pytest.raises(ValueError, match=r"line 7, character 3 is 'c', outside the alphabet"):
        text.Alphabet("ab").encode("abc", "f.txt: line 7")
