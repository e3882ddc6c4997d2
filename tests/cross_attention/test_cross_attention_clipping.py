"""Rows are clipped into the domain before they enter the release, whatever floats they hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_attention_memory import BOX, EXACT, KEY, memory

from dpx import cross_attention
from dpx._numerics import into_ball, norm
from dpx.cross_attention.domain import Domain


@pytest.mark.slow
def test_building_under_jit_clips_and_agrees():
    K, V, Q = memory(200, 2)
    build = lambda k, v, clip: cross_attention.build(  # noqa: E731
        KEY, k, v, clip=clip, degree=2, **BOX, **EXACT
    )
    traced = jax.jit(functools.partial(build, clip=True))(K, V)
    np.testing.assert_allclose(traced.query(Q), build(K, V, False).query(Q), atol=1e-4)
    with pytest.raises(ValueError, match="pass clip=True"):
        jax.jit(functools.partial(build, clip=False))(K, V)


@pytest.mark.quick_cases("box")
@pytest.mark.parametrize("domain", ["box", "ball"])
def test_clipping_bounds_every_row_by_itself(domain):
    K, V, _ = memory(6, 3)
    wild = np.array([[5, -3, 1], [np.nan, 0, 0], [np.inf, 0, 0], [1e30, 1e30, 0], [0, 0, 1e-40]])
    K[:5] = wild
    V[0] = [9, -9, np.nan]
    bounds = Domain(domain, 3, 3, 1.0, 1.0, 1.0, 3.0)
    k, v = bounds.enter(K, V, clip=True)
    assert np.isfinite(k).all()
    assert np.isfinite(v).all()
    size = np.linalg.norm(k, axis=-1) if domain == "ball" else np.abs(k).max(-1)
    assert (size <= 1 + 1e-6).all()
    assert (abs(v) <= 1).all()
    if domain == "ball":
        np.testing.assert_allclose(k[3], np.array([1, 1, 0]) / np.sqrt(2), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_into_ball_takes_every_float(dtype):
    with jax.enable_x64(True):
        largest = float(jnp.finfo(dtype).max)
        tiny = float(jnp.finfo(dtype).smallest_subnormal)
        rows = [[largest, 0], [largest, -largest], [largest / 4, 1], [3e37, 1e37], [20, 0]]
        inside = jnp.array([[0, 0], [1, -7], [tiny, 0], [9.9, 0]], dtype)
        for radius in (10.0, 1e-3, 1e30):
            for clip in (into_ball, jax.jit(into_ball, static_argnums=1)):
                got = clip(jnp.array(rows, dtype), radius)
                assert got.dtype == dtype
                norms = np.linalg.norm(np.asarray(got, np.float64), axis=-1)
                reach = np.minimum(radius, np.abs(rows).max(-1))
                np.testing.assert_allclose(
                    norms, reach, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6
                )
        for clip in (into_ball, jax.jit(into_ball, static_argnums=1)):
            assert clip(inside, 10.0).tobytes() == inside.tobytes()


@pytest.mark.quick_cases("float64")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_norms_neither_overflow_nor_underflow(dtype):
    with jax.enable_x64(True):
        largest, smallest = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).tiny)
        rows = np.array([[3, 4], [0, 0], [largest / 2, 0], [3e30, -4e30], [smallest, 0]])
        want = np.array([5, 0, largest / 2, 5e30, smallest])
        for function in (norm, jax.jit(norm)):
            got = function(jnp.asarray(rows, dtype))
            assert got.dtype == dtype
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-6)
        np.testing.assert_array_equal(norm(jnp.asarray(rows.T, dtype), axis=0), got)
        assert not np.isfinite(norm(jnp.asarray([np.inf, 1], dtype)))
