"""Exact attention against a loop over single queries, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx.attention


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_hand(q, k, v, mask, scale):
    """One query at a time, in float64."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for index in np.ndindex(q.shape[:-1]):
        keys, values = k[index[:-1]].astype(float), v[index[:-1]].astype(float)
        allowed = mask[index]
        weights = np.exp(keys[allowed] @ q[index].astype(float) * scale)
        if allowed.any():
            out[index] = weights @ values[allowed] / weights.sum()
    return out


@pytest.mark.parametrize("scale", [None, 4.0])
def test_matches_one_query_at_a_time(scale):
    q, k, v = draw(2, 3, 5, 4), draw(2, 3, 7, 4, seed=1), draw(2, 3, 7, 6, seed=2)
    mask = np.random.default_rng(3).random((2, 3, 5, 7)) < 0.5
    mask[0, 0, 0] = False
    got = dpx.attention.dot_product_attention(q, k, v, mask=mask, scale=scale)
    np.testing.assert_allclose(got, by_hand(q, k, v, mask, scale or 0.5), atol=2e-6)
    full = dpx.attention.dot_product_attention(q, k, v, scale=scale)
    everything = np.ones_like(mask)
    np.testing.assert_allclose(full, by_hand(q, k, v, everything, scale or 0.5), atol=2e-6)


@pytest.mark.slow
def test_a_query_without_keys_gets_zero_and_no_nan_gradient():
    q, k, v = draw(2, 4), draw(3, 4), draw(3, 4)
    mask = jnp.array([[False, False, False], [True, False, True]])
    loss = lambda q, k, v: dpx.attention.dot_product_attention(q, k, v, mask=mask).sum()  # noqa: E731
    gradients = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients)
    assert not dpx.attention.dot_product_attention(q, k, v, mask=mask)[0].any()
    assert not gradients[0][0].any()


@pytest.mark.slow
def test_large_logits_and_half_precision():
    q, k, v = 300 * draw(5, 4), draw(7, 4), draw(7, 2)
    best = np.argmax(q @ k.T, axis=-1)
    np.testing.assert_allclose(
        dpx.attention.dot_product_attention(100 * q, k, v), v[best], atol=1e-5
    )
    half = dpx.attention.dot_product_attention(
        *(jnp.asarray(a, jnp.bfloat16) for a in (draw(5, 4), k, v))
    )
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        half.astype(np.float32), dpx.attention.dot_product_attention(draw(5, 4), k, v), atol=0.05
    )


def test_jit_vmap_grad_agree():
    q, k, v = draw(3, 5, 4), draw(3, 7, 4, seed=1), draw(3, 7, 2, seed=2)
    want = dpx.attention.dot_product_attention(q, k, v)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(dpx.attention.dot_product_attention))(q, k, v), want, atol=1e-6
    )


def test_misuse_raises():
    q, k, v = draw(5, 4), draw(7, 4), draw(7, 2)
    with pytest.raises(ValueError, match="do not fit"):
        dpx.attention.dot_product_attention(q, k[:, :3], v)
    with pytest.raises(ValueError, match="do not fit"):
        dpx.attention.dot_product_attention(q, k, v[:5])
    with pytest.raises(ValueError, match="mask has dtype"):
        dpx.attention.dot_product_attention(q, k, v, mask=np.ones((5, 7), np.float32))
    with pytest.raises(ValueError, match="scale=0"):
        dpx.attention.dot_product_attention(q, k, v, scale=0)


@pytest.mark.parametrize("dtype", [np.int32, bool])
def test_integers_answer_as_the_same_floats(dtype):
    q, k, v = (np.arange(12).reshape(4, 3) % m < 2 for m in (3, 4, 5))
    q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    got = dpx.attention.dot_product_attention(q, k, v)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(
        got, dpx.attention.dot_product_attention(*(a.astype(np.float32) for a in (q, k, v)))
    )
