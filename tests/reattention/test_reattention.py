"""Moments against Monte Carlo and Table 1; Re-Attention against its definition, its limits and misuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import dpx
from dpx import attention, reattention
from dpx.data import Histories
from dpx.reattention import Moments

SAMPLES = 1_000_000
SCALES = [1e-2, 1.0, 1e2]  # in std


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def sample(moments, seed, count=SAMPLES):
    mean, var = (np.asarray(part, np.float64) for part in moments)
    return mean + np.sqrt(var) * draw(count, *mean.shape, seed=seed)


def moments(mean, var):
    return Moments(jnp.asarray(mean, jnp.float32), jnp.asarray(var, jnp.float32))


def assert_has_moments(found, samples, rtol=0.01):
    """1 % in variance, beyond what the samples' own variance is uncertain by; 1 % of a std in the mean."""
    var = samples.var(axis=0)
    uncertain = np.sqrt(np.square(np.square(samples - samples.mean(axis=0)) / var - 1).mean(axis=0))
    allowed = rtol + 3 * uncertain / np.sqrt(len(samples))
    assert (np.abs(found.var / var - 1) <= allowed).all(), (found.var, var)
    error = np.abs(np.asarray(found.mean, np.float64) - samples.mean(axis=0))
    assert (error <= rtol * samples.std(axis=0) + 1e-6 * np.abs(found.mean)).all()


def full(x):
    return Moments(x.mean, jnp.broadcast_to(x.var, x.mean.shape))


def normed(drawn):
    return (drawn - drawn.mean(1, keepdims=True)) / np.sqrt(drawn.var(1, keepdims=True) + 1e-6)


def dense(std):
    x, bias = (
        moments(draw(3), std**2 * np.array([0.5, 1.0, 2.0])),
        moments(draw(2, seed=2), [0.1, 0]),
    )
    for noise in (0, 0.3):
        kernel = moments(draw(3, 2, seed=1), noise * np.arange(1, 7).reshape(3, 2))
        drawn = np.einsum("ni,nij->nj", sample(x, 3), sample(kernel, 4)) + sample(bias, 5)
        yield reattention.dense(x, kernel, bias), drawn


def activations(std):
    y = moments(np.array([0.5, -0.5]) * std, np.array([0.1, 4.0]) * std**2)
    for offset in (-1.5, 0.0, 0.7, 3.0):
        x = moments([offset * std, offset * min(std, 1.0)], np.full(2, std**2))
        drawn = sample(x, 0)
        yield reattention.relu(x), np.maximum(drawn, 0)
        yield reattention.gelu(x), drawn * special.ndtr(drawn)
        yield reattention.maximum(x, y), np.maximum(drawn, sample(y, 1))


def layer_norm(std):
    """The delta method is exact in the limit; the spread of the mean is 1 here, the noise up to a tenth."""
    x = moments(draw(8), std**2 * np.linspace(0.2, 1.0, 8))
    scale, bias = moments(1 + 0.3 * draw(8, seed=1), 0.0), moments(draw(8, seed=2), 0.0)
    yield reattention.layer_norm(x, scale, bias), normed(sample(x, 3)) * scale.mean + bias.mean
    if std == 1e-3:
        scale, bias = scale._replace(var=jnp.float32(0.2)), bias._replace(var=jnp.float32(0.1))
        noisy = normed(sample(x, 1)) * sample(full(scale), 2) + sample(full(bias), 3)
        yield reattention.layer_norm(x, scale, bias), noisy


def residual(std):
    table = moments(draw(5, 2), std**2 * np.arange(1.0, 6.0)[:, None])
    rows, position = reattention.rows(table, jnp.array([3, 1, 3])), moments(draw(3, 2, seed=1), 0.5)
    np.testing.assert_allclose(rows.var[:, 0], std**2 * np.array([4.0, 2.0, 4.0]), rtol=1e-6)
    x, drawn = reattention.add(rows, position), sample(full(rows), 2) + sample(full(position), 3)
    yield x, drawn
    weights = np.array([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]], np.float32)
    yield reattention.attention(jnp.asarray(weights), x), np.einsum("qk,nkv->nqv", weights, drawn)


