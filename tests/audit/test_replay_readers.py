"""Every reader, replayed with one odd record more or less: it is refused, or it moves its own part alone.

NumPy and pandas choose the type of a column over all of its rows. Each odd row here is one that makes them
choose another type, and thereby merge the users of others, or turn their histories over.
"""

import csv
import decimal
import gzip
import json
import re

import jax
import numpy as np
import pandas
import pytest

from dpx import audit, release
from dpx.data import (
    Histories,
    from_events,
    load_amazon,
    load_movielens_1m,
    load_table,
    load_texts,
)
from dpx.data.arrays import load_array, load_columns
from dpx.data.text import joined as by_author
from dpx.recommend import popularity

KEY = jax.random.key(3)
BASE = 1_700_000_000_000_000_000
# 64-bit numbers of users and nanoseconds, of which floats hold neither: the latest event stands first.
ROWS = [(BASE + user, item, BASE + 60 - 30 * item) for user in range(12) for item in range(3)]
NOBODY = (7, 3, 5)  # a plain row of one more user
# What no user, item or time of a plain row is, in turn.
PANDAS = (pandas.NA, pandas.NaT, decimal.Decimal("1.5"))
USERS = (None, float("nan"), 0.5, 2**63, -1, "x", "nan", "", True, b"x", 1e300, "é", *PANDAS)
ITEMS = (None, 0.5, 2**63, "x", "2", pandas.NA, ";" * 400)
TIMES = (None, 1.5, 2**63, "1.5", "2020-01-01", "x", -1, 1e18, 1e300, float("inf"), *PANDAS)
DATES = (pandas.Timestamp("2020-01-01"), np.datetime64("2020-01-01"))
ODD = [
    NOBODY,
    *((user, *NOBODY[1:]) for user in USERS),
    *((NOBODY[0], item, NOBODY[2]) for item in ITEMS),
    *((*NOBODY[:2], time) for time in (*TIMES, *DATES)),
]
pytestmark = pytest.mark.usefixtures("recording")


def texts(rows):
    """Rows as people write them: what is missing is nothing."""
    return [["" if value is None else str(value) for value in row] for row in rows]


def joined(rows, separator):
    return "".join(separator.join(row) + "\n" for row in rows)


def columns(rows):
    return zip(*rows, strict=True)


def csv_file(rows, folder):
    with (folder / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("user", "item", "time"), *texts(rows)])


def compressed(rows, folder):
    (folder / "a.tsv.gz").write_bytes(gzip.compress(joined(texts(rows), "\t").encode()))


def double_colons(rows, folder):
    (folder / "a.dat").write_text(joined(texts(rows), "::"), encoding="utf-8")


def pandas_parquet(rows, folder):
    pandas.DataFrame(rows, columns=["user", "item", "time"]).to_parquet(folder / "a.parquet")


def arrow_parquet(rows, folder):
    """Of nullable integers, as Spark and databases write them."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = ("user", "item", "time")
    table = pa.table({n: pa.array(c) for n, c in zip(names, columns(rows), strict=True)})
    parquet.write_table(table, folder / "a.parquet")


def with_gaps(rows):
    """Of pandas' own integers. It makes them of floats too, but then rounds all before anybody reads them."""
    for cells in columns(rows):
        if any(isinstance(cell, float) for cell in cells):
            raise TypeError("a float")
        yield pandas.Series(cells, dtype="Int64")


def archive(rows, folder):
    user, item, time = (np.array(cells) for cells in columns(rows))
    np.savez(folder / "a.npz", user=user, item=item, time=time)


def objects(rows, folder):
    lines = [json.dumps(dict(zip(("user", "item", "time"), row, strict=True))) for row in rows]
    (folder / "a.jsonl").write_text("\n".join(lines))


def amazon(rows, folder):
    lines = [[user, item, "5", time] for user, item, time in texts(rows)]
    (folder / "a.csv").write_text(joined(lines, ","), encoding="utf-8")


def movielens(rows, folder):
    lines = [[user, item, "5", time] for user, item, time in texts(rows)]
    (folder / "a.dat").write_text(joined(lines, "::"), encoding="utf-8")


def authors(rows, folder):
    lines = [json.dumps({"who": user, "text": str(item)}) + "\n" for user, item, _ in rows]
    (folder / "a.jsonl").write_text("".join(lines))


def from_authors(path):
    found = load_texts(path, column="text", user="who")
    kept = [
        np.array(["0123x".index(c) for c in one.text if c in "0123x"], int)
        for one in by_author(found)
    ]
    return Histories(tuple(kept), 5, np.array([0, 1, 2, 3, "x"], object))


def from_block(path):
    found = release.read_histories(path, num_items=99, time="time")
    return Histories(found.items, 99, np.arange(99).astype(object))


