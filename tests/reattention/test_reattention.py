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


@pytest.mark.quick_cases("False-0.01")
@pytest.mark.parametrize("std", SCALES)
@pytest.mark.parametrize("noisy_kernel", [True, False])
def test_dense(std, noisy_kernel):
    x = moments(draw(3), std**2 * np.array([0.5, 1.0, 2.0]))
    kernel = moments(draw(3, 2, seed=1), 0.3 * np.arange(1, 7).reshape(3, 2) * noisy_kernel)
    bias = moments(draw(2, seed=2), np.array([0.1, 0.0]))
    products = np.einsum("ni,nij->nj", sample(x, 3), sample(kernel, 4)) + sample(bias, 5)
    assert_has_moments(reattention.dense(x, kernel, bias), products)


@pytest.mark.slow
def test_shared_variances_are_the_elementwise_ones():
    x, kernel = draw(4, 3), moments(draw(3, 2, seed=1), 0.2)
    var = np.array([0.1, 1.0, 2.0, 7.0])[:, None]
    shared = reattention.dense(moments(x, var), kernel)
    wide = reattention.dense(
        moments(x, np.tile(var, 3)), kernel._replace(var=jnp.full((3, 2), 0.2))
    )
    np.testing.assert_allclose(shared.var, wide.var, rtol=1e-5)
    scale, bias = jnp.asarray(draw(3, seed=2)), jnp.zeros(3)
    one = reattention.layer_norm(moments(x, var), scale, bias)
    other = reattention.layer_norm(moments(x, np.tile(var, 3)), scale, bias)
    np.testing.assert_allclose(one.var, other.var, rtol=1e-5)
    weights = jnp.asarray(np.random.default_rng(3).random((2, 4)), jnp.float32)
    one = reattention.attention(weights, moments(x, var))
    other = reattention.attention(weights, moments(x, np.tile(var, 3)))
    np.testing.assert_allclose(np.tile(one.var, 3), other.var, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("std", SCALES)
@pytest.mark.parametrize("offset", [-1.5, 0.0, 0.7, 3.0])
def test_activations_and_maximum(std, offset):
    x = moments([offset * std, offset * min(std, 1.0)], np.full(2, std**2))
    drawn = sample(x, 0)
    assert_has_moments(reattention.relu(x), np.maximum(drawn, 0))
    assert_has_moments(reattention.gelu(x), drawn * special.ndtr(drawn))
    y = moments(np.array([0.5, -0.5]) * std, np.array([0.1, 4.0]) * std**2)
    assert_has_moments(reattention.maximum(x, y), np.maximum(drawn, sample(y, 1)))


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


@pytest.mark.slow
@pytest.mark.parametrize("std", [1e-3, 1e-2, 1e-1])
def test_layer_norm_of_little_noise(std):
    """The delta method is exact in the limit; the spread of the mean is 1 here, the noise up to a tenth."""
    x = moments(draw(8), std**2 * np.linspace(0.2, 1.0, 8))
    scale, bias = jnp.asarray(1 + 0.3 * draw(8, seed=1)), jnp.asarray(draw(8, seed=2))
    drawn = sample(x, 3)
    normed = (drawn - drawn.mean(1, keepdims=True)) / np.sqrt(drawn.var(1, keepdims=True) + 1e-6)
    found = reattention.layer_norm(x, scale, bias)
    assert_has_moments(found, normed * np.asarray(scale) + np.asarray(bias), rtol=0.01 + std / 5)


@pytest.mark.quick_cases("1.0")
@pytest.mark.parametrize("std", [0.3, 1.0, 10.0])
def test_layer_norm_of_much_noise(std):
    """Errors are O(1/d): within a few per cent for d = 64, where the naive rule is off by 1 + std²."""
    x = moments(draw(64), std**2 * np.ones((64,)))
    drawn = sample(x, 3, 100_000)
    normed = (drawn - drawn.mean(1, keepdims=True)) / drawn.std(1, keepdims=True)
    found = reattention.layer_norm(x, jnp.ones(64), jnp.zeros(64))
    np.testing.assert_allclose(found.var, normed.var(0), rtol=0.05)
    np.testing.assert_allclose(found.mean, normed.mean(0), atol=0.03)


@pytest.mark.slow
def test_layer_norm_with_noisy_parameters():
    x, scale, bias = moments(draw(16), 1e-6), moments(np.ones(16), 0.2), moments(np.zeros(16), 0.1)
    drawn = sample(Moments(x.mean, jnp.full(16, x.var)), 1)
    normed = (drawn - drawn.mean(1, keepdims=True)) / drawn.std(1, keepdims=True)
    wide = [Moments(m.mean, jnp.full(16, m.var)) for m in (scale, bias)]
    expected = normed * sample(wide[0], 2) + sample(wide[1], 3)
    assert_has_moments(reattention.layer_norm(x, scale, bias), expected)


@pytest.mark.slow
@pytest.mark.parametrize("std", SCALES)
def test_residual_rows_and_attention(std):
    table = moments(draw(5, 2), std**2 * np.arange(1.0, 6.0)[:, None])
    tokens = jnp.array([3, 1, 3])
    rows = reattention.rows(table, tokens)
    np.testing.assert_allclose(rows.var[:, 0], std**2 * np.array([4.0, 2.0, 4.0]), rtol=1e-6)
    position = moments(draw(3, 2, seed=1), 0.5)
    x = reattention.add(rows, position)
    rows = Moments(rows.mean, jnp.broadcast_to(rows.var, (3, 2)))
    drawn = sample(rows, 2) + sample(Moments(position.mean, jnp.full((3, 2), 0.5)), 3)
    assert_has_moments(Moments(x.mean, jnp.broadcast_to(x.var, (3, 2))), drawn)
    weights = np.array([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]], np.float32)
    mixed = reattention.attention(jnp.asarray(weights), x)
    assert_has_moments(
        Moments(mixed.mean, jnp.broadcast_to(mixed.var, (2, 2))),
        np.einsum("qk,nkv->nqv", weights, drawn),
    )


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
        bias = (
            -jnp.square(jax.lax.stop_gradient(q)).sum(-1, keepdims=True)
            * noisy[..., 0][..., None, :]
            / 8
        )
        return (attention.attention_weights(q, k, bias=bias) @ v)[..., 0].sum()

    np.testing.assert_allclose(
        jax.grad(lambda q: reattention.attend(q, k, v, noisy)[..., 0].sum())(q),
        jax.grad(fixed_bias)(q),
        atol=1e-6,
    )


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
    np.testing.assert_allclose(
        found, 0.7 * 2 / (256 * np.array([1.0, 0.5, 0.001, 1e-4])), rtol=1e-6
    )
    assert float(reattention.effective_noise_std(0.7, 256)) == pytest.approx(0.7 / 256)
    assert np.isfinite(reattention.effective_noise_std(1.0, 10, np.zeros(3))).all()


