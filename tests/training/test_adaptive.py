"""Clipping norms that follow a quantile: the noise of one mechanism, and norms by what is released."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_cases
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant

import dpx
from dpx.training import AdaptiveClipNorm, adaptive

RNG = np.random.default_rng(0)
SIZES = np.exp(RNG.normal(size=400))  # the norms of gradients: log-normal, with median 1
X = (SIZES[:, None] * np.array([[0.6, 0.8]])).astype("f4")


def loss_fn(params, x):
    """Its gradient is x, whatever the parameters."""
    return params @ x


def fit(data=X, loss=loss_fn, **changes):
    settings = {
        "epsilon": 1e4,
        "delta": 1e-4,
        "batch_size": 100,
        "steps": 60,
        "optimizer": optax.sgd(1e-3),
        "l2_clip_norm": AdaptiveClipNorm(start=30.0, learning_rate=0.3),
    }
    return training_cases.fit(data, loss, jnp.zeros(2), **settings | changes)


def norms(trained):
    return np.array([record.l2_clip_norm for record in trained.history])


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.2, 0.8])
def test_the_norm_settles_at_the_quantile(quantile):
    clip = AdaptiveClipNorm(start=9.0, quantile=quantile, learning_rate=0.5)
    found = norms(fit(l2_clip_norm=clip))
    assert found[0] == pytest.approx(9 * np.exp(-0.5 * (1 - quantile)), rel=0.1)
    assert np.median(found[-20:]) == pytest.approx(np.quantile(SIZES, quantile), rel=0.15)


@pytest.mark.parametrize(("z", "batch_size"), [(0.5, 40), (1.3, 256), (4.0, 2000)])
def test_gradients_and_count_cost_what_one_mechanism_costs(z, batch_size):
    clip = AdaptiveClipNorm()
    gradients, count = clip.noise(z, batch_size)
    assert count == batch_size / 20
    assert gradients > z
    # A record that comes or goes changes the count by 1/2, so that its noise is twice as much.
    parts = RdpAccountant().compose(GaussianDpEvent(gradients)).compose(GaussianDpEvent(2 * count))
    whole = RdpAccountant().compose(GaussianDpEvent(z))
    assert parts.get_epsilon(1e-5) == pytest.approx(whole.get_epsilon(1e-5))
    # One isotropic noise, of z times the joint sensitivity, is that of either.
    ratio = gradients / count
    std = z * np.hypot(*adaptive.clips(ratio))
    assert std == pytest.approx(gradients)
    assert std / ratio == pytest.approx(count)


@pytest.mark.slow
def test_it_is_the_algorithm_by_hand():
    """The same steps with NumPy: clip, add the noise that was drawn, divide, move the norm."""
    clip = AdaptiveClipNorm(start=2.0, quantile=0.6, learning_rate=0.5, count_noise=7.0)
    settings = {"epsilon": 3.0, "steps": 4, "l2_clip_norm": clip, "optimizer": optax.sgd(0.1)}
    trained = fit(**settings)
    keys = training_cases.keys()
    z = dpx.calibrate_dpsgd(3.0, 1e-4, sampling_probability=0.25, steps=4)
    ratio = np.divide(*clip.noise(z, 100))
    private = dpx.privatize(
        l2_clip_norm=adaptive.clips(ratio),
        noise_multiplier=z,
        expected_batch_size=100,
        key=keys.noise,
    )
    state, params, norm = private.init(None), np.zeros(2), 2.0
    batches = dpx.poisson_batches(400, sampling_probability=0.25, steps=4, seed=keys.sampling)
    for step, (indices, mask) in enumerate(batches):
        x, sizes = X[indices[mask]], SIZES[indices[mask]]
        clipped = x / norm * np.minimum(1, norm / sizes)[:, None]
        count = ratio * np.where(sizes <= norm, 0.5, -0.5).sum()
        sums = jnp.asarray(clipped.sum(0), jnp.float32), jnp.float32(count)
        (mean, share), state = private.update(sums, state)
        params = params - 0.1 * norm * np.asarray(mean)
        norm = norm * np.exp(-0.5 * (float(share) / ratio + 0.5 - 0.6))
        assert trained.history[step].l2_clip_norm == pytest.approx(norm, rel=1e-4)
    np.testing.assert_allclose(trained.params, params, rtol=1e-3)
    assert trained.guarantee.epsilon == pytest.approx(3.0, rel=1e-2)
    assert trained.guarantee.event.event.event.noise_multiplier == pytest.approx(z)
    assert "a count of the records within the clipping norm" in trained.guarantee.mechanism


@pytest.mark.slow
def test_microbatches_and_other_units_of_the_loss_change_nothing():
    def mean_loss(params, x):
        return jnp.square(params - x).sum()

    one = fit(loss=mean_loss, steps=3)
    pieces = fit(loss=mean_loss, steps=3, microbatch_size=7)
    np.testing.assert_allclose(pieces.params, one.params, atol=1e-6)
    np.testing.assert_allclose(norms(pieces), norms(one), rtol=1e-6)
    np.testing.assert_allclose(
        [r.loss for r in pieces.history], [r.loss for r in one.history], rtol=1e-5
    )
    # In the units of the loss, although gradients were divided by the norm.
    seed = training_cases.keys().sampling
    first, mask = next(dpx.poisson_batches(400, sampling_probability=0.25, steps=3, seed=seed))
    expected = np.square(X[first[mask]]).sum(1).mean()
    assert one.history[0].loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.quick_cases("float32")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_runs_where_64_bits_are_on(dtype):
    with jax.enable_x64(True):
        found = fit(X.astype(dtype), steps=2)
    assert (norms(found) < 30).all()


def test_a_record_counts_half_and_padding_nothing():
    """What is not finite is beyond the norm."""
    norms, real = jnp.array([0.5, 1.0, jnp.inf, 0.3, 9.0]), jnp.arange(5) < 3
    assert float(adaptive.counted(norms, real, 4.0)) == 4.0 * (0.5 + 0.5 - 0.5)
    assert float(adaptive.counted(norms, ~real, 4.0)) == 0.0
    assert float(adaptive.counted(norms, real & False, 4.0)) == 0.0


def test_the_norm_stays_within_a_millionth_and_a_million_times_its_start():
    follow = adaptive.follow(AdaptiveClipNorm(start=2.0, learning_rate=100.0), 1.0)
    for count, limit in ((-0.5, 2e6), (0.5, 2e-6)):
        _, state = follow.update((jnp.zeros(2), jnp.float32(count)), follow.init(None))
        assert state.clip == pytest.approx(limit)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"start": 0.0}, "start=0.0 must"),
        ({"start": 1e13}, "start=10000000000000.0 must be between"),
        ({"quantile": 1.5}, "quantile=1.5 must be in"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must"),
        ({"count_noise": 0.0}, "count_noise=0.0 must"),
        *(({"count_noise": x}, r"count_noise=.* more than 0\.5") for x in (0.5, 1e-200, 5e-324)),
    ],
)
def test_wrong_settings_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        AdaptiveClipNorm(**changes).noise(1.0, 100)