LAYERS = [(layer, std) for layer in (dense, activations, residual) for std in SCALES]
LAYERS += [(layer_norm, std) for std in (1e-3, 1e-2, 1e-1)]


@pytest.mark.quick_cases("dense-0.01")
@pytest.mark.parametrize(("layer", "std"), LAYERS)
def test_moments_are_those_of_samples(layer, std):
    for found, drawn in layer(std):
        assert_has_moments(full(found), drawn, rtol=0.01 + (layer is layer_norm) * std / 5)


@pytest.mark.slow
def test_shared_variances_are_the_elementwise_ones():
    x, kernel = draw(4, 3), moments(draw(3, 2, seed=1), 0.2)
    var = np.array([0.1, 1.0, 2.0, 7.0])[:, None]
    one, other = moments(x, var), moments(x, np.tile(var, 3))
    of_axis, of_all = moments(x, var[:3, 0]), moments(x, np.tile(var[:3, 0], (4, 1)))
    wide = kernel._replace(var=jnp.full((3, 2), 0.2))
    scale, bias = jnp.asarray(draw(3, seed=2)), jnp.zeros(3)
    weights = jnp.asarray(np.random.default_rng(3).random((2, 4)), jnp.float32)
    for shared, elementwise in (
        (reattention.dense(one, kernel), reattention.dense(other, wide)),
        (reattention.layer_norm(one, scale, bias), reattention.layer_norm(other, scale, bias)),
        (reattention.attention(weights, one), reattention.attention(weights, other)),
        (reattention.attention(weights, of_axis), reattention.attention(weights, of_all)),
    ):
        np.testing.assert_allclose(full(shared).var, elementwise.var, rtol=1e-5)


@pytest.mark.slow
def test_activations_without_noise_and_far_from_zero():
    for far in (-1e4, -3.0, 0.0, 3.0, 1e4):
        known = moments(np.array([far]), np.zeros(1))
        for activation in (reattention.relu, reattention.gelu, reattention.gelu_series):
            found = activation(known)
            assert float(found.var[0]) <= 1e-12 * far**2 + 1e-9
            expected = max(far, 0) if activation is reattention.relu else far * special.ndtr(far)
            assert float(found.mean[0]) == pytest.approx(expected, rel=1e-5, abs=1e-12)
    # Far above zero both are the identity, and float32 must not lose the variance beside the square.
    far = moments(np.array([1e4]), np.array([1e-4]))
    assert float(reattention.relu(far).var[0]) == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("std", "relu", "gelu"),
    [(0.01, 3.408e-5, 2.500e-5), (0.1, 3.408e-3, 2.531e-3), (1.0, 0.3408, 0.3456)],
)
def test_table_1(std, relu, gelu):
    x = moments(np.zeros(1), np.full(1, std**2))
    assert float(reattention.relu(x).var[0]) == pytest.approx(relu, rel=2e-4)
    assert float(reattention.gelu(x).var[0]) == pytest.approx(gelu, rel=2e-4)


@pytest.mark.parametrize("std", [1e-3, 1e-2, 0.1, 1.0, 10.0])
def test_gelu_series_never_says_too_much_and_little_too_little(std):
    mean = np.linspace(0, 4, 9) * max(std, 1)
    x = moments(mean, np.full(9, std**2))
    share = np.asarray(reattention.gelu_series(x).var / reattention.gelu(x).var)
    assert (share > 0.95).all()
    assert (share < 1.01).all()
    np.testing.assert_allclose(reattention.gelu_series(x).mean, reattention.gelu(x).mean, rtol=1e-5)


