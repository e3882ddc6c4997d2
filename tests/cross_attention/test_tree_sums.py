"""Trees against brute force over records, their noise, and an audit that catches the paper's mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_attention_memory import BUDGET, EXACT, KEY
from dp_accounting.pld import common, privacy_loss_distribution

from dpx import audit
from dpx import cross_attention as trees
from dpx._numerics import wide_sums
from dpx.cross_attention.trees import node_noise, node_sums
from dpx.noise import Gaussian, TruncatedLaplace


def brute_force(x, w, y, power, bounds, bins):
    """Σ w|x − y|^p coordinate by coordinate, without the records of the query's own bin."""
    of_x, of_y = (np.minimum((rows / bounds * bins).astype(int), bins - 1) for rows in (x, y))
    apart = np.abs(x[None] - y[:, None]) ** power * (of_x[None] != of_y[:, None])
    return np.einsum("mnd,n->m", apart, w)


def records(n=40):
    rng, bounds = np.random.default_rng(0), np.array([1.0, 2.0, 0.3])
    x, y = rng.random((n, 3)) * bounds, rng.random((7, 3)) * bounds
    x[0] = y[0] = bounds  # the upper end belongs to the last bin
    x[1] = 0
    return *(a.astype(np.float32) for a in (x, rng.uniform(-2, 2, n), y)), bounds


X, W, Y, BOUNDS = records()


def build(x=X, w=W, **options):
    about = {"bound": BOUNDS, "weight_bound": 2.0, "bins": 16, **EXACT} | options
    return trees.DPTreeHighDim.build(KEY, x, w, **about)


def line(x, w, **options):
    about = {"bound": 1.0, "weight_bound": 1.0, "bins": 2, **EXACT} | options
    return trees.DPTreeDistance.build(KEY, x, w, **about)


def sums(values, **options):
    return trees.DPTree.build(KEY, values, **{"sensitivity": 2.0, **EXACT} | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "power"),
    [("gaussian", 1), ("gaussian", 2), ("gaussian", 3), ("truncated_laplace", 3)],
)
def test_distances_without_noise_are_brute_force(noise, power):
    options = {"power": power, "noise": noise}
    noiseless = {"rtol": 1e-3, "atol": 0.4 if noise == "gaussian" else 2e-3}
    want = brute_force(X, W, Y, power, BOUNDS, 16)
    np.testing.assert_allclose(build(**options).query(Y), want, **noiseless)
    one = line(X[:, 1], W, bound=2.0, weight_bound=2.0, bins=16, **options)
    want = brute_force(X[:, 1:2], W, Y[:, 1:2], power, BOUNDS[1:2], 16)
    np.testing.assert_allclose(one.query(Y[:, 1]), want, **noiseless)


@pytest.mark.parametrize("changed", [{"bound": 1e-50}, {"bound": 1e-20}, {"weight_bound": 1e-40}])
def test_bounds_that_floats_flush_to_zero_are_refused(changed):
    about = {"bound": 1.0, "weight_bound": 1.0, "epsilon": 1.0, "delta": 1e-6, "bins": 4}
    with pytest.raises(ValueError, match="floats hold no distances: use other units"):
        trees.DPTreeDistance.build(KEY, np.zeros(3), np.zeros(3), **about | changed)


@pytest.mark.slow
def test_sums_without_noise_are_brute_force():
    values = np.random.default_rng(0).uniform(-1, 1, 11)  # padded to 16
    tree = sums(values, bound=3.0)
    padded = np.pad(values, (0, 5))
    for y in np.linspace(0, 3, 31):
        leaf = min(int(np.float32(y / 3) * 16), 15)
        left, right = tree.query(np.float32(y))
        assert left == pytest.approx(padded[:leaf].sum(), abs=3e-3)
        assert right == pytest.approx(padded[leaf + 1 :].sum(), abs=3e-3)


@pytest.mark.slow
def test_noise_of_a_query_is_one_node_for_each_level():
    """On empty trees, left + right is the sum of L noises, whatever the leaf."""
    nodes = node_noise.NodeNoise(Gaussian(1.0), np.ones(()))
    build = jax.vmap(lambda key: sum(node_sums.tabulate(key, jnp.zeros((32, 1)), nodes)))
    answers = build(jax.random.split(KEY, 2000))[..., 0]
    np.testing.assert_allclose(answers.var(0), 5.0, rtol=0.2)
    # Neighbouring leaves of one parent share all but the last level's node.
    assert np.corrcoef(answers[:, 0], answers[:, 1])[0, 1] == pytest.approx(0.8, abs=0.04)
    assert np.corrcoef(answers[:, 0], answers[:, 31])[0, 1] == pytest.approx(0.0, abs=0.08)


