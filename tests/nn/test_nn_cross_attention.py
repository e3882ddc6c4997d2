"""The Flax layer over a private memory: exact without noise, saved without the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import dpx.attention
from dpx._numerics import into_ball
from dpx.nn.cross_attention import PrivateCrossAttention
from dpx.privacy import gaussian_epsilon, gaussian_noise_multiplier

KEY = jax.random.key(0)


def layer(seed=0, **options):
    options = {"features": "taylor", "key_bound": 1.5, "value_bound": 1.0} | options
    return PrivateCrossAttention(
        6, 5, num_heads=2, head_dim=3, out_dim=4, rngs=nnx.Rngs(seed), **options
    )


def data(n=700):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 5)).astype(np.float32), rng.normal(size=(2, 7, 6)).astype(np.float32)


def by_hand(module, memory, x):
    """The same layer with exact attention."""
    heads = lambda a: jnp.moveaxis(a.reshape(*a.shape[:-1], 2, 3), -2, -3)  # noqa: E731
    k = into_ball(heads(module.key(memory)), 1.5)
    v = jnp.clip(heads(module.value(memory)), -1, 1)
    answers = dpx.attention.dot_product_attention(into_ball(heads(module.query(x)), 1.5), k, v)
    return module.out(jnp.moveaxis(answers, -3, -2).reshape(*x.shape[:-1], 6))


@pytest.mark.slow
@pytest.mark.parametrize(("features", "tolerance"), [("taylor", 1e-3), ("random", 0.05)])
def test_without_noise_it_is_multi_head_attention(features, tolerance):
    memory, x = data()
    module = layer(features=features, num_features=2048)
    module.remember(KEY, memory, epsilon=1e8, delta=1e-6)
    got = module(x)
    assert got.shape == (2, 7, 4)
    np.testing.assert_allclose(got, by_hand(module, memory, x), atol=tolerance)


@pytest.mark.slow
def test_over_a_public_memory_it_is_multi_head_attention():
    memory, x = data(50)
    module = layer()
    np.testing.assert_allclose(module.over_public(x, memory), by_hand(module, memory, x), atol=1e-6)
    slope = jax.grad(lambda m: jnp.square(module.over_public(x, m)).sum())(jnp.asarray(memory))
    assert float(jnp.abs(slope).min(1).max()) > 0
    with pytest.raises(ValueError, match="nothing is remembered"):
        module(x)


@pytest.mark.slow
def test_guarantee_and_noise_cover_all_heads():
    memory, _ = data()
    module = layer()
    module.remember(KEY, memory, epsilon=1.0, delta=1e-6)
    guarantee = module.guarantee
    assert 1.0 <= guarantee.epsilon < 1.0 + 1e-6
    assert 1e-6 <= guarantee.delta < 1.0001e-6
    assert "2 heads" in guarantee.mechanism
    exact = layer()
    exact.remember(KEY, memory, epsilon=1e8, delta=1e-6)
    noise = (module.moments[...] - exact.moments[...])[:, 1:] * len(memory)
    T = sum(
        (1.5**2 / 3**0.5) ** t / np.prod(np.arange(1, t + 1))
        for t in range(module.taylor.degree + 1)
    )
    want = 2 * np.sqrt(3) * np.sqrt(2 * T) * gaussian_noise_multiplier(1.0, 1e-6)
    assert float(noise.std()) == pytest.approx(want, rel=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("error", "ignore:key can be guessed")
def test_a_huge_row_of_the_memory_cannot_be_told_from_others():
    memory, x = data(50)
    memory = memory.astype(np.float64)
    module = layer(features="random", num_features=64)
    for row in (1e38, 1e300, np.inf):
        memory[0] = row
        module.remember(KEY, memory, epsilon=1.0, delta=1e-6)
        assert bool(jnp.isfinite(module.moments[...]).all())
        assert bool(jnp.isfinite(module(x)).all())


@pytest.mark.slow
def test_saves_and_restores_with_orbax_and_never_holds_the_memory(tmp_path):
    memory, x = data()
    module = layer()
    module.remember(KEY, memory, epsilon=1.0, delta=1e-6)
    state = nnx.state(module)
    assert all(len(memory) not in leaf.shape for leaf in jax.tree.leaves(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", state)
    restored = layer(seed=1)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(restored, checkpointer.restore(tmp_path / "layer", nnx.state(restored)))
    np.testing.assert_array_equal(restored(x), module(x))
    assert restored.guarantee == module.guarantee


@pytest.mark.slow
def test_jit_and_gradients_of_the_query_side():
    memory, x = data()
    module = layer()
    module.remember(KEY, memory, epsilon=10.0, delta=1e-6)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(module, x), module(x), atol=1e-5)
    gradients = nnx.grad(lambda m: m(x).sum())(module)
    assert bool(jnp.abs(gradients["query"]["kernel"][...]).sum() > 0)


def test_misuse_raises():
    memory, x = data()
    module = layer()
    with pytest.raises(ValueError, match="nothing is remembered"):
        module(x)
    with pytest.raises(ValueError, match="nothing is remembered"):
        _ = module.guarantee
    for wrong in (memory[:, :2], memory[:0]):
        with pytest.raises(ValueError, match="memory has shape"):
            module.remember(KEY, wrong, epsilon=1.0, delta=1e-6)
    with pytest.raises(ValueError, match="epsilon=0"):
        module.remember(KEY, memory, epsilon=0.0, delta=1e-6)
    with pytest.raises(ValueError, match="features is"):
        layer(features="fourier")
    with pytest.raises(ValueError, match="must be at least 1"):
        PrivateCrossAttention(
            6, 5, num_heads=0, head_dim=3, key_bound=1.0, value_bound=1.0, rngs=nnx.Rngs(0)
        )


@pytest.mark.slow
def test_remembering_again_adds_to_what_was_spent():
    """Two releases about memories that may share rows cost √2 times the μ of one."""
    built = layer()
    for number in range(2):
        built.remember(jax.random.key(number), data()[0], epsilon=1.0, delta=1e-5)
    multiplier = gaussian_noise_multiplier(1.0, 1e-5)
    both = gaussian_epsilon(multiplier, 1e-5, compositions=2)
    assert built.guarantee.epsilon == pytest.approx(both, rel=1e-5)
    assert built.guarantee.epsilon > 1.4