@pytest.mark.quick_cases("1.0")
@pytest.mark.parametrize("std", [0.3, 1.0, 10.0])
def test_layer_norm_of_much_noise(std):
    """Errors are O(1/d): within a few per cent for d = 64, where the naive rule is off by 1 + std²."""
    x = moments(draw(64), std**2 * np.ones((64,)))
    drawn = normed(sample(x, 3, 100_000))
    found = reattention.layer_norm(x, jnp.ones(64), jnp.zeros(64))
    np.testing.assert_allclose(found.var, drawn.var(0), rtol=0.05)
    np.testing.assert_allclose(found.mean, drawn.mean(0), atol=0.03)


def problem():
    q, k, v = draw(2, 3, 5, 4), draw(2, 3, 6, 4, seed=1), draw(2, 3, 6, 3, seed=2)
    q, k, v = (jnp.asarray(a, jnp.float32) for a in (q, k, v))
    mask = np.random.default_rng(3).random((2, 3, 5, 6)) < 0.6
    mask[0, 0, 0] = False
    return q, k, v, jnp.asarray(mask)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_attend_is_its_definition(width, renormalize, masked):
    """One query at a time in float64: S_i / exp(Var[logit_i]/2), the logit's variance with its 1/D."""
    q, k, v, mask = problem()
    mask = mask if masked else None
    variance = np.random.default_rng(4).random((2, 3, 6, width))
    found = reattention.attend(q, k, v, jnp.asarray(variance), mask=mask, renormalize=renormalize)
    wide = np.broadcast_to(variance, k.shape)
    for index in np.ndindex(2, 3, 5):
        allowed = np.ones(6, bool) if mask is None else np.asarray(mask)[index]
        logits = np.asarray(k)[index[:2]].astype(float) @ np.asarray(q)[index] / 2
        scores = np.where(allowed, np.exp(logits), 0) / max(np.exp(logits)[allowed].sum(), 1e-300)
        corrected = scores / np.exp((wide[index[:2]] @ np.asarray(q)[index] ** 2) / 4 / 2)
        if renormalize:
            corrected = corrected / max(corrected.sum(), 1e-300)
        np.testing.assert_allclose(found[index], corrected @ np.asarray(v)[index[:2]], atol=2e-6)


@pytest.mark.parametrize("level", [0.0, 1.0, 1e8, 1e37, np.inf])
def test_constant_variance_is_plain_attention(level):
    q, k, v, mask = problem()
    expected = attention.dot_product_attention(q, k, v, mask=mask)
    for shape in ((2, 3, 6, 1), (2, 3, 6, 4)):
        found = reattention.attend(q, k, v, jnp.full(shape, level), mask=mask)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    literal = reattention.attend(q, k, v, jnp.zeros((2, 3, 6, 1)), mask=mask, renormalize=False)
    np.testing.assert_allclose(literal, expected, atol=1e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_huge_variances_are_safe(renormalize):
    q, k, v, mask = problem()
    variance = jnp.asarray(10.0 ** np.random.default_rng(0).uniform(-30, 38, (2, 3, 6, 4)))
    variance = variance.at[..., 2, :].set(np.inf)

    def total(q, k, v):
        out = reattention.attend(q, k, v, variance, mask=mask, renormalize=renormalize)
        return jnp.square(out).sum()

    value, gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)
    # All but one key of infinite variance: that one gets everything.
    one = jnp.full((2, 3, 6, 1), np.inf).at[..., 4, :].set(0.0)
    found = reattention.attend(q, k, v, one)
    np.testing.assert_allclose(found, jnp.broadcast_to(v[..., 4:5, :], found.shape), rtol=1e-6)