RECORDS = Histories(tuple(np.array(h, int) for h in ([0, 0, 1], [2], [0, 3, 1, 2], [])), 5)


def probabilities(histories, epsilon=1e8, max_tokens=4):
    return reattention.token_probabilities(
        jax.random.key(0),
        histories,
        epsilon=epsilon,
        delta=1e-5,
        max_tokens=max_tokens,
        unit="text",
    )


@pytest.mark.slow
def test_token_probabilities_without_noise_are_the_shares():
    found = probabilities(RECORDS)
    np.testing.assert_allclose(found.values, np.array([2, 2, 2, 1, 0]) / 4, atol=1e-3)
    assert found.guarantee.unit == "text"
    assert found.guarantee.epsilon == 1e8


@pytest.mark.parametrize("extra", [[4], [0, 1, 2, 3, 4], [0] * 50, [3, 4]])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_one_record_moves_presence_by_at_most_its_sensitivity(extra, max_tokens):
    """The release is counts + noise; without noise one more record moves the counts by ≤ √max_tokens."""
    more = Histories((*RECORDS.items, np.array(extra)), 5)
    base = probabilities(RECORDS, max_tokens=max_tokens).values * 4
    moved = probabilities(more, max_tokens=max_tokens).values * 5
    assert np.linalg.norm(moved - base) <= np.sqrt(max_tokens) + 1e-2


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reattention.relu(moments(np.zeros(2), -np.ones(2))), "-1.0 is negative"),
        (lambda: reattention.relu(moments(np.zeros(2), np.ones(3))), "does not broadcast|Incompat"),
        (lambda: reattention.dense(moments(np.zeros(2), 1.0), jnp.zeros((3, 2))), "kernel"),
        (lambda: reattention.effective_noise_std(1.0, 8, np.array([0.5, 1.5])), "1.5"),
        (lambda: reattention.effective_noise_std(1.0, 8, np.array([-0.1])), "-0.1"),
        (lambda: reattention.effective_noise_std(1.0, 8, np.array([np.nan])), "token_probability"),
        (lambda: reattention.effective_noise_std(-1.0, 8), "noise_multiplier"),
        (lambda: reattention.effective_noise_std(1.0, 0), "batch_size"),
        (lambda: probabilities(RECORDS, max_tokens=0), "max_tokens"),
        (lambda: probabilities(RECORDS, epsilon=0.0), "epsilon"),
    ],
)
def test_bad_moments_and_probabilities_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_variance": -jnp.ones((2, 3, 6, 1))}, "negative"),
        ({"key_variance": jnp.ones((2, 3, 5, 1))}, "key_variance"),
        ({"key_variance": jnp.ones((2, 3, 6, 2))}, "key_variance"),
        ({"k": jnp.ones((2, 3, 6, 5))}, "must be"),
        ({"v": jnp.ones((2, 3, 5, 3))}, "does not fit"),
        ({"mask": jnp.ones((5, 6))}, "mask"),
    ],
)
def test_bad_attention_inputs_are_named(change, message):
    q, k, v, mask = problem()
    arguments = {"q": q, "k": k, "v": v, "key_variance": jnp.ones((2, 3, 6, 1)), "mask": mask}
    with pytest.raises(ValueError, match=message):
        reattention.attend(**(arguments | change))


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


