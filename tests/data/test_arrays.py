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


def test_one_row_of_a_table_is_one_record(tmp_path):
    """What `str.splitlines` cuts at may stand in a cell: the rest would be rows of others."""
    path = tmp_path / "table.csv"
    path.write_text("a,b,said\n1,2,mine\u20288;8;x\x0c9;9;x\n3,4,y\n", encoding="utf-8")
    np.testing.assert_array_equal(load_columns(path, ["a", "b"]), [[1, 2], [3, 4]])
    path.write_text("1,2\u20288,8\n3,4\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1, column 2 is '2\\u20288'"):
        load_array(path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("said,a\nred, 7,1\n", "line 2 has more cells than the first line"),
        ('said,a\n"red,1\nblue,2\n', "line 2 is malformed"),
        ("said,a,a\nred,1,2\n", "has 2 columns 'a'"),
    ],
)
def test_columns_that_could_be_mixed_up_are_refused(tmp_path, content, named):
    path = tmp_path / "table.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=named):
        load_columns(path, ["a"])


@pytest.mark.parametrize("first", ["0,1,2", "1,2,3"])
def test_a_first_line_that_counts_is_names_or_a_row_and_the_caller_says_which(tmp_path, first):
    path = tmp_path / "table.csv"
    path.write_text(f"{first}\n.1,.3,.5\n.2,.4,.6\n")  # as pandas writes a frame without names
    numbers, rows = [float(x) for x in first.split(",")], [[0.1, 0.3, 0.5], [0.2, 0.4, 0.6]]
    for read in (load_array, lambda path: load_columns(path, ["2"])):
        with pytest.raises(
            ValueError, match=r"can be the names of columns or a row: .*header=True or"
        ):
            read(path)
    assert load_array(path, header=True).tolist() == rows
    assert load_array(path, header=False).tolist() == [numbers, *rows]
    place = first.split(",").index("2")
    assert load_columns(path, ["2"], header=True).ravel().tolist() == [row[place] for row in rows]
    second = [row[1] for row in [numbers, *rows]]
    assert load_columns(path, ["2"], header=False).ravel().tolist() == second


def test_a_header_that_no_guess_would_find_is_skipped_where_the_caller_says_so(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("1990,1995\n5,6\n")
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
    np.save(tmp_path / "a.npy", MATRIX)
    for options in ({"header": True}, {"separator": ";"}):
        for read in (load_array, lambda path, **o: load_columns(path, ["1"], **o)):
            with pytest.raises(ValueError, match=r"leave out --config\.data\.header"):
                read(tmp_path / "a.npy", **options)


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


def test_saved_arrays_keep_their_type(tmp_path):
    np.save(tmp_path / "x.npy", MATRIX.astype(np.float32))
    found = load_array(tmp_path / "x.npy")
    assert found.dtype == np.float32
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found, MATRIX.astype(np.float32))
    np.savez(tmp_path / "one.npz", X=MATRIX)
    np.testing.assert_array_equal(load_array(tmp_path / "one.npz"), MATRIX)
    np.savez(tmp_path / "two.npz", X=MATRIX, y=np.arange(2))
    np.testing.assert_array_equal(load_array(tmp_path / "two.npz", "y"), [0, 1])


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("a.csv", "5,2\n3,x\n", "line 2, column 2 is 'x'"),
        ("a.csv", "5,2\n3,\n", "line 2, column 2 is ''"),
        ("a.csv", "a;b\n3;4\n", "separated by ';': --config.data.separator=';'"),
        ("a.csv", "1,b\n3,4\n", "line 1, column 2 is 'b'"),
        ("a.csv", "a,b\n1,2\n3\n", "line 3 has 1 columns where the first has 2"),
        ("a.csv", "a,b\n", "holds no row of numbers"),
        ("a.npy", "1,2\n", "cannot be read as .npy"),
        ("a.npz", "1,2\n", "cannot be read as .npz"),
        ("a.xlsx", "", "must be a .csv, .tsv, .npy or .npz file"),
    ],
)
def test_bad_files_are_named(tmp_path, file, content, named):
    path = tmp_path / file
    path.write_text(content)
    with pytest.raises(ValueError, match=named) as raised:
        load_array(path)
    assert str(raised.value).startswith(str(path))
    assert str(raised.value).count(str(path)) == 1


def test_bad_arrays_are_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, X=MATRIX, words=np.array(["one"]))
    for name, words in (
        (None, "X, words"),
        ("Y", "no array 'Y'"),
        ("words", "array 'words' holds"),
    ):
        with pytest.raises(ValueError, match=words):
            load_array(path, name)
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"a\.npy: cannot be read"):
        load_array(tmp_path / "a.npy")
    with pytest.raises(ValueError, match="leave out the name 'X'"):
        load_array(tmp_path / "a.npy", "X")
    with pytest.raises(FileNotFoundError, match=r"none\.npy: no such file"):
        load_array(tmp_path / "none.npy")
