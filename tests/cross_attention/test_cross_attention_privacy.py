"""Private cross-attention: sensitivity under attack, the size of the noise, audits."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_attention_memory import BOX, BUDGET, EXACT, KEY, memory

from dpx import audit, cross_attention, noise
from dpx.cross_attention import baselines, sketch
from dpx.cross_attention.domain import Domain
from dpx.cross_attention.features import PolynomialFeatures, RandomFeatures
from dpx.cross_attention.sketch import sums as sketch_sums
from dpx.privacy import gaussian_noise_multiplier

pytestmark = pytest.mark.optimized


def taylor(domain, degree):
    return PolynomialFeatures(domain.dim, degree, domain.scale)


def contribution(domain, features, k, v, largest=1.0):
    sums = sketch_sums.contribution_sums(k[None], v[None], features, domain, largest)
    return sums if isinstance(features, RandomFeatures) else sums.at[0, 0].set(0)


def clip_key(domain, k):
    return domain.enter(k[None], jnp.zeros((1, domain.value_dim)), clip=True)[0][0]


def search(domain, features, trials=128, steps=60, **random):
    """The largest change that replacing a row makes, over random starts improved by gradient ascent."""
    rng = np.random.default_rng(0)
    keys = domain.key_bound * (2 * rng.random((trials, 2, domain.dim)) - 1)
    values = domain.value_bound * rng.choice([-1.0, 1.0], (trials, 2, domain.value_dim))
    values[::2] *= rng.random((len(values[::2]), 2, domain.value_dim))

    def change(pair):
        keys, values = pair
        keys = jax.vmap(functools.partial(clip_key, domain))(keys)
        values = domain.nearest_values(values)
        here, there = (
            contribution(domain, features, k, v, **random)
            for k, v in zip(keys, values, strict=True)
        )
        return jnp.sqrt(jnp.square(here - there).sum() + 1e-12)

    def step(pair, _):
        gradient = jax.grad(change)(pair)
        moved = jax.tree.map(lambda p, g: p + 0.1 * jnp.sign(g), pair, gradient)
        keys = jax.vmap(functools.partial(clip_key, domain))(moved[0])
        values = domain.nearest_values(moved[1])
        return (keys, values), change(pair)

    def climb(pair):
        return jax.lax.scan(step, pair, None, length=steps)[1].max()

    pairs = (jnp.asarray(keys, jnp.float32), jnp.asarray(values, jnp.float32))
    return float(jax.jit(jax.vmap(climb))(pairs).max())


@pytest.mark.quick_cases("box-box-1-1-1.0-2")
@pytest.mark.parametrize(
    ("kind", "value_domain", "dim", "value_dim", "scale", "degree"),
    [
        ("box", "box", 1, 1, 1.0, 2),
        ("ball", "box", 1, 1, 1.0, 2),
        pytest.param("box", "box", 3, 2, 1.7, 4, marks=pytest.mark.slow),
        pytest.param("ball", "box", 3, 2, 1.7, 4, marks=pytest.mark.slow),
        ("ball", "ball", 3, 4, 1.7, 4),
        pytest.param("ball", "simplex", 3, 4, 1.7, 4, marks=pytest.mark.slow),
    ],
)
def test_taylor_sensitivity_is_never_exceeded_and_attained(
    kind, value_domain, dim, value_dim, scale, degree
):
    domain = Domain(kind, dim, value_dim, 1.3, 1.3, 0.7, scale, value_domain)
    features = taylor(domain, degree)
    bound = sketch.sensitivity(domain, features)
    assert 0.99 * bound <= search(domain, features) <= bound * (1 + 1e-5)
    corner = jnp.full(dim, 1.3 if kind == "box" else 1.3 / np.sqrt(dim))
    value = jnp.full(value_dim, 0.7 if value_domain == "box" else 0.7 / np.sqrt(value_dim))
    labels = value_domain == "simplex"
    values = 0.7 * jnp.eye(value_dim)[:2] if labels else (value, -value)
    here, there = (contribution(domain, features, corner, v) for v in values)
    assert jnp.linalg.norm(here - there) == pytest.approx(bound, rel=1e-4)
    if labels:  # √2 of a contribution, never 2
        of_any_sign = dataclasses.replace(domain, value_domain="ball")
        assert bound == pytest.approx(sketch.sensitivity(of_any_sign, features) / math.sqrt(2))


@pytest.mark.quick_cases("2-simplex")
@pytest.mark.parametrize("value_domain", ["box", "ball", "simplex"])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_row_that_comes_or_goes_moves_a_release_by_the_sensitivity(value_domain, degree):
    """A row at the corner of the domain attains it, wherever its value lies on the edge."""
    domain = Domain("box", 2, 3, 1.0, 1.0, 0.7, 2.0, value_domain, "add_or_remove_one")
    features = taylor(domain, degree)
    bound = sketch.sensitivity(domain, features)
    by_hand = {"box": math.sqrt(3 + 3**0.5), "ball": math.sqrt(1 + 3**-0.5), "simplex": 1.0}
    size = 0.7 * features.norm(domain.largest_logit)
    assert bound == pytest.approx(by_hand[value_domain] * size, rel=1e-12)
    value = jnp.full(3, 0.7) if value_domain == "box" else 0.7 * jnp.eye(3)[1]
    row = jnp.ones((1, 2)), value[None]
    moved = jnp.linalg.norm(sketch_sums.contribution_sums(*row, features, domain, 1.0))
    assert moved == pytest.approx(bound, rel=1e-5)


@pytest.mark.slow
def test_a_private_count_is_told_by_the_noisy_mass_alone():
    """Nothing static depends on n, answers are those of a public n without noise, no rows are a memory."""
    K, V, Q = memory(50, 2)
    V = np.abs(V) / np.abs(V).sum(1, keepdims=True)
    relation = {"neighboring": "add_or_remove_one"}
    for options in ({}, {"value_domain": "simplex"}, {"features": "random", "num_features": 64}):
        options = {"clip": True, **BOX, **options}
        public, private = (
            cross_attention.build(KEY, K, V, **options, **EXACT, **more) for more in ({}, relation)
        )
        np.testing.assert_allclose(private.query(Q), public.query(Q), atol=2e-3)
        builds = [
            cross_attention.build(KEY, K[:n], V[:n], **options, **BUDGET, **relation)
            for n in (50, 7, 0)
        ]
        assert len({jax.tree.structure(built) for built in builds}) == 1
        assert len({tuple(leaf.shape for leaf in jax.tree.leaves(b)) for b in builds}) == 1
        assert builds[0].num_records is None
        assert all(np.isfinite(built.query(Q)).all() for built in builds)
    with pytest.raises(ValueError, match="must be 'replace_one' for trees"):
        cross_attention.build(KEY, K, V, mechanism="tree", clip=True, **BOX, **BUDGET, **relation)
    with pytest.raises(ValueError, match="no rows"):
        cross_attention.build(KEY, K[:0], V[:0], **BOX, **BUDGET)


@pytest.mark.quick_cases("ball")
@pytest.mark.parametrize("value_domain", ["box", "ball"])
def test_a_release_moves_by_no_more_than_the_sensitivity_whatever_a_row_holds(value_domain):
    K, _, _ = memory(20, 2)
    bounds = {"clip": True, "value_domain": value_domain, "degree": 4}
    domain = Domain("box", 2, 3, 1.0, 1.0, 1.0, 2.0, value_domain)
    released = []
    for sign in (1, -1):
        V = np.zeros((20, 3), np.float32)
        V[0] = 50 * sign
        K[0] = 50
        released.append(cross_attention.build(KEY, K, V, **bounds, **BOX, **EXACT).moments)
    change = float(jnp.linalg.norm(released[0] - released[1]))
    bound = sketch.sensitivity(domain, taylor(domain, 4))
    assert change == pytest.approx(bound, rel=1e-4)


def test_the_papers_box_has_the_closed_form():
    for d in (1, 2, 4):
        domain = Domain("box", d, d, 1.0, 1.0, 1.0, float(d))
        assert sketch.sensitivity(domain, taylor(domain, 30)) == pytest.approx(
            2 * np.sqrt(d * np.exp(0.5))
        )


@pytest.mark.slow
def test_random_feature_sensitivity_is_never_exceeded():
    domain = Domain("ball", 5, 2, 1.5, 1.5, 1.0, 5**0.5)
    features = RandomFeatures.draw(jax.random.key(3), 16, 5, domain.scale)
    worst = search(domain, features, largest=0.8)
    assert 0.8 <= worst / (np.sqrt(2) * 0.8) <= 1 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("logit", [60.0, 100.0])
def test_random_features_that_overflow_stay_within_the_sensitivity(logit):
    """A key along the longest of the public directions; e^{logit} is too much for 32-bit floats."""
    domain = Domain("ball", 256, 1, 1.0, 1.0, 1.0, 1 / logit)
    features = RandomFeatures.draw(jax.random.key(0), 512, 256, domain.scale)
    directions = features.directions
    longest = directions[jnp.linalg.norm(directions, axis=1).argmax()]
    key = longest / jnp.linalg.norm(longest)
    largest = math.sqrt(2) * math.exp(logit / 2)
    K, V = jnp.zeros((2, 256)).at[0].set(key), jnp.ones((2, 1))
    for clean in (False, True):
        sums = functools.partial(sketch_sums.contribution_sums, domain=domain, largest=largest)
        with jax.enable_x64(clean):
            here, there = (sums(k, V, features) for k in (K, 0 * K))
        assert np.isfinite(here).all()
        change = np.asarray(here, np.float64) - np.asarray(there, np.float64)
        assert np.linalg.norm(change) <= math.sqrt(2) * largest * (1 + 1e-5)


@pytest.mark.slow
def test_one_row_never_moves_a_long_sum_by_more_than_the_sensitivity(monkeypatch):
    """In 32 bits chunks of −0.35 ulp would move a sum below 2¹⁷ by half an ulp each, one above by none."""
    n, head, chunk = 200_000, 2**17, 128
    monkeypatch.setattr(sketch_sums, "_CHUNK_ELEMENTS", chunk)
    V = np.ones((n, 1), np.float32)
    V[head : head + chunk] = 0
    V[head + chunk :] = -0.35 * 2.0**-23 * head / chunk
    K = np.full((n, 1), 0.5, np.float32)
    released, means = [], []
    for v in (1, 0):
        V[head] = v
        released.append(cross_attention.build(KEY, K, V, degree=2, **BOX, **EXACT).moments)
        means.append(baselines.mean_of_values(KEY, V, value_bound=1.0, **EXACT).values)
    assert released[0].dtype == means[0].dtype == np.float32
    assert abs(released[0] - released[1]).max() == pytest.approx(1, abs=0.01)
    assert n * abs(means[0] - means[1]).max() == pytest.approx(1, abs=0.02)


def test_what_fills_the_last_chunk_of_rows_is_not_summed(monkeypatch):
    """Zeros are keys too, away from the centre, and would count as rows."""
    K, V, _ = memory(200, 2)
    domain = Domain.declare(K, V, **BOX)
    whole = sketch_sums.contribution_sums(K, V, taylor(domain, 2), domain, 1.0)
    monkeypatch.setattr(sketch_sums, "_CHUNK_ELEMENTS", 128)
    pieces = sketch_sums.contribution_sums(K, V, taylor(domain, 2), domain, 1.0)
    np.testing.assert_allclose(pieces, whole, rtol=1e-4, atol=1e-3)


@pytest.mark.quick_cases("box")
@pytest.mark.parametrize("domain", ["box", "ball"])
def test_fresh_noise_is_for_the_row_that_moves_each_answer_most(domain, monkeypatch):
    """One row at one end of the queries and all others at the other move answers by what is declared."""
    seen = []

    def record(_, exact, *, sensitivity, **about):
        seen.append((np.asarray(exact), np.asarray(sensitivity)))
        return exact

    monkeypatch.setattr(baselines.noise, "release", record)
    length = 1 if domain == "box" else math.sqrt(2)
    Q = np.array([[1.0, 1.0], [0.3, 0.3]]) / length
    K = np.full((5, 2), 0.0 if domain == "box" else -1 / length)
    K[0] = 1 / length
    V = np.ones((5, 2))
    for first in (1.0, -1.0):
        V[0] = first
        options = {"domain": domain, "scale": 0.7, "clip": first > 0}
        made = baselines.fresh_noise(KEY, Q, K, V, **options, **BOX, **BUDGET)
        assumed = "data within the declared bounds" in made.guarantee.assumptions
        assert assumed is not options["clip"]
    (here, declared), (there, _) = seen
    # Each of the two answers has half of the squares.
    moved = np.linalg.norm((here - there) / declared, axis=1)
    np.testing.assert_allclose(moved, math.sqrt(0.5), rtol=1e-5)


@pytest.mark.slow
def test_noise_of_an_answer_has_the_stated_size():
    K, V, Q = memory(300, 2, m=6)
    exact = cross_attention.build(KEY, K, V, degree=4, **BOX, **EXACT).sums(Q)
    build = lambda key: cross_attention.build(  # noqa: E731
        key, K, V, degree=4, clip=True, **BOX, **BUDGET
    )
    noise = jax.vmap(lambda key: build(key).sums(Q))(jax.random.split(KEY, 3000)) - exact
    built = build(KEY)
    domain = built.domain
    assert built.noise_std == pytest.approx(
        sketch.sensitivity(domain, taylor(domain, 4)) * gaussian_noise_multiplier(1.0, 1e-6),
        rel=1e-4,  # contributions are rounded
    )
    norms = np.linalg.norm(PolynomialFeatures(2, 4)(Q / np.sqrt(2)), axis=-1)
    np.testing.assert_allclose(noise[..., 1:].std((0, 2)), built.noise_std * norms, rtol=0.05)
    mass = built.noise_std * np.sqrt(
        norms**2 - 1
    )  # n is public, and with it the constant feature's
    np.testing.assert_allclose(noise[..., 0].std(0), mass, rtol=0.05)
    assert (
        built.noise_std * norms <= built.noise_std * taylor(domain, 4).norm(domain.largest_logit)
    ).all()


def sketch_statistics(noise_std, trials):
    """The exact likelihood ratio's statistic under the worst neighbours, standardised, for d = 1, s = 2."""
    domain = Domain("box", 1, 1, 1.0, 1.0, 1.0, 1.0)
    K, V = np.ones((2, 1), np.float32), np.ones((2, 1), np.float32)
    pair = [V, V * np.array([[1.0], [-1.0]], np.float32)]
    features = taylor(domain, 2)

    def release(key, V, std):
        sums = sketch_sums.contribution_sums(K, V, features, domain, 1.0)
        about = {"sensitivity": 1.0, "noise_multiplier": std, "label": "sketch"}
        return sketch_sums.with_mass(noise.release(key, sums, **about), 2, features, domain)

    here, there = (release(KEY, V, 0.0) for V in pair)
    direction = (here - there) / noise_std**2
    keys = jax.random.split(jax.random.key(1), (2, trials))
    return [
        np.asarray(jax.vmap(lambda k, V=V: (release(k, V, noise_std) * direction).sum())(key))
        for key, V in zip(keys, pair, strict=True)
    ]