@pytest.mark.slow
def test_noisy_keys_are_attended_less_and_the_mean_path_carries_the_gradient():
    q, k, v, _ = problem()
    noisy = jnp.zeros((2, 3, 6, 1)).at[..., 0, :].set(3.0)
    plain = attention.attention_weights(q, k)
    corrected = reattention.attention_weights(q, k, noisy)
    assert (corrected[..., 0] < plain[..., 0]).all()
    np.testing.assert_allclose(corrected.sum(-1), 1, rtol=1e-5)

    def through(variance):
        return reattention.attend(q, k, v, variance).sum()

    assert not np.any(jax.grad(through)(noisy))

    def fixed_bias(q):
        square = jnp.square(jax.lax.stop_gradient(q)).sum(-1, keepdims=True)
        bias = -square * noisy[..., 0][..., None, :] / 8
        return (attention.attention_weights(q, k, bias=bias) @ v)[..., 0].sum()

    found = jax.grad(lambda q: reattention.attend(q, k, v, noisy)[..., 0].sum())(q)
    np.testing.assert_allclose(found, jax.grad(fixed_bias)(q), atol=1e-6)


def test_moments_of_values_come_out_as_moments():
    q, k, v, mask = problem()
    variance = jnp.full((2, 3, 6, 1), 0.3)
    found = reattention.attend(q, k, Moments(v, jnp.full((2, 3, 6, 1), 2.0)), variance, mask=mask)
    weights = reattention.attention_weights(q, k, variance, mask=mask)
    np.testing.assert_allclose(found.mean, weights @ v, atol=1e-6)
    np.testing.assert_allclose(found.var[..., 0], 2 * jnp.square(weights).sum(-1), rtol=1e-5)


