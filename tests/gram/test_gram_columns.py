"""What the Gram release takes: forms of X, columns that are clipped, and misuse."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from test_gram import BUDGET, KEY, SAMPLING, project

from dpx import gram
from dpx.gram.accounting import Columns
from dpx.gram.columns import clipped_gram, traced_gram


@pytest.fixture
def X():
    return np.random.default_rng(0).normal(size=(5, 300)) / 5


@pytest.mark.quick_cases("gaussian-jax")
@pytest.mark.parametrize(
    "form",
    [
        np.asarray,
        lambda X: jnp.asarray(X, jnp.float32),
        sparse.csr_matrix,
        sparse.coo_array,
        sparse.dok_array,
        lambda X: [sparse.lil_matrix(X)],
        lambda X: [X[:, :7], X[:, 7:200], X[:, 200:]],
        lambda X: (X[:, i : i + 13] for i in range(0, X.shape[1], 13)),
        lambda X: iter([sparse.csc_array(X[:, :100]), X[:, 100:]]),
        pd.DataFrame,
        lambda X: [pd.DataFrame(X[:, :50]), pd.DataFrame(X[:, 50:])],
    ],
    ids=[
        "numpy",
        "jax",
        "csr",
        "coo",
        "dok",
        "lil",
        "list",
        "generator",
        "mixed",
        "pandas",
        "pandas blocks",
    ],
)
@pytest.mark.parametrize("mechanism", [{}, SAMPLING], ids=["gaussian", "sampling"])
def test_every_form_of_the_data_gives_the_same_release(X, form, mechanism):
    expected = gram.release(KEY, X, **BUDGET, **mechanism).matrix
    np.testing.assert_allclose(
        gram.release(KEY, form(X), **BUDGET, **mechanism).matrix, expected, rtol=1e-5, atol=1e-5
    )


def test_a_memory_mapped_file_is_read_in_blocks(tmp_path, monkeypatch):
    X = np.random.default_rng(0).normal(size=(4, 1001)).astype(np.float32)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    monkeypatch.setattr("dpx.gram.columns._BLOCK_ENTRIES", 4 * 64)
    matrix, columns = clipped_gram(mapped, 1.0)
    assert columns == 1001
    np.testing.assert_array_equal(matrix, clipped_gram(X, 1.0)[0])
    exact = project(X, 1.0) @ project(X, 1.0).T
    np.testing.assert_allclose(matrix * Columns(1.0).worth, exact, rtol=1e-5, atol=1e-3)


def test_clipping_is_the_projection_for_every_input():
    X = np.array([[3.0, 0.1, 0.0, np.nan, np.inf, 1e200], [4.0, 0.1, 0.0, 1.0, 0.0, 1e200]])
    half = 1 / math.sqrt(2)
    columns = np.array([[0.6, 0.1, 0, 0, 0, half], [0.8, 0.1, 0, 0, 0, half]])
    for form in (np.asarray, sparse.csr_matrix):
        found = clipped_gram(form(X), 1.0)[0] * Columns(1.0).worth
        np.testing.assert_allclose(found, columns @ columns.T, rtol=1e-5)
    with jax.enable_x64(True):
        found = jax.jit(traced_gram)(X, 1.0)
    np.testing.assert_allclose(found, columns @ columns.T, rtol=1e-12)


@pytest.mark.parametrize("form", ["csc", "coo"])
def test_entries_that_a_column_holds_twice_are_added_up_whatever_other_columns_hold(form):
    first = [1e17, -1e17] * 31 + [1.0, 0.0]  # whose sum depends on their order

    def gram_of(rows, values):
        X = sparse.csc_array((first + values, [0] * 64 + rows, [0, 64, 66]), shape=(2, 2))
        return clipped_gram(X.asformat(form), 1.0)[0]

    np.testing.assert_array_equal(gram_of([0, 1], [0.0, 0.5]), gram_of([1, 0], [0.5, 0.0]))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mechanism": "laplace"}, "mechanism='laplace'"),
        ({"calibration": "paper"}, "calibration='paper'"),
        ({"eta": 1.0}, "eta=1.0"),
        ({"mechanism": "sampling"}, "eta=None"),
        ({"clip": False}, "column_bound=1.0"),
        ({"neighboring": "remove"}, "neighboring='remove'"),
        ({"neighboring": "add_or_remove_one", "max_column_change": 1.0}, "max_column_change=1.0"),
    ],
)
def test_misuse_raises(X, changed, named):
    X = X * 3 if "clip" in changed else X
    with pytest.raises(ValueError, match=named):
        gram.release(KEY, X, **(BUDGET | changed))


@pytest.mark.parametrize("remedy", ["eta", "epsilon", "max_column_change"])
def test_the_values_named_in_the_message_are_admissible(X, remedy):
    terms = {"mechanism": "sampling", "eta": 5.0, "max_column_change": 2.0}
    with pytest.raises(ValueError, match="no admissible") as raised:
        gram.release(KEY, X, **BUDGET, **terms)
    value = float(re.search(rf"{remedy} [≥≤] ([\d.]+)", str(raised.value)).group(1))
    gram.release(KEY, X, **(BUDGET | terms | {remedy: value}))


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(3),
        np.zeros((2, 2, 2)),
        [],
        [np.zeros((2, 3)), np.zeros((3, 3))],
        [[1.0, 2.0], [3.0, 4.0]],
        "abc",
        [b"abc"],
        [np.zeros((1, 3)), np.ma.masked_array([[100.0, 0.0]], mask=[[True, False]])],
    ],
)
@pytest.mark.parametrize("mechanism", [{}, SAMPLING], ids=["gaussian", "sampling"])
def test_malformed_data_raises(bad, mechanism):
    with pytest.raises(ValueError, match="X"):
        gram.release(KEY, bad, **BUDGET, **mechanism)


@pytest.mark.slow
def test_no_columns_are_released_under_jit_too():
    def release(X):
        return gram.release(KEY, X, neighboring="add_or_remove_one", **BUDGET).matrix

    noise = jax.jit(release)(jnp.ones((3, 0)))
    assert np.isfinite(noise).all()
    assert np.linalg.norm(noise) > 0


def test_wide_promise_raises():
    with pytest.raises(ValueError, match="n > d"):
        gram.release(KEY, np.eye(5)[:, :3], assume_good=True, **BUDGET, **SAMPLING)


@pytest.mark.parametrize("longest", [1.00001, 3.0, np.inf])
def test_a_column_beyond_the_bound_is_named_whichever_block_holds_it(longest):
    """The first one is longer by more than rounding."""
    blocks = [np.array([[longest]]), np.array([[0.5]])]
    with pytest.raises(ValueError, match=rf"norm {longest:.6g}, above column_bound=1"):
        gram.release(KEY, iter(blocks), clip=False, **BUDGET)


@pytest.mark.parametrize("changed", [{"clip": False}, {"column_bound": 2.0}])
def test_a_sum_is_released_with_the_clipping_that_it_was_made_with(changed):
    """Of another bound its integers would stand for another matrix."""
    about = {"column_bound": 1.0, "clip": True}
    for made, released in ((about, about | changed), (about | changed, about)):
        total = gram.statistic(np.eye(2), **made)
        (name,) = changed
        with pytest.raises(ValueError, match=f"{name}={released[name]} must be {made[name]}"):
            gram.release(KEY, total, **(BUDGET | released))


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix])
def test_a_column_that_is_longer_by_rounding_is_kept(form):
    """Rounding makes each of its 1,011 equal entries longer by half a unit of the grid."""
    column = np.full((1011, 1), 1 / math.sqrt(1011))
    total = gram.statistic(form(column), column_bound=1.0)
    assert np.unique(total.sums[0]).tolist() == [math.ceil(2**18 / math.sqrt(1011)) ** 2]
    assert total.largest == (2**18 + math.ceil(0.51 * math.sqrt(1011))) ** 2


def test_unchecked_clipping_under_jit_raises(X):
    with pytest.raises(ValueError, match="clip=True"):
        jax.jit(lambda X: gram.release(KEY, X, clip=False, **BUDGET).matrix)(X)


@pytest.mark.parametrize(
    ("dtype", "entry"), [(np.float64, 1.7e308), (np.float64, 6e307), (np.float32, 3e38)]
)
def test_a_column_of_nearly_the_largest_number_is_projected_not_lost(dtype, entry):
    X = np.array([[entry, 1e-36], [entry, 0.0]], dtype)
    found = clipped_gram(X, 2.0)[0] * Columns(2.0).worth
    np.testing.assert_allclose(found, np.full((2, 2), 2.0), rtol=1e-5)
    under_jit = jax.jit(traced_gram)(X.clip(max=3e38).astype(np.float32), 2.0)
    np.testing.assert_allclose(under_jit, np.full((2, 2), 2.0), rtol=1e-5)


@pytest.mark.filterwarnings("error", "ignore:key can be guessed")
@pytest.mark.parametrize("form", [np.asarray, sparse.coo_array])
@pytest.mark.parametrize("bound", [1.0, 0.01])
def test_a_column_beyond_floats_is_clipped_without_a_warning(X, form, bound):
    """Which would tell of the column."""
    about = BUDGET | {"column_bound": bound}
    X[:, 1] = 1.7e308
    found = gram.release(KEY, form(X), **about)
    X[:, 1] = 5**-0.5
    np.testing.assert_allclose(found.matrix, gram.release(KEY, X, **about).matrix, atol=1e-5)
