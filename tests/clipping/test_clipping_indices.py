"""Tables that are looked up: by integers of every type (bytes index 256 rows), and several tables at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_clipping_models import check, per_example
from xla_flags import USUAL_KERNELS

import dpx
from dpx import clipping
from dpx.clipping.gradients import plan

WIDE = [pytest.param(t, marks=pytest.mark.slow) for t in ("uint16", "int16", "uint32", "int32")]
TYPES = pytest.mark.parametrize("dtype", ["uint8", "int8", *WIDE])


def taken(mode):
    return lambda p, ids: jnp.take(p, ids, axis=0, mode=mode)


def gathered(p, ids):
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(p, ids[:, None], numbers, (1, p.shape[1]), mode="clip")


def sliced(p, ids):
    zero = jnp.zeros((), ids.dtype)
    return jnp.concatenate([lax.dynamic_slice(p, (i, zero), (2, p.shape[1])) for i in ids])


@pytest.mark.quick_cases("gather-256-int8")
@TYPES
@pytest.mark.parametrize("rows", [256, 300])
@pytest.mark.parametrize("look_up", [taken("fill"), taken("clip"), gathered, sliced],
                         ids=["fill", "clip", "gather", "slice"])  # fmt: skip
def test_every_type_of_index(monkeypatch, look_up, rows, dtype):
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    most = min(rows - 1, np.iinfo(dtype).max)
    ids = np.array([[0, most, 7], [most - 2, 100, 100], [most, most, 0]]).astype(dtype)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(rows, 3)), jnp.float32)

    def loss(p, ids):
        found = look_up(p, ids)
        signs = jnp.where(jnp.arange(len(found)) % 2 == 0, 1.0, -1.01)[:, None]
        return jnp.sum(signs * jnp.tanh(found))

    for method in ("one_pass", "two_pass"):
        fn = clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method)
        # XLA's older kernels scatter by bytes to rows that do not exist.
        out = jax.jit(fn, compiler_options=USUAL_KERNELS)(table, ids)
        check(out, per_example(loss, table, (ids.astype(np.int32),)), 0.1)


@pytest.mark.quick_cases("int32")
@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "int64"])
def test_consecutive_rows_that_begin_too_late_or_too_early_are_the_last_or_the_first(dtype):
    """A start beyond the table is moved back, whatever it would be in another type."""
    early = (
        [-1, -9] if dtype.startswith("i") else [5, 7]
    )  # From the end, as JAX counts; and too early.
    far = 2**32 + 2 if dtype == "int64" else np.iinfo(dtype).max
    starts, rows = np.array([1, far, *early], dtype), np.array([1, 5, 5, 0 if early[1] < 0 else 5])
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype("f4")

    def loss(p, x, start):
        found = lax.dynamic_slice(p, (start, jnp.zeros((), dtype)), (3, 2))
        return jnp.sum(found * x) + 0.5 * jnp.sum(p[:3] * x)

    def expected(p, x, row):
        return jnp.sum(p[row + jnp.arange(3)] * x) + 0.5 * jnp.sum(p[:3] * x)

    table = jnp.ones((8, 2))
    gradients = per_example(expected, table, (x, rows))
    with jax.enable_x64(dtype == "int64"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "FAVOR_GRADIENT", 0.0)
        fn = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.5, method="one_pass"))
        check(fn(table, x, starts), gradients, 0.5)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_the_first_byte_and_the_last_do_not_cancel(method):
    """Rows 0 and 255, with gradients that would cancel if they were one row."""

    def loss(p, ids):
        return jnp.sum(jnp.take(p, ids[0], axis=0) - 1.01 * jnp.take(p, ids[1], axis=0))

    fn = clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method)
    out = jax.jit(fn)(jnp.zeros((256, 3)), np.array([[0, 255]], np.uint8))
    np.testing.assert_allclose(out.norms, np.sqrt(3 * (1 + 1.01**2)), rtol=1e-4)
    assert np.flatnonzero(np.asarray(out.grads)[:, 0]).tolist() == [0, 255]
    assert np.linalg.norm(out.grads) <= 0.1


def of_each_table(p, ids):
    return jax.vmap(lambda table, i: table[i])(p, ids)


def of_tables_in_the_middle(p, ids):
    return jax.vmap(lambda table, i: table[i], (1, 1), 1)(p.swapaxes(0, 1), ids.T)


def scanned(p, ids):
    return jax.lax.scan(lambda carry, x: (carry, x[0][x[1]]), 0, (p, ids))[1]


def tied(p, ids):
    found = of_each_table(p, ids)
    return jnp.einsum("ktc,kvc->kvt", found, p)


def by_two_indices(p, ids):
    return p[jnp.arange(3)[:, None], ids]


def by_two_indices_in_turn(p, ids):
    return p.transpose(2, 1, 0)[:, ids, jnp.arange(3)[:, None]]


def by_two_indices_the_last_axis_first(p, ids):
    numbers = lax.GatherDimensionNumbers((1,), (0, 1), (1, 0))
    both = jnp.stack([ids.ravel(), jnp.repeat(jnp.arange(3), 5)], -1)
    return lax.gather(p, both, numbers, (1, 1, 3), mode="fill", fill_value=0.0)


def by_two_indices_of_parts_that_overlap(p, ids):
    return by_two_indices(p[:, 2:], ids) + by_two_indices(p[:, 1:], ids)


def by_two_indices_of_which_one_is_no_table(p, ids):
    return p[jnp.where(ids[:, :1] < 10, jnp.arange(3)[:, None], 3), ids]


def with_an_index_of_an_axis_that_is_taken_whole(p, ids):
    """Only zero lies inside."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0, 1))
    both = jnp.stack([ids.ravel(), ids.ravel() // 10], -1)
    return lax.gather(p.reshape(60, 3), both, numbers, (1, 3), mode="fill", fill_value=0.0)


def of_all_rows(p, ids):
    return p.reshape(60, 3)[jnp.where(ids < 20, ids + jnp.array([[0], [20], [40]]), 60)]


def a_number_at_a_place(p, ids):
    return p.reshape(60, 3)[ids, jnp.arange(5) % 3]


def of_each_column(p, ids):
    return jnp.take_along_axis(p.reshape(60, 3), ids.T, axis=0)


def of_rows_that_each_have_a_matrix(p, ids):
    matrices = jnp.sin(jnp.arange(90.0)).reshape(30, 1, 3)
    table = jnp.einsum("vn,vdn->vd", p.reshape(60, 3)[::2], matrices)
    return jax.checkpoint(lambda table, ids: table[ids])(table, ids)


@pytest.mark.quick_cases(
    "of_rows_that_each_have_a_matrix-one_pass",
    "of_all_rows-one_pass",
    "by_two_indices_the_last_axis_first-one_pass",
    "by_two_indices_of_parts_that_overlap-one_pass",
)
@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
@pytest.mark.parametrize(
    "look_up",
    [
        of_each_table, of_tables_in_the_middle, scanned, tied, by_two_indices, by_two_indices_in_turn,
        by_two_indices_of_which_one_is_no_table, with_an_index_of_an_axis_that_is_taken_whole, of_all_rows,
        a_number_at_a_place, of_each_column, by_two_indices_the_last_axis_first,
        by_two_indices_of_parts_that_overlap, of_rows_that_each_have_a_matrix,
    ],
)  # fmt: skip
def test_each_of_several_tables_has_its_own_rows(monkeypatch, look_up, method):
    """Look-ups of `jax.vmap`, of a scan and of two indices: repeated ones, and one beyond the last row."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    draw = np.random.default_rng(0)
    tables = jnp.asarray(draw.normal(size=(3, 20, 3)), jnp.float32)
    ids = draw.integers(0, 20, (4, 3, 5))
    ids[:, :, 1] = ids[:, :, 0]
    ids[1, 2, 3] = 20

    def loss(p, ids):
        found = jnp.nan_to_num(look_up(p, ids))
        return jnp.sum(jnp.tanh(found) * (1 + jnp.arange(found.size).reshape(found.shape)))

    (row,) = dpx.explain_clipping(loss, tables, ids).rows
    # Rows that are counted in another order than they lie in are held, or with some left out.
    held = by_two_indices_in_turn, by_two_indices_of_parts_that_overlap
    assert row.has_rule == (look_up not in held), row.rule
    out = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method))(tables, ids)
    check(out, per_example(loss, tables, (ids,)), 0.1)


@pytest.mark.parametrize("method", ["one_pass", "two_pass"])
def test_rows_of_tables_that_take_turns_are_those_of_each(monkeypatch, method):
    """A row's number is then no number of the parameter's own order."""
    monkeypatch.setattr(plan, "FAVOR_GRADIENT", 0.0)
    tables = jnp.asarray(np.random.default_rng(0).normal(size=(3, 20, 3)), jnp.float32)
    ids = np.random.default_rng(1).integers(0, 60, (4, 9))

    def loss(p, ids):
        return jnp.sum(jnp.tanh(p.transpose(1, 0, 2).reshape(60, 3)[ids]) * jnp.arange(3))

    out = jax.jit(clipping.clipped_grad(loss, l2_clip_norm=0.1, method=method))(tables, ids)
    check(out, per_example(loss, tables, (ids,)), 0.1)
