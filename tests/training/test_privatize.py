"""`dpx.privatize`: the law of its noise, what it refuses, and numbers at the ends of floats."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx

GRADS = {"a": jnp.arange(6.0).reshape(2, 3), "b": (jnp.ones(4),)}


def make(**changes):
    settings = {"l2_clip_norm": 2.0, "noise_multiplier": 1.5, "expected_batch_size": 8.0}
    return dpx.privatize(**(settings | {"key": jax.random.key(0)} | changes))


@pytest.mark.slow
def test_no_noise_is_exactly_the_clipped_mean():
    transform = make(noise_multiplier=0.0)
    updates, _ = transform.update(GRADS, transform.init(GRADS))
    assert all(
        np.array_equal(u, g / 8.0)
        for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(GRADS), strict=True)
    )


@pytest.mark.quick_cases("clip1-5.0")
@pytest.mark.parametrize(("clip", "norm"), [(2.0, 2.0), ({"a": 3.0, "b": 4.0}, 5.0)])
def test_noise_has_the_stated_law(clip, norm):
    transform = make(l2_clip_norm=clip)
    zeros = {"a": jnp.zeros((500, 400)), "b": jnp.zeros(100_000)}
    updates, state = transform.update(zeros, transform.init(zeros))
    std = 1.5 * norm / 8
    for leaf in jax.tree.leaves(updates):
        assert np.std(leaf) == pytest.approx(std, rel=0.02)
        assert abs(np.mean(leaf)) < 5 * std / np.sqrt(leaf.size)
    a, b = (leaf.ravel()[:100_000] for leaf in jax.tree.leaves(updates))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    again, _ = transform.update(zeros, state)
    assert abs(np.corrcoef(again["b"], updates["b"])[0, 1]) < 0.02


@pytest.mark.slow
def test_update_is_a_pure_function_of_its_state():
    transform = make()
    state = transform.init(GRADS)
    first, _ = transform.update(GRADS, state)
    second, _ = jax.jit(transform.update)(GRADS, state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), first, second)


@pytest.mark.slow
def test_low_precision_gradients_get_float32_noise():
    transform = make(noise_multiplier=1.0, l2_clip_norm=1.0, expected_batch_size=1.0)
    zeros = jnp.zeros(20_000, jnp.bfloat16)
    updates, _ = transform.update(zeros, transform.init(zeros))
    assert updates.dtype == jnp.bfloat16
    wide, _ = transform.update(zeros.astype(jnp.float32), transform.init(zeros))
    np.testing.assert_array_equal(updates, wide.astype(jnp.bfloat16))


@pytest.mark.slow
def test_chains_with_optax_and_traces_its_key():
    def final(key):
        optimizer = optax.chain(make(key=key), optax.adamw(1e-2))
        params, state = GRADS, optimizer.init(GRADS)
        for _ in range(3):
            updates, state = optimizer.update(GRADS, state, params)
            params = optax.apply_updates(params, updates)
        return params["a"]

    outcomes = jax.jit(jax.vmap(final))(jax.random.split(jax.random.key(1), 3))
    assert len(np.unique(np.asarray(outcomes)[:, 0, 0])) == 3


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"l2_clip_norm": 0.0}, "l2_clip_norm"),
        ({"l2_clip_norm": {}}, "l2_clip_norm"),
        *(
            ({"l2_clip_norm": bad}, "l2_clip_norm")
            for bad in (np.nan, np.inf, 1e200, 1e-50, True, -1.0)
        ),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
    ],
)
def test_bad_arguments_are_named(changes, name):
    with pytest.raises(ValueError, match=name):
        make(**changes)


@pytest.mark.slow
def test_clips_whose_squares_leave_float32_keep_their_noise():
    sums = {"a": jnp.ones(1000), "b": jnp.zeros(1000)}
    for clip, multiplier, std in ((1e20, 0.0, 0.0), (1e-25, 1.0, 2**0.5 * 1e-25)):
        clips = {"a": clip, "b": clip}
        noisy = make(l2_clip_norm=clips, noise_multiplier=multiplier, expected_batch_size=1.0)
        update, _ = noisy.update(sums, noisy.init(sums))
        found = np.std(np.asarray(update["b"], np.float64))
        assert found == pytest.approx(std, rel=0.1, abs=0)
        assert np.isfinite(update["a"]).all()


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, bool])
def test_sums_that_real_noise_would_not_cover_are_refused(dtype):
    transform = make()
    sums = {"w": jnp.ones(3, dtype), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match="dtype"):
        jax.jit(transform.update)(sums, transform.init(sums))


def _clipped(clip):
    def loss_fn(params, x):
        return params["a"].sum() * x + params["b"][0].sum()

    return dpx.clipped_grad(loss_fn, l2_clip_norm=clip)(GRADS, jnp.ones(3))


@pytest.mark.quick_cases("clip2")
@pytest.mark.parametrize("clip", [2.0, np.float32(0.1), {"a": 3.0, "b": 4.0}])
def test_takes_what_was_clipped_at_its_own_threshold_whole(clip):
    clipped, transform = _clipped(clip), optax.chain(make(l2_clip_norm=clip), optax.sgd(1.0))
    state = transform.init(GRADS)
    whole, _ = jax.jit(transform.update)(clipped, state)
    bare, _ = transform.update(clipped.grads, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, bare)


@pytest.mark.parametrize("clip", [5.0, 1.9999, {"a": 2.0, "b": 2.0}])
def test_refuses_what_was_clipped_at_another_threshold(clip):
    transform = make(l2_clip_norm=2.0)
    state = transform.init(GRADS)
    with pytest.raises(ValueError, match=r"l2_clip_norm=\[2.0\] must be that of clipped_grad"):
        jax.jit(transform.update)(_clipped(clip), state)


def test_refuses_to_compare_a_traced_threshold():
    def update(clip):
        transform = make(l2_clip_norm=clip)
        return transform.update(_clipped(2.0), transform.init(GRADS))

    with pytest.raises(ValueError, match="l2_clip_norm is traced"):
        jax.jit(update)(2.0)


@pytest.mark.quick_cases("1e-25-bfloat16")
@pytest.mark.parametrize(
    ("clip", "dtype"), [(1e-4, jnp.float16), (1e-25, jnp.bfloat16), (1e-20, jnp.float32)]
)
def test_traced_clips_whose_squares_leave_their_floats_keep_their_noise(clip, dtype):
    def noise(*clips):
        transform = make(l2_clip_norm=clips, noise_multiplier=1.0, expected_batch_size=1.0)
        zeros = jnp.zeros(1000)
        return transform.update(zeros, transform.init(zeros))[0]

    clip = jnp.asarray(clip, dtype)
    found = np.asarray(jax.jit(noise)(clip, clip), np.float64)
    assert np.std(found) / float(clip) == pytest.approx(2**0.5, rel=0.1)


@pytest.mark.parametrize("name", ["l2_clip_norm", "noise_multiplier", "expected_batch_size"])
def test_traced_settings_are_one_number_each(name):
    """Entries of the gradient would have different noise, some of them none."""
    with pytest.raises(ValueError, match=f"{name} has shape"):
        jax.jit(lambda value: make(**{name: value}) and 0)(jnp.array([1.0, 0.0]))