@pytest.mark.slow
def test_audit_accepts_the_sketch_and_catches_half_the_noise():
    epsilon, delta = 1.0, 1e-3
    domain = Domain("box", 1, 1, 1.0, 1.0, 1.0, 1.0)
    std = sketch.sensitivity(domain, taylor(domain, 2)) * gaussian_noise_multiplier(epsilon, delta)
    bound = audit.epsilon_lower_bound(*sketch_statistics(std, 200_000), delta).epsilon
    assert 0.5 < bound <= epsilon
    # √2·R_w·√T forgets that both rows may sit at one key with opposite values.
    assert audit.epsilon_lower_bound(*sketch_statistics(std / 2**0.5, 200_000), delta).epsilon > 1.0


@pytest.mark.slow
def test_audit_accepts_tree_attention():
    """The sum over all nodes that a row at the corner moves, weighted by the noise of each."""
    epsilon, delta = 1.0, 1e-3
    K = np.ones((2, 1), np.float32)

    def statistic(key, value):
        V = jnp.ones((2, 1)).at[0].set(value)
        options = {"mechanism": "tree", "degree": 2, "bins": 2, "clip": True, **BOX}
        built = cross_attention.build(key, K, V, epsilon=epsilon, delta=delta, **options)
        # Seen from the left leaf, tables hold the right leaf's moments with the signs +, −, +.
        stds = 1 / jnp.sqrt(jnp.array([1.0, 0.0 + 1.0, 0.5])[:, None] ** 2 * jnp.array([1, 2, 1]))
        signs = jnp.array([1, -1, 1])
        return (built.tables[0, :, 0, :, 1] * signs / stds**2).sum()

    keys = jax.random.split(jax.random.key(2), (2, 50_000))
    statistics = [
        np.asarray(jax.vmap(statistic, in_axes=(0, None))(k, v))
        for k, v in zip(keys, (1.0, -1.0), strict=True)
    ]
    assert 0.4 < audit.epsilon_lower_bound(*statistics, delta).epsilon <= epsilon


@pytest.mark.parametrize("kind", ["ball", "simplex"])
def test_a_row_enters_with_the_same_bits_whatever_the_number_of_rows(kind):
    K, V = 3 * np.random.default_rng(0).normal(size=(2, 40, 5))
    bounds = Domain("ball", 5, 5, 1.0, 1.0, 1.0, 1.0, value_domain=kind)
    whole = bounds.enter(np.asfortranarray(K), V, clip=True)
    for n in range(1, 41):
        for found, expected in zip(bounds.enter(K[:n], V[:n], clip=True), whole, strict=True):
            np.testing.assert_array_equal(found, expected[:n])