def of_table(time="time", **options):
    return lambda path: load_table(path, time=time, **options)


def of_events(write):
    """A reader of columns that no file holds."""
    return lambda rows, folder: write(rows), lambda events: from_events(*events, min_count=0)


NUMBERED = {"user": "1", "item": "2", "time": "3", "header": False}
# How rows are written, and how what that returns, or else the only file, is read.
READERS = {
    "events, lists": of_events(lambda rows: map(list, columns(rows))),
    "events, arrays": of_events(lambda rows: [np.array(cells) for cells in columns(rows)]),
    "events, arrays of objects": of_events(lambda rows: np.array(rows, object).T),
    "events, columns of pandas": of_events(
        lambda rows: [pandas.Series(list(cells)) for cells in columns(rows)]
    ),
    "events, columns of pandas with gaps": of_events(with_gaps),
    "table, csv": (csv_file, of_table(header=True)),
    "table, compressed": (compressed, of_table(**NUMBERED)),
    "table, ::": (double_colons, of_table(**NUMBERED, separator="::")),
    "table, parquet of pandas": (pandas_parquet, of_table()),
    "table, parquet": (arrow_parquet, of_table()),
    "table, jsonl": (objects, of_table()),
    "blocks, parquet of pandas": (pandas_parquet, from_block),
    "blocks, parquet": (arrow_parquet, from_block),
    "blocks, npz": (archive, from_block),
    "Amazon": (amazon, lambda path: load_amazon(path, min_count=0)),
    "MovieLens": (movielens, lambda path: load_movielens_1m(path, min_count=0)),
    "authors": (authors, from_authors),
}
# The catalogue is public: a number for each id that some row has.
CATALOGUE = {label: n for n, label in enumerate([0, 1, 2, 3, "x", str(2**63), "0.5", ";" * 400])}


# The odd row, or the first one, where whoever wrote the column has changed all of it.
NAMED = r"event (17|0)\b|row (18|1)\b|line 1[89]\b|Object arrays"


@pytest.mark.quick_cases(
    "authors",
    "Amazon",
    "table, csv",
    "blocks, npz",
    "events, arrays",
    "events, columns of pandas",
    "table, parquet of pandas",
    "MovieLens",
)
@pytest.mark.parametrize("reader", READERS)
def test_an_odd_record_moves_nothing_but_its_own_part(reader, tmp_path):
    write, read = READERS[reader]

    def written(rows, name):
        (folder := tmp_path / name).mkdir()
        given = write(rows, folder)
        return next(folder.iterdir()) if given is None else list(given)

    def program(given):
        found = read(given)
        known = (np.array([CATALOGUE[found.item_ids[n]] for n in items]) for items in found.items)
        users = Histories(tuple(known), len(CATALOGUE))
        return popularity.fit(KEY, users, epsilon=1.0, delta=1e-5, age_decay=0.5)

    plain = written(ROWS, "plain")
    first, ratios = audit.record(program, plain), []
    for number, odd in enumerate(ODD):
        try:
            other = written([*ROWS[:17], odd, *ROWS[17:]], str(number))
        except Exception:  # the library that writes the format refuses it
            assert odd is not NOBODY
            continue
        try:
            added = audit.replay(program, plain, other, first=first)
        except ValueError as error:
            if not re.search(NAMED, str(error)):
                raise
            continue
        ratios.append(added.check().largest_ratio)
        removed = audit.replay(program, other, plain).check()
        assert removed.largest_ratio == pytest.approx(ratios[-1])
    assert ratios[0] == pytest.approx(1)


def json_cell(text):
    """A number of JSON where the text is one, and otherwise a string."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text)
    return text


@pytest.mark.parametrize(
    "cell", ["nan", "inf", "1e400", "9007199254740993", "", "x", "1e-400", "-0"]
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_odd_cell_changes_no_other_row_of_numbers(tmp_path, cell, place):
    rows = [["0.1", "0.30000000000000004"], ["9007199254740991", "5"], ["7", "8"], ["1", "2"]]
    for kind, read in (
        ("csv", load_array),
        ("csv", lambda path: load_columns(path, ["2", "1"])),
        ("jsonl", lambda path: load_columns(path, ["2", "1"])),
    ):
        path = tmp_path / f"a.{kind}"

        def write(rows, path=path):
            if path.suffix == ".jsonl":
                cells = [map(json_cell, row) for row in rows]
                rows = [[f'{{"1": {one}', f' "2": {two}}}'] for one, two in cells]
            path.write_text(joined(rows, ","))

        write(rows)
        before = read(path)
        changed = [list(row) for row in rows]
        changed[place][1] = cell
        write(changed)
        try:
            after = read(path)
        except ValueError:
            continue
        others = np.arange(4) != place
        assert after.dtype == before.dtype == np.float64
        assert after[others].tobytes() == before[others].tobytes()
