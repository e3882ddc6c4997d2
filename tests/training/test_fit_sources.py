"""Data as people keep them: frames, and sources of records, of which no row chooses how others are read."""

import jax
import numpy as np
import optax
import pandas as pd
import pytest

import dpx
from dpx.training.examples import as_examples, assumed
from dpx.training.sources import ROW_BY_ROW
from dpx.training.users import grouped

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = RNG.normal(size=40).astype(np.float32)


class Source:
    """The protocol of PyGrain's sources, and how often each row was read."""

    def __init__(self, records):
        self.records, self.reads = records, [0] * len(records)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, row):
        self.reads[row] += 1
        return self.records[row]


class Column:
    """The protocol of a column of polars: a type of its own, which numbers and missing values (None) have."""

    def __init__(self, name, values, dtype):
        self.name, self.values, self.dtype = name, list(values), dtype
        np.array([value for value in self.values if value is not None], dtype[1:])

    def to_numpy(self):
        gaps = None in self.values
        return np.array(
            [np.nan if v is None else v for v in self.values], float if gaps else self.dtype[1:]
        )

    def is_null(self):
        return [value is None for value in self.values]

    def __getitem__(self, rows):
        return Column(self.name, self.values[rows], self.dtype)


class Frame:
    """The protocol of a frame of polars."""

    def __init__(self, columns):
        self.parts, self.columns = columns, [column.name for column in columns]

    def get_columns(self):
        return self.parts

    to_numpy = None


def polars_column(values):
    polars = pytest.importorskip("polars")
    return polars.Series("n", values, dtype=polars.Int64)


def polars_arrays(values):
    polars = pytest.importorskip("polars")
    return polars.Series("n", [[value, 5] for value in values], dtype=polars.Array(polars.Int64, 2))


def grain_source(values):
    return pytest.importorskip("grain").MapDataset.source(values).map(lambda value: {"n": value})


def frame_of_pandas(values):
    return pd.DataFrame({"a": 1, "n": pd.array(values, dtype="Int64")})


def arrow(values):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.array(values, pyarrow.int64())


WRITTEN = {
    "source": Source,
    "source of records": lambda values: Source([{"n": value, "m": [value, 7]} for value in values]),
    "PyGrain": grain_source,
    "column of polars' protocol": lambda values: Column("n", values, "<i8"),
    "frame of polars' protocol": lambda values: Frame([Column("n", values, "<i8")]),
    "column of polars": polars_column,
    "frame of polars": lambda values: polars_column(values).to_frame(),
    "arrays of polars": polars_arrays,
    "column of pandas": lambda values: pd.Series(values, dtype="Int64", name="n"),
    "column of arrow": lambda values: pd.Series(values, dtype="int64[pyarrow]", name="n"),
    "frame of pandas": frame_of_pandas,
    "arrow": arrow,
    "chunks of arrow": lambda values: pytest.importorskip("pyarrow").chunked_array([arrow(values)]),
    "table of arrow": lambda values: pytest.importorskip("pyarrow").table({"n": arrow(values)}),
}
# 64-bit numbers, of which floats hold no two neighbours.
ROWS = [2**60 + row for row in range(5)]
ODD = [None, 0.5, 2**63, "x", True, [1], np.int32(3), np.ma.masked_array([1], [True]), 3]


def read(given):
    """The arrays, or else the error."""
    try:
        return as_examples(given)[0], None
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("written", WRITTEN)
def test_an_odd_row_is_refused_or_changes_no_other(written, place):
    write, refused = WRITTEN[written], 0
    with jax.enable_x64(True):
        before = jax.tree.leaves(as_examples(write(ROWS))[0])
        for odd in ODD:
            rows = [*ROWS[:place], odd, *ROWS[place:]]
            try:
                given = write(rows)
            except Exception:  # the library does not hold such rows
                assert odd != 3 or isinstance(odd, np.generic)
                continue
            after, error = read(given)
            if error is not None:
                # Where the odd row is the first, the second one is not like it.
                assert f"row {place or 1}" in error or "row 0" in error
                assert len(error.splitlines()) == 1
                refused += 1
                continue
            for one, other in zip(jax.tree.leaves(after), before, strict=True):
                assert len(one) == 6
                assert one.dtype == other.dtype
                assert np.delete(one, place, axis=0).tobytes() == other.tobytes()
    assert refused