@pytest.mark.parametrize(("epsilon", "count"), [(0.01, 5000), (1.0, 17), (1.0, 5000), (20.0, 5000)])
def test_split_budget_composes_to_the_budget(epsilon, count):
    """By dp-accounting, for mechanisms that are (ε, δ)-DP and no better; their losses are ±ε."""
    each, delta = node_noise.split_budget(epsilon, 1e-6, count)
    losses = privacy_loss_distribution.from_privacy_parameters(
        common.DifferentialPrivacyParameters(each, delta), value_discretization_interval=each
    )
    assert losses.self_compose(count).get_delta_for_epsilon(epsilon) <= 1e-6


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 20.0, 1e4, 1e8])
@pytest.mark.parametrize("count", [1, 17, 5000])
def test_split_budget_is_no_less_than_basic_composition(epsilon, count):
    each, _ = node_noise.split_budget(epsilon, 1e-6, count)
    assert each >= epsilon / count * (1 - 1e-12)


def test_gaussian_noise_spends_exactly_the_budget():
    ranges = np.array([1.0, 0.5, 2.0])
    stds = node_noise.gaussian_stds(ranges, 2, 7, 3.0)
    assert (7 * 3.0**2 / stds**2).sum() == pytest.approx(1)
    worst = ranges[:, None] ** 2 * np.array([1, 2, 1])
    assert (worst**2 * stds**2).sum() < (worst**2 * 3.0**2 * 7 * 9).sum()


@pytest.mark.slow
def test_audit_accepts_the_tree_and_catches_a_released_root():
    """Two leaves, so one level below the root. A record flips its weight: every node above it moves by 2."""
    delta = 1e-2
    law = TruncatedLaplace.calibrate(2.0, *node_noise.split_budget(1.0, delta, 1))

    def audited(levels, delta):
        ratios = []
        for key, shift in enumerate((1.0, -1.0)):
            nodes = np.asarray(law.sample(jax.random.key(key), (100_000, levels)), float) + shift
            here, there = (-np.abs(nodes - s) / law.scale for s in (1.0, -1.0))
            outside = np.abs(nodes + 1) > law.bound
            ratio = np.where(outside, np.inf, here - np.where(outside, 0, there)).sum(1)
            ratios.append(np.round(ratio, 3))  # the last digits would tell the shift
        return audit.epsilon_lower_bound(*ratios, delta, confidence=0.99).epsilon

    assert 0.8 < audited(1, delta) <= 1.0
    # The paper's tree gives each of log₂(2) = 1 levels ε/log₂(2) and releases two, the root among them.
    assert audited(2, 2 * delta) > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("noise", node_noise.NOISES)
def test_audit_of_a_whole_distance_structure(noise):
    """A likelihood-ratio-like statistic over all that two-leaf trees release stays below the claim."""
    budget = {"epsilon": 1.0, "delta": 1e-2}

    def release(key, w):
        weights, about = jnp.zeros(3).at[0].set(w), {"bound": 1.0, "weight_bound": 1.0, "bins": 2}
        tree = trees.DPTreeDistance.build(key, np.ones(3), weights, noise=noise, **about, **budget)
        return tree.table[0, 0, :, 0]  # the three moments of the right leaf, seen from the left one

    stds = np.ones(3) if noise == "truncated_laplace" else 1 / np.sqrt([1.0, 2.0, 1.0])
    keys = jax.random.split(jax.random.key(5), (2, 40_000))
    released = (jax.vmap(release, (0, None))(k, w) for k, w in zip(keys, (1.0, -1.0), strict=True))
    statistics = [np.asarray(made) @ (np.array([1, -1, 1]) / stds**2) for made in released]
    bound = audit.epsilon_lower_bound(*statistics, 1e-2, confidence=0.99).epsilon
    assert 0.3 < bound <= 1.0


@pytest.mark.slow
def test_structures_are_pytrees_and_build_under_jit():
    eager, traced = build(), jax.jit(build)(X, W)
    np.testing.assert_allclose(traced.query(Y), eager.query(Y), rtol=2e-4, atol=0.8)
    query = jax.jit(lambda tree, y: tree.query(y))
    np.testing.assert_allclose(query(eager, Y), eager.query(Y), rtol=1e-4, atol=1e-2)


