"""A small transformer with public weights that reads a private memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import cross_attention as configs
from dpx.training.keys import derive
from experiments.cross_attention import reader

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def small():
    return reader.Reader(8, 2, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def rows():
    x, y = reader.made_up(KEY, 3000)
    return np.column_stack([x, y]).astype(np.float32)


@pytest.mark.slow
def test_without_noise_it_reads_the_exact_memory(small, rows):
    small.remember(derive(KEY), jnp.asarray(rows), epsilon=1e8, delta=1e-6)
    x = jnp.asarray(rows[:40, :3])
    np.testing.assert_allclose(small(x), small(x, jnp.asarray(rows)), atol=2e-3)


@pytest.mark.slow
def test_a_row_enters_for_itself_alone(small, rows):
    """What a layer is given of a row, and so the sensitivity of its release, depends on no other row."""
    whole = small.encode(jnp.asarray(rows[:50]))
    changed = rows[:50].copy()
    changed[7] = 1.0
    other = small.encode(jnp.asarray(changed))
    assert not np.allclose(whole[7], other[7])
    np.testing.assert_array_equal(np.delete(whole, 7, 0), np.delete(other, 7, 0))


@pytest.mark.slow
def test_made_up_rows_are_within_their_bounds():
    x, y = jax.vmap(reader.made_up, (0, None))(jax.random.split(KEY, 50), 64)
    assert float(jnp.abs(x).max()) <= 1
    assert 0.3 < float(y.std()) < 1
    assert bool(jnp.isfinite(x).all() & jnp.isfinite(y).all())


@pytest.mark.slow
def test_training_lowers_the_error_on_memories_that_it_has_not_seen():
    config = configs.get_config("reader,tiny")
    config.public_training.update({"steps": 60, "tasks": 4, "rows": 64})
    x, y = jax.vmap(reader.made_up, (0, None))(jax.random.split(jax.random.key(9), 20), 64)

    def error(model):
        def of_task(x, y):
            memory = jnp.concatenate([x[:32], y[:32, None]], axis=1)
            return jnp.square(model(x[32:], memory) - y[32:]).mean()

        return float(jax.vmap(of_task)(x, y).mean())

    assert error(reader.trained(config)) < 0.8 * float(jnp.square(y).mean())