def data(kind):
    """What `fit` is given, as the kind says."""
    if kind == "polars":
        polars = pytest.importorskip("polars")
        return polars.DataFrame(X, schema=["a", "b", "c"]), polars.Series("y", Y)
    if kind == "PyGrain":
        return pytest.importorskip("grain").MapDataset.source(range(40)).map(lambda i: (X[i], Y[i]))
    if kind == "polars' protocol":
        columns = [Column(name, X[:, i], "<f4") for i, name in enumerate("abc")]
        return Frame(columns), Column("y", Y, "<f4")
    return Source(list(zip(X.tolist(), Y.tolist(), strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["source", "PyGrain", "polars", "polars' protocol"])
def test_fit_takes_records_one_by_one_and_says_what_it_assumes(kind):
    def fit(data):
        return dpx.training.fit(
            lambda w, x, y: (x @ w - y) ** 2,
            np.zeros(3, np.float32),
            data,
            epsilon=2.0,
            delta=1e-3,
            batch_size=10,
            steps=2,
            optimizer=optax.sgd(0.1),
            l2_clip_norm=0.5,
            key=jax.random.key(0),
            progress=False,
        )

    given = data(kind)
    trained, expected = fit(given), fit((X, Y))
    np.testing.assert_allclose(trained.params, expected.params, atol=1e-6)
    of_rows = kind in ("source", "PyGrain")
    said = trained.guarantee.assumptions
    assert (ROW_BY_ROW in said) == of_rows
    assert any("follow from all records" in text for text in said) == (not of_rows)
    assert len(said) == len(expected.guarantee.assumptions) + 1
    if isinstance(given, Source):
        assert given.reads == [1] * 40


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (Source([]), "data has 0 records"),
        (Source([None]), "data: row 0 holds nothing: give numbers"),
        (Source([{"x": 1}, {"x": "a"}]), r"data: row 1, field \['x'\] has dtype <U1"),
        (Source([[1], [[1], [1, 2]]]), "data: row 1 must be an array, with rows of one length"),
        (
            Source([{"x": 1}, {"x": 1, "y": 2}]),
            r"row 1 holds \['x'\] int64 \(\), \['y'\] int64 \(\), and row 0 \['x'\] int64 \(\): give",
        ),
        ((Source([1]), X), r"data\[0\] is a source, which must be all of the data: .*\(x, y\)"),
        ({"x": pd.DataFrame({"a": [1], "said": ["b"]})}, r"data\['x'\], column 'said' has dtype"),
        ((pd.DataFrame(index=[0]), Y[:1]), r"data\[0\] has no columns"),
        (Frame([Column("a", [[1]], "<f4"), Column("b", [1], "<f4")]), "column 'a' holds an array"),
        (iter([1]), "data has dtype object"),
    ],
)
def test_what_cannot_be_read_is_named(given, named):
    with pytest.raises(ValueError, match=named):
        as_examples(given)


def test_a_source_without_an_end_is_refused_at_once():
    class Endless(Source):
        def __len__(self):
            return 2**63 - 1

    with pytest.raises(ValueError, match=r"as a MapDataset does without repeat\(\)"):
        as_examples(Endless([1]))


def test_users_are_read_from_a_column_of_polars():
    polars = pytest.importorskip("polars")
    found = grouped(polars.Series(["ann", "7", "ann"]), 2, 3)
    assert found is not None
    assert found.order.tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="users: row 1 is missing"):
        grouped(polars.Series([2**62, None]), 2, 2)


def test_a_column_may_hold_nan_where_it_is_one_of_floats():
    (found,), _ = as_examples(pd.DataFrame({"a": [1.0, np.nan], "b": [True, False]}))
    np.testing.assert_array_equal(found, [[1, 1], [np.nan, 0]])


def test_arrays_assume_nothing():
    assert assumed((X, Y, X.tolist())) == ()
    assert assumed({"x": jax.numpy.asarray(X)}) == ()
