"""The constants of rounding: how many roundings are counted, and that nothing is left out of a bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.clipping import groups, rounding
from dpx.clipping.gradients import gram

pytestmark = pytest.mark.optimized

U = 2.0**-24


def gamma(roundings):
    return roundings * U / (1 - roundings * U)


@pytest.mark.parametrize(
    ("shape", "roundings"),
    [
        ((), 0),
        ((7,), 7),
        ((3, 5), 8),
        ((1024,), 1024),
        ((3, 2000), 512 + 4 + 3),
        ((1025,), 512 + 3),
    ],
)
def test_every_axis_that_is_added_up_rounds(shape, roundings):
    total, found = rounding.added_up(jnp.ones(shape))
    assert (float(total), found) == (np.prod(shape), roundings)
    # In 64 bits, in which neither the sum nor the factor is rounded visibly.
    raised = float(rounding.sum_of_squares(jnp.ones(shape)))
    assert raised >= np.prod(shape) * (1 + gamma(roundings + 2)) * (1 - 2 * U)


def test_a_product_rounds_and_so_does_every_sum_of_chunks():
    assert [rounding.chunked(n) for n in (1, 512, 513, 1100)] == [2, 513, 1 + 512 + 2, 1 + 512 + 3]


def test_narrow_numbers_are_squared_in_32_bits():
    x = jnp.asarray([1 + 2.0**-7] * 3, jnp.bfloat16)
    assert float(rounding.sum_of_squares(x)) >= 3 * (1 + 2.0**-7) ** 2


def test_squares_that_are_flushed_are_counted():
    tiny = float(np.finfo(np.float32).tiny)
    assert float(rounding.sum_of_squares(jnp.zeros(100))) >= 400 * tiny


def test_matrix_units_that_truncate_round_twice_as_much(monkeypatch):
    assert rounding.unit(jnp.float32) == U
    assert rounding.in_products(7) == 11
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert rounding.unit(jnp.float32) == 2 * U
    assert rounding.in_products(7) == 43


def test_norms_of_groups_are_above_the_root_of_their_sum():
    tree = {"a": jnp.ones(1), "b": [jnp.ones(1)] * 201}
    found = groups.assign({"a": 1.0, "b": 2.0}, tree)
    squares = [(0, jnp.array([9.0])), (1, jnp.array([16.0])), *[(1, jnp.zeros(1))] * 200]
    (one,), (other,) = (np.asarray(norm) for norm in groups.group_norms(found, squares))
    for norm, root, count in ((one, 3.0, 1), (other, 4.0, 201)):  # Every square may be rounded.
        bound = gamma(count + 24)
        assert root * (1 + bound) * (1 - 2 * U) <= norm <= root * (1 + 2 * bound)


@pytest.mark.parametrize("first", ["float32", "float64"])
def test_norms_of_groups_of_two_types_are_raised_by_what_the_narrower_rounds(first):
    """Products of a clip factor and a gradient in float32 are rounded to 32 bits."""
    with jax.enable_x64(True):
        squares = [
            (0, jnp.array([9.0], x))
            for x in sorted(("float32", "float64"), reverse=first > "float32")
        ]
        found = groups.assign(1.0, {"a": jnp.ones(1), "b": jnp.ones(1)})
        (norm,) = groups.group_norms(found, squares)
        assert norm.dtype == jnp.float64
        assert norm[0] >= 18**0.5 * (1 + gamma(2 + 24)) * (1 - 2.0**-50)


def test_clip_factors_too_small_to_scale_by_are_zero():
    found = groups.assign(1e-3, jnp.ones(1))
    norms = [jnp.array([1e-4, 1.0, 1e11, 1e12, jnp.inf], jnp.float32)]
    for normalize in (False, True):
        (factors,) = groups.clip_factors(found, norms, jnp.ones(5, bool), normalize)
        kept = 1 / (norms[0] + 0.01) if normalize else 1 / jnp.maximum(norms[0], 1e-3)
        expected = jnp.where(jnp.arange(5) < 3, 1e-3 * kept, 0)
        np.testing.assert_allclose(factors, expected, rtol=1e-6)
    (masked,) = groups.clip_factors(found, norms, jnp.arange(5) == 1, False)
    assert (masked != 0).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("clip", [1e-3, 1.0, 3.0, 100.0])
def test_normalized_factors_are_at_most_one(clip):
    found = groups.assign(clip, jnp.ones(1))
    (factors,) = groups.clip_factors(found, [jnp.array([0.0, 1.0])], jnp.ones(2, bool), True)
    assert np.all(factors <= 1)
    np.testing.assert_allclose(
        factors * groups.unit_of(clip), [clip / 0.01, clip / 1.01], rtol=1e-6
    )


def test_the_sum_of_a_batch_rounds_as_often_as_it_has_examples():
    """The whole sum may be made by several calls, of which `batch` is one."""
    gradient = dpx.clipped_grad(
        lambda w, x: jnp.sum(w * x), l2_clip_norm=1.0, method="vmap", microbatch_size=4
    )
    params, batch = jnp.ones(3), jnp.ones((8, 3))
    for size in (8, 80):
        expected = 2 * size * (gamma(4 + 4) + gamma(9) + 3 * U)
        assert gradient.rounding(size, params, batch) == pytest.approx(expected, rel=1e-12)
        more = 2 * size * (gamma(16) - gamma(9))
        found = gradient.rounding(size, params, batch, devices=8)
        assert found == pytest.approx(expected + more, rel=1e-12)
    with pytest.raises(ValueError, match="devices=0 must be a whole number"):
        gradient.rounding(8, params, batch, devices=0)


def test_a_sum_rounds_as_its_narrowest_parameters_do():
    """Of parameters in 32 bits and in 64, whose common type is that of 64."""
    gradient = dpx.clipped_grad(
        lambda p, x: jnp.sum(p["a"] * x) + jnp.sum(p["b"] * x), l2_clip_norm=1.0, microbatch_size=4
    )
    batch = jnp.ones((8, 3))
    with jax.enable_x64(True):
        params = {"a": jnp.ones(3, jnp.float32), "b": jnp.ones(3, jnp.float64)}
        assert gradient.rounding(8, params, batch) >= 2 * 8 * (gamma(4 + 4) + gamma(9) + 3 * U)


def test_a_sum_rounds_as_its_products_of_factors_do():
    """They may cancel: what is added up may be 64 times as long as what is clipped."""

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]) + params["b"])

    params, size, places = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}, 3, 5
    gradient = dpx.clipped_grad(loss, l2_clip_norm=1.0, method="one_pass", microbatch_size=size)
    found = gradient.rounding(size, params, jnp.ones((size, places, 64)))
    assert found >= 2 * size * 64 * gamma(size * places + 4)


def test_a_stack_rounds_as_the_part_of_it_that_rounds_most():
    """One part is kept as factors, the other held."""

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params[0])) + x[0, 0] * jnp.sum(jnp.sin(params[1]))

    params, size, places = jnp.ones((2, 64, 64)), 3, 5
    gradient = dpx.clipped_grad(loss, l2_clip_norm=1.0, method="one_pass", microbatch_size=size)
    found = gradient.rounding(size, params, jnp.ones((size, places, 64)))
    assert found >= 2 * size * 64 * gamma(size * places + 4)


def bounded(layout, rows, columns):
    squared = gram.squared_norm(layout, [gram.Pair(jnp.asarray(rows), jnp.asarray(columns))])
    return float(squared) ** 0.5


def test_inner_products_of_rows_that_are_looked_up_round_too():
    count = 300
    layout = gram.Layout((7, count), (), (0,), (1,), (False,))
    norm = bounded(layout, np.zeros((1, 1), "i4"), np.ones((1, 1, count), "f4"))
    assert norm >= count**0.5 * (1 + gamma(count) / 2 + gamma(36) / 2)


def test_rows_whose_squares_are_flushed_have_a_length():
    layout = gram.Layout((100, 1), (), (0,), (1,), (False,))
    norm = bounded(layout, np.full((1, 1, 100), 1e-23, "f4"), np.full((1, 1, 1), 1e10, "f4"))
    assert norm >= 1e-23 * 100**0.5 * 1e10


def test_what_the_sum_over_positions_rounds_is_in_the_norm():
    """Every product is one, so that all terms add up, and each addition may round."""
    count = 400
    layout = gram.Layout((1, 1), (), (), (), (False,))
    norm = bounded(layout, np.ones((1, count, 1), "f4"), np.ones((1, count, 1), "f4"))
    assert norm >= count * (1 + gamma(count + 16) + gamma(count))


def test_terms_that_cancel_leave_some_of_their_length():
    """What they add to a sum rounds as if they did not, and counts 64 times at most."""
    layout = gram.Layout((1, 1), (), (), (), (False,))
    norm = bounded(layout, np.ones((1, 2, 1), "f4"), np.array([[[1], [-1]]], "f4"))
    assert norm >= 2 / 64


def test_positions_of_all_uses_round():
    """Of a parameter that is used in many places, and then in one more."""
    layout = gram.Layout((1, 1), (), (), (), (False, False))
    uses = [gram.Pair(*[jnp.ones((1, count, 1))] * 2) for count in (400, 1)]
    norm = float(gram.squared_norm(layout, uses)) ** 0.5
    assert norm >= 401 * (1 + gamma(400) + gamma(401))
