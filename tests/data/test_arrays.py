"""Arrays from files: what is read back is what was saved, and every error names the place."""

import datetime
import gzip

import numpy as np
import pandas
import pytest

from dpx.data.arrays import load_array, load_columns

MATRIX = np.array([[1.5, -2.0, 3e4], [0.0, 0.25, 1e-7]])


@pytest.mark.parametrize("header", ["", "height,weight,age\n"])
@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_tables_with_and_without_a_header(tmp_path, header, suffix, delimiter):
    lines = [",".join(map(repr, row.tolist())) for row in MATRIX]
    text = (header + "\n".join(lines) + "\n\n").replace(",", delimiter)
    path = tmp_path / f"table.{suffix}"
    path.write_text(text, encoding="utf-8-sig")
    np.testing.assert_array_equal(load_array(path), MATRIX)


def test_a_number_with_an_underscore_is_none(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,b\n1,2\n1_0,4\n")  # which Python would read as 10
    for read in (load_array, lambda path: load_columns(path, ["a"])):
        with pytest.raises(ValueError, match=r"line 3, column .* is '1_0': write a number"):
            read(path)


def test_one_row_of_a_table_is_one_record(tmp_path):
    """What `str.splitlines` cuts at may stand in a cell: the rest would be rows of others."""
    path = tmp_path / "table.csv"
    path.write_text("a,b,said\n1,2,mine\u20288;8;x\x0c9;9;x\n3,4,y\n", encoding="utf-8")
    np.testing.assert_array_equal(load_columns(path, ["a", "b"]), [[1, 2], [3, 4]])


@pytest.mark.parametrize("first", ["0,1,2", "1,2,3"])
def test_a_first_line_that_counts_is_names_or_a_row_and_the_caller_says_which(tmp_path, first):
    path = tmp_path / "table.csv"
    path.write_text(f"{first}\n.1,.3,.5\n.2,.4,.6\n")  # as pandas writes a frame without names
    numbers, rows = [float(x) for x in first.split(",")], [[0.1, 0.3, 0.5], [0.2, 0.4, 0.6]]
    words = r"can be the names of columns or a row: .*header=True or"
    for read in (load_array, lambda path: load_columns(path, ["2"])):
        with pytest.raises(ValueError, match=words):
            read(path)
    assert load_array(path, header=True).tolist() == rows
    assert load_array(path, header=False).tolist() == [numbers, *rows]
    place = first.split(",").index("2")
    assert load_columns(path, ["2"], header=True).ravel().tolist() == [row[place] for row in rows]
    second = [row[1] for row in [numbers, *rows]]
    assert load_columns(path, ["2"], header=False).ravel().tolist() == second
    path.write_text("1990,1995\n5,6\n")  # which no guess would take for names
    assert load_array(path).tolist() == [[1990, 1995], [5, 6]]
    assert load_array(path, header=True).tolist() == [[5, 6]]
    assert load_columns(path, ["1995"], header=True).tolist() == [[6]]


def test_cells_may_be_separated_otherwise_and_files_compressed(tmp_path):
    path = tmp_path / "table.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("a::b\n.1::.2\n.3::.4\n")
    assert load_array(path, separator="::").tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert load_columns(path, ["b"], separator="::").tolist() == [[0.2], [0.4]]
    with pytest.raises(ValueError, match=r"no column 'b'.*separated by '::': --config"):
        load_columns(path, ["b"])


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_columns_of_named_cells_are_those_of_text(tmp_path, kind):
    frame = pandas.DataFrame({"a": [1, 2, 2**53], "said": list("xyz"), "b": [0.1, 1e-7, 3.0]})
    path = tmp_path / f"t.{kind}"

    def write(frame):
        if kind == "parquet":
            return frame.to_parquet(path)
        return frame.to_json(path, orient="records", lines=True)

    write(frame)
    frame.to_csv(tmp_path / "t.csv", index=False)
    found = load_columns(path, ["b", "a"])
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, load_columns(tmp_path / "t.csv", ["b", "a"]))
    with pytest.raises(ValueError, match=r"no column 'c': it has a, said, b"):
        load_columns(path, ["c"])
    with pytest.raises(ValueError, match=f"{kind.split('.')[0]} names its columns"):
        load_columns(path, ["a"], header=True)
    dates = [datetime.date(2026, 1, 1)] if kind == "parquet" else []
    for odd in (None, "x", [1.0], *dates):
        write(frame.astype(object).assign(b=pandas.Series([odd] * 3)))
        with pytest.raises(ValueError, match=r"(line|row) 1, column 'b' is|column 'b' holds"):
            load_columns(path, ["a", "b"])


def test_saved_arrays_keep_their_type_and_bad_ones_are_named(tmp_path):
    one, two, odd = tmp_path / "x.npy", tmp_path / "two.npz", tmp_path / "odd.npy"
    np.save(one, MATRIX.astype(np.float32))
    found = load_array(one)
    assert found.dtype == np.float32
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found, MATRIX.astype(np.float32))
    np.testing.assert_array_equal(load_columns(one, ["3", "1"]), found[:, [2, 0]])
    np.savez(tmp_path / "one.npz", X=MATRIX)
    np.testing.assert_array_equal(load_array(tmp_path / "one.npz"), MATRIX)
    np.savez(two, X=MATRIX, words=np.array(["one"]))
    np.testing.assert_array_equal(load_array(two, "X"), MATRIX)
    np.save(odd, np.array([{}]), allow_pickle=True)
    for call, words in (
        (lambda: load_array(two), "X, words"),
        (lambda: load_array(two, "Y"), "no array 'Y'"),
        (lambda: load_array(two, "words"), "array 'words' holds"),
        (lambda: load_array(odd), r"odd\.npy: cannot be read"),
        (lambda: load_array(one, "X"), "leave out the name 'X'"),
        (lambda: load_array(one, header=True), r"leave out --config\.data\.header"),
        (lambda: load_columns(one, ["1"], separator=";"), r"leave out --config\.data\.header"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