def test_effective_error_is_claim_4_2():
    p = np.array([1.0, 0.5, 0.001, 0.0])
    found = reattention.effective_noise_std(0.7, 256, p, l2_clip_norm=2.0, floor=1e-4)
    expected = 0.7 * 2 / (256 * np.array([1.0, 0.5, 0.001, 1e-4]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert float(reattention.effective_noise_std(0.7, 256)) == pytest.approx(0.7 / 256)
    assert np.isfinite(reattention.effective_noise_std(1.0, 10, np.zeros(3))).all()


RECORDS = Histories(tuple(np.array(h, int) for h in ([0, 0, 1], [2], [0, 3, 1, 2], [])), 5)


def probabilities(histories, epsilon=1e8, max_tokens=4):
    budget = {"epsilon": epsilon, "delta": 1e-5, "max_tokens": max_tokens}
    return reattention.token_probabilities(jax.random.key(0), histories, **budget, unit="text")


@pytest.mark.slow
def test_token_probabilities_without_noise_are_the_shares():
    found = probabilities(RECORDS)
    np.testing.assert_allclose(found.values, np.array([2, 2, 2, 1, 0]) / 4, atol=1e-3)
    assert found.guarantee.unit == "text"
    assert found.guarantee.epsilon == 1e8


def test_token_probabilities_are_noisy_charged_and_in_range():
    many = Histories(RECORDS.items * 2500, 4000)
    found = probabilities(many, epsilon=1.0)
    assert ((found.values >= 0) & (found.values <= 1)).all()
    # Tokens that no record has: noise of std multiplier · √max_tokens, of which the positive half is left.
    spread = np.sqrt(2 * np.mean(np.square(found.values[5:] * 10_000)))
    multiplier = dpx.gaussian_noise_multiplier(1.0, 1e-5)
    assert spread == pytest.approx(2 * multiplier, rel=0.1)
    assert found.guarantee.event.noise_multiplier == pytest.approx(multiplier)
    total = dpx.Ledger().spend(found.guarantee, "a").spend(found.guarantee, "b").guarantee(1e-5)
    assert 1 < total.epsilon < 2


def test_uniform_probabilities():
    found = reattention.uniform_probabilities(10, 5)
    assert found.shape == (10,)
    assert found[0] == pytest.approx(1 - 0.9**5)


X, ones = Moments(jnp.ones((3, 4)), jnp.ones((3, 4))), jnp.ones


def attended(**change):
    q, k, v, mask = problem()
    arguments = {"q": q, "k": k, "v": v, "key_variance": ones((2, 3, 6, 1)), "mask": mask}
    return reattention.attend(**(arguments | change))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: reattention.relu(moments(np.zeros(2), -np.ones(2))), "-1.0 is negative"),
        (lambda: reattention.relu(moments(np.zeros(2), np.ones(3))), "does not broadcast|Incompat"),
        (lambda: reattention.effective_noise_std(1.0, 8, np.array([0.5, 1.5])), "1.5"),
        (lambda: reattention.effective_noise_std(1.0, 8, np.array([-0.1])), "-0.1"),
        (lambda: reattention.effective_noise_std(1.0, 8, np.array([np.nan])), "token_probability"),
        (lambda: reattention.effective_noise_std(-1.0, 8), "noise_multiplier"),
        (lambda: reattention.effective_noise_std(1.0, 0), "batch_size"),
        (lambda: probabilities(RECORDS, max_tokens=0), "max_tokens"),
        (lambda: probabilities(RECORDS, epsilon=0.0), "epsilon"),
        (lambda: attended(key_variance=-ones((2, 3, 6, 1))), "negative"),
        (lambda: attended(key_variance=ones((2, 3, 5, 1))), "key_variance"),
        (lambda: attended(key_variance=ones((2, 3, 6, 2))), "key_variance"),
        (lambda: attended(k=ones((2, 3, 6, 5))), "must be"),
        (lambda: attended(v=ones((2, 3, 5, 3))), "does not fit"),
        (lambda: attended(mask=ones((5, 6))), "mask"),
        (lambda: reattention.dense(X, ones((5, 5))), "^kernel .*does not fit"),
        (lambda: reattention.dense(ones(()), ones((4, 5))), "^kernel .*does not fit"),
        (lambda: reattention.dense(X, ones((4, 5)), ones(3)), "^bias .*does not fit"),
        (lambda: reattention.dense(X, ones((4, 5)), ones((2, 3, 5))), "^bias .*does not fit"),
        (lambda: reattention.add(X, ones(3)), "^y .*does not fit"),
        (lambda: reattention.maximum(X, ones(3)), "^y .*does not fit"),
        (lambda: reattention.layer_norm(X, ones(3), ones(4)), "^scale .*does not fit"),
        (lambda: reattention.layer_norm(X, ones(4), ones((7, 3, 4))), "^bias .*does not fit"),
        (lambda: reattention.attention(ones((2, 5)), X), "^v .*does not fit"),
    ],
)
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("layer", [reattention.gelu, reattention.gelu_series, reattention.relu])
def test_activations_of_half_precision_keep_it(layer):
    narrow = Moments(jnp.array([-1.0, 0.5], jnp.bfloat16), jnp.array([0.25, 1.0], jnp.bfloat16))
    got, want = layer(narrow), layer(Moments(*(a.astype(jnp.float32) for a in narrow)))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2e-2)


@pytest.mark.slow
def test_gradient_of_gelus_variance_at_zero_is_its_limit():
    def variance(var):
        return reattention.gelu(Moments(jnp.array([-0.4, 0.0, 0.9]), var)).var.sum()

    at_zero, near = jax.grad(variance)(jnp.zeros(3)), jax.grad(variance)(jnp.full(3, 1e-4))
    np.testing.assert_allclose(at_zero, near, rtol=5e-3, atol=1e-3)
    assert not variance(jnp.zeros(3))


@pytest.mark.parametrize("dtype", [np.int32, bool])
def test_integers_are_attended_to_as_the_same_floats(dtype):
    q, k, v = (np.arange(12).reshape(4, 3) % m < 2 for m in (3, 4, 5))
    integers = [a.astype(dtype) for a in (q, k, v)]
    floats = [a.astype(np.float32) for a in (q, k, v)]
    got = reattention.attend(*integers, np.full((4, 1), 2))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, reattention.attend(*floats, np.full((4, 1), 2.0)))