@pytest.mark.slow
def test_one_record_never_moves_a_long_sum_by_more_than_the_sensitivity():
    """In 32 bits weights of −0.35 ulp would move a sum below 2¹³ by half an ulp each, one above by none."""
    n, head = 20_000, 2**13
    weights = np.where(np.arange(n) < head, 1, -0.35 * 2.0**-23 * head).astype(np.float32)
    tables, lefts = [], []
    for w in (1.0, 0.0):
        weights[head] = w
        tables.append(np.asarray(line(np.full(n, 0.75), weights).table))
        lefts.append(np.asarray(sums(weights).left))
    assert tables[0].dtype == lefts[0].dtype == np.float32
    moved, left = (a.astype(np.float64) - b for a, b in (tables, lefts))
    assert abs(moved)[..., 0, 0].max() == pytest.approx(1, abs=1e-3)
    # Leaves left of the changed one do not move, and all others move by its weight.
    assert set(np.round(left, 2)) == {0.0, 1.0}


def test_wide_sums_are_for_arrays_that_are_not_traced():
    seen = []

    def dtype(x):
        with wide_sums(x):
            seen.append((x + jnp.zeros(())).dtype)
        return x

    x = np.float32(1)
    for f in (dtype, jax.jit(dtype), jax.jit(lambda y: y + dtype(x))):
        f(x)
    assert seen == [np.float64, np.float32, np.float64]
    assert jnp.zeros(()).dtype == np.float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bound": 0.9}, r"x\[0\] is outside"),
        ({"bound": None}, "bound"),
        ({"bound": [1.0, 1.0]}, r"bound has shape \(2,\)"),
        ({"weight_bound": 0.5}, r"weights\[\d+\] is outside"),
        ({"noise": "uniform"}, "noise='uniform'"),
        ({"power": 2.5}, "power"),
        ({"bins": np.nan}, "bins"),
        ({"w": np.ones(3)}, "pass"),
    ],
)
def test_misuse_raises(wrong, message):
    with pytest.raises(ValueError, match=message):
        build(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["x", "weights"])
def test_record_that_is_not_finite_counts_as_zero_under_jit_and_is_named_without(value, where):
    x, w, without = X.copy(), W.copy(), W.copy()
    without[3] = 0
    (x if where == "x" else w)[(3, 1) if where == "x" else 3] = value
    with pytest.raises(ValueError, match=rf"{where}\[3\] is outside"):
        build(x, w)
    got, want = jax.jit(build)(x, w), build(np.where(np.isfinite(x), x, 0), without)
    np.testing.assert_allclose(got.query(Y), want.query(Y), rtol=1e-3, atol=0.8)


@pytest.mark.slow
def test_records_beyond_the_bounds_are_clipped_under_jit():
    traced = jax.jit(lambda x, w: build(x, w, bound=[1.0, 0.5], bins=4, **BUDGET).table)
    beyond = traced(jnp.array([[-3.0, 0.9], [7.0, 0.2]]), jnp.array([5.0, -9.0]))
    clipped = traced(jnp.array([[0.0, 0.5], [1.0, 0.2]]), jnp.array([2.0, -2.0]))
    np.testing.assert_array_equal(beyond, clipped)


@pytest.mark.slow
def test_sum_that_is_not_finite_counts_as_zero_under_jit_and_is_named_without():
    with pytest.raises(ValueError, match=r"values\[1\] is not finite"):
        sums(np.array([1.0, np.nan]))
    got = jax.jit(sums)(np.array([1.0, np.nan, 2.0]))
    np.testing.assert_allclose(got.left, sums(np.array([1.0, 0.0, 2.0])).left, atol=1e-3)


@pytest.mark.slow
def test_queries_out_of_bounds_raise_and_are_clipped_under_jit():
    many, one, both = build().query, line(X[:, 0], W / 2).query, sums(W).query
    for value in (1.1, -0.1, np.nan):
        wrong = Y.copy()
        wrong[2, 0] = value
        for query, y in ((many, wrong), (one, wrong[:, 0]), (both, wrong[:, 0])):
            with pytest.raises(ValueError, match=r"y\[2\] is outside"):
                query(y)
        with pytest.raises(ValueError, match="y is outside"):
            both(value)
    ends = jax.jit(many)(BOUNDS * np.ones_like(Y))
    np.testing.assert_allclose(jax.jit(many)(np.full_like(Y, 10)), ends, rtol=1e-6)
    for wrong in (Y[:, :2], np.float32(0)):
        with pytest.raises(ValueError, match=r"pass \(m, 3\)"):
            many(wrong)