def test_shapes_that_do_not_fit_are_named():
    x, ones = Moments(jnp.ones((3, 4)), jnp.ones((3, 4))), jnp.ones
    for call, name in (
        (lambda: reattention.dense(x, ones((5, 5))), "kernel"),
        (lambda: reattention.dense(jnp.ones(()), ones((4, 5))), "kernel"),
        (lambda: reattention.dense(x, ones((4, 5)), ones(3)), "bias"),
        (lambda: reattention.dense(x, ones((4, 5)), ones((2, 3, 5))), "bias"),
        (lambda: reattention.add(x, ones(3)), "y"),
        (lambda: reattention.maximum(x, ones(3)), "y"),
        (lambda: reattention.layer_norm(x, ones(3), ones(4)), "scale"),
        (lambda: reattention.layer_norm(x, ones(4), ones((7, 3, 4))), "bias"),
        (lambda: reattention.attention(ones((2, 5)), x), "v"),
    ):
        with pytest.raises(ValueError, match=rf"^{name} .*does not fit"):
            call()


@pytest.mark.parametrize("dtype", [np.int32, bool])
def test_integers_are_attended_to_as_the_same_floats(dtype):
    q, k, v = (np.arange(12).reshape(4, 3) % m < 2 for m in (3, 4, 5))
    integers = [a.astype(dtype) for a in (q, k, v)]
    floats = [a.astype(np.float32) for a in (q, k, v)]
    got = reattention.attend(*integers, np.full((4, 1), 2))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, reattention.attend(*floats, np.full((4, 1), 2.0)))
